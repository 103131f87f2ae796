"""Where a pipeline's offload is found: on its components, and in a note that the pipeline itself keeps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..config import OffloadConfig
from ..discovery import components_of, declared_modules, unwrapped
from ..engine.entries import RootEntry, entry_of
from .component import ManagedComponent

if TYPE_CHECKING:
    from .offload import Offload

MEMORY = "_offload_memory"


class _Memory:
    """A pipeline's note of the offload that was enabled through it; a copy of the pipeline has none.

    `again` is what to enable where another pipeline, with some of its components, has turned that off.
    """

    def __init__(self, offload: Offload | None = None, again: tuple[OffloadConfig, torch.device] | None = None) -> None:
        self.offload = offload
        self.again = again

    def __deepcopy__(self, memo: dict[int, Any]) -> _Memory:
        return _Memory()

    def __reduce__(self) -> Any:
        return _Memory, ()


def remember(pipeline: Any, offload: Offload) -> None:
    """Note in `pipeline` that `offload` was enabled through it: it is found there when all components are swapped."""
    pipeline.__dict__[MEMORY] = _Memory(offload)
    offload.owners.add(pipeline)


def owners_beside(pipeline: Any, offloads: Iterable[Offload]) -> list[tuple[Any, OffloadConfig, torch.device]]:
    """The other pipelines through which `offloads` were enabled, each with what it asked for."""
    return [
        (owner, offload.plan.config, offload.plan.device)
        for offload in offloads
        for owner in offload.owners
        if owner is not pipeline
    ]


def note_for_later(pipeline: Any, config: OffloadConfig, device: torch.device) -> None:
    """Note in `pipeline` what to enable when it is used next, if no offload manages any of its components."""
    if not offloads_on(pipeline):
        pipeline.__dict__[MEMORY] = _Memory(again=(config, device))


def to_enable_again(pipeline: Any) -> tuple[OffloadConfig, torch.device] | None:
    """What `note_for_later` noted; the note is gone then."""
    memory = pipeline.__dict__.get(MEMORY)
    if memory is None or memory.again is None:
        return None
    del pipeline.__dict__[MEMORY]
    return memory.again


def has_memory(pipeline: Any) -> bool:
    """Whether an offload was enabled through `pipeline`."""
    return MEMORY in pipeline.__dict__


def offloads_on(pipeline: Any) -> list[Offload]:
    """The offloads that manage components of `pipeline`, interrupted ones included: none, or one as a rule."""
    found: dict[int, Offload] = {}
    for module in managed_modules(pipeline):
        entry = entry_of(module)
        if isinstance(entry, RootEntry) and isinstance(entry.root, ManagedComponent):
            found[id(entry.root.offload)] = entry.root.offload
    memory = pipeline.__dict__.get(MEMORY)
    if memory is not None and memory.offload is not None and memory.offload.on:
        found[id(memory.offload)] = memory.offload
    return list(found.values())


def managed_modules(pipeline: Any) -> list[nn.Module]:
    """The modules of `pipeline` that may carry a root entry: its components, by every path that it declares."""
    named = [unwrapped(module) for module in components_of(pipeline).values()]
    return named + declared_modules(pipeline)
