"""How bytes get from a host store into a slot, and how computing and copying wait for one another.

Owns slots, the copy stream (or the copy thread) and their events; knows nothing of which unit is wanted when.

[Note: three waits]
A slot is written by the copy stream and read by whichever stream computes. Three waits keep them apart, none of them
a wait of the host:
  - a refill waits for `free`, recorded on the stream that computed when the last reader of the slot was done with it;
  - a computation waits for `ready`, recorded on the copy stream behind the copy;
  - memory that is given up is given up on the stream it was allocated on (`home`), made to wait for both first: the
    allocator hands it out again in the order of that stream.
The caller may compute on a stream of their own, and on another one next time. `free` is one event, so the second
stream waits for what the first one recorded before it records anew; otherwise the first reader would be forgotten.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from .stores import HostStore


@dataclass(eq=False)
class Slot:
    """Device memory for one unit at a time: a 1-D uint8 `buffer` and the state its transfer keeps with it.

    `faces` holds the views that units have cut from it, by their store: a slot may outlive units, and must not keep one
    alive.
    """

    buffer: torch.Tensor
    state: Any = None
    faces: weakref.WeakKeyDictionary[HostStore, list[torch.Tensor]] = field(default_factory=weakref.WeakKeyDictionary)

    def __post_init__(self) -> None:
        self._storage = self.buffer.untyped_storage()
        self._bare = self._references()
        self._held_by: weakref.WeakKeyDictionary[HostStore, int] = weakref.WeakKeyDictionary()
        self._counted = self._own = 0

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.buffer.numel()

    def _references(self) -> int:
        return int(torch._C._storage_Use_Count(self._storage._cdata))

    def add_face(self, store: HostStore, cut: Callable[[torch.Tensor], list[torch.Tensor]]) -> list[torch.Tensor]:
        """The views that `cut` makes of the buffer, remembered for `store`."""
        before = self._references()
        face = self.faces[store] = cut(self.buffer)
        self._held_by[store] = self._references() - before
        self._counted = 0
        return face

    def kept_by_others(self) -> bool:
        """Whether somebody holds a view of this memory while no unit shows it: an output or a cache of a block."""
        if len(self._held_by) != self._counted:
            self._counted = len(self._held_by)
            self._own = sum(self._held_by.values())
        return self._references() > self._bare + self._own


class Transfer(Protocol):
    """Moves bytes from host stores into slots of one device. See [Note: three waits]."""

    device: torch.device
    copies: int
    copied_bytes: int

    def new_slot(self, nbytes: int) -> Slot:
        """Allocate a slot of `nbytes` bytes. Raises `torch.OutOfMemoryError`."""

    def fill(self, slot: Slot, store: HostStore) -> None:
        """Issue the copy of `store` into `slot`, behind everything that still reads the slot."""

    def await_ready(self, slot: Slot) -> None:
        """Make the computing stream wait until what was last copied into `slot` is there."""

    def mark_free(self, slot: Slot) -> None:
        """Say that what the computing stream has been given so far was the last that reads `slot`."""

    def retire(self, slot: Slot) -> None:
        """Prepare `slot` for its memory to be given up: the caller drops it afterwards."""

    def settle(self) -> None:
        """Wait on the host until every copy issued so far is done."""

    def synchronize(self) -> None:
        """Wait on the host until the device is idle: for repairs, never in a steady pass."""

    def close(self) -> None:
        """`settle`, and give up what the transfer itself holds."""


def _empty(nbytes: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):  # a tensor made in inference mode could not be written outside it
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


@dataclass(eq=False)
class _StreamState:
    ready: torch.Event
    free: torch.Event
    home: torch.Stream
    reader: torch.Stream  # where `free` was recorded last


class StreamTransfer:
    """Transfer by a copy stream and events, through torch's generic accelerator interface."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.copies = 0
        self.copied_bytes = 0
        self._settled = 0  # how many copies had been issued when they were last awaited
        self._stream = torch.Stream(device=device)

    def _computing_stream(self) -> torch.Stream:
        return torch.accelerator.current_stream(self.device)  # the device is named: another one may be current

    def new_slot(self, nbytes: int) -> Slot:
        buffer = _empty(nbytes, self.device)
        home = self._computing_stream()
        state = _StreamState(torch.Event(device=self.device), torch.Event(device=self.device), home, home)
        state.free.record(home)  # the memory's last user may still be queued there
        return Slot(buffer, state)

    def fill(self, slot: Slot, store: HostStore) -> None:
        state: _StreamState = slot.state
        self.copies += 1
        self.copied_bytes += store.nbytes
        self._stream.wait_event(state.free)
        with self._stream:
            slot.buffer[: store.nbytes].copy_(store.bytes, non_blocking=True)
        state.ready.record(self._stream)

    def await_ready(self, slot: Slot) -> None:
        state: _StreamState = slot.state
        stream = self._computing_stream()
        stream.wait_event(state.ready)
        if stream != state.reader:
            stream.wait_event(state.free)
            state.reader = stream

    def mark_free(self, slot: Slot) -> None:
        state: _StreamState = slot.state
        stream = self._computing_stream()
        if stream != state.reader:
            stream.wait_event(state.free)
            state.reader = stream
        state.free.record(stream)

    def retire(self, slot: Slot) -> None:
        state: _StreamState = slot.state
        state.home.wait_event(state.free)
        state.home.wait_stream(self._stream)

    def settle(self) -> None:
        if self._settled != self.copies:
            issued = self.copies
            self._stream.synchronize()
            self._settled = issued

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)

    def close(self) -> None:
        self.settle()


class ThreadTransfer:
    """Transfer for `device="cpu"`: one thread copies, and what a stream orders elsewhere the thread's queue orders."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.copies = 0
        self.copied_bytes = 0
        self._thread: ThreadPoolExecutor | None = None
        self._last: Future[None] | None = None

    def new_slot(self, nbytes: int) -> Slot:
        return Slot(_empty(nbytes, self.device))

    def fill(self, slot: Slot, store: HostStore) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="omni_offload-copy")
        try:
            copying = self._thread.submit(_copy, slot.buffer, store.bytes)
        except RuntimeError:  # the main thread has ended, this one has not: no executor takes work any more
            _copy(slot.buffer, store.bytes)
            copying = Future()
            copying.set_result(None)
        slot.state = self._last = copying
        self.copies += 1
        self.copied_bytes += store.nbytes

    def await_ready(self, slot: Slot) -> None:
        slot.state.result()

    def mark_free(self, slot: Slot) -> None:
        pass  # the computation is over when the host says so

    def retire(self, slot: Slot) -> None:
        pass  # a copy under way holds the memory itself

    def settle(self) -> None:
        if self._last is not None:
            self._last.exception()  # one thread, in order: the last copy is done last

    def synchronize(self) -> None:
        self.settle()

    def close(self) -> None:
        self.settle()
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._thread = None


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target[: source.numel()].copy_(source)


def transfer_for(device: torch.device) -> Transfer:
    """The transfer that serves `device`."""
    return ThreadTransfer(device) if device.type == "cpu" else StreamTransfer(device)
