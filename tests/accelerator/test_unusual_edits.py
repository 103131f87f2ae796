"""Weights that are edited in unusual ways, at unusual moments: what runs next has seen the edit, nothing before it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
from models import MODES, WIDTH, Block, Denoiser, SmallPipeline, enable, run, sample, seeded, unequal
from torch import nn

from omni_offload import OffloadConfigError

modes = pytest.mark.parametrize("mode", MODES)


def pipeline_of(
    block: Callable[[int], nn.Module] = Block, dit: type = Denoiser, kind: type = SmallPipeline, count: int = 5
) -> Any:
    return seeded(lambda: kind(dit([block(inner) for inner in unequal(count)])))


# --- edits that change a form and no memory ---------------------------------------------------------------------------


class Transposable(Block):
    def __init__(self, inner: int) -> None:
        super().__init__(inner)
        self.square = nn.Parameter(torch.randn(WIDTH, WIDTH) / 6)
        self.register_buffer("square_buffer", torch.randn(WIDTH, WIDTH) / 6)
        self.rows = nn.Parameter(torch.randn(12, WIDTH) / 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) @ self.square @ self.square_buffer + self.rows.sum(0)


def transpose_data(block: Any) -> None:
    block.square.data = block.square.data.t()


def truncate_data(block: Any) -> None:
    block.rows.data = block.rows.data[:7]


def transpose_in_place(block: Any) -> None:
    block.square_buffer.t_()


@modes
@pytest.mark.parametrize("edit", [transpose_data, truncate_data, transpose_in_place], ids=lambda edit: edit.__name__)
def test_weights_in_the_same_memory_with_another_form_are_seen(
    edit: Callable[[Any], None], mode: str, device: torch.device, schedule: dict[str, bool]
) -> None:
    pipe = pipeline_of(Transposable)
    plain = models.resident(pipe, device)
    enable(pipe, mode, device)
    before = run(pipe, device)
    assert torch.equal(before, run(plain, device))
    for one in (pipe, plain):
        for block in one.transformer.blocks:
            edit(block)
    for _ in range(2):
        result = run(pipe, device)
        assert torch.equal(result, run(plain, device))
    assert not torch.equal(result, before)
    assert pipe.offload_report().copies > 0


class Growing(Denoiser):
    """A parameter of the shell that may have any number of rows."""

    def __init__(self, blocks: Any) -> None:
        super().__init__(blocks)
        self.rows = nn.Parameter(torch.randn(9, WIDTH))

    def forward(self, x: torch.Tensor, order: Any = None) -> torch.Tensor:
        return super().forward(x, order) + self.rows.sum(0)


def shorten(pipe: Any) -> None:
    pipe.transformer.rows.data = pipe.transformer.rows.data[:5].clone()


class StopsBetween(SmallPipeline):
    """Calls `between` after the first of its two steps."""

    between: Callable[[], None] | None = None

    def forward(self, x: torch.Tensor, order: Any = None, steps: int = 2) -> torch.Tensor:
        y = self.transformer(x + self.text_encoder(x))
        if self.between is not None:
            self.between()
        return self.transformer(y)


@modes
def test_a_shell_that_was_resized_may_be_refreshed_within_a_call(
    mode: str, device: torch.device, schedule: dict[str, bool]
) -> None:
    pipe = pipeline_of(dit=Growing, kind=StopsBetween, count=4)
    plain = models.resident(pipe, device)
    enable(pipe, mode, device)

    def edit() -> None:
        shorten(pipe)
        pipe.offload_refresh()

    pipe.between, plain.between = edit, lambda: shorten(plain)
    for _ in range(2):
        assert torch.equal(run(pipe, device), run(plain, device))


@modes
def test_a_shell_that_was_resized_after_its_component_was_called_by_itself_is_seen(
    mode: str, device: torch.device, schedule: dict[str, bool]
) -> None:
    pipe = pipeline_of(dit=Growing, count=4)
    plain = models.resident(pipe, device)
    enable(pipe, mode, device)
    for one in (pipe, plain):
        one.transformer(sample().to(device))
        shorten(one)
    for _ in range(2):
        assert torch.equal(run(pipe, device), run(plain, device))


# --- edits that leave no trace, or come while work is queued ----------------------------------------------------------


@modes
@pytest.mark.parametrize("name", ["transformer", "text_encoder"])
def test_data_written_after_a_component_was_called_by_itself_is_seen(
    name: str, mode: str, device: torch.device, schedule: dict[str, bool]
) -> None:
    pipe = models.small(2)
    plain = models.resident(pipe, device)
    enable(pipe, mode, device, components=["dit", "text_encoder"])
    for one in (pipe, plain):
        component = getattr(one, name)
        component(sample().to(device))
        for weight in component.parameters():
            weight.data.mul_(1.1)
    assert torch.equal(run(pipe, device), run(plain, device))
    assert pipe.offload_report().copies > 0


class Fusing(Denoiser):
    def fuse_lora(self) -> None:
        for block in self.blocks:
            block.up.weight.data += 0.1


def write_in_place(pipe: Any) -> None:
    for weight in pipe.transformer.parameters():
        weight.mul_(1.3)


def fuse(pipe: Any) -> None:
    pipe.transformer.fuse_lora()


def load(pipe: Any) -> None:
    state = {name: torch.full(t.shape, 0.01) for name, t in pipe.transformer.state_dict().items()}
    pipe.transformer.load_state_dict(state)


@modes
@pytest.mark.parametrize("edit", [write_in_place, fuse, load], ids=lambda edit: edit.__name__)
def test_weights_edited_right_behind_a_call_do_not_change_its_result(
    edit: Callable[[Any], None], mode: str, device: torch.device, schedule: dict[str, bool]
) -> None:
    """Nothing is fetched from the device between the call and the edit, so the call may still be at work."""
    pipe = pipeline_of(dit=Fusing)
    plain = models.resident(pipe, device)
    enable(pipe, mode, device)
    x = sample().to(device)
    with torch.no_grad():
        for _ in range(3):
            expected = plain(x)
            edit(plain)
            result = pipe(x)
            edit(pipe)
            assert torch.equal(result.cpu(), expected.cpu())
    assert pipe.offload_report().copies > 0


@modes
def test_a_hook_that_writes_weights_at_each_use_does_not_fill_the_device(
    mode: str, device: torch.device, memory: Any
) -> None:
    pipe = pipeline_of(lambda inner: Block(512), count=6)
    expected = run(models.resident(pipe, device), device)
    enable(pipe, mode, device)
    run(pipe, device)
    gc.collect()
    idle = memory.allocated()

    def clamp(block: Any, args: Any) -> None:
        for layer in (block.up, block.down):
            layer.weight.detach().clamp_(-9, 9)

    for block in pipe.transformer.blocks:
        block.register_forward_pre_hook(clamp)
    for _ in range(3):
        assert torch.equal(run(pipe, device), expected)
    gc.collect()
    assert memory.allocated() <= 1.05 * idle


# --- components and blocks that come and go ---------------------------------------------------------------------------


@modes
def test_a_component_that_is_swapped_between_calls_is_served_and_the_old_one_let_go(
    mode: str, device: torch.device, schedule: dict[str, bool]
) -> None:
    pipe, other = models.small(4), seeded(lambda: Denoiser([Block(inner) for inner in unequal(3)]), 5)
    plain = models.resident(pipe, device)
    enable(pipe, mode, device)
    assert torch.equal(run(pipe, device), run(plain, device))
    old = pipe.transformer
    plain.transformer = models.resident(other, device)
    pipe.transformer = other
    for _ in range(2):
        assert torch.equal(run(pipe, device), run(plain, device))
    assert type(old) is Denoiser and not models.on_device(old)
    assert pipe.offload_report().copies > 0


@modes
def test_a_block_that_is_deleted_is_freed(mode: str, device: torch.device, schedule: dict[str, bool]) -> None:
    pipe = models.small(5)
    plain = models.resident(pipe, device)
    enable(pipe, mode, device)
    run(pipe, device)
    block = weakref.ref(pipe.transformer.blocks[2])
    for one in (pipe, plain):
        del one.transformer.blocks[2]
    for _ in range(2):
        assert torch.equal(run(pipe, device), run(plain, device))
    gc.collect()
    assert block() is None


class Odd(torch.Tensor):
    """A tensor of a class of its own, as quantised weights are."""


def put_on_meta(block: Any) -> None:
    block.up.to("meta")


def put_odd_weight(block: Any) -> None:
    block.up.weight = nn.Parameter(torch.randn(5, 5).as_subclass(Odd))


@modes
@pytest.mark.parametrize("spoil", [put_on_meta, put_odd_weight], ids=lambda spoil: spoil.__name__)
@pytest.mark.parametrize("called", [False, True])
def test_offload_can_be_turned_off_whatever_weights_have_come_in(
    called: bool, spoil: Callable[[Any], None], mode: str, device: torch.device
) -> None:
    pipe = models.small(4)
    expected = run(models.resident(pipe, device), device)
    enable(pipe, mode, device)
    run(pipe, device)
    up = pipe.transformer.blocks[1].up
    weight, bias = (t.detach().cpu().clone() for t in (up.weight, up.bias))
    spoil(pipe.transformer.blocks[1])
    if called:
        with pytest.raises(OffloadConfigError, match=r"transformer\.blocks\.1: weight is"):
            run(pipe, device)
    pipe.disable_offload()
    assert type(pipe.transformer) is Denoiser and type(pipe.transformer.blocks[0]) is Block
    assert {t.device.type for _, t in models.tensors(pipe)} <= {"cpu", "meta"}
    pipe.transformer.blocks[1].up.weight = nn.Parameter(weight)
    pipe.transformer.blocks[1].up.bias = nn.Parameter(bias)
    enable(pipe, mode, device)
    assert torch.equal(run(pipe, device), expected)
