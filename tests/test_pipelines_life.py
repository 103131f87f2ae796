"""A pipeline with the mixin: loading, saving, naming, and the calls that turn offload on and off. On the CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline, Flux2KleinPipeline, WanPipeline

from omni_offload import (
    OffloadConfig,
    OffloadConfigError,
    OffloadFlux2KleinPipeline,
    OffloadMixin,
    OffloadStateError,
    OffloadWanPipeline,
    with_offload,
)
from omni_offload.demo import small_pipelines as small
from omni_offload.demo.split_model import SmallSplitPipeline

CPU = torch.device("cpu")
LAYER = {"mode": "layer", "components": ["dit"]}
MODULE = {"mode": "module"}


class OffloadSplitPipeline(OffloadMixin, SmallSplitPipeline):
    """The split model with the mixin."""


def run(pipe: Any, family: str = "wan") -> torch.Tensor:
    result = pipe(**small.call_arguments(family, steps=1))
    return result.frames if "frames" in result else result.images


def wan(**options: Any) -> Any:
    return small.build("wan", cls=OffloadWanPipeline, layers=2, **options)


def is_on(pipe: Any) -> bool:
    try:
        pipe.offload_report()
    except OffloadStateError:
        return False
    return True


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small Wan pipeline that was saved while offloaded."""
    folder = tmp_path_factory.mktemp("saved")
    pipe = wan()
    pipe.enable_layerwise_offload(device="cpu")
    pipe.save_pretrained(folder)
    return folder


# --- loading and saving ----------------------------------------------------------------------------


def test_saved_index_names_the_plain_class(saved: Path) -> None:
    index = json.loads((saved / "model_index.json").read_text())
    assert index["_class_name"] == "WanPipeline"
    assert index["transformer"] == ["diffusers", "WanTransformer3DModel"]
    assert index["text_encoder"] == ["transformers", "UMT5EncoderModel"]


@pytest.mark.parametrize("kind", [WanPipeline, DiffusionPipeline, OffloadWanPipeline])
def test_saved_pipeline_loads_with_plain_diffusers(kind: Any, saved: Path) -> None:
    pipe = kind.from_pretrained(saved)
    pipe.set_progress_bar_config(disable=True)
    assert type(pipe) is (WanPipeline if kind is DiffusionPipeline else kind)
    assert torch.equal(run(pipe), run(wan()))


def test_a_class_of_the_users_own_is_saved_under_the_plain_name(tmp_path: Path) -> None:
    class MyPipeline(OffloadMixin, Flux2KleinPipeline):
        _dit_modules = ["transformer"]

    for kind in (MyPipeline, OffloadFlux2KleinPipeline):
        small.build("flux2-klein", cls=kind, layers=1).save_pretrained(tmp_path / kind.__name__)
        index = json.loads((tmp_path / kind.__name__ / "model_index.json").read_text())
        assert index["_class_name"] == "Flux2KleinPipeline"


@pytest.mark.parametrize(
    ("keywords", "mode"),
    [
        ({}, None),
        ({"enable_cpu_offload": False}, None),
        ({"enable_cpu_offload": True}, "module"),
        ({"diffusion_offload_config": LAYER}, "layer"),
        ({"diffusion_offload_config": json.dumps(MODULE)}, "module"),
        ({"diffusion_offload_config": OffloadConfig("layer", components=("text_encoder",))}, "layer"),
    ],
)
def test_from_pretrained_turns_offload_on(
    keywords: dict[str, Any], mode: str | None, saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device = {} if mode is None else {"offload_device": "cpu"}
    pipe = OffloadWanPipeline.from_pretrained(saved, **keywords, **device)
    pipe.set_progress_bar_config(disable=True)
    assert (pipe.offload_report().mode if is_on(pipe) else None) == mode
    assert "not expected" not in caplog.text  # Diffusers would say so of a keyword that it was handed
    assert torch.equal(run(pipe), run(wan()))
    if mode is not None:
        assert pipe.offload_report().copies > 0


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"enable_cpu_offload": True, "diffusion_offload_config": LAYER}, "enable_cpu_offload and diffusion_offload"),
        ({"enable_cpu_offload": "yes"}, "enable_cpu_offload='yes'"),
        ({"diffusion_offload_config": {"mode": "blocks"}}, "mode='blocks'"),
        ({"diffusion_offload_config": "layer"}, "not JSON"),
        ({"diffusion_offload_config": {}}, "mode is missing"),
        ({"offload_device": "cpu"}, "offload_device='cpu' without"),
        ({"enable_cpu_offload": True, "offload_device": "meta"}, "cannot compute"),
        ({"enable_cpu_offload": True, "offload_device": "cpu", "device_map": "balanced"}, "device_map"),
    ],
)
def test_from_pretrained_refuses_before_it_loads(keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(OffloadConfigError, match=words):
        OffloadWanPipeline.from_pretrained("no/such/folder", **keywords)


# --- one grammar -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form", [lambda c: c, json.dumps, OffloadConfig.from_dict], ids=["mapping", "JSON", "OffloadConfig"]
)
@pytest.mark.parametrize(
    "config",
    [
        LAYER,
        MODULE,
        {"mode": "layer", "components": ["dit", "text_encoder"], "pin_memory": False},
        {"mode": "layer", "components": ["dit"], "layer_options": {"dit": {"resident_layers": 1}}},
        {"mode": "module", "components": ["transformer", "text_encoder"]},
    ],
)
def test_enable_offload_takes_every_form(config: dict[str, Any], form: Any) -> None:
    pipe = wan()
    report = pipe.enable_offload(form(config), device="cpu")
    assert report.mode == config["mode"] and report.device == "cpu"
    placed = {c.path: c.placement for c in report.components}
    text = "text_encoder" in config.get("components", ["text_encoder"])
    there = "streamed" if config["mode"] == "layer" else "swapped"
    assert placed == {"transformer": there, "text_encoder": there if text else "stays", "vae": "stays"}
    units = 1 if "layer_options" in config else 2
    assert next(c.units for c in report.components if c.path == "transformer") >= units
    assert torch.equal(run(pipe), run(wan()))
    assert pipe.offload_report().copies > 0


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"mode": "layer", "components": ["unet"]}, r"components\[0\]='unet' is not one of: .*'dit'"),
        ({"mode": "layer", "components": ["vae"]}, "VAEs stay"),
        ({"mode": "layer", "components": []}, "components"),
        ({"mode": "layer", "components": ["dit", "dit"]}, "components"),
        ({"mode": "layer", "layers": 3}, "layers=3"),
        ({"mode": "module", "layer_options": {"dit": {"resident_layers": 1}}}, "layer_options"),
        ({"mode": "layer", "layer_options": {"dit": {"weight_transfer": "allgather"}}}, "allgather"),
        ({"mode": "layer", "layer_options": {"dit": {"resident_layers": 2}}}, "resident_layers=2"),
        ('{"mode": "layer", "mode": "module"}', "twice"),
        (3, "mapping, JSON text or an OffloadConfig"),
    ],
)
def test_enable_offload_refuses_and_touches_nothing(config: Any, words: str) -> None:
    pipe = wan()
    before = {name: tensor.data_ptr() for name, tensor in pipe.transformer.state_dict().items()}
    with pytest.raises(OffloadConfigError, match=words):
        pipe.enable_offload(config, device="cpu")
    assert not is_on(pipe)
    assert {name: tensor.data_ptr() for name, tensor in pipe.transformer.state_dict().items()} == before
    assert type(pipe.transformer) is pipe.transformer.__class__


def test_refused_change_leaves_what_is_on() -> None:
    pipe = wan()
    pipe.enable_offload(LAYER, device="cpu")
    with pytest.raises(OffloadConfigError):
        pipe.enable_offload({"mode": "layer", "components": ["unet"]}, device="cpu")
    assert pipe.offload_report().mode == "layer"
    assert torch.equal(run(pipe), run(wan()))


# --- Diffusers' own calls --------------------------------------------------------------------------


@pytest.mark.parametrize("config", [LAYER, MODULE], ids=["layer", "module"])
def test_diffusers_other_offloads_are_refused_while_on(config: dict[str, Any]) -> None:
    pipe = wan()
    pipe.enable_offload(config, device="cpu")
    with pytest.raises(OffloadStateError, match=r"enable_sequential_cpu_offload.*disable_offload\(\)"):
        pipe.enable_sequential_cpu_offload()
    with pytest.raises(OffloadStateError, match=r"enable_group_offload.*disable_offload\(\)"):
        pipe.enable_group_offload(CPU, offload_type="leaf_level")
    assert torch.equal(run(pipe), run(wan()))


def test_group_offload_works_again_when_off() -> None:
    pipe = wan()
    pipe.enable_offload(LAYER, device="cpu")
    pipe.disable_offload()
    pipe.enable_group_offload(CPU, offload_type="leaf_level")
    assert torch.equal(run(pipe), run(wan()))


def test_remove_all_hooks_turns_offload_off() -> None:
    pipe = wan()
    pipe.enable_offload(LAYER, device="cpu")
    pipe.remove_all_hooks()
    assert not is_on(pipe)
    assert type(pipe.transformer) is pipe.transformer.__class__
    assert torch.equal(run(pipe), run(wan()))


def test_maybe_free_model_hooks_goes_to_the_idle_level_and_stays_on() -> None:
    pipe = wan()
    pipe.enable_offload(MODULE, device="cpu")
    with torch.no_grad():
        pipe.encode_prompt("a boat", "a ship", max_sequence_length=8)
    assert pipe.offload_report().window_bytes > 0
    pipe.maybe_free_model_hooks()
    assert pipe.offload_report().window_bytes == 0
    assert torch.equal(run(pipe), run(wan()))
    assert is_on(pipe)


def test_calls_on_a_pipeline_that_is_off_are_diffusers_own() -> None:
    pipe = wan()
    assert pipe.device == CPU and pipe._execution_device == CPU
    pipe.maybe_free_model_hooks()
    pipe.disable_offload()
    assert pipe.to(torch.float64).transformer.proj_out.weight.dtype is torch.float64
    with pytest.raises(OffloadStateError, match=r"offload_refresh.*enable_layerwise_offload"):
        pipe.offload_refresh()
    with pytest.raises(OffloadStateError, match=r"offload_report.*enable_layerwise_offload"):
        pipe.offload_report()


# --- with_offload ----------------------------------------------------------------------------------


def test_with_offload_keeps_the_name() -> None:
    pipe = small.build("wan", layers=2)
    same = with_offload(pipe)
    assert same is pipe and isinstance(pipe, WanPipeline) and isinstance(pipe, OffloadMixin)
    assert type(pipe).__name__ == "WanPipeline" and type(pipe).__module__ == WanPipeline.__module__
    assert with_offload(pipe) is pipe and type(pipe) is type(with_offload(small.build("wan", layers=2)))
    assert type(wan()) is type(with_offload(wan()))
    pipe.enable_layerwise_offload(device="cpu")
    assert torch.equal(run(pipe), run(wan()))
    assert pipe.offload_report().copies > 0


def test_adopted_pipeline_is_saved_under_its_name(tmp_path: Path) -> None:
    pipe = with_offload(small.build("wan", layers=2))
    pipe.enable_layerwise_offload(device="cpu")
    pipe.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "model_index.json").read_text())["_class_name"] == "WanPipeline"
    loaded = DiffusionPipeline.from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    assert type(loaded) is WanPipeline
    assert torch.equal(run(loaded), run(wan()))


def test_with_offload_refuses_what_is_no_pipeline() -> None:
    with pytest.raises(OffloadConfigError, match="neither a DiffusionPipeline nor"):
        with_offload(object())


# --- pipelines with a life cycle of their own ------------------------------------------------------


class Recording(OffloadMixin, SmallSplitPipeline):
    """Writes down what its life cycle is asked for; `trouble` makes it fail half-way."""

    trouble: BaseException | None = None

    def enable_omni_model_cpu_offload(self, **options: Any) -> None:
        self.__dict__.setdefault("calls", []).append(("enable", options))
        super().enable_omni_model_cpu_offload(**options)
        if self.trouble is not None:
            raise self.trouble

    def disable_omni_model_cpu_offload(self) -> None:
        self.__dict__.setdefault("calls", []).append(("disable", {}))
        super().disable_omni_model_cpu_offload()


def split(kind: Any = OffloadSplitPipeline) -> Any:
    return small.build("split", cls=kind, layers=2)


def test_model_offload_is_handed_to_the_pipelines_own_life_cycle() -> None:
    pipe = split(Recording)
    report = pipe.enable_model_cpu_offload(device="cpu")
    assert pipe.calls == [
        ("enable", {"device": CPU, "pin_memory": True, "use_hsdp": False, "offload_components": None})
    ]
    assert report.mode == "module"
    assert torch.equal(run(pipe, "split"), run(split(SmallSplitPipeline), "split"))


def test_what_was_passed_is_handed_on() -> None:
    pipe = split(Recording)
    pipe.enable_model_cpu_offload(device="cpu", components=["dit"], pin_memory=False)
    assert pipe.calls == [
        ("enable", {"device": CPU, "pin_memory": False, "use_hsdp": False, "offload_components": frozenset({"dit"})})
    ]


@pytest.mark.parametrize("trouble", [RuntimeError("half-way"), KeyboardInterrupt(), torch.OutOfMemoryError("full")])
def test_failed_life_cycle_is_rolled_back_through_its_other_half(trouble: BaseException) -> None:
    pipe = split(Recording)
    pipe.trouble = trouble
    with pytest.raises(type(trouble)):
        pipe.enable_model_cpu_offload(device="cpu")
    assert [name for name, _ in pipe.calls] == ["enable", "disable"]
    assert not is_on(pipe)
    assert torch.equal(run(pipe, "split"), run(split(SmallSplitPipeline), "split"))
    pipe.trouble = None
    pipe.enable_model_cpu_offload(device="cpu")
    assert is_on(pipe)


def test_pipeline_without_parts_is_not_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("handed on")

    pipe = wan()
    monkeypatch.setattr(OffloadMixin, "enable_omni_model_cpu_offload", fail)
    assert pipe.enable_model_cpu_offload(device="cpu").mode == "module"


def test_sharded_parameters_are_refused() -> None:
    with pytest.raises(OffloadConfigError, match="use_hsdp=True"):
        split().enable_omni_model_cpu_offload(device="cpu", use_hsdp=True)


def test_life_cycle_may_be_called_directly() -> None:
    pipe = split()
    pipe.enable_omni_model_cpu_offload(device="cpu", pin_memory=True, offload_components=["dit"])
    assert torch.equal(run(pipe, "split"), run(split(SmallSplitPipeline), "split"))
    assert pipe.offload_report().copies > 0
    pipe.disable_omni_model_cpu_offload()
    pipe.disable_omni_model_cpu_offload()
    assert not is_on(pipe)


# --- parts of a split module -----------------------------------------------------------------------


@contextmanager
def nothing_changes(module: torch.nn.Module) -> Iterator[None]:
    before = {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}
    yield
    assert {name: tensor.data_ptr() for name, tensor in module.state_dict().items()} == before


def test_context_does_nothing_while_off() -> None:
    transformer = split().transformer
    with nothing_changes(transformer), transformer._offload_context("reasoner"), nothing_changes(transformer):
        assert type(transformer) is transformer.__class__


def test_context_does_nothing_in_layerwise_offload() -> None:
    pipe = split()
    pipe.enable_layerwise_offload(device="cpu")
    before = pipe.offload_report()
    with pipe.transformer._offload_context("generator"):
        assert pipe.offload_report().copies == before.copies


@pytest.mark.parametrize("on", [False, True])
def test_unknown_part_is_refused(on: bool) -> None:
    pipe = split()
    if on:
        pipe.enable_model_cpu_offload(device="cpu")
    with (
        pytest.raises(OffloadConfigError, match=r"'generater' is not one of: 'reasoner', 'generator'.*'generator'\?"),
        pipe.transformer._offload_context("generater"),
    ):
        raise AssertionError("not reached")


def test_parts_take_turns() -> None:
    pipe = split()
    pipe.enable_model_cpu_offload(device="cpu")
    sizes = {
        name: sum(t.nbytes for t in getattr(pipe.transformer, path).parameters())
        for name, path in (("reasoner", "layers"), ("generator", "gen_layers"))
    }
    shell = sum(t.nbytes for t in pipe.transformer.parameters()) - sum(sizes.values())
    for name in ("reasoner", "generator", "reasoner"):
        with pipe.transformer._offload_context(name):
            on_device = pipe.offload_report().window_bytes
            assert sizes[name] <= on_device < sum(sizes.values())
            assert on_device < 1.2 * (sizes[name] + shell)
