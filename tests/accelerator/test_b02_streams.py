"""B02: refills and releases wait for the stream that computed, whichever it was; the host waits for nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import models
import pytest
import torch
from models import MODES, enable, run

modes = pytest.mark.parametrize("mode", MODES)

WAITS = ("stream_syncs", "event_syncs", "device_syncs", "item_syncs", "sync_ops", "blocking_h2d", "blocking_d2h")


@contextmanager
def a_stream_of_their_own(device: torch.device) -> Iterator[torch.Stream]:
    """A stream of the caller's, made current: behind what the current one has been given, and awaited by it after."""
    before, stream = torch.accelerator.current_stream(device), torch.Stream(device=device)
    stream.wait_stream(before)
    with stream:
        yield stream
    before.wait_stream(stream)


@modes
def test_caller_computes_on_a_stream_of_their_own(mode: str, device: torch.device, schedule: dict[str, bool]) -> None:
    pipe = models.small(5)
    expected = run(models.resident(pipe, device), device)
    enable(pipe, mode, device)
    for _ in range(3):
        with a_stream_of_their_own(device) as stream:
            assert torch.accelerator.current_stream(device) == stream
            result = run(pipe, device)
        assert torch.equal(result, expected)


@modes
def test_enabled_on_one_stream_and_used_on_others(mode: str, device: torch.device, schedule: dict[str, bool]) -> None:
    pipe = models.small(5)
    expected = run(models.resident(pipe, device), device)
    with a_stream_of_their_own(device):
        enable(pipe, mode, device)
    assert torch.equal(run(pipe, device), expected)
    with a_stream_of_their_own(device):
        assert torch.equal(run(pipe, device), expected)
    assert torch.equal(run(pipe, device), expected)
    with a_stream_of_their_own(device):
        pipe.disable_offload()
    assert torch.equal(run(pipe.to(device), device), expected)


@modes
def test_stream_changes_between_passes(mode: str, device: torch.device, schedule: dict[str, bool]) -> None:
    """Every pass of one call computes on another stream; what is prefetched for the next belongs to none of them."""
    pipe = models.small(4)
    x = models.sample()
    expected = [models.resident(pipe, device).transformer(x.to(device)).cpu()]
    for _ in range(5):
        expected.append(models.resident(pipe, device).transformer(expected[-1].to(device)).cpu())
    enable(pipe, mode, device)
    results = [x.to(device)]  # kept: another stream may still read what this one would free
    with torch.no_grad():
        for _ in expected:
            with a_stream_of_their_own(device):
                results.append(pipe.transformer(results[-1]))
    for result, wanted in zip(results[1:], expected, strict=True):
        assert torch.equal(result.cpu(), wanted)


@modes
def test_stream_changes_from_block_to_block(mode: str, device: torch.device, schedule: dict[str, bool]) -> None:
    pipe = models.small(5)
    blocks, x = pipe.transformer.blocks, models.sample()
    expected = [x.to(device)]
    with torch.no_grad():
        for block in models.resident(pipe, device).transformer.blocks:
            expected.append(block(expected[-1]))
        enable(pipe, mode, device)
        streams = [torch.Stream(device=device) for _ in range(2)]
        before = current = torch.accelerator.current_stream(device)
        for _ in range(2):
            results = [x.to(device)]
            for index, block in enumerate(blocks):
                streams[index % 2].wait_stream(current)
                current = streams[index % 2]
                with current:
                    results.append(block(results[-1]))
            before.wait_stream(current)
            current = before
            for result, wanted in zip(results, expected, strict=True):
                assert torch.equal(result, wanted)


@modes
@pytest.mark.parametrize("ending", ["disable", "drop"])
def test_memory_is_given_up_behind_what_still_computes(
    ending: str, mode: str, device: torch.device, schedule: dict[str, bool]
) -> None:
    """Turned off or dropped right behind a pass that is still queued: nobody gets its slots before it is through."""
    pipe = models.small(5)
    expected = run(models.resident(pipe, device), device)
    enable(pipe, mode, device)
    with a_stream_of_their_own(device), torch.no_grad():
        result = pipe(models.sample().to(device))
    if ending == "disable":
        pipe.disable_offload()
    else:
        del pipe
    greedy = [torch.full((1 << 14,), float("nan"), device=device) for _ in range(8)]
    assert torch.equal(result.cpu(), expected)
    del greedy


@modes
@pytest.mark.simulated_only
def test_host_waits_for_nothing_in_a_steady_call(mode: str, device: torch.device, sim: ModuleType) -> None:
    """But once, when the call ends: its last copies must have read the host before anybody edits it."""
    pipe = models.small(6)
    x = models.sample().to(device)
    enable(pipe, mode, device)
    with torch.no_grad():
        pipe(x)
        sim.counters(clear=True)
        pipe(x, steps=4)
    counters = sim.counters()
    assert {name: counters[name] for name in WAITS if counters.get(name)} == {"stream_syncs": 1}
    assert counters["h2d"] > 0


@pytest.mark.simulated_only
@pytest.mark.parametrize("count", [3, 4, 9])
@pytest.mark.parametrize("staying", [0, 1])
def test_one_copy_per_streamed_unit_and_pass(count: int, staying: int, device: torch.device, sim: ModuleType) -> None:
    pipe = models.small(count)
    options = {"dit": {"resident_layers": staying}} if staying else None
    report = enable(pipe, "layer", device, layer_options=options)
    streamed = {c.path: c for c in report.components}["transformer"]
    assert streamed.units == count - staying
    # Units that all fit the window are fetched once in a call.
    fetched_again = streamed.units > 2
    x = models.sample().to(device)
    for steps in (1, 2, 5):
        sim.counters(clear=True)
        with torch.no_grad():
            pipe(x, steps=steps)
        counters = sim.counters()
        passes = steps if fetched_again else 1
        ahead = 1 if fetched_again else 0  # the last block fetches the first one for a pass that does not come
        assert counters["h2d"] == passes * streamed.units + ahead
        assert passes * streamed.host_bytes <= counters["h2d_bytes"]
        assert counters["h2d_bytes"] <= passes * streamed.host_bytes + ahead * report.window_bytes // 2


@pytest.mark.simulated_only
def test_model_level_copies_each_unit_once_in_a_call(device: torch.device, sim: ModuleType) -> None:
    pipe = models.small(6)
    report = enable(pipe, "module", device)
    x = models.sample().to(device)
    for steps in (1, 5):
        sim.counters(clear=True)
        with torch.no_grad():
            pipe(x, steps=steps)
        counters = sim.counters()
        assert counters["h2d"] == sum(c.units for c in report.components)
        assert counters["h2d_bytes"] == report.host_bytes
        assert counters.get("d2h", 0) == counters.get("d2h_pageable", 0) == 0


OTHER_INDEX = """
import gc, sys
import torch, simdev, models
torch.set_num_threads(1)
simdev.load()
second = torch.device(simdev.NAME, 1)
assert torch.accelerator.current_device_index() == 0
x = models.sample()
for mode in models.MODES:
    expected = models.run(models.small(5), torch.device("cpu"))
    for settings in simdev.schedules():
        simdev.set(**settings)
        pipe = models.small(5)
        report = models.enable(pipe, mode, second)
        assert report.device == str(second), report.device
        for number in range(3):
            side = torch.Stream(device=second)
            side.wait_stream(torch.accelerator.current_stream(second))
            with side if number else torch.no_grad():
                result = models.run(pipe, second)
            assert torch.equal(result, expected), (mode, settings)
            assert torch.accelerator.current_device_index() == 0
            assert simdev.counters()["peak:0"] == 0, "something was allocated on the other index"
        assert simdev.counters()["peak:1"] > 0 and report.streamed_bytes > 0
        pipe.disable_offload()
        gc.collect()
        torch.accelerator.synchronize(second)
        assert torch.accelerator.memory_allocated(second) == 0
races = simdev.races()
assert not races, races[:5]
print("index 1 is fine")
"""


@pytest.mark.simulated_only
def test_second_device_while_the_first_is_current() -> None:
    here = Path(__file__).resolve().parent
    paths = [str(here), str(here.parent), str(here.parent.parent), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "SIM_DEVICES": "2", "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    child = subprocess.run([sys.executable, "-c", OTHER_INDEX], env=env, capture_output=True, text=True, timeout=300)
    assert child.returncode == 0 and "index 1 is fine" in child.stdout, child.stdout + child.stderr
