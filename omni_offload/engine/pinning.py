"""Page-locking host memory that already exists, behind one small interface.

Owns the calls to the device runtime's registration; knows nothing of what lies in the memory. torch's own pinned
allocator rounds each request to a power of two, so a unit of 700 MB would lock 1 GiB; registering memory of our own
locks what is asked for.
"""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

import torch

_SUCCESS = 0
_PORTABLE = 1  # cudaHostRegisterPortable: locked for every context, so that any device index may copy from it


class PinRefused(Exception):
    """The device runtime would not lock this much more memory. Caught inside the engine, never seen by a user."""


class Registrar(Protocol):
    """Locks and unlocks ranges of host memory. A copy must lie inside one registered range."""

    def register(self, address: int, nbytes: int) -> None:
        """Lock `nbytes` from `address`. Raises `PinRefused`."""

    def unregister(self, address: int) -> None:
        """Unlock the range that was registered at `address`."""


class RuntimeRegistrar:
    """Registration through a runtime object with `cudaHostRegister` and `cudaHostUnregister` (CUDA, ROCm)."""

    def __init__(self, device: torch.device, runtime: Any) -> None:
        self._device = device
        self._runtime = runtime

    def register(self, address: int, nbytes: int) -> None:
        code = int(self._runtime.cudaHostRegister(address, nbytes, _PORTABLE))
        if code != _SUCCESS:
            self._forget_error()
            raise PinRefused(f"the runtime answered {code} to locking {nbytes} bytes of host memory")

    def unregister(self, address: int) -> None:
        if int(self._runtime.cudaHostUnregister(address)) != _SUCCESS:
            self._forget_error()

    def _forget_error(self) -> None:
        # The runtime remembers the last error, and the next kernel launch would report it as its own: a refusal of
        # host memory must not turn up as "CUDA out of memory". So a launch of ours fetches it.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=self._device)


def registrar_for(device: torch.device) -> Registrar | None:
    """The registrar of `device`, or None where its runtime has none (the CPU, XPU, MPS)."""
    if device.type == "cpu":
        return None
    runtime = getattr(torch.get_device_module(device), "cudart", None)
    return None if runtime is None else RuntimeRegistrar(device, runtime())
