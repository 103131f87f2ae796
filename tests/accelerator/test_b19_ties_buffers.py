"""B19: shared tensors stay shared and move once; buffers are where they are used and keep what is written."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import models
import pytest
import torch
from models import MODES, Block, CountingBlock, Denoiser, MixedBlock, SmallPipeline, enable, run, seeded, unequal
from torch import nn

modes = pytest.mark.parametrize("mode", MODES)
WIDTH = models.WIDTH


def ties(pipe: nn.Module) -> list[set[str]]:
    """Names that lead to one tensor, for every tensor with more than one."""
    names: dict[int, set[str]] = {}
    for name, tensor in models.tensors(pipe):
        names.setdefault(id(tensor), set()).add(name)
    return sorted((group for group in names.values() if len(group) > 1), key=sorted)


# --- ties -------------------------------------------------------------------------------------------------------------


def within_a_unit(pipe: SmallPipeline) -> None:
    block = pipe.transformer.blocks[1] = Block(WIDTH)
    block.down.weight = block.up.weight
    block.register_buffer("one", torch.ones(3))
    block.register_buffer("other", block.one)


def across_two_blocks(pipe: SmallPipeline) -> None:
    first, second = pipe.transformer.blocks[0], pipe.transformer.blocks[3] = Block(24), Block(24)
    first.up.weight = second.up.weight
    pipe.transformer.blocks[0] = first


def block_and_shell(pipe: SmallPipeline) -> None:
    block = pipe.transformer.blocks[2] = Block(WIDTH)
    block.up.weight = pipe.transformer.proj_in.weight
    block.register_buffer("offset", pipe.transformer.offset)


def shells_of_two_components(pipe: SmallPipeline) -> None:
    pipe.text_encoder.proj_in.weight = pipe.transformer.proj_in.weight
    pipe.text_encoder.offset = pipe.transformer.offset


def blocks_of_two_components(pipe: SmallPipeline) -> None:
    pipe.text_encoder.blocks[0] = Block(24)
    pipe.transformer.blocks[0] = Block(24)
    pipe.text_encoder.blocks[0].up.weight = pipe.transformer.blocks[0].up.weight


def block_and_the_vae(pipe: SmallPipeline) -> None:
    block = pipe.transformer.blocks[2] = Block(WIDTH)
    block.up.weight = pipe.vae[0].weight


def one_block_twice(pipe: SmallPipeline) -> None:
    pipe.transformer.blocks[4] = pipe.transformer.blocks[1]


def one_module_in_two_components(pipe: SmallPipeline) -> None:
    pipe.text_encoder.proj_in = pipe.transformer.proj_in


def one_module_in_two_blocks(pipe: SmallPipeline) -> None:
    first, second = Block(24), Block(24)
    first.up = second.up
    pipe.transformer.blocks[0], pipe.transformer.blocks[3] = first, second


TIES: dict[str, Callable[[SmallPipeline], None]] = {
    make.__name__: make
    for make in (
        within_a_unit,
        across_two_blocks,
        block_and_shell,
        shells_of_two_components,
        blocks_of_two_components,
        block_and_the_vae,
        one_block_twice,
        one_module_in_two_components,
        one_module_in_two_blocks,
    )
}


def tied(how: str) -> SmallPipeline:
    def make() -> SmallPipeline:
        pipe = SmallPipeline(Denoiser(map(Block, unequal(5))))
        TIES[how](pipe)
        return pipe

    pipe = seeded(make)
    assert ties(pipe)
    return pipe


@modes
@pytest.mark.parametrize("how", TIES)
def test_shared_tensors_stay_shared(how: str, mode: str, device: torch.device, schedule: dict[str, bool]) -> None:
    pipe = tied(how)
    before, identities = ties(pipe), {name: id(t) for name, t in models.tensors(pipe)}
    expected = run(models.resident(pipe, device), device)
    components = {"components": ["dit", "text_encoder"]} if mode == "layer" else {}
    enable(pipe, mode, device, **components)
    for _ in range(2):
        assert torch.equal(run(pipe, device), expected)
        assert ties(pipe) == before
    assert {name: id(t) for name, t in models.tensors(pipe)} == identities
    assert pipe.offload_report().copies > 0
    pipe.disable_offload()
    assert ties(pipe) == before and {name: id(t) for name, t in models.tensors(pipe)} == identities
    assert torch.equal(run(pipe.to(device), device), expected)


@modes
@pytest.mark.parametrize("how", TIES)
def test_shared_tensors_are_stored_and_moved_once(how: str, mode: str, device: torch.device, memory: Any) -> None:
    pipe = tied(how)
    total = models.nbytes(pipe)  # shared ones once
    components = {"components": ["dit", "text_encoder"]} if mode == "layer" else {}
    base = memory.allocated()
    report = enable(pipe, mode, device, **components)
    resident = memory.allocated() - base - report.window_bytes
    assert report.streamed_bytes + resident <= total + 512 * len(list(models.tensors(pipe)))
    run(pipe, device)
    assert sum(c.streamed_bytes for c in pipe.offload_report().components) == report.streamed_bytes
    if mode == "module":
        assert pipe.offload_report().copied_bytes == report.host_bytes


@modes
def test_parameters_that_share_memory_only_compute_right(mode: str, device: torch.device) -> None:
    """Two tensors over one storage are no tie that a model knows of; they are stored apart and equal."""
    pipe = models.small(4)
    blocks = pipe.transformer.blocks
    blocks[0] = Block(24)
    blocks[2] = Block(24)
    blocks[2].up.weight.data = blocks[0].up.weight.data
    blocks[2].down.bias.data = blocks[0].up.weight.data.view(-1)[5 : 5 + WIDTH]
    expected = run(models.resident(pipe, device), device)
    enable(pipe, mode, device)
    for _ in range(2):
        assert torch.equal(run(pipe, device), expected)


# --- buffers of every kind --------------------------------------------------------------------------------------------


class BufferedDenoiser(Denoiser):
    """Its root holds buffers of every kind, and it looks where they and the block's are whenever a block runs."""

    def __init__(self, count: int) -> None:
        super().__init__(map(MixedBlock, unequal(count)))
        self.register_buffer("phases", torch.randn(WIDTH, dtype=torch.complex64), persistent=False)
        self.register_buffer("mask", torch.rand(WIDTH) < 0.5)
        self.register_buffer("table", torch.randperm(WIDTH), persistent=False)
        self.register_buffer("nothing", None)
        self.register_buffer("halves", torch.randn(WIDTH).half())
        self.seen: list[set[torch.device]] = []

    def forward(self, x: torch.Tensor, order: Any = None) -> torch.Tensor:
        x = torch.where(self.mask, x, -x)[..., self.table] + self.halves.float()
        x = x * torch.view_as_real(self.phases).sum(-1)
        self.seen.append({t.device for name, t in models.tensors(self) if not name.startswith("blocks.")})
        return super().forward(x, order)


@modes
def test_buffers_are_on_the_device_when_used(mode: str, device: torch.device, schedule: dict[str, bool]) -> None:
    pipe = seeded(lambda: SmallPipeline(BufferedDenoiser(4)))
    expected = run(models.resident(pipe, device), device)
    keys = set(pipe.state_dict())
    enable(pipe, mode, device)
    assert set(pipe.state_dict()) == keys
    pipe.transformer.seen.clear()
    for block in pipe.transformer.blocks:
        block.norm.register_forward_pre_hook(
            lambda *_, block=block: pipe.transformer.seen.append({t.device for _, t in models.tensors(block)})
        )
    for _ in range(2):
        assert torch.equal(run(pipe, device), expected)
    assert pipe.transformer.seen == [{device}] * (2 * 2 * 5)
    assert set(pipe.state_dict()) == keys


@modes
def test_dtypes_are_never_changed(mode: str, device: torch.device) -> None:
    """Mixed on purpose, as in a model with modules kept in float32."""
    pipe = seeded(lambda: SmallPipeline(BufferedDenoiser(3)))
    before = {name: t.dtype for name, t in models.tensors(pipe)}
    assert len(set(before.values())) >= 8
    enable(pipe, mode, device)
    assert {name: t.dtype for name, t in models.tensors(pipe)} == before
    run(pipe, device)
    assert {name: t.dtype for name, t in models.tensors(pipe)} == before
    pipe.disable_offload()
    assert {name: t.dtype for name, t in models.tensors(pipe)} == before


# --- buffers that a forward writes ------------------------------------------------------------------------------------


class InPlace(Block):
    """Writes two buffers in place, and its result shows what earlier forwards wrote."""

    def __init__(self, inner: int) -> None:
        super().__init__(inner)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.mean.mul_(0.5).add_(x.detach().mean((0, 1)))
        return super().forward(x) + self.mean + 0.01 * self.calls


class WithBatchNorm(Block):
    """Keeps running statistics in training mode."""

    def __init__(self, inner: int) -> None:
        super().__init__(inner)
        self.batch_norm = nn.BatchNorm1d(models.TOKENS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.batch_norm(super().forward(x))
        return x + self.batch_norm.running_mean[:, None] + 0.01 * self.batch_norm.num_batches_tracked


class WritingDenoiser(Denoiser):
    """Writes a buffer of its root."""

    def __init__(self, blocks: Any) -> None:
        super().__init__(blocks)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, order: Any = None) -> torch.Tensor:
        self.calls.add_(1)
        return super().forward(x, order) + 0.01 * self.calls


def buffers(pipe: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t.cpu().clone() for name, t in pipe.named_buffers()}


def assert_same_buffers(one: nn.Module, other: nn.Module) -> None:
    mine, theirs = buffers(one), buffers(other)
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


@modes
@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("block", [InPlace, CountingBlock, WithBatchNorm])
def test_what_a_forward_writes_is_kept(
    block: Callable[[int], nn.Module], inference: bool, mode: str, device: torch.device, schedule: dict[str, bool]
) -> None:
    pipe = seeded(lambda: SmallPipeline(WritingDenoiser(map(block, unequal(4)))))
    pipe.train(block is WithBatchNorm)
    plain = models.resident(pipe, device)
    untouched = buffers(pipe)
    enable(pipe, mode, device)
    for number in range(4):
        with torch.inference_mode(inference):
            x = models.sample(number)
            assert torch.equal(run(pipe, device, x), run(plain, device, x)), f"run {number}"
        assert_same_buffers(pipe, plain)
    assert any(not torch.equal(untouched[name], now) for name, now in buffers(pipe).items() if "blocks" in name)
    pipe.disable_offload()
    assert_same_buffers(pipe, plain)
    assert not models.on_device(pipe)
    assert torch.equal(run(pipe.to(device), device), run(plain, device))


@modes
def test_what_a_repeated_and_nested_forward_writes_is_kept(mode: str, device: torch.device) -> None:
    class Outer(InPlace):
        inner: Callable[[], nn.Module] | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            return self.inner()(x) + self.mean if self.inner is not None else x

    def link(pipe: SmallPipeline) -> SmallPipeline:
        pipe.transformer.blocks[0].inner = lambda: pipe.transformer.blocks[2]
        return pipe

    def make() -> SmallPipeline:
        return link(models.small(4, Outer))

    pipe, plain = make(), make().to(device)
    enable(pipe, mode, device)
    for order in (None, (0, 0, 3, 1, 1), (2, 0), None):
        assert torch.equal(run(pipe, device, order=order), run(plain, device, order=order))
        assert_same_buffers(pipe, plain)


@pytest.mark.simulated_only
def test_a_written_buffer_is_copied_back_once(device: torch.device, sim: ModuleType) -> None:
    """Layerwise: from then on it stays on the device, and passes copy nothing back."""
    pipe = models.small(5, InPlace)
    x = models.sample().to(device)
    enable(pipe, "layer", device)
    with torch.no_grad():
        pipe(x)
        sim.counters(clear=True)
        for _ in range(3):
            pipe(x)
    counters = sim.counters()
    assert counters.get("d2h", 0) == counters.get("d2h_pageable", 0) == 0
    assert counters["h2d"] >= 3 * 5
    written = {name for name in models.on_device(pipe) if "blocks" in name and "text_encoder" not in name}
    assert written == {f"transformer.blocks.{i}.{name}" for i in range(5) for name in ("calls", "mean")}
