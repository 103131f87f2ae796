"""What cannot be offloaded as a whole, and what to do about it. Reads; moves nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..declarations import UNSERVED_WEIGHTS
from ..errors import OffloadConfigError, not_one_of, quoted
from ..plan import OffloadPlan
from .components import DIT, ENCODERS, Component, declared_list, has_encoder_list
from .units import is_split


def refuse_unknown_paths(pipeline: Any, plan: OffloadPlan, found: Sequence[Component]) -> None:
    """Refuse declarations for components that the pipeline neither has nor declares as optional."""
    declared = [path for kind in ("dit", "encoder") for path in declared_list(pipeline, f"_{kind}_modules")]
    paths = list(dict.fromkeys([*(one.path for one in found), *declared]))
    for attribute in (
        "encoder_component_types",
        "encoder_block_attrs",
        "block_attrs",
        "offload_submodules",
        "outside_calls",
    ):
        for path in getattr(plan, attribute):
            if path not in paths:
                raise not_one_of(
                    f"_offload_plan.{attribute}", path, paths, advice="This pipeline has these components."
                )


def refuse_without_exclusion(pipeline: Any, found: Sequence[Component]) -> None:
    """Refuse model-level offload where nothing takes turns: it needs a DiT and an encoder."""
    if any(is_split(one.module) for one in found):
        return
    name = type(pipeline).__name__
    dits = [one.path for one in found if one.role == DIT]
    encoders = [one.path for one in found if one.role in ENCODERS]
    if not dits:
        raise OffloadConfigError(
            f"mode='module' lets DiTs and encoders take turns on the device, and {name} has no DiT. Name it in "
            "_dit_modules, or use enable_layerwise_offload for what it has."
        )
    if not encoders and not has_encoder_list(pipeline):
        raise OffloadConfigError(
            f"mode='module' lets DiTs and encoders take turns on the device, and {name} has no encoder beside "
            f"{quoted(dits)}. Name it in _encoder_modules, or use enable_layerwise_offload(components=['dit'])."
        )


def refuse_foreign_offload(pipeline: Any, found: Sequence[Component]) -> None:
    """Refuse what somebody else moves already: a device map, accelerate, group offload, sharding."""
    device_map = getattr(pipeline, "hf_device_map", None)
    if isinstance(device_map, Mapping) and len(device_map) > 1:
        raise OffloadConfigError("This pipeline is spread by a device_map; call pipe.reset_device_map() first.")
    for one in found:
        spread = getattr(one.module, "hf_device_map", None)
        if isinstance(spread, Mapping) and len({str(place) for place in spread.values()}) > 1:
            raise OffloadConfigError(
                f"{one.path} is spread over devices by a device_map; load it without device_map to offload it."
            )
        for module in one.module.modules():
            if isinstance(module, torch.jit.ScriptModule):
                raise OffloadConfigError(
                    f"{one.path} is or holds a TorchScript module, whose calls cannot be extended. Load it as a plain "
                    "module."
                )
            if hasattr(module, "_hf_hook"):
                raise OffloadConfigError(
                    f"{one.path} carries accelerate hooks (Diffusers' enable_model_cpu_offload or "
                    "enable_sequential_cpu_offload, or a device_map); call pipe.remove_all_hooks() first, or for hooks "
                    "of your own accelerate.hooks.remove_hook_from_module(module, recurse=True)."
                )
            registry = module.__dict__.get("_diffusers_hook")
            if registry is not None and registry.get_hook("group_offloading") is not None:
                raise OffloadConfigError(
                    f"{one.path} has Diffusers' group offloading; take it off first: "
                    f"pipe.{one.path}._diffusers_hook.remove_hook('group_offloading', recurse=True), and the same for "
                    "'lazy_prefetch_group_offloading'."
                )
            if not module._parameters:
                continue
            for tensor in module._parameters.values():
                if type(tensor).__name__ == "DTensor" or type(getattr(tensor, "data", None)).__name__ == "DTensor":
                    raise OffloadConfigError(
                        f"{one.path} holds sharded parameters (DTensor), which are not served; load it unsharded."
                    )


def refuse_unserved(tensor: torch.Tensor, where: str) -> None:
    """Refuse quantised weights of a kind that is known not to survive coming and going."""
    kind = type(tensor)
    if kind.__name__ in UNSERVED_WEIGHTS:
        raise OffloadConfigError(
            f"{where} is a {kind.__module__}.{kind.__qualname__}, which cannot be offloaded: "
            f"{UNSERVED_WEIGHTS[kind.__name__]}. Leave its component out of `components`, or quantise it otherwise."
        )
