"""One pipeline's offload while it is on: what was built, who answers for each component, and its undoing.

Owns the life cycle (enable, rest, refresh, disable, report) that the policies share. It hangs on the components, not on
a pipeline: every pipeline that has them finds it there, also one made by `from_pipe`.
"""

from __future__ import annotations

import enum
import logging
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch import nn

from ..declarations import MUTATORS, REFUSED
from ..discovery import (
    STAYS,
    ComponentPlan,
    ResolvedPlan,
    UnitPlan,
    components_of,
    declared_modules,
    tensor_bytes,
    unwrapped,
)
from ..engine.entries import BlockEntry, RootEntry, attach_block, attach_child, attach_root, detach, entry_of
from ..engine.pinning import registrar_for
from ..engine.stores import PINNED, HostAllocator
from ..engine.streamer import LOOK_AGAIN_SECONDS, Group, LayerStreamer, Token, WholeStreamer
from ..engine.transfer import transfer_for
from ..engine.unit import Shell, Unit, is_plain, move, own_tensors, walk
from ..errors import OffloadStateError
from ..report import ComponentReport, OffloadReport
from .interop import acquires_in_forward, point_hooks_at

logger = logging.getLogger(__name__)


class State(enum.Enum):
    """Where an offload is in its life. Found in another state than ON or OFF, it was interrupted and is undone."""

    BUILDING = enum.auto()
    ON = enum.auto()
    CLOSING = enum.auto()
    OFF = enum.auto()


class ManagedComponent:
    """Answers for one component whose weights come and go: the `Root` of the engine's entries."""

    def __init__(self, offload: Offload, plan: ComponentPlan) -> None:
        self.offload = offload
        self.plan = plan
        self.units: list[Unit] = []
        self.shell: Shell | Unit | None = None
        self.group: Group | None = None
        self.parts: dict[str, Group] = {}
        self.attached: list[nn.Module] = []
        self.device = offload.plan.device

    @property
    def all_units(self) -> list[Unit]:
        """Its units, and its shell where that is one."""
        return [*self.units, *([self.shell] if isinstance(self.shell, Unit) else [])]

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
        move((t for t in tensors if is_plain(t) and not t.is_meta), torch.device("cpu"))

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


class Offload(ABC):
    """What is built for one resolved plan.

    Args:
        plan: what to do; everything that can be refused has been.
    """

    streamer: LayerStreamer | WholeStreamer

    def __init__(self, plan: ResolvedPlan) -> None:
        self.plan = plan
        self.state = State.OFF
        self.components: list[ManagedComponent] = []
        self._shells: list[Shell] = []
        self._stay: list[ComponentPlan] = []
        self.owners: weakref.WeakSet[Any] = weakref.WeakSet()
        self.watched = False
        self._calls: list[Token] = []
        self._call_ended = threading.Condition()

    # --- building --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def enable(self) -> None:
        """Build everything and bring the pipeline to its idle level. On any failure it is as before, on the host."""
        with torch.inference_mode(False):
            self.state = State.BUILDING
            try:
                self._build()
                self.state = State.ON
            except BaseException:
                self.disable()
                raise

    def _build(self) -> None:
        device = self.plan.device
        self._transfer = transfer_for(device)
        self._allocator = HostAllocator(
            device,
            registrar=registrar_for(device),
            pin=self.plan.config.pin_memory is not False,
            settle=self._transfer.settle,
        )
        for plan in self.plan.components:
            if plan.placement != STAYS:
                component = ManagedComponent(self, plan)
                self.components.append(component)
                attach_root(
                    plan.module, component, MUTATORS, REFUSED
                )  # first: through it an interrupted build is found
        # Units leave the device, if they were there, before anything is brought to it.
        for component in self.components:
            self._build_component(component)
        self._stay = [plan for plan in self.plan.components if plan.placement == STAYS]
        for shell in self._shells:
            shell.place()
        for plan in self._stay:
            relocate(plan.module, device)
        self._rest = self._outside_components()
        self._shells.append(self._rest)
        self._rest.place()
        self._start()

    def _outside_components(self) -> Shell:
        inside = [plan.module for plan in self.plan.components]
        return Shell("outside all components", self.plan.tops, self.plan.device, stop=inside)

    @abstractmethod
    def _build_component(self, component: ManagedComponent) -> None:
        """Make the units of a component, which parks them, and its shell."""

    @abstractmethod
    def _start(self) -> None:
        """Make the streamer and attach the blocks."""

    def _unit(self, plan: UnitPlan, **options: Any) -> Unit:
        return Unit(plan.name, plan.modules, self._allocator, excluded=self.plan.shared, **options)

    def _attach(self, component: ManagedComponent, plan: UnitPlan, unit: Unit) -> None:
        for module in plan.modules:
            plain = module.__class__.forward
            component.attached.append(module)
            attach_block(module, BlockEntry(self.streamer, unit, acquires_in_forward))
            point_hooks_at(module, type(module).forward, (plain,))
            for child in _callable_children(module):
                if entry_of(child) is None:
                    component.attached.append(child)
                    attach_child(child, BlockEntry(self.streamer, unit))

    # --- undoing ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def disable(self) -> None:
        """Undo everything: weights on the host in ordinary memory, classes and forwards the original ones.

        An interrupt leaves the state CLOSING; calling again finishes. The roots go last, so that it can be found.
        """
        if self.state is State.OFF:
            return
        if self.state is State.ON:
            self._wait_for_calls()
        with torch.inference_mode(False):
            if self.state is not State.CLOSING and hasattr(self, "streamer"):
                self.streamer.rest("disabling offload")
            self.state = State.CLOSING
            if hasattr(self, "streamer"):
                self.streamer.close()
            elif hasattr(self, "_transfer"):
                self._transfer.close()
            for component in self.components:
                component.make_plain()
            for shell in self._shells:
                shell.bring_back()
            for plan in self._stay:
                relocate(plan.module, torch.device("cpu"))
            for component in self.components:
                detach(component.plan.module)
            self.state = State.OFF
            for owner in self.owners:
                owner.__dict__.pop(_MEMORY, None)
            self.components, self._shells, self._stay = [], [], []

    @torch.no_grad()
    def let_go(self, pipeline: Any) -> None:
        """Give up the components that `pipeline`, through which this was enabled, does not have any more.

        They are plain again, and nothing here keeps them: this is how people drop an encoder behind its use.
        """
        if self.state is not State.ON or pipeline not in self.owners or self.inside_call():
            return
        for component in self.components:
            self._prune(component)
        present = {id(unwrapped(module)) for module in (*components_of(pipeline).values(), *managed_modules(pipeline))}
        gone = [plan for plan in self.plan.components if id(plan.module) not in present]
        if not gone:
            return
        self._wait_for_calls()
        paths = {plan.path for plan in gone}
        with torch.inference_mode(False):
            for component in [c for c in self.components if c.plan.path in paths]:
                self.streamer.forget(component.all_units)
                component.make_plain()
                if isinstance(component.shell, Shell):
                    component.shell.bring_back()
                    self._shells.remove(component.shell)
                detach(component.plan.module)
                self.components.remove(component)
            for plan in [plan for plan in self._stay if plan.path in paths]:
                relocate(plan.module, torch.device("cpu"))
                self._stay.remove(plan)
            self.plan = replace(
                self.plan,
                components=tuple(plan for plan in self.plan.components if plan.path not in paths),
                tops=tuple(top for top in self.plan.tops if id(top) in present or top is pipeline),
                children=tuple(child for child in self.plan.children if id(child) in present),
            )
            self._shells.remove(self._rest)
            self._rest = self._outside_components()
            self._shells.append(self._rest)

    # --- between calls ---------------------------------------------------------------------------------------

    def begin_call(self, frame: FrameType, watched: bool = False) -> Token:
        """A pipeline call starts in `frame`, behind those of other threads.

        `watched`: a callback looks on between the passes and may edit weights, so copies are awaited behind each.
        """
        token = Token("pipeline", None, None, frame)
        with self._call_ended:
            while any(call.thread != token.thread for call in self._running()):
                self._call_ended.wait(LOOK_AGAIN_SECONDS)
            outermost = not self._calls
            self._calls.append(token)
        if outermost:
            self.watched = watched
        if outermost and self.state is State.ON and not self.streamer.runs_anything_here():
            # A component may have been called by itself before, and its weights edited since.
            self.streamer.keep_device_edits()
            self.streamer.rest("beginning a pipeline call")
        return token

    def end_call(self, token: Token) -> None:
        """A pipeline call is over. Behind the outermost one of a thread, go to the idle level."""
        outermost = next((call for call in self._running() if call.thread == token.thread), token) is token
        token.done()
        try:
            if outermost and self.state is State.ON and not self.streamer.runs_anything_here():
                self.streamer.rest("ending a pipeline call")
        finally:
            with self._call_ended:
                self._running()
                self._call_ended.notify_all()

    def _running(self) -> list[Token]:
        self._calls = [call for call in self._calls if call.alive()]
        return self._calls

    def inside_call(self) -> bool:
        """Whether a pipeline call is under way in this thread."""
        return any(call.thread == threading.get_ident() for call in self._running())

    def _wait_for_calls(self) -> None:
        """Let the pipeline calls of other threads end. Raises `OffloadStateError` inside one of this thread."""
        with self._call_ended:
            while self._running():
                if self.inside_call():
                    raise OffloadStateError(
                        "offload cannot be turned off or changed inside a pipeline call: what is computed next would "
                        "find its weights elsewhere. Do it behind the call."
                    )
                self._call_ended.wait(LOOK_AGAIN_SECONDS)

    def settle(self) -> None:
        """Wait until no copy still reads host memory."""
        self._transfer.settle()

    def park(self, what: str) -> None:
        """Go to the idle level, before `what` changes weights."""
        if self.state is State.ON:
            self.streamer.rest(what)

    @torch.no_grad()
    def absorb_changes(self) -> None:
        """Take in what was changed while parked, unit by unit, so that no second copy of a weight outlives it."""
        if self.state is not State.ON:
            return
        with torch.inference_mode(False):
            for component in self.components:
                self._prune(component)
                for unit in component.all_units:
                    if not unit.on_device and unit.replaced():
                        unit.absorb()
            for shell in self._shells:
                shell.place()

    def _prune(self, component: ManagedComponent) -> None:
        """Let go of blocks that are not in the component any more: deleted ones, and those that were replaced."""
        if component.shell is None or not component.shell.restructured():
            return
        modules = list(walk([component.plan.module]))
        present = {id(module) for module in modules}
        gone = [unit for unit in component.units if not any(id(root) in present for root in unit.roots)]
        if gone:
            self.streamer.forget(gone)
            component.units = [unit for unit in component.units if unit not in gone]
            for module in [module for module in component.attached if id(module) not in present]:
                detach(module)
                component.attached.remove(module)
            for unit in gone:
                unit.release()
            component.shell.keep_out_only(modules)
            if isinstance(component.shell, Shell):
                component.shell.place()
            former = component.plan
            component.plan = former.without({unit.name for unit in gone})
            plans = [component.plan if plan is former else plan for plan in self.plan.components]
            self.plan = replace(self.plan, components=tuple(plans))

    def refresh(self) -> None:
        """Drop every device copy and take in every change, whatever kind it was."""
        if self.state is State.ON:
            self.streamer.keep_device_edits()
        self.park("offload_refresh()")
        self.absorb_changes()

    @contextmanager
    def changing(self, what: str) -> Iterator[None]:
        """Around a call that edits weights."""
        self.park(what)
        try:
            yield
        finally:
            self.absorb_changes()

    def fits(self, pipeline: Any) -> bool:
        """Whether `pipeline` has no other modules than when this was built; for its owner also: none less."""
        known = {id(module) for module in (*self.plan.children, *(c.module for c in self.plan.components))}
        present = {id(module) for module in managed_modules(pipeline)}
        if not {id(unwrapped(module)) for module in components_of(pipeline).values()} <= known:
            return False
        managed = {id(plan.module) for plan in self.plan.components if plan.placement != STAYS}
        nothing_to_manage = not managed and not self.plan.all_stay
        return not nothing_to_manage and (pipeline not in self.owners or managed <= present)

    # --- figures ---------------------------------------------------------------------------------------------

    def report(self) -> OffloadReport:
        """What has been done so far; see `OffloadReport`."""
        managed = {component.plan.path: component for component in self.components}
        entries = []
        for plan in self.plan.components:
            component = managed.get(plan.path)
            if component is None:
                size = tensor_bytes([plan.module])
                entries.append(self._entry(plan, [], size))
                continue
            resident = component.shell.nbytes if isinstance(component.shell, Shell) else 0
            entries.append(self._entry(plan, component.all_units, resident))
        window = self.streamer.window
        notices = list(self.plan.notices)
        if self._allocator.refusal is not None:
            notices.append(f"some host memory could not be locked: {self._allocator.refusal}")
        resident = sum(entry.resident_bytes for entry in entries)
        return OffloadReport(
            pipeline=self.plan.pipeline,
            mode=self.plan.config.mode,
            device=str(self.plan.device),
            components=tuple(entries),
            window_bytes=window.nbytes,
            peak_window_bytes=window.peak_nbytes,
            idle_device_bytes=resident + self._idle_window_bytes(),
            copies=self._transfer.copies,
            copied_bytes=self._transfer.copied_bytes,
            hits=window.hits,
            misses=window.misses,
            notices=tuple(notices),
        )

    @abstractmethod
    def _idle_window_bytes(self) -> int:
        """Device bytes of the window between calls."""

    @staticmethod
    def _entry(plan: ComponentPlan, units: Sequence[Unit], resident: int) -> ComponentReport:
        return ComponentReport(
            path=plan.path,
            role=plan.role,
            class_name=plan.module.__class__.__name__,
            placement=plan.placement,
            units=len(units),
            streamed_bytes=sum(tensor.nbytes for unit in units for tensor in unit.tensors),
            resident_bytes=resident,
            host_bytes=sum(unit.nbytes for unit in units),
            pinned_bytes=sum(unit.nbytes for unit in units if unit.store.kind == PINNED),
            copies=sum(unit.copies for unit in units),
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
    tensors = [tensor for _, tensor in own_tensors(walk([module]))]
    if all(is_plain(tensor) for tensor in tensors):
        move(tensors, device)
    else:
        module.to(device)


_MEMORY = "_offload_memory"


class _Memory:
    """A pipeline's note of the offload that was enabled through it; a copy of the pipeline has none."""

    def __init__(self, offload: Offload | None = None) -> None:
        self.offload = offload

    def __deepcopy__(self, memo: dict[int, Any]) -> _Memory:
        return _Memory()

    def __reduce__(self) -> Any:
        return _Memory, ()


def remember(pipeline: Any, offload: Offload) -> None:
    """Note in `pipeline` that `offload` was enabled through it: it is found there when all components are swapped."""
    pipeline.__dict__[_MEMORY] = _Memory(offload)
    offload.owners.add(pipeline)


def has_memory(pipeline: Any) -> bool:
    """Whether an offload was enabled through `pipeline`."""
    return _MEMORY in pipeline.__dict__


def offloads_on(pipeline: Any) -> list[Offload]:
    """The offloads that manage components of `pipeline`, interrupted ones included: none, or one as a rule."""
    found: dict[int, Offload] = {}
    for module in managed_modules(pipeline):
        entry = entry_of(module)
        if isinstance(entry, RootEntry) and isinstance(entry.root, ManagedComponent):
            found[id(entry.root.offload)] = entry.root.offload
    memory = pipeline.__dict__.get(_MEMORY)
    if memory is not None and memory.offload is not None and memory.offload.state is not State.OFF:
        found[id(memory.offload)] = memory.offload
    return list(found.values())


def managed_modules(pipeline: Any) -> list[nn.Module]:
    """The modules of `pipeline` that may carry a root entry: its components, by every path that it declares."""
    named = [unwrapped(module) for module in components_of(pipeline).values()]
    return named + declared_modules(pipeline)
