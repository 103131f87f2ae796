"""The streamer: acquire before a unit computes, release behind it.

Owns who is running what, the lock, the repair after an interrupt, and what happens to edits; leaves slots to the
window and copies to the transfer. A policy says which groups of units exclude one another.

[Note: tokens]
What is running is a stack of tokens under one lock, not flags spread over modules. A token is pushed before anything
is changed for it and popped when everything is back, and it remembers the frame that will release it. An interrupt
can arrive between any two lines; whatever it leaves behind is a token whose frame is no longer on its thread's stack.
The next entry finds such tokens and undoes what they stand for. A second thread waits until the first one's tokens
are gone, so that two callers never see one another's weights come and go.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import torch

from ..errors import OffloadStateError
from .order import Order
from .process import Process
from .transfer import Transfer
from .unit import Shell, Unit
from .window import StreamingWindow, WholeWindow

logger = logging.getLogger(__name__)

# How long a thread that waits for another one sleeps before it looks whether that one still runs (an interrupt may
# have taken it out without a word). Nobody waits this long in the ordinary case: a release wakes the waiting.
LOOK_AGAIN_SECONDS = 0.2
TELL_AFTER_LOOKS = 50  # about ten seconds: longer than most forwards, and time to say that somebody waits


class Group:
    """Units that are on the device together, and not together with another group's: a component, or a part of one.

    Args:
        component: the component's path.
        units: in declared order.
        shell: what is left of the component, a unit that its parts share; None without one.
        part: the part's name in a split component. There the group without a part stands for the shell alone.
    """

    def __init__(
        self, component: str, units: Sequence[Unit], shell: Unit | None = None, *, part: str | None = None
    ) -> None:
        self.component = component
        self.part = part
        self.name = component if part is None else f"{component}:{part}"
        self.units = list(units)
        self.shell = shell

    def excludes(self, other: Group) -> bool:
        """Whether the two may not be on the device together."""
        if self.component != other.component:
            return True
        return self.part is not None and other.part is not None and self.part != other.part

    @property
    def all_units(self) -> list[Unit]:
        """The shell, then the units: the order in which they are needed."""
        return ([self.shell] if self.shell is not None else []) + self.units

    def __repr__(self) -> str:
        return f"Group({self.name!r})"


class Token:
    """Something that runs: a unit, or a whole component (`unit` None); see [Note: tokens]."""

    __slots__ = ("component", "frame", "group", "name", "thread", "unit")

    def __init__(self, name: str, unit: Unit | None, group: Group | None, frame: FrameType) -> None:
        self.name = name
        self.unit = unit
        self.group = group
        self.component = None if unit is not None else name if group is None else group.component
        self.frame: FrameType | None = frame
        self.thread = threading.get_ident()

    def done(self) -> None:
        """Let go of the frame, which holds the token, and the activations that were passed to it."""
        self.frame = None

    def alive(self) -> bool:
        """Whether the code that will release it is still running."""
        if self.thread == threading.get_ident():
            frame: FrameType | None = sys._getframe()
        else:
            frame = sys._current_frames().get(self.thread)
        while frame is not None:
            if frame is self.frame:
                return True
            frame = frame.f_back
        return False


class Streamer:
    """Base of both streamers: tokens, edits, faces. Not thread-bound; one lock serves all callers."""

    def __init__(self, transfer: Transfer, shells: Sequence[Shell]) -> None:
        self.transfer = transfer
        self.shells = shells
        self._tokens: list[Token] = []
        self._lock = threading.Condition(threading.RLock())
        self._told_no_grad = False
        self._process = Process()
        self.window: StreamingWindow | WholeWindow

    @property
    def device(self) -> torch.device:
        """The onload device."""
        return self.transfer.device

    def held(self, unit: Unit) -> bool:
        """Whether `unit` is computing."""
        return any(token.unit is unit for token in self._tokens)

    def held_here(self, unit: Unit) -> bool:
        """Whether `unit` is computing in this thread."""
        me = threading.get_ident()
        return any(token.unit is unit and token.thread == me for token in self._tokens)

    def runs_here(self, component: str) -> bool:
        """Whether `component` has been entered in this thread."""
        me = threading.get_ident()
        return any(token.component == component and token.thread == me for token in self._tokens)

    # --- around a unit ---------------------------------------------------------------------------------------

    def acquire(self, unit: Unit, frame: FrameType) -> Token:
        """Bring `unit` and point its tensors at the device. Raises what copying or allocating raises, undone."""
        self._process.require()
        with self._lock:
            if self._tokens:
                self._admit()
            nested = self.held(unit)
            token = Token(unit.name, unit, self._group_of(unit), frame)
            self._tokens.append(token)
            try:
                if not nested:
                    self._prepare(unit)
                    slot = self.window.bring(unit)
                    self.transfer.await_ready(slot)
                    unit.show(slot)
                self.window.entered(unit)
            except BaseException:
                self._undo(token)
                raise
            return token

    def release(self, token: Token) -> None:
        """Point the tensors back at the host, when the outermost holder is done."""
        with self._lock:
            if token not in self._tokens:
                return  # an interrupt's repair was here before
            unit = token.unit
            if unit is not None and sum(t.unit is unit for t in self._tokens) == 1:
                self.window.left(unit)
                written = unit.written()
                if written:
                    self._keep_written(unit, written)
                unit.park()
                self.window.parked(unit)
                if torch.is_autocast_enabled(self.device.type):
                    # Autocast remembers casts by tensor; the tensor now means other memory.
                    torch.clear_autocast_cache()
            self._drop_token(token)

    def _drop_token(self, token: Token) -> None:
        if token in self._tokens:
            self._tokens.remove(token)
        token.done()
        self._lock.notify_all()

    def _prepare(self, unit: Unit) -> None:
        """See to what others did to the parked unit, before it is brought."""
        if unit.replaced():
            logger.debug("%s was changed from outside; laying it out anew", unit.name)
            self.transfer.settle()  # a copy of the old bytes may be under way
            self.window.drop(unit)
            unit.absorb()
        elif unit.edited() and self.window.holds(unit):
            self.window.drop(unit)

    def _keep_written(self, unit: Unit, indices: list[int]) -> None:
        """A forward wrote to tensors of the unit (running statistics, say): keep that."""
        unit.write_back(indices)
        self.window.drop(unit)

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """While the body reads parked weights, no other thread makes them show the device."""
        self._process.require()
        with self._lock:
            self._admit()
            yield

    # --- around a component ----------------------------------------------------------------------------------

    def enter(self, name: str, group: Group | None, frame: FrameType) -> None:
        """The component `name` starts. Repairs what an interrupt left, and brings the component's shell in."""
        self._process.require()
        with self._lock:
            self._admit()
            token = Token(name, None, group, frame)
            self._tokens.append(token)
            try:
                self._begin(group)
            except BaseException:
                self._undo(token)
                raise

    def leave(self, name: str) -> None:
        """The component `name` is done, as far as it was entered in this thread."""
        me = threading.get_ident()
        with self._lock:
            for token in reversed(self._tokens):
                if token.unit is None and token.name == name and token.thread == me:
                    self._end(token.group)
                    self._drop_token(token)
                    return

    def _begin(self, group: Group | None) -> None:
        for shell in self.shells:
            if shell.astray():
                shell.place()

    def _end(self, group: Group | None) -> None:
        """What the component computes has been issued."""

    def _group_of(self, unit: Unit) -> Group | None:
        return None

    # --- states that an interrupt leaves ---------------------------------------------------------------------

    def _admit(self) -> None:
        """Wait until no other thread runs anything, and undo what no longer runs."""
        me = threading.get_ident()
        waited = 0
        while True:
            for token in [t for t in self._tokens if not t.alive()]:
                self._undo(token)
            if all(token.thread == me for token in self._tokens):
                return
            waited += not self._lock.wait(LOOK_AGAIN_SECONDS)
            if waited == TELL_AFTER_LOOKS:
                inside = ", ".join(sorted({token.name for token in self._tokens if token.thread != me}))
                logger.warning(
                    "Waiting for another thread, which is inside %s. Should that one wait for this thread in turn, "
                    "neither will end: weights serve one thread at a time.",
                    inside,
                )

    def _undo(self, token: Token) -> None:
        unit = token.unit
        if unit is not None and sum(t.unit is unit for t in self._tokens) == 1:
            self.transfer.synchronize()  # whichever stream computed with it is done then
            if unit.on_device:
                unit.park()
            self.window.drop(unit)
        self._drop_token(token)

    # --- between calls ---------------------------------------------------------------------------------------

    def rest(self, what: str = "parking the weights") -> None:
        """Go to the idle level. Device copies are dropped: the host may be edited from here on.

        Raises:
            OffloadStateError: something is computing in this thread; `what` names the caller in the message.
        """
        self._process.require()
        with self._lock:
            self._admit()
            self._refuse_while_running(what)
            self._let_copies_end()
            self.window.rest()

    def keep_device_edits(self) -> None:
        """Take what is on the device for edits that left no trace, where the device is what others could see."""

    def _let_copies_end(self) -> None:
        # The host runs ahead of the device: copies of the last pass may still have to read what is edited next.
        self.transfer.settle()

    def runs_anything_here(self) -> bool:
        """Whether a component or a unit is running in this thread."""
        me = threading.get_ident()
        return any(token.thread == me and token.alive() for token in self._tokens)

    def forget(self, units: Sequence[Unit]) -> None:
        """`units` are not this streamer's any more."""
        with self._lock:
            self.rest("giving up modules")
            self.window.forget(units)

    def close(self) -> None:
        """Give all device memory of the window back, and end the transfer."""
        with self._lock:
            self.rest("disabling offload")
            self.window.close()
            self.transfer.close()

    def _refuse_while_running(self, what: str) -> None:
        running = [token.name for token in self._tokens]
        if running:
            raise OffloadStateError(
                f"{what} is not possible while {', '.join(running)} is computing; call it between forwards, for "
                "instance in a step callback or after the pipeline call"
            )

    def note_no_grad(self) -> None:
        """Say once that gradients are not recorded through managed weights."""
        if not self._told_no_grad:
            self._told_no_grad = True
            logger.warning(
                "Offloaded modules compute without recording gradients, since their weights leave the device behind "
                "each use. Wrap the call in torch.no_grad() to silence this, or call disable_offload() to train."
            )


class LayerStreamer(Streamer):
    """Streams units of all components through one window of `depth` + 1 slots; shells stay on the device.

    Args:
        transfer: moves the bytes.
        sequences: per list of blocks, the units in declared order.
        shells: what stays.
        depth: units fetched ahead.
        home: for a unit, the shell that takes a tensor which a forward was seen to write.
    """

    def __init__(
        self,
        transfer: Transfer,
        sequences: Sequence[Sequence[Unit]],
        shells: Sequence[Shell],
        *,
        depth: int = 1,
        home: Callable[[Unit], Shell],
    ) -> None:
        super().__init__(transfer, shells)
        self._home = home
        units = [unit for sequence in sequences for unit in sequence]
        self.window: StreamingWindow = StreamingWindow(transfer, units, Order(sequences), depth=depth, held=self.held)

    def _keep_written(self, unit: Unit, indices: list[int]) -> None:
        # A buffer is copied back once; from then on it stays on the device, where the next forward writes it again.
        # Not so a parameter: whoever writes to all of them would have the whole model on the device in the end.
        tensors = [unit.tensors[i] for i in indices if not isinstance(unit.tensors[i], torch.nn.Parameter)]
        super()._keep_written(unit, indices)
        if not tensors:
            return
        self.transfer.settle()
        unit.park()
        unit.rebuild_without(tensors)
        shell = self._home(unit)
        shell.adopt(tensors)
        shell.place()


class WholeStreamer(Streamer):
    """Keeps the group in use on the device; its units flow in on first use, and no other group's are there then."""

    def __init__(self, transfer: Transfer, groups: Sequence[Group], shells: Sequence[Shell]) -> None:
        super().__init__(transfer, shells)
        self.groups = list(groups)
        self.window: WholeWindow = WholeWindow(transfer, self.held)
        self._active: list[Group] = []
        self._groups = {unit: group for group in groups for unit in group.units}

    def forget(self, units: Sequence[Unit]) -> None:
        super().forget(units)
        gone = set(units)
        self._groups = {unit: group for unit, group in self._groups.items() if unit not in gone}
        self.groups = [group for group in self.groups if group.shell not in gone]
        for group in self.groups:
            group.units = [unit for unit in group.units if unit not in gone]

    @property
    def active(self) -> list[Group]:
        """The groups on the device: one, or several where one runs inside another."""
        return list(self._active)

    def _group_of(self, unit: Unit) -> Group | None:
        return self._groups.get(unit)

    def _begin(self, group: Group | None) -> None:
        super()._begin(group)
        if group is not None:
            self.activate(group)
            if group.shell is not None:  # each use waits for itself: it may be on another stream than the last one
                self.transfer.await_ready(self.window.bring(group.shell))

    def _end(self, group: Group | None) -> None:
        if group is not None and group.shell is not None:
            self.window.left(group.shell)

    def _prepare(self, unit: Unit) -> None:
        group = self._groups.get(unit)
        if group is not None and group not in self._active:
            self.activate(group)
        super()._prepare(unit)

    def activate(self, group: Group) -> None:
        """Make `group` the one on the device: evict the others that do not run, then load it."""
        with self._lock:
            if group in self._active and (group.shell is None or group.shell.on_device):
                return
            running = {id(token.group) for token in self._tokens}
            for other in list(self._active):
                if id(other) not in running and group.excludes(other):
                    self._evict(other, keep=group.shell)
            for unit in group.all_units:
                if not self.held(unit) and not unit.on_device:
                    super()._prepare(unit)
            if group not in self._active:
                self._active.append(group)
            try:
                self.window.load(group.all_units)
                shell = group.shell
                if shell is not None and not shell.on_device:
                    self.transfer.await_ready(self.window.bring(shell))
                    shell.show(self.window.bring(shell))
            except BaseException:
                self._evict(group)
                raise

    def _evict(self, group: Group, keep: Unit | None = None) -> None:
        shell = group.shell
        shared = any(g.shell is shell for g in self._active if g is not group)
        if shell is not None and shell is not keep and not shared:
            if shell.on_device:
                self.window.left(shell)
                self._bring_shell_home(shell)
            self.window.unload([shell])
        self.window.unload(group.units)
        if group in self._active:
            self._active.remove(group)

    def keep_device_edits(self) -> None:
        with self._lock:
            for group in self._active:
                # One that was replaced or reshaped is laid out anew when it leaves.
                if group.shell is not None and group.shell.on_device and not group.shell.astray():
                    group.shell.write_back(range(len(group.shell.tensors)))

    def _bring_shell_home(self, shell: Unit) -> None:
        """Park a shell, which others could see and edit on the device for as long as its group was there."""
        if shell.astray():
            shell.absorb()
        else:
            written = shell.written()
            if written:
                shell.write_back(written)
            shell.park()

    def rest(self, what: str = "parking the weights") -> None:
        self._process.require()
        with self._lock:
            self._admit()
            self._refuse_while_running(what)
            self._let_copies_end()
            for group in list(self._active):
                self._evict(group)
            self.window.rest()
