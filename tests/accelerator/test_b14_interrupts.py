"""B14: an interrupt or an error at any line of the package leaves a pipeline whose next call works, unasked."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pipes import both_modes, brief, build, changes, device_bytes, pinned_bytes, tensors_of, traces
from types import FrameType
from typing import Any

import pytest
import torch

import omni_offload

HOME = omni_offload.__path__[0]
PLACES = (f"{HOME}/engine/", f"{HOME}/policies/")
LAYERS = 3


class Injected(Exception):
    """An error that nobody expects."""


class _Injector:
    """Counts the lines of the package as they start, and raises in front of one of them."""

    def __init__(self, at: int | None, error: type[BaseException]) -> None:
        self.at, self.error = at, error
        self.lines = 0
        self.where: str | None = None

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(PLACES):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                self.where = f"{frame.f_code.co_filename.removeprefix(HOME)}:{frame.f_lineno}"
                raise self.error  # which also ends the tracing
        return self


@contextmanager
def injected(at: int | None, error: type[BaseException] = KeyboardInterrupt) -> Iterator[_Injector]:
    """Raise `error` in front of the package's line number `at`, counted from here as lines are run."""
    injector = _Injector(at, error)
    former = sys.gettrace()
    sys.settrace(injector)
    try:
        yield injector
    finally:
        sys.settrace(former)


def count_lines(action: Callable[[], object]) -> int:
    with injected(None) as counter:
        action()
    return counter.lines


def spread(total: int, count: int, seed: int) -> list[int]:
    """`count` line numbers up to `total`: half of them evenly spaced, half drawn at random, the same in every run."""
    even = range(1, total + 1, max(1, 2 * total // count))
    drawn = random.Random(seed).sample(range(1, total + 1), min(total, count // 2))
    return sorted({*even, *drawn})


def errors() -> Iterator[type[BaseException]]:
    while True:
        yield KeyboardInterrupt
        yield Injected


def interrupt(action: Callable[[], object], at: int, error: type[BaseException]) -> str:
    """Run `action` and interrupt it at line `at`; answers where that was."""
    with injected(at, error) as injector, suppress(error):
        action()
    return injector.where or "past its end"


@both_modes
def test_next_call_works_after_an_interrupt_anywhere_in_a_call(config: dict[str, Any], device: torch.device) -> None:
    pipe = build(layers=LAYERS)
    pipe.enable_offload(config, device=device)
    expected = brief(pipe)
    idle = device_bytes(device, pipe)
    total = count_lines(lambda: brief(pipe))
    for at, error in zip(spread(total, 70, seed=0), errors(), strict=False):
        where = interrupt(lambda: brief(pipe), at, error)
        assert torch.equal(brief(pipe), expected), where
        assert device_bytes(device, pipe) == idle, where


@both_modes
def test_interrupt_while_a_call_is_repaired_is_repaired_too(config: dict[str, Any], device: torch.device) -> None:
    pipe = build(layers=LAYERS)
    pipe.enable_offload(config, device=device)
    expected = brief(pipe)
    idle = device_bytes(device, pipe)
    total = count_lines(lambda: brief(pipe))
    chance = random.Random(1)
    for _ in range(25):
        places = [interrupt(lambda: brief(pipe), chance.randrange(total // 8, total), KeyboardInterrupt)]
        # The repair comes early in the next call.
        places.append(interrupt(lambda: brief(pipe), chance.randrange(1, total // 8), KeyboardInterrupt))
        assert torch.equal(brief(pipe), expected), places
        assert device_bytes(device, pipe) == idle, places


@both_modes
def test_interrupted_enable_leaves_a_plain_pipeline(config: dict[str, Any], device: torch.device) -> None:
    pipe = build(layers=LAYERS)
    on_cpu = brief(pipe)
    plain, tensors = traces(pipe), tensors_of(pipe)
    empty, locked = device_bytes(device, pipe), pinned_bytes(device)
    total = count_lines(lambda: pipe.enable_offload(config, device=device))
    expected = brief(pipe)
    pipe.disable_offload()
    undone = 0
    for at, error in zip(spread(total, 24, seed=2), errors(), strict=False):
        where = interrupt(lambda: pipe.enable_offload(config, device=device), at, error)
        # Unasked: what could not be undone by an interrupted undoing is undone by the call.
        got = brief(pipe)
        if pipe.device == device:  # it was on already, and making the report was interrupted
            assert torch.equal(got, expected), where
            pipe.disable_offload()
        else:
            assert torch.equal(got, on_cpu), where
            undone += 1
        assert not changes(plain, traces(pipe)), where
        now = tensors_of(pipe)
        assert now.keys() == tensors.keys() and all(now[name] is tensors[name] for name in now), where
        assert all(tensor.device.type == "cpu" for tensor in now.values()), where
        assert device_bytes(device, pipe) == empty and pinned_bytes(device) == locked, where
        pipe.enable_offload(config, device=device)
        assert torch.equal(brief(pipe), expected), where
        pipe.disable_offload()
    assert undone > 10


@both_modes
def test_interrupted_disable_is_finished_by_the_next_call(config: dict[str, Any], device: torch.device) -> None:
    pipe = build(layers=LAYERS)
    on_cpu = brief(pipe)
    plain, empty, locked = traces(pipe), device_bytes(device, pipe), pinned_bytes(device)
    pipe.enable_offload(config, device=device)
    expected, idle = brief(pipe), device_bytes(device, pipe)
    total = count_lines(pipe.disable_offload)
    for at, error in zip(spread(total, 24, seed=3), errors(), strict=False):
        pipe.enable_offload(config, device=device)
        where = interrupt(pipe.disable_offload, at, error)
        got = brief(pipe)
        if pipe.device.type == "cpu":
            assert torch.equal(got, on_cpu), where
            assert not changes(plain, traces(pipe)), where
            assert device_bytes(device, pipe) == empty and pinned_bytes(device) == locked, where
        else:  # it had not begun
            assert torch.equal(got, expected), where
            assert device_bytes(device, pipe) == idle, where
        pipe.disable_offload()
        assert not changes(plain, traces(pipe)), where
        assert device_bytes(device, pipe) == empty and pinned_bytes(device) == locked, where


@both_modes
def test_enable_and_disable_survive_two_interrupts_in_a_row(config: dict[str, Any], device: torch.device) -> None:
    pipe = build(layers=LAYERS)
    on_cpu = brief(pipe)
    plain, empty, locked = traces(pipe), device_bytes(device, pipe), pinned_bytes(device)
    building = count_lines(lambda: pipe.enable_offload(config, device=device))
    undoing = count_lines(pipe.disable_offload)
    chance = random.Random(4)
    for _ in range(15):
        places = [
            interrupt(
                lambda: pipe.enable_offload(config, device=device),
                chance.randrange(building // 2, building),
                KeyboardInterrupt,
            )
        ]
        with injected(chance.randrange(1, undoing), KeyboardInterrupt) as second:
            try:
                pipe.disable_offload()
            except KeyboardInterrupt:
                places.append(str(second.where))
        assert torch.equal(brief(pipe), on_cpu), places
        assert not changes(plain, traces(pipe)), places
        assert device_bytes(device, pipe) == empty and pinned_bytes(device) == locked, places


def test_the_injector_reaches_the_package(device: torch.device) -> None:
    pipe = build(layers=1)
    with injected(1, Injected), pytest.raises(Injected):
        pipe.enable_layerwise_offload(device=device)
