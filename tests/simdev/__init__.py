"""A simulated accelerator for tests: torch's PrivateUse1 device on host memory, named ``simgpu``.

`load` makes it known to torch, for the rest of the process. What this module then offers is what a real
device cannot: its schedule, its limits and costs, the races it saw, and what it counted. See README.md for
what that proves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import NamedTuple

import torch

from .build import SimdevUnavailable, library
from .device_module import Cudart, make_device_module, patch_tensor_data

__all__ = [
    "NAME",
    "Cudart",
    "SimdevUnavailable",
    "TraceEvent",
    "counters",
    "host_access",
    "host_time",
    "load",
    "pending",
    "races",
    "reset",
    "schedules",
    "set",
    "settings",
    "trace",
]

NAME = "simgpu"
_module: ModuleType | None = None


class TraceEvent(NamedTuple):
    """One operation of the device in virtual time.

    Attributes:
        stream: Index of the stream; 0 is the default stream of device 0.
        engine: "h2d", "d2h" or "compute".
        name: "h2d", "h2d_pageable", "d2h", "d2h_pageable", "copy_d2d", or the operator's name.
        begin: Microseconds.
        end: Microseconds.
        nbytes: Bytes moved by a copy; bytes of inputs and results of an operator.
    """

    stream: int
    engine: str
    name: str
    begin: float
    end: float
    nbytes: int


def load() -> ModuleType:
    """Build the device if need be, register it with torch, and return ``torch.simgpu``; again is harmless.

    Raises:
        SimdevUnavailable: If it cannot be built here.
    """
    global _module
    if _module is None:
        torch.ops.load_library(str(library()))
        module = make_device_module(NAME, torch.ops.simdev.install())
        torch.utils.rename_privateuse1_backend(NAME)
        torch._register_device_module(NAME, module)
        torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
        patch_tensor_data(NAME)
        _module = module
    return _module


def set(**values: float | None) -> None:
    """Change settings; None restores a default.

    Args:
        lazy_copy, lazy_compute: Whether copies, and all other work, are deferred until something forces them.
        race_mode: 0 off, 1 collect (see `races`), 2 raise RuntimeError at the offending call.
        tracing: Whether `trace` is kept.
        capacity: Bytes of each device.
        pinned_capacity: Bytes of host memory that may be pinned.
        h2d_bw, d2h_bw, mem_bw: Bytes per microsecond between host and device, and within the device.
        flops: Floating-point operations per microsecond.
        latency: Microseconds of each operation on the device.
        host_op: Microseconds the host takes to submit an operation.
        sticky_errors: Whether an error code of `cudaHostRegister` or `cudaHostUnregister` is raised again by the
            next operator, once. CUDA does that.
    """
    defaults = torch.ops.simdev.settings(True)
    for name, value in values.items():
        torch.ops.simdev.set(name, float(defaults[name] if value is None else value))


@contextlib.contextmanager
def settings(**values: float | None) -> Iterator[None]:
    """Change settings as `set` does, for a while."""
    before = dict(torch.ops.simdev.settings(False))
    set(**values)
    try:
        yield
    finally:
        set(**{name: before[name] for name in values})


def schedules() -> list[dict[str, bool]]:
    """Return the four schedules, as settings: copies and computes each at once or as late as allowed."""
    return [
        {"lazy_copy": lazy_copy, "lazy_compute": lazy_compute}
        for lazy_copy in (False, True)
        for lazy_compute in (False, True)
    ]


def reset() -> None:
    """Restore all settings, and forget races, errors, trace and counters, and the peaks of pinned memory.

    Memory, registrations, queued work and the virtual clock stay as they are.
    """
    set(**dict.fromkeys(torch.ops.simdev.settings(True)))
    torch.ops.simdev.clear_pending_error()
    races(clear=True)
    trace(clear=True)
    counters(clear=True)


def races(clear: bool = True) -> list[str]:
    """Return what the race detector has found, one message each, and forget it if `clear`."""
    return list(torch.ops.simdev.races(clear))


def counters(clear: bool = False) -> dict[str, int]:
    """Return what the device counted; names that never occurred are missing, so use ``.get(name, 0)``.

    Since the last clear: h2d, h2d_bytes, h2d_pageable, h2d_pageable_bytes and the same for d2h (a copy is
    counted either as pinned or as pageable); blocking_h2d, blocking_d2h, stream_syncs, event_syncs,
    device_syncs, item_syncs, sync_ops (the host waited); staged_copies (dtype or layout differed);
    alloc_retries; pinned_allocs; registers, unregisters, register_refused; ``op:NAME`` for each operator.

    As of now: streams, registrations, pinned_bytes and pinned_peak, pinned_pow2_bytes and pinned_pow2_peak
    (what a pool of power-of-two blocks, such as torch's, would have locked for the same requests),
    ``allocated:INDEX`` and ``peak:INDEX`` bytes of each device. `clear` resets the peaks of pinned memory;
    the device's are reset by `torch.accelerator.reset_peak_memory_stats`.
    """
    return dict(torch.ops.simdev.counters(clear))


def trace(clear: bool = True) -> list[TraceEvent]:
    """Return what ran when in virtual time, in the order it was submitted; needs ``set(tracing=True)``."""
    events = []
    for line in torch.ops.simdev.trace(clear):
        stream, engine, name, begin, end, nbytes = line.split("\t")
        events.append(TraceEvent(int(stream), engine, name, float(begin), float(end), int(nbytes)))
    return events


def host_time() -> float:
    """Return the host's virtual time in microseconds."""
    return float(torch.ops.simdev.host_time())


def pending(stream: int = 0) -> int:
    """Return the number of items that wait in the queue of a stream, given by its index."""
    return int(torch.ops.simdev.pending(stream))


def host_access(tensor: torch.Tensor, write: bool = True) -> None:
    """Have the race detector check that the host may use a pinned tensor now.

    The host's own reads and writes are invisible to the detector, so a test has to say where they are.
    """
    torch.ops.simdev.host_access(tensor, write)
