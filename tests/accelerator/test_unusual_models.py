"""Models and pipelines written in unusual ways compute what they compute where everything is resident."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import models
import pytest
import torch
from diffusers import WanPipeline
from models import MODES, WIDTH, Block, Denoiser, SmallPipeline, enable, run, sample, seeded, unequal
from torch import nn

from omni_offload import OffloadConfigError, OffloadMixin, OffloadStateError, with_offload
from omni_offload.demo import small_pipelines

modes = pytest.mark.parametrize("mode", MODES)

Call = Callable[[Any, torch.device], torch.Tensor]


def pipeline_of(
    block: Callable[[int], nn.Module] = Block, dit: type = Denoiser, kind: type = SmallPipeline, count: int = 5
) -> Any:
    return seeded(lambda: kind(dit([block(inner) for inner in unequal(count)])))


def runs_as_resident(pipe: Any, mode: str, device: torch.device, call: Call = run, times: int = 3) -> None:
    plain = models.resident(pipe, device)
    enable(pipe, mode, device)
    for _ in range(times):
        assert torch.equal(call(pipe, device), call(plain, device))
    assert pipe.offload_report().copies > 0


# --- what blocks give out and keep ------------------------------------------------------------------------------------


class TableBlock(Block):
    def __init__(self, inner: int) -> None:
        super().__init__(inner)
        self.register_buffer("table", torch.randn(16, WIDTH))


class GivesView(TableBlock):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x), self.table[:8]


class AddsViewsAtTheEnd(Denoiser):
    def forward(self, x: torch.Tensor, order: Any = None) -> torch.Tensor:
        x, views = self.proj_in(x), []
        for block in self.blocks:
            x, view = block(x)
            views.append(view)
        for view in views:
            x = x + view
        return self.norm_out(x)


class KeepsViewAsAttribute(TableBlock):
    kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None or self.kept.device != x.device:
            self.kept = self.table[:8]
        return super().forward(x) + self.kept


class KeepsViewAsBuffer(TableBlock):
    def __init__(self, inner: int) -> None:
        super().__init__(inner)
        self.register_buffer("kept", None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kept is None:
            self.kept = self.table[:8]
        return super().forward(x) + self.kept


@modes
def test_a_view_of_a_buffer_that_a_block_returned_keeps_its_values(
    mode: str, device: torch.device, schedule: dict[str, bool]
) -> None:
    runs_as_resident(pipeline_of(GivesView, AddsViewsAtTheEnd), mode, device)


@modes
@pytest.mark.parametrize("block", [KeepsViewAsAttribute, KeepsViewAsBuffer])
def test_a_view_of_a_table_that_a_block_keeps_for_later_calls_keeps_its_values(
    block: type, mode: str, device: torch.device, schedule: dict[str, bool]
) -> None:
    runs_as_resident(pipeline_of(block), mode, device)


# --- what is called, and by whom --------------------------------------------------------------------------------------


class CallsIntoBlock(Denoiser):
    def forward(self, x: torch.Tensor, order: Any = None) -> torch.Tensor:
        return super().forward(x + self.blocks[0].norm(x), order)


class DeepShell(Denoiser):
    def __init__(self, blocks: Any) -> None:
        super().__init__(blocks)
        self.embedding = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())


class ReadsRootFirst(Denoiser):
    def forward(self, x: torch.Tensor, order: Any = None) -> torch.Tensor:
        return super().forward(x * self.scale_shift_table[0], order)


@modes
def test_the_root_may_call_a_module_inside_a_block(mode: str, device: torch.device, schedule: dict[str, bool]) -> None:
    runs_as_resident(pipeline_of(dit=CallsIntoBlock), mode, device)


@modes
def test_a_module_deep_in_the_shell_may_be_called_by_itself(mode: str, device: torch.device) -> None:
    pipe = pipeline_of(dit=DeepShell)
    plain = models.resident(pipe, device)
    enable(pipe, mode, device)
    for _ in range(2):
        ours, theirs = (one.transformer.embedding[0](sample().to(device)) for one in (pipe, plain))
        assert torch.equal(ours, theirs)
        assert torch.equal(run(pipe, device), run(plain, device))


@modes
def test_the_forward_of_a_component_may_be_called_directly(
    mode: str, device: torch.device, schedule: dict[str, bool]
) -> None:
    def call(pipe: Any, device: torch.device) -> torch.Tensor:
        return pipe.transformer.forward(sample().to(device))

    runs_as_resident(pipeline_of(dit=ReadsRootFirst), mode, device, call)


@modes
def test_a_hook_may_call_the_pipeline_while_its_component_is_called_by_itself(
    mode: str, device: torch.device, schedule: dict[str, bool]
) -> None:
    pipe = models.small(3)
    plain = models.resident(pipe, device)
    for one in (plain, pipe):
        inside: list[Any] = []

        def hook(module: Any, args: Any, output: Any, one: Any = one, inside: list[Any] = inside) -> Any:
            if inside:
                return None
            inside.append(one)
            result = output + 0.1 * one(sample(3).to(device))
            inside.clear()
            return result

        one.transformer.blocks[1].register_forward_hook(hook)
    enable(pipe, mode, device)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(pipe.transformer(sample().to(device)), plain.transformer(sample().to(device)))
    assert pipe.offload_report().copies > 0


@modes
def test_components_used_on_another_stream_wait_for_their_shell(
    mode: str, device: torch.device, schedule: dict[str, bool]
) -> None:
    pipe = models.small(3)
    plain = models.resident(pipe, device)
    x, y = sample().to(device), sample(2).to(device)
    enable(pipe, mode, device)
    with torch.no_grad():
        expected = plain.transformer(x), plain.text_encoder(y)
        stream = torch.Stream(device=device)
        torch.accelerator.synchronize(device)
        pipe.transformer(x)
        with stream:
            first = pipe.transformer(x)
        second = pipe.text_encoder(y)
        torch.accelerator.synchronize(device)
    assert torch.equal(first, expected[0])
    assert torch.equal(second, expected[1])


class YieldingPipeline(SmallPipeline):
    def __call__(self, x: torch.Tensor, steps: int = 2) -> Iterator[torch.Tensor]:
        y = x + self.text_encoder(x)
        for _ in range(steps):
            y = self.transformer(y)
            yield y


@modes
def test_a_pipeline_that_yields_its_steps_sees_edits_between_its_calls(
    mode: str, device: torch.device, schedule: dict[str, bool]
) -> None:
    pipe = pipeline_of(kind=YieldingPipeline)
    plain = models.resident(pipe, device)
    enable(pipe, mode, device)
    for _ in range(3):
        ours, theirs = (list(one(sample().to(device)))[-1] for one in (pipe, plain))
        assert torch.equal(ours, theirs)
        for one in (pipe, plain):
            for weight in one.parameters():
                weight.data.mul_(1.01)
    assert pipe.offload_report().copies > 0


# --- what a component is given ----------------------------------------------------------------------------------------


class FillsWhatItIsGiven(Denoiser):
    def forward(self, x: torch.Tensor, order: Any = None, found: Any = None, cache: Any = None) -> torch.Tensor:
        x = self.proj_in(x)
        for block in self.blocks:
            x = block(x)
            if found is not None:
                found.append(x)
        if cache is not None:
            cache["index"].add_(1)
            cache["calls"] = cache.get("calls", 0) + 1
            x = x + cache["index"]
        return self.norm_out(x)


class TakesConditions(Denoiser):
    def forward(self, x: torch.Tensor, order: Any = None, condition: Any = None) -> torch.Tensor:
        return super().forward(x, order) + condition["mask"].to(x.device)


@modes
def test_a_list_that_is_passed_in_holds_what_the_forward_appended(mode: str, device: torch.device) -> None:
    pipe = pipeline_of(dit=FillsWhatItIsGiven)
    plain = models.resident(pipe, device)
    enable(pipe, mode, device)
    ours: list[torch.Tensor] = []
    theirs: list[torch.Tensor] = []
    pipe.transformer(sample().to(device), found=ours)
    plain.transformer(sample().to(device), found=theirs)
    assert len(ours) == 5 and all(map(torch.equal, ours, theirs))


@modes
def test_a_cache_of_device_tensors_that_is_passed_in_holds_what_the_forward_wrote(
    mode: str, device: torch.device
) -> None:
    pipe = pipeline_of(dit=FillsWhatItIsGiven)
    enable(pipe, mode, device)
    cache: dict[str, Any] = {"index": torch.zeros(1, device=device)}
    for _ in range(3):
        pipe.transformer(sample().to(device), cache=cache)
    assert cache["index"].item() == 3 and cache["calls"] == 3


@modes
def test_a_dict_of_host_tensors_that_is_passed_in_is_left_as_it_was(mode: str, device: torch.device) -> None:
    pipe = pipeline_of(dit=TakesConditions)
    plain = models.resident(pipe, device)
    enable(pipe, mode, device)
    condition = {"mask": torch.ones(WIDTH)}
    ours, theirs = (one.transformer(sample().to(device), condition=condition) for one in (pipe, plain))
    assert torch.equal(ours, theirs)
    assert condition["mask"].device.type == "cpu"


# --- classes ----------------------------------------------------------------------------------------------------------


class SetsItsDevice(Denoiser):
    def forward(self, x: torch.Tensor, order: Any = None) -> torch.Tensor:
        self.device = x.device
        return super().forward(x, order)


@modes
def test_a_component_may_set_its_own_device(mode: str, device: torch.device) -> None:
    runs_as_resident(pipeline_of(dit=SetsItsDevice), mode, device)


@modes
def test_a_registry_of_subclasses_hears_nothing_of_offload(mode: str, device: torch.device) -> None:
    names: list[str] = []

    class Registered(Block):
        def __init_subclass__(cls, **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            assert cls.__name__ not in names, "registered twice"
            names.append(cls.__name__)

    class Mine(Registered):
        pass

    runs_as_resident(pipeline_of(Mine), mode, device)
    assert names == ["Mine"]


@modes
@pytest.mark.parametrize("between", ["while on", "while off"])
def test_a_forward_that_is_replaced_on_the_class_of_the_blocks_is_the_one_that_runs(
    between: str, mode: str, device: torch.device
) -> None:
    class Patched(Block):
        pass

    pipe = pipeline_of(Patched)
    plain = models.resident(pipe, device)
    enable(pipe, mode, device)
    before = run(pipe, device)
    if between == "while off":
        pipe.disable_offload()
    Patched.forward = lambda self, x: Block.forward(self, x) * 2
    if between == "while off":
        enable(pipe, mode, device)
    result = run(pipe, device)
    assert torch.equal(result, run(plain, device))
    assert not torch.equal(result, before)


@modes
def test_script_modules_are_refused_by_name(mode: str, device: torch.device) -> None:
    pipe = pipeline_of(lambda inner: torch.jit.script(nn.Linear(WIDTH, WIDTH)))
    with pytest.raises(OffloadConfigError, match=r"transformer is or holds a TorchScript module.*as a plain module"):
        enable(pipe, mode, device)
    assert type(pipe.transformer) is Denoiser and not models.on_device(pipe)


def test_a_class_with_the_mixin_behind_the_pipeline_is_refused_where_it_is_defined() -> None:
    with pytest.raises(OffloadConfigError, match=r"Behind: DiffusionPipeline.*class Behind\(OffloadMixin, "):

        class Behind(WanPipeline, OffloadMixin):
            pass


@pytest.mark.parametrize("name", ["transformer", "text_encoder"])
def test_with_offload_refuses_a_model(name: str) -> None:
    model = small_pipelines.components("wan")[name]
    kind = type(model)
    with pytest.raises(OffloadConfigError, match=f"{kind.__name__} is a model and not a pipeline.*components"):
        with_offload(model)
    assert type(model) is kind


@modes
def test_group_offload_of_a_component_is_refused_while_offload_is_on(mode: str, device: torch.device) -> None:
    pipe = models.offloadable("wan")
    expected = models.generate(models.resident(pipe, device), "wan", steps=1)
    enable(pipe, mode, device)
    with pytest.raises(OffloadStateError, match=r"enable_group_offload.*disable_offload\(\)"):
        pipe.transformer.enable_group_offload(onload_device=device, offload_type="leaf_level")
    assert torch.equal(models.generate(pipe, "wan", steps=1), expected)


# --- copies, pickles and missing parts --------------------------------------------------------------------------------


@modes
def test_a_deep_copy_of_an_offloaded_pipeline_is_on_the_host_and_not_offloaded(mode: str, device: torch.device) -> None:
    pipe = models.small(4)
    expected = run(models.resident(pipe, device), device)
    enable(pipe, mode, device)
    run(pipe, device)
    twin = copy.deepcopy(pipe)
    assert type(twin) is type(pipe) and type(twin.transformer) is Denoiser
    assert not models.on_device(twin)
    with pytest.raises(OffloadStateError, match="offload_report"):
        twin.offload_report()
    assert run(twin, torch.device("cpu")).isfinite().all()
    with torch.no_grad():
        twin.transformer.proj_in.weight.zero_()
    assert torch.equal(run(pipe, device), expected)
    twin.transformer.load_state_dict(pipe.transformer.state_dict())
    enable(twin, mode, device)
    assert torch.equal(run(twin, device), expected)


@modes
@pytest.mark.parametrize("on", [False, True])
def test_a_pipeline_that_was_given_the_mixin_can_be_pickled(on: bool, mode: str, device: torch.device) -> None:
    pipe = with_offload(small_pipelines.build("wan", layers=2))
    expected = models.generate(models.resident(pipe, device), "wan", steps=1)
    if on:
        enable(pipe, mode, device)
        models.generate(pipe, "wan", steps=1)
    twin = pickle.loads(pickle.dumps(pipe))
    assert type(twin) is type(pipe) and type(twin) is not WanPipeline and isinstance(twin, WanPipeline)
    with pytest.raises(OffloadStateError, match="offload_report"):
        twin.offload_report()
    twin.set_progress_bar_config(disable=True)
    enable(twin, mode, device)
    for _ in range(2):
        assert torch.equal(models.generate(twin, "wan", steps=1), expected)
    assert twin.offload_report().copies > 0


class WithoutEncoder(SmallPipeline):
    def __init__(self, transformer: nn.Module) -> None:
        super().__init__(transformer)
        self.text_encoder = None

    def forward(self, x: torch.Tensor, order: Any = None, steps: int = 2) -> torch.Tensor:
        for _ in range(steps):
            x = self.transformer(x, order)
        return self.vae(x)


@modes
def test_a_pipeline_made_without_its_text_encoder_may_be_offloaded(
    mode: str, device: torch.device, schedule: dict[str, bool]
) -> None:
    runs_as_resident(pipeline_of(kind=WithoutEncoder), mode, device)


# --- too little memory, for a while -----------------------------------------------------------------------------------


def large(count: int = 5) -> SmallPipeline:
    return pipeline_of(lambda inner: Block(512), count=count)


def grow(pipe: Any) -> None:
    for block in pipe.transformer.blocks:
        place = block.up.weight.device
        block.extra = nn.Parameter(torch.arange(20000.0).to(place))


def misses_of_a_call(pipe: Any, device: torch.device) -> int:
    before = pipe.offload_report().misses
    run(pipe, device)
    return pipe.offload_report().misses - before


@modes
@pytest.mark.simulated_only
@pytest.mark.parametrize("then", ["they stay large", "they shrink again"])
def test_units_that_outgrow_the_memory_for_a_while_are_fetched_ahead_again(
    then: str, mode: str, device: torch.device, memory: Any, sim: ModuleType
) -> None:
    pipe = large()
    plain = models.resident(pipe, device)
    expected = run(plain, device)
    del plain
    enable(pipe, mode, device)
    run(pipe, device)
    steady = misses_of_a_call(pipe, device)
    grow(pipe)
    with sim.settings(capacity=memory.allocated() + 60000):
        for _ in range(3):
            try:
                result = run(pipe, device)
            except torch.OutOfMemoryError:
                continue
            assert torch.equal(result, expected)
    if then == "they shrink again":
        for block in pipe.transformer.blocks:
            del block.extra
    for _ in range(2):
        assert torch.equal(run(pipe, device), expected)
    assert misses_of_a_call(pipe, device) <= steady
