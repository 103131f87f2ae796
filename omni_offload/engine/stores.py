"""Host stores: where a unit's bytes live on the host.

Owns the memory (exact in size, pinned or pageable), its filling and its unlocking; knows nothing of slots or order.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import torch

from .layout import Layout, flat, shaped
from .pinning import PinRefused, Registrar
from .process import Process

logger = logging.getLogger(__name__)

PINNED = "pinned"
PAGEABLE = "pageable"


class HostStore:
    """The host memory of one unit: `layout.nbytes` bytes, filled from tensors, seen through `views`.

    Every view has a storage of its own over the shared memory, so that saving, pickling or copying one tensor takes
    its own bytes along and not the whole unit.
    """

    def __init__(self, layout: Layout, memory: mmap.mmap | torch.Tensor | None, kind: str) -> None:
        self.layout = layout
        self.kind = kind
        self._memory = memory
        self._unlock: weakref.finalize | None = None
        pieces = [self._piece(f.offset, f.nbytes) for f in layout.fields]
        self.views = [shaped(piece, field) for piece, field in zip(pieces, layout.fields, strict=True)]
        self.bytes = self._piece(0, layout.nbytes)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.layout.nbytes

    def _piece(self, offset: int, nbytes: int) -> torch.Tensor:
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        memory = self._memory.numpy() if isinstance(self._memory, torch.Tensor) else self._memory
        assert memory is not None
        return torch.from_numpy(np.frombuffer(memory, dtype=np.uint8, count=nbytes, offset=offset))

    def fill(self, index: int, source: torch.Tensor) -> None:
        """Copy `source` (any device, the field's dtype, shape and strides) into field `index`."""
        flat(self.views[index]).copy_(flat(source))

    def seen_by_others(self, index: int, ours: int) -> bool:
        """Whether field `index` has more tensors looking at it than its view and `ours` others."""
        storage = self.views[index].untyped_storage()  # which counts itself
        return int(torch._C._storage_Use_Count(storage._cdata)) > 2 + ours

    def release(self) -> None:
        """Unlock the memory. It stays readable for as long as somebody holds a view of it."""
        if self._unlock is not None and self.kind == PINNED:
            _, function, arguments, _ = self._unlock.peek() or (None, _unlock, (), None)
            function(*arguments)
            self.kind = PAGEABLE  # only now: an interrupted release is released again
            self._unlock.detach()

    def _lock(self, registrar: Registrar, settle: Callable[[], None]) -> None:
        address = self.bytes.data_ptr()
        # The memory rides along in the arguments: it may not go before it is unlocked, nor be unlocked in mid-copy.
        # First the finalizer, then the lock: unlocking what an interrupt left unlocked is harmless.
        self._unlock = weakref.finalize(self, _unlock, Process(), registrar, address, settle, self._memory)
        try:
            registrar.register(address, self.nbytes)
        except PinRefused:
            self._unlock.detach()
            raise
        self.kind = PINNED


def _unlock(process: Process, registrar: Registrar, address: int, settle: Callable[[], None], memory: object) -> None:
    if process.is_this_one():  # a forked child has inherited the memory, but no lock on it
        settle()
        registrar.unregister(address)
    del memory


def _heap_trimmer() -> Callable[[int], int] | None:
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim  # glibc has it
    except (AttributeError, OSError, TypeError):
        return None
    return trim


_trim = _heap_trimmer()


def return_freed_memory() -> None:
    """Give freed memory back to the system, where the C library would keep it.

    Once it has freed one large block, as loading a checkpoint does, glibc serves tensors of up to 32 MiB from its heap,
    and freeing them one after another returns nothing: the originals would stay beside their copies.
    """
    if _trim is not None:
        _trim(0)


class HostAllocator:
    """Makes host stores, pinned where that is wanted and granted.

    Args:
        registrar: locks memory of our own, or None where the device's runtime cannot.
        pin: whether copies should start from locked memory.
        device: the onload device; without a registrar torch's own pinned allocator serves it.
        settle: waits until no copy issued so far still reads host memory.
    """

    def __init__(
        self, device: torch.device, *, registrar: Registrar | None, pin: bool, settle: Callable[[], None]
    ) -> None:
        self.device = device
        self._registrar = registrar
        self._settle = settle
        self.pin = pin and device.type != "cpu"
        self.pinned_bytes = 0
        self.refusal: str | None = None

    def store(self, tensors: Sequence[torch.Tensor]) -> HostStore:
        """A store that holds the bytes of `tensors`. The tensors themselves are left alone."""
        layout = Layout.of(tensors)
        with torch.inference_mode(False), torch.no_grad():
            store = self._empty(layout)
            for index, tensor in enumerate(tensors):
                store.fill(index, tensor)
        if self.pin and self._registrar is not None and layout.nbytes:
            try:
                store._lock(self._registrar, self._settle)
            except PinRefused as refusal:
                self._fall_back(layout.nbytes, refusal)
        if store.kind == PINNED:
            self.pinned_bytes += layout.nbytes
            weakref.finalize(store, self._returned, layout.nbytes).atexit = False
        return store

    def _empty(self, layout: Layout) -> HostStore:
        if self.pin and self._registrar is None and layout.nbytes:
            try:
                memory = torch.empty(layout.nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
                return HostStore(layout, memory, PINNED)
            except RuntimeError as refusal:
                self._fall_back(layout.nbytes, refusal)
        if not layout.nbytes:
            return HostStore(layout, None, PAGEABLE)
        # Private pages of our own: page-aligned as registration needs, exact in size, anonymous as memory limits count.
        pages = mmap.mmap(-1, layout.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(AttributeError, OSError):  # not on every kernel
            pages.madvise(mmap.MADV_HUGEPAGE)  # fewer faults while filling, fewer entries to lock
        return HostStore(layout, pages, PAGEABLE)

    def _fall_back(self, nbytes: int, refusal: Exception) -> None:
        if self.refusal is None:
            logger.warning(
                "Host memory: locking %.3f MiB more was refused with %.3f MiB locked already (%s). This unit and any "
                "other that is refused stay in ordinary memory, from which copies are slower. Pass pin_memory=False "
                "to do without locked memory, or raise the limit.",
                nbytes / 2**20,
                self.pinned_bytes / 2**20,
                refusal,
            )
        self.refusal = str(refusal)

    def _returned(self, nbytes: int) -> None:
        self.pinned_bytes -= nbytes
