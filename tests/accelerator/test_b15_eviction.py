"""B15: who is on the device follows who really runs; what goes, goes before what comes; peaks are those announced."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import models
import pytest
import torch
from models import MODES, Block, Denoiser, ExpertsPipeline, SmallPipeline, enable, nbytes, run, seeded
from torch import nn

modes = pytest.mark.parametrize("mode", MODES)

GRANULE = 512  # the allocator rounds each request up to this


def rounded(size: int) -> int:
    return -(-size // GRANULE) * GRANULE


def experts() -> ExpertsPipeline:
    def denoiser(*inner: int) -> Denoiser:
        return Denoiser(map(Block, inner))

    return seeded(
        lambda: ExpertsPipeline(denoiser(200, 300, 100, 300), denoiser(300, 200, 300), denoiser(300, 300, 250))
    )


def slack(pipe: nn.Module) -> int:
    """What rounding may add: one granule for each tensor."""
    return GRANULE * len(list(models.tensors(pipe)))


def activations(make: Callable[[], nn.Module], device: torch.device, memory: Any) -> int:
    """The most that a call needs beside its weights, its input among it, when all of them are resident."""
    pipe = make().to(device)
    run(pipe, device)
    base = memory.allocated()
    memory.reset_peak()
    run(pipe, device)
    return memory.peak() - base


def on_device_now(pipe: Any, names: tuple[str, ...]) -> set[str]:
    """The components that have blocks on the device."""
    offload = pipe.transformer.__dict__["_offload_entry"].root.offload
    window = offload.streamer.window
    return {c.plan.path for c in offload.components if c.plan.path in names and any(map(window.holds, c.units))}


# --- model level ------------------------------------------------------------------------------------------------------


def test_model_level_peak_is_the_largest_component(
    device: torch.device, schedule: dict[str, bool], memory: Any
) -> None:
    pipe = experts()
    largest = max(nbytes(pipe.transformer), nbytes(pipe.transformer_2), nbytes(pipe.text_encoder))
    needed = activations(experts, device, memory)
    base = memory.allocated()
    expected = run(models.resident(pipe, device), device)
    report = enable(pipe, "module", device)
    idle = memory.allocated() - base
    assert nbytes(pipe.vae) <= idle <= report.idle_device_bytes + slack(pipe.vae)
    memory.reset_peak()
    assert torch.equal(run(pipe, device), expected)
    peak = memory.peak() - base
    assert largest < peak <= idle + largest + needed + slack(pipe)
    assert memory.allocated() - base == idle


@pytest.mark.simulated_only
def test_evict_comes_before_load(device: torch.device, schedule: dict[str, bool], memory: Any, sim: ModuleType) -> None:
    """With room for the largest component alone, whichever comes next must find the former one gone."""
    pipe = experts()
    sizes = {name: nbytes(getattr(pipe, name)) for name in ("transformer", "transformer_2", "text_encoder")}
    needed = activations(experts, device, memory)
    expected = run(models.resident(pipe, device), device)
    base = memory.allocated()
    enable(pipe, "module", device)
    room = nbytes(pipe.vae) + max(sizes.values()) + needed + slack(pipe)
    two = sorted(sizes.values())
    assert room < two[0] + two[1]  # not even the two smallest fit together
    sim.set(capacity=base + room)
    for _ in range(2):
        assert torch.equal(run(pipe, device), expected)
    assert sim.counters().get("alloc_retries", 0) == 0


def test_one_expert_of_two_at_a_time(device: torch.device, schedule: dict[str, bool]) -> None:
    pipe = experts()
    enable(pipe, "module", device)
    names = ("transformer", "transformer_2", "text_encoder")
    seen: list[tuple[str, set[str]]] = []
    for name in names:
        part = getattr(pipe, name)
        part.blocks[-1].register_forward_hook(lambda *_, name=name: seen.append((name, on_device_now(pipe, names))))
    run(pipe, device)
    assert [name for name, _ in seen] == ["text_encoder", *["transformer"] * 2, *["transformer_2"] * 2]
    assert all(there == {name} for name, there in seen)
    assert on_device_now(pipe, names) == set()


def test_eviction_follows_calls_and_not_declarations(device: torch.device, schedule: dict[str, bool]) -> None:
    """Components called directly, in any order and with none in between, find room and give way."""
    pipe = experts()
    plain = models.resident(pipe, device)
    enable(pipe, "module", device)
    names = ("transformer", "transformer_2", "text_encoder")
    x = models.sample().to(device)
    with torch.no_grad():
        for name in ("transformer_2", "transformer", "transformer_2", "text_encoder", "text_encoder", "transformer"):
            assert torch.equal(getattr(pipe, name)(x), getattr(plain, name)(x))
            assert on_device_now(pipe, names) == {name}
    run(pipe, device)
    assert on_device_now(pipe, names) == set()


def test_a_component_stays_while_it_is_the_one_in_use(device: torch.device) -> None:
    pipe = experts()
    enable(pipe, "module", device)
    run(pipe, device)
    before = pipe.offload_report().copies
    run(pipe, device, steps=40)
    assert pipe.offload_report().copies - before == sum(c.units for c in pipe.offload_report().components)


# --- layerwise --------------------------------------------------------------------------------------------------------


def test_layerwise_peak_is_shell_and_window(device: torch.device, schedule: dict[str, bool], memory: Any) -> None:
    def make() -> SmallPipeline:
        return seeded(lambda: SmallPipeline(Denoiser(map(Block, (200, 300, 100, 300, 250, 150)))))

    needed = activations(make, device, memory)
    pipe = make()
    expected = run(models.resident(pipe, device), device)
    base = memory.allocated()
    memory.reset_peak()
    report = enable(pipe, "layer", device)
    blocks = pipe.transformer.blocks
    window = 2 * max(rounded(c) for c in (sum(rounded(t.nbytes) for _, t in models.tensors(b)) for b in blocks))
    rest = nbytes(pipe) - nbytes(blocks)
    idle = memory.allocated() - base
    assert rest < idle <= rest + window + slack(pipe)
    assert memory.peak() - base == idle  # enabling takes no more than it leaves
    assert report.idle_device_bytes <= idle <= report.idle_device_bytes + slack(pipe)
    memory.reset_peak()
    for _ in range(2):
        assert torch.equal(run(pipe, device), expected)
        assert memory.allocated() - base == idle
    assert memory.peak() - base <= idle + needed
    assert memory.peak() - base < nbytes(pipe)  # it was worth it


@pytest.mark.parametrize("staying", [1, 3])
def test_resident_blocks_cost_what_they_weigh(staying: int, device: torch.device, memory: Any) -> None:
    def make() -> SmallPipeline:
        return seeded(lambda: SmallPipeline(Denoiser([Block(200) for _ in range(6)])))

    base = memory.allocated()
    pipe = make()
    enable(pipe, "layer", device)
    without = memory.allocated() - base
    pipe.disable_offload()
    assert memory.allocated() == base
    enable(pipe, "layer", device, layer_options={"dit": {"resident_layers": staying}})
    one = nbytes(pipe.transformer.blocks[0])
    assert 0 <= memory.allocated() - base - without - staying * one <= staying * slack(pipe.transformer.blocks[0])
    assert len({name.split(".")[2] for name in models.on_device(pipe) if ".blocks." in name and "transf" in name}) == (
        staying
    )


# --- enabling ---------------------------------------------------------------------------------------------------------


@modes
@pytest.mark.simulated_only
def test_enabling_passes_at_most_one_unit_through_the_device(
    mode: str, device: torch.device, memory: Any, sim: ModuleType
) -> None:
    pipe = experts()
    unit = max(nbytes(block) for part in (pipe.transformer, pipe.transformer_2) for block in part.blocks)
    base = memory.allocated()
    stays = nbytes(pipe.vae)
    if mode == "layer":
        parts = (pipe.transformer, pipe.transformer_2)
        stays = nbytes(pipe) - sum(nbytes(part.blocks) for part in parts) + unit  # and a window of two units
    sim.set(capacity=base + stays + unit + slack(pipe))
    memory.reset_peak()
    report = enable(pipe, mode, device)
    assert memory.peak() - base <= stays + unit + slack(pipe)
    assert report.copies == 0
    assert sim.counters().get("d2h", 0) == sim.counters().get("d2h_pageable", 0) == 0


@modes
def test_enabling_a_pipeline_on_the_device_takes_no_more_of_it(mode: str, device: torch.device, memory: Any) -> None:
    base = memory.allocated()
    pipe = experts().to(device)
    resident = memory.allocated() - base
    memory.reset_peak()
    report = enable(pipe, mode, device)
    assert memory.peak() - base == resident
    assert memory.allocated() - base <= report.idle_device_bytes + slack(pipe) < resident


# --- split models -----------------------------------------------------------------------------------------------------


def split() -> models.SplitPipeline:
    return seeded(lambda: models.SplitPipeline(models.SplitModel(map(Block, (250, 200)), map(Block, (150, 300, 200)))))


@pytest.mark.simulated_only
def test_one_part_of_a_split_model_at_a_time(
    device: torch.device, schedule: dict[str, bool], memory: Any, sim: ModuleType
) -> None:
    pipe = split()
    expected = run(models.resident(pipe, device), device)
    needed = activations(split, device, memory)
    base = memory.allocated()
    reasoner = nbytes(pipe.transformer.layers) + nbytes(pipe.transformer.head)
    generator = nbytes(pipe.transformer.gen_layers)
    common = nbytes(pipe.transformer) - reasoner - generator + nbytes(pipe.vae)
    enable(pipe, "module", device)
    idle = memory.allocated() - base
    assert idle <= rounded(nbytes(pipe.vae)) + slack(pipe.vae)
    room = common + max(reasoner, generator) + needed + slack(pipe)
    assert room < common + reasoner + generator
    sim.set(capacity=base + room)
    seen: list[tuple[bool, bool]] = []

    def look(*_: Any) -> None:
        offload = pipe.transformer.__dict__["_offload_entry"].root.offload
        holds = offload.streamer.window.holds
        parts = offload.components[0].parts
        seen.append(tuple(any(map(holds, parts[name].units)) for name in ("reasoner", "generator")))

    for block in (*pipe.transformer.layers, *pipe.transformer.gen_layers):
        block.register_forward_pre_hook(look)
    for _ in range(2):
        assert torch.equal(run(pipe, device), expected)
        assert memory.allocated() - base == idle
    assert set(seen) == {(True, False), (False, True)}


def test_switching_parts_copies_each_part_once(device: torch.device) -> None:
    pipe = split()
    enable(pipe, "module", device)
    units = sum(c.units for c in pipe.offload_report().components)
    before = pipe.offload_report().copies
    run(pipe, device, steps=5)
    assert pipe.offload_report().copies - before == units
