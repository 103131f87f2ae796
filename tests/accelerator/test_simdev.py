"""The simulated device catches what it is there to catch, and computes what the CPU computes."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.simulated_only

WIDTH = 64
LAYERS = 6
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Pipeline:
    """Weights that take turns in two device buffers: copied on one stream while another computes."""

    def __init__(self, device: torch.device, layers: int = LAYERS) -> None:
        generator = torch.Generator().manual_seed(0)
        self.device = device
        self.weights = [torch.randn(WIDTH, WIDTH, generator=generator).pin_memory() for _ in range(layers)]
        self.start = torch.randn(WIDTH, WIDTH, generator=generator)

    def expected(self) -> torch.Tensor:
        x = self.start
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return x

    def run(self, wait_for_copy: bool = True, wait_for_compute: bool = True) -> torch.Tensor:
        compute = torch.accelerator.current_stream(self.device)
        copy = torch.Stream(device=self.device)
        buffers = [torch.empty(WIDTH, WIDTH, device=self.device) for _ in range(2)]
        ready = [torch.Event(device=self.device) for _ in buffers]
        free = [torch.Event(device=self.device) for _ in buffers]
        copy.wait_stream(compute)

        def fetch(layer: int) -> None:
            slot = layer % 2
            with copy:
                if wait_for_compute and layer >= 2:
                    copy.wait_event(free[slot])
                buffers[slot].copy_(self.weights[layer], non_blocking=True)
                ready[slot].record(copy)

        x = self.start.to(self.device)
        fetch(0)
        for layer in range(len(self.weights)):
            if layer + 1 < len(self.weights):
                fetch(layer + 1)
            slot = layer % 2
            if wait_for_copy:
                compute.wait_event(ready[slot])
            x = torch.tanh(x @ buffers[slot])
            free[slot].record(compute)
        compute.wait_stream(copy)  # before the buffers are freed
        return x


@pytest.fixture
def pipeline(device: torch.device) -> Pipeline:
    return Pipeline(device)


@pytest.fixture
def cudart(device: torch.device) -> Any:
    return torch.get_device_module(device).cudart()


class HostRange:
    """Anonymous memory of the caller's own, as a uint8 tensor."""

    def __init__(self, nbytes: int) -> None:
        self.mapping = mmap.mmap(-1, nbytes)
        self.tensor = torch.frombuffer(self.mapping, dtype=torch.uint8)
        self.pointer = self.tensor.data_ptr()

    def close(self) -> None:
        """Unmap it, views and all: whoever reads it later faults."""
        del self.tensor
        self.mapping.close()


@pytest.fixture
def host_range(cudart: Any) -> Iterator[Callable[[int], HostRange]]:
    ranges: list[HostRange] = []

    def make(nbytes: int) -> HostRange:
        ranges.append(HostRange(nbytes))
        return ranges[-1]

    yield make
    for each in ranges:
        cudart.cudaHostUnregister(each.pointer)


# ---- ordering --------------------------------------------------------------------------------------------


def test_correct_pipeline_is_right_under_every_schedule(pipeline: Pipeline, schedule: dict[str, bool]) -> None:
    assert torch.equal(pipeline.run().cpu(), pipeline.expected())


@pytest.mark.expects_race
def test_missing_wait_for_a_copy_is_caught(pipeline: Pipeline, schedule: dict[str, bool], sim: ModuleType) -> None:
    result = pipeline.run(wait_for_copy=False).cpu()
    races = sim.races()
    assert any("read by 'aten::mm.out' on stream 0 is not ordered after the write by 'h2d'" in race for race in races)
    if schedule == {"lazy_copy": True, "lazy_compute": False}:
        assert result.isnan().any()  # the copy came too late, and the buffer was poisoned before


@pytest.mark.expects_race
def test_early_refill_is_caught(pipeline: Pipeline, schedule: dict[str, bool], sim: ModuleType) -> None:
    result = pipeline.run(wait_for_compute=False).cpu()
    assert any("write by 'h2d'" in race and "after the read by 'aten::mm.out'" in race for race in sim.races())
    if schedule == {"lazy_copy": False, "lazy_compute": True}:
        assert not torch.equal(result, pipeline.expected())


@pytest.mark.expects_race
def test_race_count_is_the_same_in_every_run(pipeline: Pipeline, sim: ModuleType) -> None:
    counts = set()
    for _ in range(5):
        pipeline.run(wait_for_copy=False)
        counts.add(len(sim.races()))
    assert counts == {LAYERS}


def test_race_mode_raise_stops_at_the_offending_call(pipeline: Pipeline, sim: ModuleType) -> None:
    sim.set(race_mode=2)
    with pytest.raises(RuntimeError, match="is not ordered after the write by 'h2d'"):
        pipeline.run(wait_for_copy=False)
    torch.accelerator.synchronize()
    sim.races()


def test_race_mode_off_reports_nothing(pipeline: Pipeline, sim: ModuleType) -> None:
    sim.set(race_mode=0)
    pipeline.run(wait_for_copy=False)
    assert sim.races() == []


@pytest.mark.expects_race
@pytest.mark.parametrize("remedy", ["none", "record_stream", "wait_stream", "synchronize"])
def test_free_in_use_is_caught(remedy: str, device: torch.device, schedule: dict[str, bool], sim: ModuleType) -> None:
    side = torch.Stream(device=device)
    compute = torch.accelerator.current_stream(device)
    block = torch.ones(WIDTH, WIDTH, device=device)
    side.wait_stream(compute)
    with side:
        result = block @ block
    if remedy == "record_stream":
        block.record_stream(side)
    elif remedy == "wait_stream":
        compute.wait_stream(side)
    elif remedy == "synchronize":
        side.synchronize()
    del block
    races = sim.races()
    compute.wait_stream(side)
    values = result.cpu()
    if remedy != "none":
        assert races == []
        assert values.eq(WIDTH).all()
        return
    assert len(races) == 1 and "freed while 'aten::mm.out'" in races[0]
    if schedule["lazy_compute"]:
        assert values.isnan().all()  # the product came after the block was freed, and so poisoned


def test_disjoint_halves_of_one_block_do_not_race(device: torch.device, schedule: dict[str, bool]) -> None:
    host = torch.empty(4096, dtype=torch.uint8, pin_memory=True)
    part = host[512:768].view(torch.float32).view(8, 8)
    part.copy_(torch.arange(64.0).view(8, 8))
    slot = torch.empty(4096, dtype=torch.uint8, device=device)
    copy = torch.Stream(device=device)
    copy.wait_stream(torch.accelerator.current_stream(device))
    with copy:
        slot[:2048].copy_(host[:2048], non_blocking=True)
    other = slot[2048:2304].view(torch.float32).fill_(1.0)
    torch.accelerator.current_stream(device).wait_stream(copy)
    assert torch.equal(slot[512:768].view(torch.float32).view(8, 8).cpu(), part)
    assert other.cpu().eq(1).all()


def test_polling_an_event_comes_to_an_end(device: torch.device, sim: ModuleType) -> None:
    sim.set(lazy_compute=True)
    value = torch.ones(3, device=device)
    event = torch.Event(device=device)
    event.record()
    assert [event.query(), event.query()] == [False, True]
    assert value.cpu().eq(1).all()


@pytest.mark.expects_race
def test_host_reads_and_writes_can_be_checked(device: torch.device, sim: ModuleType) -> None:
    sim.set(lazy_copy=True)
    host = torch.full((4,), 1.0).pin_memory()
    target = torch.zeros(4, device=device)
    target.copy_(host, non_blocking=True)
    sim.host_access(host, write=False)
    assert sim.races() == []
    sim.host_access(host)
    assert "write by the host is not ordered after the read by 'h2d'" in sim.races()[0]
    host.fill_(9.0)  # what the race is about
    assert target.cpu().eq(9).all()
    sim.host_access(host)
    assert sim.races() == []


def test_threads_do_not_deadlock(device: torch.device, sim: ModuleType) -> None:
    sim.set(lazy_copy=True, lazy_compute=True)

    def load() -> None:
        stream = torch.Stream(device=device)
        for i in range(50):
            host = torch.randn(16, 16).pin_memory()
            with stream:
                block = host.to(device, non_blocking=True)
                event = torch.Event(device=device)
                event.record(stream)
            if i % 3 == 0:
                event.synchronize()
            del block, host

    threads = [threading.Thread(target=load, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    x = torch.randn(16, 16, device=device)
    for i in range(100):
        x = torch.tanh(x @ x)
        if i % 20 == 0:
            x.sum().item()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


# ---- placement and memory --------------------------------------------------------------------------------

MIXED: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "add": lambda here, there: here + there,
    "add in place": lambda here, there: there.clone().add_(here),
    "linear": lambda here, there: F.linear(here, there),
    "layer_norm": lambda here, there: F.layer_norm(here, (8,), there[0], there[0]),
    "cat": lambda here, there: torch.cat([there, here]),
    "where": lambda here, there: torch.where(there > 0, here, there),
    "embedding": lambda here, there: F.embedding(torch.tensor([1], device=here.device), there),
    "sdpa": lambda here, there: F.scaled_dot_product_attention(here[None], there[None], here[None]),
    "conv2d": lambda here, there: F.conv2d(here[None, None], there[None, None, :2, :2]),
}


@pytest.mark.parametrize("name", MIXED)
def test_mixed_devices_raise(name: str, device: torch.device) -> None:
    with pytest.raises(RuntimeError, match=r"[Ee]xpected all tensors to be on the same device"):
        MIXED[name](torch.ones(8, 8, device=device), torch.ones(8, 8))


def test_host_scalars_and_indices_are_allowed(device: torch.device) -> None:
    value = torch.arange(6.0, device=device).view(2, 3)
    assert torch.equal((value * torch.tensor(2.0)).cpu(), torch.arange(6.0).view(2, 3) * 2)
    assert torch.equal(value[0, torch.tensor([0, 2])].cpu(), torch.tensor([0.0, 2.0]))


def test_over_capacity_raises_out_of_memory(device: torch.device, sim: ModuleType, memory: Any) -> None:
    base = memory.allocated()
    sim.set(capacity=base + 4096)
    held = torch.empty(1024, device=device)
    with pytest.raises(torch.OutOfMemoryError, match="simulated device out of memory"):
        torch.empty(1, device=device)
    del held
    torch.empty(1024, device=device)


def test_allocated_and_peak_are_exact(device: torch.device, sim: ModuleType, memory: Any) -> None:
    base = memory.allocated()
    memory.reset_peak()
    first, second = torch.empty(1000, dtype=torch.uint8, device=device), torch.empty(4096, device=device)
    assert memory.allocated() - base == 1024 + 16384
    del second
    assert (memory.allocated() - base, memory.peak() - base) == (1024, 1024 + 16384)
    counters = sim.counters()
    assert (counters["allocated:0"], counters["peak:0"]) == (memory.allocated(), memory.peak())
    del first


def test_record_stream_holds_memory_until_the_stream_is_through(
    device: torch.device, schedule: dict[str, bool], sim: ModuleType, memory: Any
) -> None:
    sim.set(capacity=memory.allocated() + (8 << 10))
    side = torch.Stream(device=device)
    block = torch.ones(1024, device=device)
    side.wait_stream(torch.accelerator.current_stream(device))
    with side:
        block.mul_(2)
    block.record_stream(side)
    del block
    torch.empty(2048, device=device)  # waits for the side stream rather than failing
    assert sim.counters().get("alloc_retries", 0) == schedule["lazy_compute"]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_new_memory_is_poisoned(dtype: torch.dtype, device: torch.device) -> None:
    assert torch.empty(16, device=device, dtype=dtype).cpu().isnan().all()
    assert torch.empty(16, dtype=dtype, pin_memory=True).isnan().all()


# ---- pinned memory and registration ----------------------------------------------------------------------


def test_pin_over_the_limit_raises(sim: ModuleType) -> None:
    sim.set(pinned_capacity=sim.counters()["pinned_bytes"] + 1000)
    with pytest.raises(RuntimeError, match="cannot pin 4000 more bytes"):
        torch.empty(1000, pin_memory=True)
    assert torch.empty(250, pin_memory=True).is_pinned()


def test_pinned_memory_may_be_freed_before_its_copy_has_run(device: torch.device, sim: ModuleType) -> None:
    sim.set(lazy_copy=True)
    before = sim.counters()["pinned_bytes"]
    host = torch.full((1000,), 3.0).pin_memory()
    block = host.to(device, non_blocking=True)
    del host
    assert sim.counters()["pinned_bytes"] == before
    assert block.cpu().eq(3).all()


def test_registration_over_the_limit_is_refused(cudart: Any, host_range: Any, sim: ModuleType) -> None:
    memory = host_range(8192)
    sim.set(pinned_capacity=sim.counters()["pinned_bytes"] + 8191)
    assert cudart.cudaHostRegister(memory.pointer, 8192, 0) == 2
    assert not memory.tensor.is_pinned()
    assert cudart.cudaHostRegister(memory.pointer, 8191, 0) == 0
    with pytest.raises(RuntimeError, match="cannot pin"):
        torch.empty(1, pin_memory=True)


def test_registration_codes(cudart: Any, host_range: Any) -> None:
    memory = host_range(8192)
    assert cudart.cudaHostRegister(0, 10, 0) == 1
    assert cudart.cudaHostRegister(memory.pointer, 0, 0) == 1
    assert cudart.cudaHostRegister(memory.pointer + 100, 4000, 0) == 0
    assert cudart.cudaHostRegister(memory.pointer, 101, 0) == 712
    assert cudart.cudaHostRegister(memory.pointer + 4099, 1, 0) == 712
    assert cudart.cudaHostRegister(memory.pointer + 200, 10, 0) == 712
    assert cudart.cudaHostRegister(memory.pointer, 100, 0) == 0
    pinned = torch.ones(3).pin_memory()
    assert cudart.cudaHostRegister(pinned.data_ptr(), 12, 0) == 712
    assert cudart.cudaHostUnregister(memory.pointer + 101) == 713
    assert cudart.cudaHostUnregister(memory.pointer + 100) == 0
    assert cudart.cudaHostUnregister(memory.pointer + 100) == 713


@pytest.mark.expects_race
def test_memory_freed_while_registered_is_caught(cudart: Any, sim: ModuleType) -> None:
    memory = HostRange(1 << 20)
    before = sim.counters()
    assert cudart.cudaHostRegister(memory.pointer, 1 << 20, 0) == 0
    memory.close()
    blocks = []
    for _ in range(300):  # one of them is given the addresses
        blocks.append(torch.empty(1 << 14, dtype=torch.uint8, pin_memory=True))
        if races := sim.races():
            break
    assert races == ["race: host memory of 1048576 bytes freed while registered"]
    del blocks
    assert sim.counters()["pinned_bytes"] == before["pinned_bytes"]


def test_error_of_a_refused_registration_surfaces_at_the_next_kernel(
    cudart: Any, host_range: Any, device: torch.device, sim: ModuleType
) -> None:
    memory = host_range(4096)
    value = torch.ones(4, device=device)
    sim.set(pinned_capacity=sim.counters()["pinned_bytes"])
    assert cudart.cudaHostRegister(memory.pointer, 4096, 0) == 2
    assert value.cpu().eq(1).all()  # a copy is no kernel
    with pytest.raises(RuntimeError, match="cudaHostRegister returned 2"):
        value.add_(1)
    assert value.add_(1).cpu().eq(2).all()
    assert cudart.cudaHostUnregister(memory.pointer) == 713
    with pytest.raises(RuntimeError, match="cudaHostUnregister returned 713"):
        value.add_(1)
    sim.set(sticky_errors=False)
    assert cudart.cudaHostRegister(0, 0, 0) == 1
    value.add_(1)


def test_registered_memory_is_pinned_and_counted_exactly(
    cudart: Any, host_range: Any, device: torch.device, sim: ModuleType
) -> None:
    memory = host_range(12288)
    before = sim.counters()["pinned_bytes"]
    assert cudart.cudaHostRegister(memory.pointer, 12288, 0) == 0
    assert memory.tensor.is_pinned() and memory.tensor[5000:6000].is_pinned()
    assert sim.counters()["pinned_bytes"] - before == 12288
    torch.empty(12288, dtype=torch.uint8, device=device).copy_(memory.tensor, non_blocking=True)
    assert sim.counters()["h2d"] == 1 and "h2d_pageable" not in sim.counters()
    torch.accelerator.synchronize(device)
    assert cudart.cudaHostUnregister(memory.pointer) == 0
    assert not memory.tensor.is_pinned()
    assert sim.counters()["pinned_bytes"] == before


def test_power_of_two_ledger(cudart: Any, host_range: Any, sim: ModuleType) -> None:
    memory = host_range(12288)
    before = sim.counters(clear=True)
    assert cudart.cudaHostRegister(memory.pointer, 12288, 0) == 0
    pinned = torch.empty(5000, dtype=torch.uint8, pin_memory=True)
    now = sim.counters()
    assert now["pinned_bytes"] - before["pinned_bytes"] == 12288 + 5000
    assert now["pinned_pow2_bytes"] - before["pinned_pow2_bytes"] == 16384 + 8192
    assert cudart.cudaHostUnregister(memory.pointer) == 0
    del pinned
    now = sim.counters()
    assert now["pinned_pow2_bytes"] == before["pinned_pow2_bytes"]
    assert now["pinned_pow2_peak"] - before["pinned_pow2_bytes"] == 16384 + 8192


@pytest.mark.parametrize("upload", [True, False], ids=["h2d", "d2h"])
@pytest.mark.parametrize("non_blocking", [True, False])
def test_copy_that_spans_two_registrations_raises(
    upload: bool, non_blocking: bool, cudart: Any, host_range: Any, device: torch.device
) -> None:
    memory = host_range(8192)
    block = torch.zeros(8192, dtype=torch.uint8, device=device)

    def copy(part: slice) -> None:
        host, there = memory.tensor[part], block[part]
        (there if upload else host).copy_(host if upload else there, non_blocking=non_blocking)

    assert cudart.cudaHostRegister(memory.pointer + 4096, 4096, 0) == 0
    copy(slice(0, 4096))
    for partly in (slice(0, 8192), slice(4095, 4097)):
        with pytest.raises(RuntimeError, match="pinned in part or spans two"):
            copy(partly)
    assert cudart.cudaHostRegister(memory.pointer, 4096, 0) == 0
    with pytest.raises(RuntimeError, match="pinned in part or spans two"):
        copy(slice(0, 8192))
    copy(slice(0, 4096))
    copy(slice(4096, 8192))
    torch.accelerator.synchronize(device)
    cudart.cudaHostUnregister(memory.pointer + 4096)


@pytest.mark.expects_race
@pytest.mark.parametrize("wait", ["none", "event", "stream", "device"])
def test_unregister_in_use_is_caught_and_safe(
    wait: str, cudart: Any, device: torch.device, schedule: dict[str, bool], sim: ModuleType
) -> None:
    memory = HostRange(4096)
    memory.tensor.fill_(7)
    assert cudart.cudaHostRegister(memory.pointer, 4096, 0) == 0
    copy = torch.Stream(device=device)
    event = torch.Event(device=device)
    target = torch.zeros(4096, dtype=torch.uint8, device=device)
    copy.wait_stream(torch.accelerator.current_stream(device))
    with copy:
        target.copy_(memory.tensor, non_blocking=True)
    event.record(copy)
    if wait == "event":
        event.synchronize()
    elif wait == "stream":
        copy.synchronize()
    elif wait == "device":
        torch.accelerator.synchronize(device)
    assert cudart.cudaHostUnregister(memory.pointer) == 0
    memory.close()  # a copy that has not run yet would fault
    races = sim.races()
    torch.accelerator.current_stream(device).wait_stream(copy)
    assert target.cpu().eq(7).all()
    if wait == "none":
        assert len(races) == 1 and "unregistered while 'h2d' on stream" in races[0] and "may still use it" in races[0]
    else:
        assert races == []


@pytest.mark.expects_race
def test_registered_memory_takes_part_in_race_detection(
    cudart: Any, host_range: Any, device: torch.device, sim: ModuleType
) -> None:
    memory = host_range(4096)
    assert cudart.cudaHostRegister(memory.pointer, 4096, 0) == 0
    block = torch.ones(4096, dtype=torch.uint8, device=device)
    up, down = torch.Stream(device=device), torch.Stream(device=device)
    for stream in (up, down):
        stream.wait_stream(torch.accelerator.current_stream(device))
    with down:
        memory.tensor.copy_(block, non_blocking=True)
    with up:
        torch.empty_like(block).copy_(memory.tensor, non_blocking=True)
    assert any("registered block of 4096 bytes" in race for race in sim.races())
    torch.accelerator.synchronize(device)


# ---- values ----------------------------------------------------------------------------------------------


class Values:
    """Inputs for an operator, contiguous, on a device."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype

    def __call__(self, *shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(sum(shape))
        return torch.randn(*shape, generator=generator).to(self.dtype).to(self.device)


EQUAL: dict[str, Callable[[Values], torch.Tensor]] = {
    "linear": lambda v: F.linear(v(2, 16, 32), v(24, 32), v(24)),
    "matmul": lambda v: v(2, 4, 16, 32) @ v(2, 4, 32, 8),
    "conv2d": lambda v: F.conv2d(v(1, 4, 8, 8), v(6, 4, 3, 3), v(6), padding=1),
    "conv2d grouped": lambda v: F.conv2d(v(1, 4, 8, 8), v(4, 1, 3, 3), groups=4),
    "conv3d": lambda v: F.conv3d(v(1, 4, 3, 8, 8), v(6, 4, 1, 2, 2), stride=(1, 2, 2)),
    "layer_norm": lambda v: F.layer_norm(v(2, 16, 32), (32,), v(32), v(32)),
    "rms_norm": lambda v: F.rms_norm(v(2, 16, 32), (32,), v(32)),
    "group_norm": lambda v: F.group_norm(v(1, 4, 8, 8), 2, v(4), v(4)),
    "sdpa": lambda v: F.scaled_dot_product_attention(v(1, 4, 16, 8), v(1, 4, 20, 8), v(1, 4, 20, 8)),
    "sdpa causal": lambda v: F.scaled_dot_product_attention(*[v(1, 4, 16, 8)] * 3, is_causal=True),
    "softmax": lambda v: v(2, 16, 32).softmax(-1),
    "activations": lambda v: F.silu(F.gelu(v(2, 16, 32), approximate="tanh")),
    "interpolate": lambda v: F.interpolate(v(1, 4, 8, 8), scale_factor=2),
    "reductions": lambda v: v(2, 16, 32).float().pow(2).mean(-1, keepdim=True).rsqrt(),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", EQUAL)
def test_results_equal_the_cpu_bit_for_bit(
    name: str, dtype: torch.dtype, device: torch.device, schedule: dict[str, bool]
) -> None:
    result = EQUAL[name](Values(device, dtype))
    assert result.device == device
    assert torch.equal(result.cpu(), EQUAL[name](Values(torch.device("cpu"), dtype)))


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t,
    "channels_last": lambda t: t.to(memory_format=torch.channels_last),
    "transposed": lambda t: t.mT,
    "slice": lambda t: t[:, 1:3, ::2, 1:],
    "one-element dimension": lambda t: t[:1, :, 2],
    "expanded": lambda t: t[:, :1].expand(-1, 3, -1, -1),
    "zero-dim": lambda t: t[0, 0, 0, 0],
    "empty": lambda t: t[:0],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_keep_values_whatever_the_layout(
    layout: str, dtype: torch.dtype, device: torch.device, schedule: dict[str, bool]
) -> None:
    host = LAYOUTS[layout](torch.arange(240.0).view(2, 4, 5, 6))
    expected = host.to(dtype)
    assert torch.equal(host.to(device, dtype).cpu(), expected)
    assert torch.equal(LAYOUTS[layout](torch.arange(240.0).view(2, 4, 5, 6).to(device)).to("cpu", dtype), expected)
    target = torch.empty(host.shape, device=device, dtype=dtype)
    target.copy_(host.contiguous().pin_memory(), non_blocking=True)
    back = torch.zeros(host.shape, dtype=dtype, pin_memory=True).copy_(target, non_blocking=True)
    torch.accelerator.synchronize(device)
    assert torch.equal(back, expected)


def test_random_numbers_follow_the_seed(device: torch.device) -> None:
    torch.manual_seed(5)
    here = torch.randn(8, device=device).cpu()
    torch.manual_seed(5)
    assert torch.equal(here, torch.randn(8))
    there = torch.randn(8, device=device, generator=torch.Generator(device).manual_seed(3)).cpu()
    assert torch.equal(there, torch.randn(8, generator=torch.Generator().manual_seed(3)))


# ---- Tensor.data -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "strided view", "empty"])
def test_data_can_be_set_across_devices(
    layout: str, requires_grad: bool, inference: bool, device: torch.device
) -> None:
    value = torch.arange(48.0).view(2, 4, 2, 3)
    if layout == "channels_last":
        value = value.to(memory_format=torch.channels_last)
    elif layout == "strided view":
        value = value[:, ::2, :, 1:]
    elif layout == "empty":
        value = value[:0]
    parameter = torch.nn.Parameter(value, requires_grad=requires_grad)
    held = parameter
    with torch.inference_mode(inference):
        there = value.to(device)
        parameter.data = there
        assert (parameter.device, parameter.shape, parameter.stride()) == (
            device,
            value.shape,
            there.stride(),
        )
        assert parameter.data_ptr() == there.data_ptr()
        assert torch.equal(parameter.detach().cpu(), value)
        parameter.data = torch.zeros(5, device=device)
        assert parameter.shape == (5,)
        parameter.data = value
    assert parameter is held and isinstance(parameter, torch.nn.Parameter)
    assert parameter.device.type == "cpu" and parameter.requires_grad == requires_grad and parameter.is_leaf


def test_data_set_across_devices_keeps_gradients_working(device: torch.device) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    (parameter * 2).sum().backward()
    parameter.grad = None
    parameter.data = torch.ones(3, device=device)
    (parameter * 2).sum().backward()
    assert parameter.grad is not None and torch.equal(parameter.grad.cpu(), torch.full((3,), 2.0))


def test_data_needs_a_differentiable_dtype_for_gradients(device: torch.device) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(RuntimeError, match="floating point or complex dtype"):
        parameter.data = torch.ones(3, dtype=torch.int64, device=device)
    parameter.data = torch.ones(3, dtype=torch.bfloat16, device=device)
    assert parameter.dtype == torch.bfloat16


def test_data_of_other_devices_is_refused_as_ever(device: torch.device) -> None:
    for here in ("cpu", device):
        with pytest.raises(RuntimeError, match="incompatible tensor type"):
            torch.nn.Parameter(torch.ones(3, device=here)).data = torch.ones(3, device="meta")


def test_module_to_keeps_parameter_identity(device: torch.device) -> None:
    module = torch.nn.Linear(3, 3)
    weight = module.weight
    module.to(device)
    assert module.weight is weight and weight.device == device


# ---- virtual time, counters, several devices -------------------------------------------------------------


def _elapsed(device: torch.device, work: Callable[[], object]) -> float:
    begin, end = (torch.Event(device=device, enable_timing=True) for _ in range(2))
    torch.accelerator.synchronize(device)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def test_virtual_time_overlaps_copies_and_compute(device: torch.device, sim: ModuleType) -> None:
    pipeline = Pipeline(device, layers=12)
    copy_us = compute_us = 100.0
    sim.set(latency=0, host_op=0, mem_bw=1e12, h2d_bw=WIDTH * WIDTH * 4 / copy_us, flops=2 * WIDTH**3 / compute_us)

    def one_by_one() -> None:
        x = pipeline.start.to(device)
        for weight in pipeline.weights:
            x = torch.tanh(x @ weight.to(device, non_blocking=True))

    sim.set(tracing=True)
    overlapped = _elapsed(device, pipeline.run)
    trace = sim.trace()
    serial = _elapsed(device, one_by_one)
    start_ms = 2 * copy_us / 1e3  # the input is pageable
    assert overlapped - start_ms == pytest.approx(13 * 0.1, rel=0.01)
    assert serial - start_ms == pytest.approx(24 * 0.1, rel=0.01)
    copies = [event for event in trace if event.name == "h2d"]
    assert len(copies) == 12 and all(event.nbytes == WIDTH * WIDTH * 4 for event in copies)
    assert all(event.end - event.begin == pytest.approx(copy_us) for event in copies)


def test_submitting_costs_host_time(device: torch.device, sim: ModuleType) -> None:
    sim.set(host_op=3)
    value = torch.ones(4, device=device)
    before = sim.host_time()
    for _ in range(5):
        value.mul_(2)
    assert sim.host_time() - before == pytest.approx(15)


def test_counters_tell_copies_and_waits_apart(device: torch.device, sim: ModuleType) -> None:
    host = torch.ones(100).pin_memory()
    sim.counters(clear=True)
    block = host.to(device, non_blocking=True)
    torch.ones(25).to(device)
    host.copy_(block, non_blocking=True)
    torch.accelerator.current_stream(device).synchronize()
    event = torch.Event(device=device)
    event.record()
    event.synchronize()
    torch.accelerator.synchronize(device)
    block.sum().item()
    expected = {
        "h2d": 1,
        "h2d_bytes": 400,
        "h2d_pageable": 1,
        "h2d_pageable_bytes": 100,
        "d2h": 1,
        "d2h_bytes": 400,
        "blocking_h2d": 1,
        "stream_syncs": 1,
        "event_syncs": 1,
        "device_syncs": 1,
        "item_syncs": 1,
    }
    counters = sim.counters(clear=True)
    assert {name: counters.get(name, 0) for name in expected} == expected
    assert counters.get("blocking_d2h", 0) == 0
    assert "h2d" not in sim.counters()


def test_settings_are_restored(sim: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="no setting colour"):
        torch.ops.simdev.set("colour", 1.0)
    before = dict(torch.ops.simdev.settings(False))
    with sim.settings(capacity=1 << 20, lazy_copy=True):
        assert torch.ops.simdev.settings(False)["capacity"] == 1 << 20
    assert dict(torch.ops.simdev.settings(False)) == before
    assert len({tuple(schedule.values()) for schedule in sim.schedules()}) == 4


def test_generic_accelerator_api(device: torch.device) -> None:
    assert torch.accelerator.current_accelerator() == torch.device(device.type)
    stream = torch.Stream(device=device)
    before = torch.accelerator.current_stream(device)
    with stream:
        assert torch.accelerator.current_stream(device) == stream
    assert torch.accelerator.current_stream(device) == before
    free, total = torch.accelerator.get_memory_info(device)
    assert 0 < free <= total
    module = torch.get_device_module(device)
    with module.stream(module.Stream()), module.device(0):
        module.synchronize()


def test_autocast_casts_as_on_cuda(device: torch.device) -> None:
    matrix = torch.ones(4, 4, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert (matrix @ matrix).dtype == torch.bfloat16
        assert F.linear(matrix, matrix).dtype == torch.bfloat16
        assert F.layer_norm(matrix.bfloat16(), (4,)).dtype == torch.float32
        assert (matrix + matrix.bfloat16()).dtype == torch.float32
    assert (matrix @ matrix).dtype == torch.float32


TWO_DEVICES = """
import torch, simdev
simdev.load()
assert torch.accelerator.device_count() == 2
first, second = torch.device("simgpu", 0), torch.device("simgpu", 1)
value = torch.ones(1000, dtype=torch.uint8, device=second)
assert value.device == second
assert torch.accelerator.memory_allocated(first) == 0 and torch.accelerator.memory_allocated(second) == 1024
assert simdev.counters()["allocated:1"] == 1024
stream = torch.Stream(device=second)
stream.wait_stream(torch.accelerator.current_stream(second))
with stream:
    assert torch.accelerator.current_device_index() == 1
    doubled = value * 2
stream.synchronize()
assert doubled.device == second and doubled.cpu().eq(2).all()
assert torch.accelerator.current_device_index() == 0
for wrong in (lambda: value + torch.ones(1000, dtype=torch.uint8, device=first), lambda: value.to(first)):
    try:
        wrong()
    except RuntimeError as error:
        print(error)
    else:
        raise SystemExit("not refused")
try:
    torch.empty(1, device="simgpu:2")
except RuntimeError as error:
    assert "invalid device ordinal 2" in str(error)
else:
    raise SystemExit("not refused")
assert simdev.races() == []
print("two devices are fine")
"""


def test_two_devices() -> None:
    tests = str(Path(__file__).resolve().parent.parent)
    env = {**os.environ, "SIM_DEVICES": "2", "PYTHONPATH": tests, "OMP_NUM_THREADS": "1"}
    child = subprocess.run([sys.executable, "-c", TWO_DEVICES], env=env, capture_output=True, text=True, timeout=300)
    assert child.returncode == 0 and "two devices are fine" in child.stdout, child.stdout + child.stderr
    assert "at least two devices, simgpu:1 and simgpu:0" in child.stdout


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_wan_transformer_equals_the_cpu_bit_for_bit(
    dtype: torch.dtype, device: torch.device, schedule: dict[str, bool], memory: Any
) -> None:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=256,
        ffn_dim=32,
        num_layers=2,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )
    model = model.eval().requires_grad_(False).to(dtype)
    inputs = {
        "hidden_states": torch.randn(1, 4, 2, 16, 16, dtype=dtype),
        "timestep": torch.tensor([7]),
        "encoder_hidden_states": torch.randn(1, 12, 16, dtype=dtype),
    }
    with torch.inference_mode():
        expected = model(**inputs).sample
        before = memory.allocated()
        model.to(device)
        weights = {id(t): t for t in [*model.parameters(), *model.buffers()]}.values()
        assert memory.allocated() - before == sum((t.nbytes + 511) // 512 * 512 for t in weights)
        result = model(**{name: value.to(device) for name, value in inputs.items()}).sample
    assert torch.equal(result.cpu(), expected)
