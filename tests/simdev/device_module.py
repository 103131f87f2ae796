"""What torch looks for on the Python side: the module ``torch.simgpu``, and `Tensor.data` across devices."""

from __future__ import annotations

import contextlib
from enum import IntEnum
from types import ModuleType
from typing import Any

import torch
from torch.overrides import has_torch_function_unary

_MEMORY_FUNCTIONS = (
    "empty_cache",
    "max_memory_allocated",
    "max_memory_reserved",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "reset_accumulated_memory_stats",
    "reset_peak_memory_stats",
)


class Cudart:
    """Host registration with the interface of `torch.cuda.cudart()`; codes are those of CUDA's runtime."""

    class cudaError(IntEnum):
        """The return codes that occur."""

        success = 0
        invalid_value = 1
        memory_allocation = 2
        host_memory_already_registered = 712
        host_memory_not_registered = 713

    def cudaHostRegister(self, ptr: int, size: int, flags: int) -> int:
        """Pin `size` bytes of the caller's memory at `ptr`.

        Returns 0; 1 for a null pointer or an empty range; 2 if that is more than may be pinned; 712 if the
        range overlaps pinned memory.
        """
        return int(torch.ops.simdev.host_register(ptr, size, flags))

    def cudaHostUnregister(self, ptr: int) -> int:
        """Unpin what was registered at exactly `ptr`.

        Returns 0, or 713 if nothing was. A copy that may still use the memory is reported as a race; it has
        been carried out on return.
        """
        return int(torch.ops.simdev.host_unregister(ptr))

    def cudaGetErrorString(self, code: int) -> str:
        """Return words for a return code."""
        return Cudart.cudaError(code).name.replace("_", " ")


def make_device_module(name: str, count: int) -> ModuleType:
    """Return the module for `torch._register_device_module`, for `count` devices."""
    accelerator = torch.accelerator
    module: Any = ModuleType(f"torch.{name}")
    cudart = Cudart()

    def index_of(device: int | str | torch.device | None) -> int:
        if isinstance(device, int):
            return device
        index = None if device is None else torch.device(device).index
        return accelerator.current_device_index() if index is None else index

    class device_context:
        """Makes a device the current one for a while."""

        def __init__(self, device: int | str | torch.device | None) -> None:
            self.index = index_of(device)

        def __enter__(self) -> None:
            self.previous = accelerator.current_device_index()
            accelerator.set_device_index(self.index)

        def __exit__(self, *exc: object) -> None:
            accelerator.set_device_index(self.previous)

    def new_stream(device: int | str | torch.device | None = None, priority: int = 0) -> torch.Stream:
        return torch.Stream(device=torch.device(name, index_of(device)), priority=priority)

    def new_event(enable_timing: bool = False, **_: object) -> torch.Event:
        return torch.Event(device=name, enable_timing=enable_timing)

    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module.init = module._lazy_init = lambda: None
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: count
    module.current_device = accelerator.current_device_index
    module.set_device = lambda device: accelerator.set_device_index(index_of(device))
    module.device = device_context
    module.synchronize = lambda device=None: accelerator.synchronize(index_of(device))
    module.current_stream = lambda device=None: accelerator.current_stream(index_of(device))
    module.set_stream = accelerator.set_stream
    module.stream = lambda stream: contextlib.nullcontext() if stream is None else stream
    module.Stream = new_stream
    module.Event = new_event
    module.mem_get_info = accelerator.get_memory_info
    for function in _MEMORY_FUNCTIONS:
        setattr(module, function, getattr(accelerator, function))
    module.cudart = lambda: cudart
    # Without a generator of its own the device draws from the CPU's, which torch.manual_seed seeds already.
    module.manual_seed = module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    module.is_bf16_supported = lambda: True
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16, torch.float32]
    return module


def patch_tensor_data(name: str) -> None:
    """Let `tensor.data = other` cross between the CPU and the device, as torch allows for CUDA alone."""
    builtin: Any = torch._C.TensorBase.__dict__["data"]
    plain = (torch.Tensor, torch.nn.Parameter)
    set_data = torch.ops.simdev.set_data.default._op  # the operator without Python around it: this is called a lot

    def assign(self: torch.Tensor, new: Any) -> None:
        if type(self) in plain and type(new) in plain and self.is_cpu != new.is_cpu:
            strided = self.layout is torch.strided and new.layout is torch.strided
            if strided and not torch._C._len_torch_dispatch_stack():
                set_data(self, new)
                return
        ours = (
            isinstance(new, torch.Tensor)
            and not has_torch_function_unary(self)  # a subclass has the first say, and comes back here
            and name in (self.device.type, new.device.type)
            and {self.device.type, new.device.type} <= {"cpu", name}
            and self.layout == new.layout == torch.strided
        )
        if not ours:
            builtin.__set__(self, new)
            return
        with torch._C._DisableTorchDispatch():
            set_data(self, new)

    torch.Tensor.data = property(builtin.__get__, assign, doc=builtin.__doc__)  # type: ignore[assignment]
