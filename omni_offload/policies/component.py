"""One component whose weights come and go: what answers for it, what is attached to it, and its undoing."""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

import torch
from torch import nn

from ..discovery import ComponentPlan, UnitPlan
from ..engine.entries import BlockEntry, TableEntry, attach_block, attach_child, attach_table, detach, entry_of
from ..engine.streamer import Group
from ..engine.unit import Shell, Unit, is_parameter_with_more, is_plain, move, own_tensors, walk
from ..errors import OffloadStateError
from .interop import acquires_in_forward, point_hooks_at

if TYPE_CHECKING:
    from .offload import Offload


class ManagedComponent:
    """Answers for one component whose weights come and go: the `Root` of the engine's entries."""

    def __init__(self, offload: Offload, plan: ComponentPlan) -> None:
        self.offload = offload
        self.plan = plan
        self.units: list[Unit] = []
        self.tables: list[Unit] = []
        self.shell: Shell | Unit | None = None
        self.group: Group | None = None
        self.parts: dict[str, Group] = {}
        self.attached: list[nn.Module] = []
        self.device = offload.plan.device

    @property
    def all_units(self) -> list[Unit]:
        """Its units, tables on the host, and its shell where that is a unit."""
        return [*self.units, *self.tables, *([self.shell] if isinstance(self.shell, Unit) else [])]

    def attach(self, plan: UnitPlan, unit: Unit) -> None:
        """Make the modules of `unit`, and what is inside them, acquire it."""
        streamer = self.offload.streamer
        for module in plan.modules:
            plain = module.__class__.forward
            self.attached.append(module)
            if any(module is table for table in plan.tables):
                attach_table(module, TableEntry(streamer, unit))
                point_hooks_at(module, type(module).forward, (plain,))
                continue
            attach_block(module, BlockEntry(streamer, unit, acquires_in_forward))
            point_hooks_at(module, type(module).forward, (plain,))
            for child in _callable_children(module):
                self._attach_child(child, unit)
            outside = {id(one) for one in self.plan.outside_calls}
            for inner in [inner for inner in walk([module]) if id(inner) in outside] if outside else []:
                self._attach_child(inner, unit)

    def _attach_child(self, module: nn.Module, unit: Unit) -> None:
        if entry_of(module) is None:
            self.attached.append(module)
            attach_child(module, BlockEntry(self.offload.streamer, unit))

    def make_plain(self) -> None:
        """Give blocks and what is inside them their classes back, and let the weights be ordinary host memory."""
        for module in self.attached:
            ours = type(module).forward
            detach(module)
            point_hooks_at(module, type(module).forward, (ours,))
        for unit in self.all_units:
            unit.release()
        # Whatever a failed or interrupted build had not parked yet. A shell that stays is brought back by its owner.
        stays = {id(tensor) for tensor in self.shell.tensors} if isinstance(self.shell, Shell) else set()
        tensors = [tensor for _, tensor in own_tensors(walk([self.plan.module])) if id(tensor) not in stays]
        ordinary = (t for t in tensors if (is_plain(t) or is_parameter_with_more(t)) and not t.is_meta)
        move(ordinary, torch.device("cpu"))

    @property
    def comes_as_a_whole(self) -> bool:
        return self.group is not None

    def enter(self, frame: FrameType) -> None:
        self.offload.streamer.enter(self.plan.path, self.group, frame)

    def leave(self) -> None:
        self.offload.streamer.leave(self.plan.path)
        if self.offload.watched:
            self.offload.settle()

    def runs_here(self) -> bool:
        return self.offload.streamer.runs_here(self.plan.path)

    def check_device(self, device: torch.device) -> None:
        refuse_other_device(self.plan.path, device, self.device)

    def refuse(self, what: str) -> None:
        raise OffloadStateError(
            f"{self.plan.path}.{what} cannot work beside the offload that is on. Call disable_offload() on the "
            "pipeline first."
        )

    def before_change(self, what: str) -> None:
        self.offload.park(what)

    def after_change(self) -> None:
        self.offload.absorb_changes()

    def enter_part(self, name: str, frame: FrameType) -> None:
        """Part `name` of a split module starts in `frame`."""
        if name in self.parts:
            self.offload.streamer.enter(self.parts[name].name, self.parts[name], frame)

    def leave_part(self, name: str) -> None:
        """Part `name` is done."""
        if name in self.parts:
            self.offload.streamer.leave(self.parts[name].name)


def refuse_other_device(what: str, device: torch.device, onload: torch.device) -> None:
    """Raise `OffloadStateError` if `device` is not where `what` computes anyway."""
    same = device.type == onload.type and (device.index is None or device.index == (onload.index or 0))
    if not same:
        raise OffloadStateError(
            f"{what} is offloaded: its weights are on the host and compute on {onload}, so it cannot be moved to "
            f"{device}. Call disable_offload() on the pipeline first."
        )


def _callable_children(block: nn.Module) -> Iterator[nn.Module]:
    """The children of a block with weights, those in its lists and dictionaries included."""
    for child in block.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _callable_children(child)
        elif next(own_tensors(walk([child])), None) is not None:
            yield child


def relocate(module: nn.Module, device: torch.device) -> None:
    """Move a component that stays. One with weights of a kind of its own (quantised, say) does so itself."""
    held = [tensor for part in walk([module]) for kind in (part._parameters, part._buffers) for tensor in kind.values()]
    if all(tensor is None or is_plain(tensor) for tensor in held):
        move((tensor for _, tensor in own_tensors(walk([module]))), device)
    else:
        module.to(device)
