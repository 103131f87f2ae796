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
    tensor_bytes,
    unwrapped,
)
from ..engine.entries import attach_root, detach
from ..engine.pinning import registrar_for
from ..engine.stores import PINNED, HostAllocator
from ..engine.streamer import LOOK_AGAIN_SECONDS, LayerStreamer, Token, WholeStreamer
from ..engine.transfer import transfer_for
from ..engine.unit import Shell, Unit, walk
from ..errors import OffloadStateError
from ..report import ComponentReport, OffloadReport
from .component import ManagedComponent, relocate
from .memory import MEMORY, managed_modules

logger = logging.getLogger(__name__)


class State(enum.Enum):
    """Where an offload is in its life. Found in another state than ON or OFF, it was interrupted and is undone."""

    BUILDING = enum.auto()
    ON = enum.auto()
    CLOSING = enum.auto()
    OFF = enum.auto()


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

    @property
    def on(self) -> bool:
        """Whether there is anything left of it: on, being built or being undone."""
        return self.state is not State.OFF

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
        self._pageable = HostAllocator(device, registrar=None, pin=False, settle=self._transfer.settle)
        for plan in self.plan.components:
            if plan.placement != STAYS:
                component = ManagedComponent(self, plan)
                self.components.append(component)
                # First: through it an interrupted build is found.
                attach_root(plan.module, component, MUTATORS, REFUSED)
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
        allocator = self._pageable if plan.stays_on_host else self._allocator
        return Unit(plan.name, plan.modules, allocator, excluded=self.plan.shared, **options)

    def _build_tables(self, component: ManagedComponent) -> list[nn.Module]:
        """Make the units of the tables that stay on the host; returns their modules."""
        for plan in component.plan.host_tables:
            component.tables.append(self._unit(plan))
        return [module for plan in component.plan.host_tables for module in plan.modules]

    @staticmethod
    def _attach_tables(component: ManagedComponent) -> None:
        for plan, unit in zip(component.plan.host_tables, component.tables, strict=True):
            component.attach(plan, unit)

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
                owner.__dict__.pop(MEMORY, None)
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
        managed = [*component.units, *component.tables]
        gone = [unit for unit in managed if not any(id(root) in present for root in unit.roots)]
        if gone:
            self.streamer.forget(gone)
            component.units = [unit for unit in component.units if unit not in gone]
            component.tables = [unit for unit in component.tables if unit not in gone]
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
            entries.append(self._entry(plan, component.all_units, resident, component.tables))
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
    def _entry(
        plan: ComponentPlan, units: Sequence[Unit], resident: int, tables: Sequence[Unit] = ()
    ) -> ComponentReport:
        coming = [unit for unit in units if unit not in tables]
        return ComponentReport(
            path=plan.path,
            role=plan.role,
            class_name=plan.module.__class__.__name__,
            placement=plan.placement,
            units=len(coming),
            streamed_bytes=sum(tensor.nbytes for unit in coming for tensor in unit.tensors),
            resident_bytes=resident,
            host_bytes=sum(unit.nbytes for unit in units),
            pinned_bytes=sum(unit.nbytes for unit in units if unit.store.kind == PINNED),
            copies=sum(unit.copies for unit in units),
        )
