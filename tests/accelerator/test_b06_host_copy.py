"""B06: one host copy of the streamed weights, of their own size; the original is gone, and so is what enabling took."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import models
import pytest
import torch
from models import MODES, Block, Denoiser, SmallPipeline, enable, run, seeded
from torch.multiprocessing.reductions import StorageWeakRef

from omni_offload.policies.memory import offloads_on

modes = pytest.mark.parametrize("mode", MODES)

WIDTH, INNER = 256, 600  # blocks of 1.18 MiB, for which a pool of power-of-two blocks takes 2 MiB


class LargePipeline(SmallPipeline):
    """A DiT of large blocks; its encoder is large too."""

    def forward(self, x: torch.Tensor, order: Any = None, steps: int = 2) -> torch.Tensor:
        y = self.text_encoder(x)
        for _ in range(steps):
            y = self.transformer(y, order)
        return y


def large(count: int = 5) -> LargePipeline:
    def denoiser(blocks: int) -> Denoiser:
        return Denoiser([Block(INNER, WIDTH) for _ in range(blocks)], WIDTH)

    return seeded(lambda: LargePipeline(denoiser(count), denoiser(2)))


def wide_sample() -> torch.Tensor:
    return torch.randn(2, 4, WIDTH, generator=torch.Generator("cpu").manual_seed(1), device="cpu")


def units_of(pipe: Any) -> Iterable[Any]:
    for component in offloads_on(pipe)[0].components:
        yield from component.units
        if hasattr(component.shell, "store"):
            yield component.shell


@modes
@pytest.mark.simulated_only
def test_locked_bytes_are_those_of_the_weights(mode: str, device: torch.device, sim: ModuleType) -> None:
    pipe = large()
    base = sim.counters()
    report = enable(pipe, mode, device)
    counters = sim.counters()
    pinned = counters["pinned_bytes"] - base.get("pinned_bytes", 0)
    assert report.streamed_bytes >= models.nbytes(pipe.transformer.blocks)
    assert pinned == report.host_bytes == sum(c.pinned_bytes for c in report.components)
    assert report.streamed_bytes <= pinned <= 1.05 * report.streamed_bytes
    assert counters["registrations"] - base.get("registrations", 0) == sum(c.units for c in report.components)
    assert counters.get("pinned_allocs", 0) == base.get("pinned_allocs", 0)
    # The comparison means something: torch's own allocator would have locked far more for these blocks.
    assert counters["pinned_pow2_bytes"] - base.get("pinned_pow2_bytes", 0) > 1.5 * pinned
    pipe.disable_offload()
    assert sim.counters()["pinned_bytes"] == base.get("pinned_bytes", 0)
    assert sim.counters()["registrations"] == base.get("registrations", 0)


@modes
@pytest.mark.parametrize("pin", [None, False])
def test_original_memory_is_gone(pin: bool | None, mode: str, device: torch.device) -> None:
    pipe = large()
    managed = pipe.transformer.blocks if mode == "layer" else pipe.transformer
    originals = {name: StorageWeakRef(t.untyped_storage()) for name, t in models.tensors(managed)}
    enable(pipe, mode, device, pin_memory=pin)
    assert [name for name, storage in originals.items() if not storage.expired()] == []


@modes
def test_parked_tensors_lie_in_the_one_host_store(mode: str, device: torch.device) -> None:
    pipe = large()
    enable(pipe, mode, device)
    run(pipe, device, wide_sample())
    parked = 0
    for unit in units_of(pipe):
        start = unit.store.bytes.data_ptr()
        for tensor in unit.tensors:
            assert tensor.device.type == "cpu"
            assert start <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= start + unit.nbytes
            parked += tensor.nbytes
        assert unit.nbytes <= 1.05 * sum(t.nbytes for t in unit.tensors) or unit.nbytes < 1 << 20
    assert parked == pipe.offload_report().streamed_bytes


@modes
def test_what_was_on_the_device_leaves_no_copy_there(mode: str, device: torch.device, memory: Any) -> None:
    """A pipeline that was moved to the device first: its streamed weights are on the host once, and only there."""
    base = memory.allocated()
    pipe = large()
    fresh = enable(pipe, mode, device).idle_device_bytes
    pipe.disable_offload()
    assert memory.allocated() == base
    pipe.to(device)
    report = enable(pipe, mode, device)
    slack = 512 * len(list(models.tensors(pipe)))
    assert report.idle_device_bytes == fresh
    assert fresh <= memory.allocated() - base <= fresh + slack


@modes
@pytest.mark.simulated_only
def test_refused_pin_falls_back_with_one_warning(
    mode: str,
    device: torch.device,
    schedule: dict[str, bool],
    sim: ModuleType,
    caplog: pytest.LogCaptureFixture,
) -> None:
    pipe = large()
    expected = run(models.resident(pipe, device), device, wide_sample())
    room = 3 * models.nbytes(pipe.transformer.blocks[0])
    sim.set(pinned_capacity=sim.counters()["pinned_bytes"] + room)
    with caplog.at_level(logging.WARNING, logger="omni_offload"):
        report = enable(pipe, mode, device)
    warnings = [r.getMessage() for r in caplog.records if "locking" in r.getMessage()]
    assert len(warnings) == 1
    pinned = sum(c.pinned_bytes for c in report.components)
    assert 0 < pinned <= room < report.host_bytes
    unit = next(u for u in units_of(pipe) if u.store.kind == "pageable")
    wanted, locked = map(float, re.findall(r"([\d.]+) MiB", warnings[0]))
    assert wanted == pytest.approx(unit.nbytes / 2**20, abs=1e-3)
    assert 0 < locked <= pinned / 2**20 + 1e-3
    assert "CUDA" not in warnings[0] and "out of memory" not in warnings[0]
    assert any("could not be locked" in notice for notice in report.notices)
    for _ in range(2):
        assert torch.equal(run(pipe, device, wide_sample()), expected)
    assert sim.counters()["h2d_pageable"] > 0 and sim.counters()["h2d"] > 0


@modes
def test_pageable_by_choice(mode: str, device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    pipe = large()
    expected = run(models.resident(pipe, device), device, wide_sample())
    with caplog.at_level(logging.WARNING, logger="omni_offload"):
        report = enable(pipe, mode, device, pin_memory=False)
    assert sum(c.pinned_bytes for c in report.components) == 0 < report.host_bytes
    assert not any("locking" in r.getMessage() for r in caplog.records)
    assert torch.equal(run(pipe, device, wide_sample()), expected)


PEAK = """
import gc, re, sys
import torch
from torch import nn
import models
from omni_offload.engine.stores import HostAllocator

torch.set_num_threads(1)
MODE = sys.argv[1]
MIB = 2**20


def anonymous():
    status = open("/proc/self/status").read()
    kib = dict(re.findall(r"(RssAnon|VmLck):\\s+(\\d+) kB", status))
    return (int(kib["RssAnon"]) + int(kib["VmLck"])) * 1024


samples = []
plain = HostAllocator.store


def store(self, tensors):
    made = plain(self, tensors)
    samples.append(anonymous())  # the most there is: the new store is filled and the originals are still there
    return made


HostAllocator.store = store
WIDTH, INNER = 1024, 1200  # blocks of 9.4 MiB

gc.collect()
base = anonymous()
blocks = lambda count: models.Denoiser([models.Block(INNER, WIDTH) for _ in range(count)], WIDTH)
pipe = models.seeded(lambda: models.SmallPipeline(blocks(18), blocks(4)))
weights, unit = models.nbytes(pipe), models.nbytes(pipe.transformer.blocks[0])
built = anonymous() - base
assert 0.95 * weights < built < 1.05 * weights, (built / MIB, weights / MIB)
report = models.enable(pipe, MODE, torch.device("cpu"))
streamed = report.streamed_bytes
assert streamed > 0.75 * weights, streamed / MIB
assert len(samples) >= 18
peak, after = max(samples) - base, anonymous() - base
print(f"weights {weights / MIB:.1f} unit {unit / MIB:.1f} peak {peak / MIB:.1f} after {after / MIB:.1f}")
assert peak <= 1.05 * (weights + unit), (peak / MIB, weights / MIB)
assert after <= 1.05 * weights, (after / MIB, weights / MIB)
print("one copy")
"""


@modes
@pytest.mark.simulated_only
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_enabling_takes_no_more_than_one_unit_beside_the_weights(mode: str) -> None:
    here = Path(__file__).resolve().parent
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(here), str(here.parent.parent), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        # glibc keeps freed blocks of up to 32 MiB otherwise; real weights are larger, and really go.
        "MALLOC_MMAP_THRESHOLD_": "65536",
    }
    child = subprocess.run([sys.executable, "-c", PEAK, mode], env=env, capture_output=True, text=True, timeout=300)
    assert child.returncode == 0 and "one copy" in child.stdout, child.stdout + child.stderr
