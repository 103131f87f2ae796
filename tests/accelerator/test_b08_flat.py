"""B08: run after run everything stays as it was: memory, hooks, threads, streams; weights are never copied back."""

from __future__ import annotations

import gc
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from models import MODES, Block, enable, generate, offloadable, run, seeded

modes = pytest.mark.parametrize("mode", MODES)

RUNS = 20
HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)


def parts(pipe: Any) -> list[torch.nn.Module]:
    if isinstance(pipe, torch.nn.Module):
        return [pipe]
    return [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssAnon:\s+(\d+)", status)[1]) * 1024  # type: ignore[index]


def standing(pipe: Any, memory: Any, sim: Any) -> dict[str, Any]:
    """What one more run may not change."""
    gc.collect()
    torch.accelerator.synchronize(memory.device)
    modules = [module for part in parts(pipe) for module in part.modules()]
    report = pipe.offload_report()
    state = {
        "allocated": memory.allocated(),
        "threads": threading.active_count(),
        "hooks": sum(len(getattr(module, name)) for module in modules for name in HOOKS),
        "classes": [type(module) for module in modules],
        "attributes": sum(len(module.__dict__) for module in modules),
        "window": report.window_bytes,
        "host": report.host_bytes,
        "pinned": sum(c.pinned_bytes for c in report.components),
        "where": [(name, t.device, t.dtype, id(t)) for part in parts(pipe) for name, t in models.tensors(part)],
    }
    if sim is not None:
        names = ("pinned_bytes", "registrations", "streams", "registers", "unregisters", "pinned_allocs")
        state |= {name: sim.counters().get(name, 0) for name in names}
    return state


def split() -> models.SplitPipeline:
    return seeded(
        lambda: models.SplitPipeline(models.SplitModel(map(Block, models.unequal(3)), map(Block, models.unequal(4))))
    )


PIPELINES: dict[str, Callable[[], Any]] = {"blocks": lambda: models.small(6), "split": split}


@pytest.fixture
def ledger(simulated: bool) -> Any:
    """The module `simdev`, or None on a real device."""
    if not simulated:
        return None
    import simdev

    return simdev


@pytest.mark.parametrize(("name", "mode"), [("blocks", "layer"), ("blocks", "module"), ("split", "module")])
def test_twenty_runs_leave_everything_as_the_first_did(
    name: str, mode: str, device: torch.device, schedule: dict[str, bool], memory: Any, ledger: Any
) -> None:
    pipe = PIPELINES[name]()
    expected = run(models.resident(pipe, device), device)
    enable(pipe, mode, device)
    assert torch.equal(run(pipe, device), expected)
    first = standing(pipe, memory, ledger)
    anonymous = anonymous_bytes() if sys.platform.startswith("linux") else 0
    memory.reset_peak()
    peaks = []
    for number in range(2, RUNS + 1):
        assert torch.equal(run(pipe, device), expected)
        assert standing(pipe, memory, ledger) == first, f"run {number}"
        peaks.append(memory.peak())
        memory.reset_peak()
    assert len(set(peaks)) == 1
    if anonymous:
        assert anonymous_bytes() <= 1.01 * anonymous
    assert pipe.offload_report().copies >= RUNS * 6


@pytest.mark.parametrize(("name", "mode"), [("blocks", "layer"), ("blocks", "module"), ("split", "module")])
@pytest.mark.simulated_only
def test_nothing_is_copied_back_nor_locked_after_enable(
    name: str, mode: str, device: torch.device, schedule: dict[str, bool], ledger: Any
) -> None:
    pipe = PIPELINES[name]()
    x = models.sample().to(device)
    enable(pipe, mode, device)
    ledger.counters(clear=True)
    with torch.no_grad():
        for _ in range(3):
            pipe(x)
    counters = ledger.counters()
    names = ("d2h", "d2h_pageable", "registers", "unregisters", "register_refused", "pinned_allocs", "h2d_pageable")
    assert {name: counters[name] for name in names if counters.get(name)} == {}
    assert counters["h2d"] > 0


@modes
def test_runs_of_a_real_pipeline_are_flat(mode: str, device: torch.device, memory: Any, ledger: Any) -> None:
    pipe = offloadable("wan", layers=3)
    enable(pipe, mode, device)
    expected = generate(pipe, "wan", output_type="latent")
    first = standing(pipe, memory, ledger)
    for number in range(2, 7):
        assert torch.equal(generate(pipe, "wan", output_type="latent"), expected)
        assert standing(pipe, memory, ledger) == first, f"run {number}"


@modes
def test_enabling_again_and_again_is_flat(mode: str, device: torch.device, memory: Any, ledger: Any) -> None:
    pipe = models.small(4)
    expected = run(models.resident(pipe, device), device)
    enable(pipe, mode, device)
    first = None
    for _ in range(4):
        enable(pipe, mode, device)
        assert torch.equal(run(pipe, device), expected)
        state = standing(pipe, memory, ledger)
        first = first or state
        assert state == first
