"""Which components a pipeline has, and the role of each: declared, or taken by name and class.

Reads class attributes and names; moves nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import nn

from ..declarations import PIPELINES, ROLE_OF_CLASS, ROLE_OF_NAME
from ..errors import OffloadConfigError, describe, not_one_of, quoted
from ..plan import OffloadPlan

DIT, TEXT_ENCODER, IMAGE_ENCODER, VAE, RESIDENT = "dit", "text_encoder", "image_encoder", "vae", "resident"
CONTROLNET = "controlnet"
ENCODERS = (TEXT_ENCODER, IMAGE_ENCODER)


def components_of(pipeline: Any) -> dict[str, nn.Module]:
    """Name -> module for what a pipeline is made of: registered components, or the children of an `nn.Module`."""
    if isinstance(pipeline, nn.Module):
        return dict(pipeline.named_children())
    named = getattr(pipeline, "components", None)
    if not isinstance(named, Mapping):
        raise OffloadConfigError(
            f"{type(pipeline).__name__} is neither a DiffusionPipeline nor a torch.nn.Module; offload works on these"
        )
    return {name: module for name, module in named.items() if isinstance(module, nn.Module)}


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside a wrapper that `torch.compile(module)` made; any other module itself."""
    inner = module.__dict__.get("_modules", {}).get("_orig_mod")
    return inner if isinstance(inner, nn.Module) else module


@dataclass
class Component:
    """A component that was found: its dotted path, its role, its module."""

    path: str
    role: str
    module: nn.Module


_LISTS = ("_dit_modules", "_encoder_modules", "_vae_modules", "_resident_modules")


def _declaration(pipeline: Any, attribute: str) -> Any:
    """A class attribute; for a class that has none of the four lists, what is known of it or of a class it extends."""
    cls = type(pipeline)
    if any(hasattr(cls, name) for name in _LISTS):
        return getattr(cls, attribute, None)
    known = next((PIPELINES[base.__name__] for base in cls.__mro__ if base.__name__ in PIPELINES), {})
    return known.get(attribute, getattr(cls, attribute, None))


def declared_list(pipeline: Any, attribute: str) -> tuple[str, ...]:
    """The paths that a pipeline declares in `attribute`. Raises `OffloadConfigError` for anything else than paths."""
    paths = _declaration(pipeline, attribute) or ()
    if isinstance(paths, str) or not all(isinstance(path, str) and path for path in paths):
        raise OffloadConfigError(
            f"{describe(f'{type(pipeline).__name__}.{attribute}', paths)} must be a list of dotted module paths"
        )
    repeated = [path for path, count in Counter(paths).items() if count > 1]
    if repeated:
        raise OffloadConfigError(f"{type(pipeline).__name__}.{attribute} names {quoted(repeated)} twice")
    return tuple(paths)


def _lookup(pipeline: Any, path: str, where: str, choices: Iterable[str]) -> nn.Module | None:
    """The module at `path`, None for an optional component that this pipeline was made without."""
    try:
        module = attrgetter(path)(pipeline)
    except AttributeError:
        raise not_one_of(where, path, sorted(choices), advice="No such attribute on this pipeline.") from None
    if module is None:
        return None
    if not isinstance(module, nn.Module):
        raise OffloadConfigError(
            f"{describe(where, path)} leads to a {type(module).__name__}, not to a torch.nn.Module"
        )
    return unwrapped(module)


def _category(path: str, module: nn.Module, plan: OffloadPlan, notices: list[str]) -> str:
    """Whether an encoder encodes text or images: declared, or by name, said in a notice."""
    declared = plan.encoder_component_types.get(path)
    if declared is not None:
        return declared
    role = _role_by_name(path)
    if role not in ENCODERS:
        role = IMAGE_ENCODER if "vision" in module.__class__.__name__.lower() else TEXT_ENCODER
    notices.append(f"{path} is taken for a {role} by its name; _offload_plan.encoder_component_types can say otherwise")
    return role


def _role_by_name(path: str) -> str | None:
    name = re.sub(r"_?\d+$", "", path.rpartition(".")[2])
    while name not in ROLE_OF_NAME and "_" in name:
        name = name.partition("_")[2]  # prior_text_encoder, unconditional_transformer
    return ROLE_OF_NAME.get(name)


def _guessed_role(name: str, module: nn.Module) -> str:
    role = _role_by_name(name)
    if role is not None:
        return role
    kind = module.__class__.__name__
    return next((role for role, pattern in ROLE_OF_CLASS.items() if re.search(pattern, kind)), RESIDENT)


def find_components(pipeline: Any, plan: OffloadPlan) -> tuple[list[Component], list[str]]:
    """Every component with its role, in the order dit, encoders, VAEs, residents; and what was guessed, as notices."""
    named = components_of(pipeline)
    choices = list(named)
    lists = {
        DIT: declared_list(pipeline, "_dit_modules"),
        "encoder": declared_list(pipeline, "_encoder_modules"),
        VAE: declared_list(pipeline, "_vae_modules"),
        RESIDENT: declared_list(pipeline, "_resident_modules"),
    }
    notices: list[str] = []
    found: list[Component] = []
    for kind, paths in lists.items():
        attribute = f"_{kind}_modules"
        for path in paths:
            module = _lookup(pipeline, path, f"{type(pipeline).__name__}.{attribute}", choices)
            if module is not None:
                role = _category(path, module, plan, notices) if kind == "encoder" else kind
                found.append(Component(path, role, module))
    known = {path.partition(".")[0] for paths in lists.values() for path in paths}
    guessed = []
    for name, module in named.items():
        if name not in known:
            role = _guessed_role(name, unwrapped(module)) if not any(lists.values()) else RESIDENT
            found.append(Component(name, role, unwrapped(module)))
            guessed.append(f"{name} as {role}")
    if guessed and not any(lists.values()):
        notices.append(
            f"{type(pipeline).__name__} declares no components; taken by name and class: {', '.join(guessed)}"
        )
    seen: dict[int, Component] = {}
    for one in found:
        first = seen.setdefault(id(one.module), one)  # one module under two names is one component
        if first.role != one.role and RESIDENT not in (first.role, one.role):
            raise OffloadConfigError(
                f"{first.path} is declared as {first.role} and {one.path} as {one.role}, and they are the same module. "
                "Declare it once."
            )
    return list(seen.values()), notices


def has_encoder_list(pipeline: Any) -> bool:
    """Whether the pipeline has encoders by its class, be it that this one was made without (`text_encoder=None`)."""
    named = getattr(pipeline, "components", {})
    by_name = [name for name in named if _role_by_name(name) in ENCODERS] if isinstance(named, Mapping) else []
    return bool(declared_list(pipeline, "_encoder_modules") or by_name)


def declared_modules(pipeline: Any) -> list[nn.Module]:
    """The modules at all paths that the pipeline's class attributes name, as far as they exist."""
    found = []
    for attribute in _LISTS:
        try:
            paths = declared_list(pipeline, attribute)
        except OffloadConfigError:
            continue  # refused when offload is asked for, and nothing to anybody else
        for path in paths:
            try:
                module = attrgetter(path)(pipeline)
            except AttributeError:
                continue
            if isinstance(module, nn.Module):
                found.append(unwrapped(module))
    return found


def declared_plan(pipeline: Any) -> OffloadPlan:
    """The pipeline class's `_offload_plan`, or an empty one."""
    plan = _declaration(pipeline, "_offload_plan")
    if plan is None:
        return OffloadPlan()
    if not isinstance(plan, OffloadPlan):
        raise OffloadConfigError(f"{describe(f'{type(pipeline).__name__}._offload_plan', plan)} must be an OffloadPlan")
    return plan
