"""B03: blocks may be skipped, repeated, reversed, nested or appear late; wrong guesses are dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import models
import pytest
import torch
from models import MODES, Block, Denoiser, SmallPipeline, enable, run, seeded
from torch import nn

modes = pytest.mark.parametrize("mode", MODES)

COUNT = 6
ORDERS: dict[str, Sequence[int]] = {
    "skipped": (0, 2, 3, 5),
    "only the last": (5,),
    "repeated": (0, 0, 0, 1, 1, 2, 3, 4, 5, 5),
    "alternating": (0, 1, 0, 1, 4, 5, 4, 5),
    "reversed": (5, 4, 3, 2, 1, 0),
    "shuffled": (3, 0, 5, 1, 4, 2),
    "none": (),
}


class CallsAnother(Block):
    """A block that runs another block in the middle of its own forward."""

    inner: Callable[[], nn.Module] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(self.norm(x))
        if self.inner is not None:
            x = self.inner()(x)  # while `self` still needs `down`
        return x + self.down(nn.functional.gelu(y))


def nested(depth: int) -> SmallPipeline:
    """Six blocks of which the first `depth` run inside one another, block 0 outermost."""
    pipe = seeded(lambda: SmallPipeline(Denoiser(map(CallsAnother, models.unequal(COUNT)))))
    link(pipe, depth)
    return pipe


def link(pipe: SmallPipeline, depth: int) -> None:
    blocks = pipe.transformer.blocks
    for index in range(depth - 1):
        blocks[index].inner = lambda index=index: blocks[index + 1]


@modes
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_any_order_and_any_subset(
    order: Sequence[int], mode: str, device: torch.device, schedule: dict[str, bool], memory: Any
) -> None:
    pipe = models.small(COUNT)
    plain = models.resident(pipe, device)
    expected = {used: run(plain, device, order=used) for used in (None, order)}
    enable(pipe, mode, device)
    run(pipe, device)
    settled = memory.allocated(), pipe.offload_report().window_bytes
    for used in (order, None, order, order, None):
        before = pipe.offload_report().copies
        assert torch.equal(run(pipe, device, order=used), expected[used])
        assert pipe.offload_report().copies > before or not used
        assert (memory.allocated(), pipe.offload_report().window_bytes) == settled


@modes
def test_another_order_in_every_pass_of_a_call(mode: str, device: torch.device, schedule: dict[str, bool]) -> None:
    pipe = models.small(COUNT)
    plain = models.resident(pipe, device)
    generator = torch.Generator("cpu").manual_seed(0)
    orders = [torch.randint(COUNT, (n % 9,), generator=generator, device="cpu").tolist() for n in range(12)]

    @torch.no_grad()
    def passes(one: SmallPipeline) -> torch.Tensor:
        y = models.sample().to(device)
        for order in orders:
            y = one.transformer(y, order)
        return y.cpu()

    expected = passes(plain)
    enable(pipe, mode, device)
    assert torch.equal(passes(pipe), expected)
    assert torch.equal(passes(pipe), expected)


@pytest.mark.simulated_only
def test_a_new_order_is_learnt_in_one_pass(device: torch.device, sim: ModuleType) -> None:
    """Behind the first reversed pass nothing is fetched in vain: one copy per block and pass again."""
    pipe = models.small(COUNT)
    enable(pipe, "layer", device)
    x = models.sample().to(device)
    with torch.no_grad():
        for order in (range(COUNT), ORDERS["reversed"], ORDERS["reversed"]):
            pipe.transformer(x, order)
        before = pipe.offload_report()
        for _ in range(3):
            pipe.transformer(x, ORDERS["reversed"])
    report = pipe.offload_report()
    assert report.copies - before.copies == 3 * COUNT
    assert report.misses == before.misses


@pytest.mark.parametrize("order", [(0, 2, 4), (1, 1, 1)])
def test_a_pass_fetches_no_more_than_what_it_runs_and_one_guess(order: Sequence[int], device: torch.device) -> None:
    pipe = models.small(COUNT)
    enable(pipe, "layer", device)
    for _ in range(3):
        run(pipe, device, order=order, steps=1)
    before = pipe.offload_report().copies
    run(pipe, device, order=order, steps=1)
    assert pipe.offload_report().copies - before <= len(set(order)) + 1


@modes
def test_blocks_first_used_on_a_later_call(mode: str, device: torch.device, schedule: dict[str, bool]) -> None:
    pipe = models.small(COUNT)
    plain = models.resident(pipe, device)
    orders = [(0, 1), (0, 1), (0, 1, 4), (5, 0), None]
    expected = [run(plain, device, order=order) for order in orders]
    enable(pipe, mode, device)
    for order, wanted in zip(orders, expected, strict=True):
        assert torch.equal(run(pipe, device, order=order), wanted)


@modes
@pytest.mark.parametrize("depth", [2, 3, 6])
def test_blocks_inside_one_another(
    depth: int, mode: str, device: torch.device, schedule: dict[str, bool], memory: Any
) -> None:
    pipe, plain = nested(depth), nested(depth).to(device)
    expected = run(plain, device)
    del plain
    enable(pipe, mode, device)
    limit = pipe.offload_report().window_bytes
    settled = None
    behind_the_blocks: list[int] = []  # within the call: memory is back at the limit as soon as nobody needs more
    if mode == "layer":
        pipe.transformer.norm_out.register_forward_pre_hook(
            lambda *_: behind_the_blocks.append(pipe.offload_report().window_bytes)
        )
    for _ in range(3):
        before = pipe.offload_report().copies
        assert torch.equal(run(pipe, device), expected)
        assert set(behind_the_blocks) <= {limit}
        assert pipe.offload_report().copies - before >= COUNT
        assert pipe.offload_report().window_bytes == limit
        assert settled in (None, memory.allocated())
        settled = memory.allocated()


@modes
def test_a_block_inside_itself(mode: str, device: torch.device, schedule: dict[str, bool]) -> None:
    class Recursive(Block):
        depth = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.up(self.norm(x))
            if self.depth < 2:
                self.depth += 1
                x = self(x)
                self.depth -= 1
            return x + self.down(nn.functional.gelu(y))

    pipe = models.small(4, Recursive)
    expected = run(models.resident(pipe, device), device)
    enable(pipe, mode, device)
    for _ in range(3):
        assert torch.equal(run(pipe, device), expected)
    assert not models.on_device(pipe.transformer.blocks)


@modes
def test_one_block_called_from_outside(mode: str, device: torch.device, schedule: dict[str, bool]) -> None:
    pipe = models.small(COUNT)
    plain = models.resident(pipe, device)
    x = models.sample().to(device)
    with torch.no_grad():
        expected = [block(x).cpu() for block in plain.transformer.blocks]
        enable(pipe, mode, device)
        for index in (4, 0, 4, 5, 1):
            assert torch.equal(pipe.transformer.blocks[index](x).cpu(), expected[index])
            assert torch.equal(pipe.transformer.blocks[index].forward(x).cpu(), expected[index])
    assert torch.equal(run(pipe, device), run(plain, device))
