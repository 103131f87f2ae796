"""Small pipelines of as many Diffusers classes as possible: real classes, tiny configurations, no download.

Each module of this package registers cases; `CASES` holds them all by name. A case makes constructor arguments with
seeded weights and the arguments of one short call, so that two pipelines of one case give the same output.
"""

from __future__ import annotations

import copy
import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import diffusers
import numpy as np
import torch

from omni_offload.demo.small_pipelines import make_module

Builder = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """One pipeline class in one small configuration.

    Args:
        name: the class's name, with a word behind a colon where one class has several cases.
        components: makes the constructor's arguments.
        arguments: makes the arguments of one call, a fresh generator among them.
    """

    name: str
    components: Builder
    arguments: Builder

    @property
    def cls(self) -> Any:
        """The pipeline class."""
        return getattr(diffusers, self.name.partition(":")[0])

    def build(self) -> Any:
        """A pipeline of its own on the CPU; equal weights every time."""
        parts = {name: _own(part) for name, part in _components(self.name).items()}
        pipe = self.cls(**parts)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def run(self, pipe: Any) -> list[torch.Tensor]:
        """The output of one short call, as tensors on the CPU."""
        torch.manual_seed(0)  # some pipelines draw from the global generator beside the one they are given
        return tensors_in(pipe(**self.arguments()))


CASES: dict[str, Case] = {}


@functools.cache
def _components(name: str) -> dict[str, Any]:
    with torch.device("cpu"):
        return CASES[name].components()


def _own(part: Any) -> Any:
    """A copy for what has weights or state of a run; tokenizers and processors are shared."""
    if isinstance(part, torch.nn.Module):
        return copy.deepcopy(part)
    if isinstance(part, (list, tuple)):
        return type(part)(_own(one) for one in part)
    if hasattr(part, "timesteps") or hasattr(part, "set_timesteps"):
        return type(part).from_config(part.config)
    return part


def case(name: str, arguments: Builder) -> Callable[[Builder], Builder]:
    """Register the decorated builder of components as the case `name`."""

    def register(components: Builder) -> Builder:
        if name in CASES:
            return components
        CASES[name] = Case(name, components, arguments)
        return components

    return register


def generator(seed: int = 0) -> torch.Generator:
    """A seeded generator on the CPU."""
    return torch.Generator("cpu").manual_seed(seed)


def module(name: str, cls: Any, seed: int = 0, **config: Any) -> Any:
    """A float32 module `cls(**config)` in eval mode with seeded weights, none of them constant."""
    with torch.no_grad():  # a weight that weight_norm computes could not be copied with its history
        return make_module(name, lambda: cls(**config), torch.float32, seed)


def configured(name: str, cls: Any, config: Any, seed: int = 0) -> Any:
    """The same for a transformers model, whose constructor takes a configuration object."""
    return make_module(name, lambda: cls(config), torch.float32, seed)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor, array and picture in a pipeline's output, in order, as tensors on the CPU."""
    if isinstance(value, torch.Tensor):
        return [value.detach().cpu()]
    if isinstance(value, np.ndarray):
        return [torch.from_numpy(value.copy())]
    if isinstance(value, Mapping):
        return [tensor for one in value.values() for tensor in tensors_in(one)]
    if isinstance(value, (list, tuple)):
        return [tensor for one in value for tensor in tensors_in(one)]
    if hasattr(value, "getpixel"):
        return [torch.from_numpy(np.array(value))]
    return []


for _found in sorted(found.name for found in pkgutil.iter_modules(__path__)):
    importlib.import_module(f"{__name__}.{_found}")
