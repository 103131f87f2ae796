"""The engine on plain CPU: layout, stores, order, windows and streamers, with copies made by a thread and counted.

On the CPU a parked weight computes the right answer too: every test of values asserts copies beside them.
"""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

sys.path.append(str(Path(__file__).resolve().parent / "accelerator"))

import models
from models import MODES, Block, CountingBlock, MixedBlock, enable, run, seeded

from omni_offload.engine.entries import BlockEntry, attach_block, detach
from omni_offload.engine.layout import ALIGNMENT, Layout, extent, flat
from omni_offload.engine.order import Order
from omni_offload.engine.stores import HostAllocator
from omni_offload.engine.streamer import Group, LayerStreamer, WholeStreamer
from omni_offload.engine.transfer import ThreadTransfer, transfer_for
from omni_offload.engine.unit import Shell, Unit
from omni_offload.engine.window import StreamingWindow, WholeWindow

CPU = torch.device("cpu")
modes = pytest.mark.parametrize("mode", MODES)


@pytest.fixture
def transfer() -> Any:
    made = ThreadTransfer(CPU)
    yield made
    made.close()


def allocator(transfer: ThreadTransfer) -> HostAllocator:
    return HostAllocator(CPU, registrar=None, pin=False, settle=transfer.settle)


def units(transfer: ThreadTransfer, sizes: Sequence[int]) -> tuple[list[nn.Module], list[Unit]]:
    blocks = seeded(lambda: nn.ModuleList(Block(size, 8) for size in sizes))
    host = allocator(transfer)
    return list(blocks), [Unit(str(i), [block], host) for i, block in enumerate(blocks)]


# --- layout -----------------------------------------------------------------------------------------------------------

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.float8_e4m3fn, torch.complex64]


@st.composite
def any_tensor(draw: st.DrawFn) -> torch.Tensor:
    """A tensor of any dtype and layout: dense, permuted, with gaps, overlapping, empty, without dimensions."""
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    values = torch.randint(0, 2 if dtype == torch.bool else 100, tuple(2 * n for n in shape), dtype=torch.int16)
    tensor = values.to(torch.float32).to(dtype)
    kind = draw(st.sampled_from(["plain", "permuted", "gaps", "expanded"]))
    tensor = tensor[tuple(slice(None, None, 2) for _ in shape)]
    if kind == "plain":
        tensor = tensor.contiguous()
    elif kind == "permuted":
        tensor = tensor.permute(draw(st.permutations(range(tensor.ndim))))
    elif kind == "expanded":
        tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
    return tensor


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal values, for every dtype."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.dtype.itemsize == 1:
        one, other = (t.contiguous().view(torch.uint8) for t in (one, other))
    return torch.equal(one, other)


@given(st.lists(any_tensor(), max_size=6))
def test_layout_keeps_values_strides_and_alignment(tensors: list[torch.Tensor]) -> None:
    layout = Layout.of(tensors)
    assert layout.nbytes % ALIGNMENT == 0
    assert layout.nbytes < sum(extent(t) * t.element_size() + ALIGNMENT for t in tensors) or not tensors
    buffer = torch.full((layout.nbytes + ALIGNMENT,), 255, dtype=torch.uint8)
    views, end = layout.views(buffer), 0
    for tensor, view, field in zip(tensors, views, layout.fields, strict=True):
        assert (view.dtype, view.shape, view.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
        assert field.offset % ALIGNMENT == 0 and field.offset >= end
        end = field.offset + field.nbytes
        assert view.numel() == 0 or view.data_ptr() == buffer.data_ptr() + field.offset
        flat(view).copy_(flat(tensor))
    assert end <= layout.nbytes
    for tensor, view in zip(tensors, views, strict=True):
        assert same_bytes(view, tensor)  # no view wrote into another one
    assert buffer[layout.nbytes :].eq(255).all()


@given(st.lists(any_tensor(), max_size=5))
def test_store_holds_each_tensor_once_and_exactly(tensors: list[torch.Tensor]) -> None:
    store = HostAllocator(CPU, registrar=None, pin=False, settle=lambda: None).store(tensors)
    assert store.nbytes == Layout.of(tensors).nbytes == store.bytes.numel()
    start = store.bytes.data_ptr()
    for tensor, view in zip(tensors, store.views, strict=True):
        assert same_bytes(view, tensor) and view.stride() == tensor.stride()
        assert not view.numel() or start <= view.data_ptr() < start + store.nbytes
        assert not view.is_inference() and not view.requires_grad
    # One copy of all bytes brings every tensor.
    slot = torch.empty(store.nbytes, dtype=torch.uint8).copy_(store.bytes)
    for tensor, view in zip(tensors, store.layout.views(slot), strict=True):
        assert same_bytes(view, tensor)


def test_a_view_of_a_store_does_not_drag_the_store_along() -> None:
    tensors = [torch.randn(1000), torch.randn(5)]
    store = HostAllocator(CPU, registrar=None, pin=False, settle=lambda: None).store(tensors)
    assert store.views[1].untyped_storage().nbytes() == 20
    assert len(pickle.dumps(store.views[1])) < 1000
    assert torch.equal(copy.deepcopy(store.views[1]), tensors[1])


def test_store_memory_lives_as_long_as_a_view_of_it() -> None:
    store = HostAllocator(CPU, registrar=None, pin=False, settle=lambda: None).store([torch.arange(1000.0)])
    gone = weakref.ref(store)
    view = store.views[0]
    store.release()
    del store
    gc.collect()
    assert gone() is None
    assert torch.equal(view, torch.arange(1000.0))


class FakeRegistrar:
    """Grants locks up to a limit, and remembers them."""

    def __init__(self, limit: int) -> None:
        self.limit, self.held = limit, {}

    def register(self, address: int, nbytes: int) -> None:
        from omni_offload.engine.pinning import PinRefused

        if sum(self.held.values()) + nbytes > self.limit:
            raise PinRefused("no more")
        assert address % 4096 == 0, "not the beginning of a page"
        self.held[address] = nbytes

    def unregister(self, address: int) -> None:
        del self.held[address]


def test_stores_are_locked_one_by_one_and_unlocked_when_dropped(caplog: pytest.LogCaptureFixture) -> None:
    registrar = FakeRegistrar(limit=10_000)
    settled: list[int] = []
    host = HostAllocator(
        torch.device("cuda"), registrar=registrar, pin=True, settle=lambda: settled.append(len(registrar.held))
    )
    with caplog.at_level(logging.WARNING, logger="omni_offload"):
        stores = [host.store([torch.ones(1000)]) for _ in range(4)]
    assert [store.kind for store in stores] == ["pinned", "pinned", "pageable", "pageable"]
    assert registrar.held == {store.bytes.data_ptr(): 4096 for store in stores[:2]}
    assert host.pinned_bytes == 8192
    assert len(caplog.records) == 1 and "0.004 MiB" in caplog.text and "0.008 MiB" in caplog.text
    stores[0].release()
    assert stores[0].kind == "pageable" and len(registrar.held) == 1
    assert torch.equal(stores[0].views[0], torch.ones(1000))
    del stores[1]
    gc.collect()
    assert registrar.held == {}
    assert settled == [2, 1]  # nobody was reading when the memory was unlocked
    assert host.pinned_bytes <= 4096


# --- transfer ---------------------------------------------------------------------------------------------------------


def test_the_cpu_is_served_by_a_copy_thread(transfer: ThreadTransfer) -> None:
    assert isinstance(transfer_for(CPU), ThreadTransfer)
    before = threading.active_count()
    store = allocator(transfer).store([torch.arange(1000.0)])
    slot = transfer.new_slot(store.nbytes)
    for number in range(1, 4):
        transfer.fill(slot, store)
        transfer.await_ready(slot)
        assert torch.equal(store.layout.views(slot.buffer)[0], torch.arange(1000.0))
        assert (transfer.copies, transfer.copied_bytes) == (number, number * store.nbytes)
    assert threading.active_count() == before + 1
    transfer.close()
    assert threading.active_count() == before


def test_a_failed_copy_is_raised_where_it_is_awaited(transfer: ThreadTransfer) -> None:
    store = allocator(transfer).store([torch.arange(1000.0)])
    slot = transfer.new_slot(16)  # too small
    transfer.fill(slot, store)
    with pytest.raises(RuntimeError):
        transfer.await_ready(slot)
    transfer.settle()  # and not once more


# --- order ------------------------------------------------------------------------------------------------------------


def stand_ins(count: int) -> list[Any]:
    return [object() for _ in range(count)]


def test_order_is_the_declared_one_and_wraps() -> None:
    a, b, c, x, y = stand_ins(5)
    order = Order([[a, b, c], [x, y]])
    assert order.upcoming(a, 1) == [b]
    assert order.upcoming(b, 5) == [c, a]
    assert order.upcoming(c, 1) == [a]
    assert order.upcoming(y, 3) == [x]
    assert order.upcoming(a, 0) == []


def test_order_follows_what_happened_last() -> None:
    a, b, c = stand_ins(3)
    order = Order([[a, b, c]])
    for unit in (a, c, a, c):
        order.observe(unit)
    assert order.upcoming(a, 1) == [c]
    assert order.upcoming(c, 1) == [a]
    assert order.upcoming(c, 3) == [a]
    order.observe(b)
    assert order.upcoming(c, 2) == [b]  # behind b the declared c is expected, which is where we are


def test_order_knows_nothing_of_a_unit_it_has_not_seen() -> None:
    assert Order([]).upcoming(stand_ins(1)[0], 3) == []
    only = stand_ins(1)[0]
    assert Order([[only]]).upcoming(only, 3) == []


@given(st.lists(st.integers(0, 5), max_size=40), st.integers(0, 5), st.integers(0, 7))
def test_upcoming_units_are_different_and_never_the_present_one(observed: list[int], present: int, count: int) -> None:
    things = stand_ins(6)
    order = Order([things[:4], things[4:]])
    for index in observed:
        order.observe(things[index])
    upcoming = order.upcoming(things[present], count)
    assert len(upcoming) <= count
    assert things[present] not in upcoming and len(set(map(id, upcoming))) == len(upcoming)
    if count and len(observed) > 1 and observed[-2] != observed[-1]:
        assert order.upcoming(things[observed[-2]], 1) == [things[observed[-1]]]


# --- units ------------------------------------------------------------------------------------------------------------


def test_faces_switch_memory_and_keep_the_tensors(transfer: ThreadTransfer) -> None:
    block = seeded(lambda: MixedBlock(24))
    before = {name: (id(t), t.clone(), t.stride()) for name, t in models.tensors(block)}
    unit = Unit("unit", [block], allocator(transfer))
    slot = transfer.new_slot(unit.nbytes)
    transfer.fill(slot, unit.store)
    transfer.await_ready(slot)
    for _ in range(2):
        unit.show(slot)
        assert unit.on_device
        for name, tensor in models.tensors(block):
            identity, value, stride = before[name]
            assert (id(tensor), tensor.stride()) == (identity, stride)
            assert same_bytes(tensor, value)
            assert not tensor.numel() or 0 <= tensor.data_ptr() - slot.buffer.data_ptr() < slot.nbytes
        unit.park()
        for tensor in unit.tensors:
            assert not tensor.numel() or 0 <= tensor.data_ptr() - unit.store.bytes.data_ptr() < unit.nbytes
    assert not unit.replaced() and not unit.edited()


EDITS: dict[str, Callable[[Block], None]] = {
    "cast": lambda block: block.half(),
    "new parameter": lambda block: block.register_parameter("extra", nn.Parameter(torch.ones(3))),
    "replaced parameter": lambda block: setattr(block.up, "weight", nn.Parameter(torch.ones(24, 8))),
    "new module": lambda block: setattr(block, "adapter", nn.Linear(8, 2)),
    "removed module": lambda block: delattr(block, "norm"),
    "other memory": lambda block: setattr(block.up.weight, "data", torch.ones(24, 8)),
    "assigned state": lambda block: block.load_state_dict(
        {name: value + 1 for name, value in block.state_dict().items()}, assign=True
    ),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_a_change_of_structure_is_seen_and_absorbed(edit: Callable[[Block], None], transfer: ThreadTransfer) -> None:
    (block,), (unit,) = units(transfer, [24])
    with torch.no_grad():
        edit(block)
    expected = {name: t.clone() for name, t in models.tensors(block)}
    assert unit.replaced()
    unit.absorb()
    assert not unit.replaced() and not unit.edited()
    assert {id(t) for t in unit.tensors} == {id(t) for _, t in models.tensors(block)}
    slot = transfer.new_slot(unit.nbytes)
    transfer.fill(slot, unit.store)
    transfer.await_ready(slot)
    unit.show(slot)
    assert all(same_bytes(t, expected[name]) for name, t in models.tensors(block))


@torch.no_grad()
def test_an_edit_in_place_is_seen_on_either_face(transfer: ThreadTransfer) -> None:
    (block,), (unit,) = units(transfer, [24])
    slot = transfer.new_slot(unit.nbytes)
    unit.stamp()
    transfer.fill(slot, unit.store)
    transfer.await_ready(slot)
    block.up.weight.mul_(2)
    assert unit.edited() and not unit.replaced()
    unit.stamp()
    transfer.fill(slot, unit.store)
    transfer.await_ready(slot)
    unit.show(slot)
    assert unit.written() == []
    block.down.bias.add_(3)
    index = next(i for i, tensor in enumerate(unit.tensors) if tensor is block.down.bias)
    assert unit.written() == [index]
    unit.write_back([index])
    value = block.down.bias.clone()
    unit.park()
    assert torch.equal(block.down.bias, value)


def test_a_released_unit_leaves_plain_weights_in_place(transfer: ThreadTransfer) -> None:
    (block,), (unit,) = units(transfer, [24])
    values = {name: t.clone() for name, t in models.tensors(block)}
    unit.release()
    assert all(torch.equal(t, values[name]) for name, t in models.tensors(block))


# --- windows and streamers --------------------------------------------------------------------------------------------


class Rig:
    """Blocks under a streamer: what a policy builds, without a pipeline."""

    def __init__(self, transfer: ThreadTransfer, sizes: Sequence[int], *, depth: int | None) -> None:
        self.plain = seeded(lambda: nn.ModuleList(Block(size, 8) for size in sizes))
        self.blocks, self.units = units(transfer, sizes)
        self.transfer = transfer
        if depth is None:
            self.streamer: Any = WholeStreamer(transfer, [Group("all", self.units)], [])
            self.limit, self.slots = 0, len(sizes)
        else:
            shell = Shell("shell", [], CPU)
            self.streamer = LayerStreamer(transfer, [self.units], [shell], depth=depth, home=lambda _: shell)
            self.slots = min(depth + 1, len(sizes))
            self.limit = self.slots * max(unit.nbytes for unit in self.units)
        for block, unit in zip(self.blocks, self.units, strict=True):
            attach_block(block, BlockEntry(self.streamer, unit))

    @property
    def window(self) -> StreamingWindow | WholeWindow:
        return self.streamer.window

    def close(self) -> None:
        self.streamer.close()
        for block in self.blocks:
            detach(block)


Call = tuple[int, list[Any]]  # a block, and calls made inside its forward


def calls(depth: int = 2) -> st.SearchStrategy[list[Call]]:
    inner: Any = st.just([]) if depth == 0 else st.deferred(lambda: calls(depth - 1))
    return st.lists(st.tuples(st.integers(0, 5), inner), max_size=5)


def follow(blocks: Sequence[nn.Module], x: torch.Tensor, plan: list[Call]) -> torch.Tensor:
    """Run the blocks of `plan`, each with its inner calls in the middle of its own forward."""
    for index, inner in plan:
        block = blocks[index]
        handles = []
        if inner:

            def nested(
                module: nn.Module, args: Any, output: torch.Tensor, inner: Any = inner, me: Any = handles
            ) -> Any:
                me.pop().remove()  # once, also where the block runs again inside itself
                return output + follow(blocks, args[0], inner)

            handles.append(block.norm.register_forward_hook(nested))
        x = block(x)
    return x


@pytest.mark.parametrize("depth", [0, 1, 2, 9, None], ids=lambda depth: "whole" if depth is None else f"depth {depth}")
@settings(max_examples=40)
@given(passes=st.lists(calls(), min_size=1, max_size=4), resting=st.booleans())
def test_any_sequence_of_calls_computes_right_and_keeps_to_the_limit(
    depth: int | None, passes: list[list[Call]], resting: bool
) -> None:
    """Repeats, skips, backwards, nesting: values as without offload, and device bytes back at the limit behind them."""
    transfer = ThreadTransfer(CPU)
    rig = Rig(transfer, [8, 40, 16, 24, 56, 8], depth=depth)
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    try:
        with torch.no_grad():
            for plan in passes:
                used = {index for index, _ in plan}
                before = transfer.copies
                assert torch.equal(follow(rig.blocks, x, plan), follow(rig.plain, x, plan))
                if len(used) > rig.slots:
                    assert transfer.copies - before >= len(used) - rig.slots
                elif before == 0:
                    assert transfer.copies >= len(used)
                assert not any(unit.on_device for unit in rig.units)
                assert all(t.data_ptr() >= 0 for unit in rig.units for t in unit.tensors)
                assert rig.streamer._tokens == []
                if depth is not None:
                    assert rig.window.nbytes == rig.limit
                if resting:
                    rig.streamer.rest()
                    assert rig.window.nbytes == rig.limit
                    assert not any(map(rig.window.holds, rig.units))
        rig.streamer.rest()
        assert rig.window.nbytes == rig.limit
    finally:
        rig.close()
    assert rig.window.nbytes == 0
    assert all(type(block) is Block for block in rig.blocks)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_steady_pass_copies_each_unit_once_and_ahead_of_its_use(depth: int, transfer: ThreadTransfer) -> None:
    rig = Rig(transfer, [8, 40, 16, 24, 56, 8], depth=depth)
    x = torch.randn(2, 8)
    with torch.no_grad():
        follow(rig.blocks, x, [(index, []) for index in range(6)])
        copies, misses = transfer.copies, rig.window.misses
        for _ in range(3):
            follow(rig.blocks, x, [(index, []) for index in range(6)])
    assert transfer.copies - copies == 3 * 6
    assert rig.window.misses == misses == 1
    rig.close()


def test_units_that_fit_the_window_are_copied_once(transfer: ThreadTransfer) -> None:
    rig = Rig(transfer, [8, 40], depth=1)
    with torch.no_grad():
        for _ in range(3):
            follow(rig.blocks, torch.randn(2, 8), [(0, []), (1, [])])
    assert transfer.copies == 2
    rig.close()


def test_an_edit_between_passes_reaches_the_device(transfer: ThreadTransfer) -> None:
    for depth in (1, None):
        rig = Rig(transfer, [8, 40], depth=depth)
        x, plan = torch.randn(2, 8), [(0, []), (1, [])]
        with torch.no_grad():
            follow(rig.blocks, x, plan)
            for blocks in (rig.blocks, rig.plain):
                blocks[0].up.weight.mul_(2)
                blocks[1].down.bias = nn.Parameter(torch.arange(8.0))
            before = transfer.copies
            assert torch.equal(follow(rig.blocks, x, plan), follow(rig.plain, x, plan))
        assert transfer.copies - before == 2
        rig.close()


def test_a_streamer_that_is_computing_refuses_to_rest(transfer: ThreadTransfer) -> None:
    from omni_offload import OffloadStateError

    rig = Rig(transfer, [8, 40], depth=1)
    seen: list[str] = []

    def rest(*_: Any) -> None:
        with pytest.raises(OffloadStateError, match=r"parking the weights is not possible while 0 is computing"):
            rig.streamer.rest()
        seen.append("refused")

    rig.blocks[0].norm.register_forward_hook(rest)
    with torch.no_grad():
        rig.blocks[0](torch.randn(2, 8))
    assert seen == ["refused"]
    rig.streamer.rest()
    rig.close()


# --- pipelines on the CPU ---------------------------------------------------------------------------------------------


@modes
@pytest.mark.parametrize("count", range(1, 10))
def test_pipeline_on_the_cpu_equals_and_copies(mode: str, count: int) -> None:
    pipe = models.small(count, MixedBlock if count % 2 else Block)
    expected = [run(models.resident(pipe, CPU), CPU, models.sample(number)) for number in range(3)]
    report = enable(pipe, mode, CPU)
    assert report.device == "cpu"
    for number in range(3):
        before = pipe.offload_report().copies
        assert torch.equal(run(pipe, CPU, models.sample(number)), expected[number])
        assert pipe.offload_report().copies - before >= count
    threads = [thread.name for thread in threading.enumerate()]
    assert sum(name.startswith("omni_offload-copy") for name in threads) == 1
    pipe.disable_offload()
    assert not any(thread.name.startswith("omni_offload-copy") for thread in threading.enumerate())
    assert torch.equal(run(pipe, CPU, models.sample(0)), expected[0])


@pytest.mark.parametrize("mode", MODES)
def test_without_an_accelerator_the_cpu_is_taken_and_said(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    pipe = models.small(3)
    expected = run(models.resident(pipe, CPU), CPU)
    with caplog.at_level(logging.WARNING, logger="omni_offload"):
        report = {"layer": pipe.enable_layerwise_offload, "module": pipe.enable_model_cpu_offload}[mode]()
    assert report.device == "cpu" and "No accelerator was found" in caplog.text and "device='cpu'" in caplog.text
    assert torch.equal(run(pipe, CPU), expected)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="omni_offload"):
        enable(models.small(3), mode, CPU)
    assert "accelerator" not in caplog.text  # it was asked for


@modes
@pytest.mark.parametrize("inference", [False, True])
def test_what_a_forward_writes_is_kept(mode: str, inference: bool) -> None:
    pipe = models.small(4, CountingBlock)
    plain = models.resident(pipe, CPU)
    enable(pipe, mode, CPU)
    for number in range(4):
        with torch.inference_mode(inference):
            assert torch.equal(run(pipe, CPU, models.sample(number)), run(plain, CPU, models.sample(number)))
        for (name, mine), (_, theirs) in zip(pipe.named_buffers(), plain.named_buffers(), strict=True):
            assert torch.equal(mine, theirs), name
    assert pipe.offload_report().copies > 0


@modes
@settings(max_examples=30)
@given(
    order=st.lists(st.integers(0, 4), max_size=8),
    other=st.lists(st.integers(0, 4), max_size=8),
    steps=st.integers(1, 3),
)
def test_pipeline_runs_its_blocks_in_any_order(mode: str, order: list[int], other: list[int], steps: int) -> None:
    assume(order or other)
    pipe = models.small(5)
    plain = models.resident(pipe, CPU)
    report = enable(pipe, mode, CPU)
    for used in (order, other, order):
        assert torch.equal(run(pipe, CPU, order=used, steps=steps), run(plain, CPU, order=used, steps=steps))
        assert pipe.offload_report().window_bytes == report.window_bytes
    assert pipe.offload_report().copies >= len(set(order) | set(other))
    pipe.disable_offload()


@modes
@pytest.mark.parametrize("family", ["wan", "split"])
def test_real_pipelines_on_the_cpu(family: str, mode: str) -> None:
    from omni_offload.demo import small_pipelines

    expected = models.generate(small_pipelines.build(family, layers=2), family)
    pipe = models.offloadable(family, layers=2)
    report = enable(pipe, mode, CPU)
    for _ in range(2):
        before = pipe.offload_report().copies
        assert torch.equal(models.generate(pipe, family), expected)
        assert pipe.offload_report().copies - before >= sum(c.units for c in report.components)
    pipe.disable_offload()


def test_dropping_a_pipeline_ends_its_copies_and_frees_its_modules() -> None:
    for mode in MODES:
        pipe = models.small(4)
        enable(pipe, mode, CPU)
        run(pipe, CPU)
        gone = [weakref.ref(module) for module in (pipe, pipe.transformer, pipe.transformer.blocks[0], pipe.vae)]
        del pipe
        gc.collect()
        assert [reference() for reference in gone] == [None] * 4
