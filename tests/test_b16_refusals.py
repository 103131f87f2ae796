"""B16: nothing is skipped in silence. A refusal names field, value and choices, and nothing has been touched."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.append(str(Path(__file__).resolve().parent / "accelerator"))

import models
from models import Block, Denoiser, SmallPipeline, seeded

from omni_offload import (
    OffloadConfig,
    OffloadConfigError,
    OffloadMixin,
    OffloadPlan,
    OffloadStateError,
    SplitOffloadMixin,
    with_offload,
)

CPU = torch.device("cpu")


def state(pipe: Any) -> dict[str, Any]:
    """Everything that enabling could have touched: tensors, their memory, classes, hooks, attributes of modules."""
    parts = {"": pipe} if isinstance(pipe, nn.Module) else pipe.components
    result: dict[str, Any] = {"class": type(pipe), "attributes": set(vars(pipe))}
    for path, part in parts.items():
        if not isinstance(part, nn.Module):
            continue
        for name, tensor in models.tensors(part):
            pointer = None if tensor.is_meta or tensor.layout != torch.strided else tensor.untyped_storage().data_ptr()
            result[f"{path}.{name}"] = (id(tensor), pointer, tensor.device, tensor.dtype, tensor._version)
        for name, module in part.named_modules():
            hooks = (len(module._forward_pre_hooks), len(module._forward_hooks))
            result[f"{path}.{name} module"] = (type(module), module.__class__, hooks, sorted(vars(module)))
    return result


def small(**attributes: Any) -> SmallPipeline:
    """A small pipeline of a class of its own, with `attributes` on the class."""
    cls = type("ThisPipeline", (SmallPipeline,), attributes)
    return seeded(lambda: cls(Denoiser(map(Block, models.unequal(3)))))


@dataclass
class Refused:
    """A pipeline, a call on it, and what the refusal has to say."""

    make: Callable[[], Any]
    call: Callable[[Any], Any]
    says: tuple[str, ...]
    error: type[Exception] = OffloadConfigError


def layer(**options: Any) -> Callable[[Any], Any]:
    return lambda pipe: pipe.enable_layerwise_offload(**({"device": "cpu"} | options))


def module(**options: Any) -> Callable[[Any], Any]:
    return lambda pipe: pipe.enable_model_cpu_offload(**({"device": "cpu"} | options))


def with_module(path: str, replacement: Callable[[], nn.Module], **attributes: Any) -> Callable[[], Any]:
    """A small pipeline with the module at `path` replaced."""

    def make() -> SmallPipeline:
        pipe = small(**attributes)
        pipe.set_submodule(path, replacement())
        return pipe

    return make


def with_attribute(name: str, value: Any, component: str | None = None) -> Callable[[], Any]:
    def make() -> SmallPipeline:
        pipe = small()
        setattr(pipe if component is None else getattr(pipe, component), name, value)
        return pipe

    return make


class Marked(torch.Tensor):
    """A tensor subclass, as quantised weights are."""


def with_parameter(value: torch.Tensor) -> Callable[[], Any]:
    """A small pipeline with another weight in its second block."""

    def make() -> SmallPipeline:
        pipe = small()
        pipe.transformer.blocks[1].up.weight = nn.Parameter(value, requires_grad=False)
        return pipe

    return make


def marked() -> Any:
    pipe = small()
    block = pipe.transformer.blocks[1]
    block.up.weight = nn.Parameter(block.up.weight.detach().as_subclass(Marked), requires_grad=False)
    return pipe


def with_accelerate_hooks() -> Any:
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    pipe = small()
    add_hook_to_module(pipe.text_encoder.blocks[1], AlignDevicesHook(io_same_device=True))
    return pipe


def with_group_offloading() -> Any:
    from diffusers.hooks import apply_group_offloading

    pipe = small()
    options = {"onload_device": CPU, "offload_device": CPU, "offload_type": "block_level", "num_blocks_per_group": 1}
    apply_group_offloading(pipe.transformer, **options)
    return pipe


class Nothing(OffloadMixin, nn.Module):
    """A pipeline without modules."""


class OnlyVae(OffloadMixin, nn.Module):
    _vae_modules = ["vae"]

    def __init__(self) -> None:
        super().__init__()
        self.vae = nn.Linear(3, 3)


class OnlyDit(OffloadMixin, nn.Module):
    _dit_modules = ["transformer"]

    def __init__(self) -> None:
        super().__init__()
        self.transformer = Denoiser([Block(8)])


class OnlyEncoder(OffloadMixin, nn.Module):
    _encoder_modules = ["text_encoder"]

    def __init__(self) -> None:
        super().__init__()
        self.text_encoder = Denoiser([Block(8)])


def split(components: Any) -> Callable[[], Any]:
    """A pipeline with a split model that declares `components` as its parts."""

    def make() -> Any:
        cls = type("ThisSplit", (models.SplitModel,), {"_offload_components": components})
        return seeded(lambda: models.SplitPipeline(cls(map(Block, (8, 8)), map(Block, (8, 8)))))

    return make


def options(**entries: Any) -> dict[str, Any]:
    return {"layer_options": entries}


ROLES = ("'dit'", "'text_encoder'", "'transformer'")

REFUSED: dict[str, Refused] = {
    # what the call names
    "unknown component": Refused(
        small, layer(components=["dti"]), ("components[0]='dti'", *ROLES, "Did you mean 'dit'?")
    ),
    "unknown component, module": Refused(small, module(components=["transformer_2"]), ("'transformer_2'", *ROLES)),
    "second component unknown": Refused(
        small, layer(components=["dit", "text_encoder_3"]), ("components[1]='text_encoder_3'", *ROLES)
    ),
    "role that the pipeline has not": Refused(
        small, layer(components=["image_encoder"]), ("components[0]='image_encoder'", *ROLES)
    ),
    "path below a component": Refused(
        small, layer(components=["transformer.blocks"]), ("'transformer.blocks'", *ROLES)
    ),
    "no component at all": Refused(small, layer(components=[]), ("components=[]", "empty")),
    "components as a string": Refused(small, layer(components="dit"), ("components='dit'", "['dit']")),
    "doubled component": Refused(small, layer(components=["dit", "dit"]), ("components[1]='dit'", "twice")),
    "the VAE's role": Refused(
        small, layer(components=["vae"]), ("components[0]='vae'", "VAEs stay on the device", "'dit'")
    ),
    "the VAE's role, module": Refused(small, module(components=["vae"]), ("components[0]='vae'", "VAEs stay")),
    "the VAE's path": Refused(
        lambda: small_with_second_vae(), layer(components=["decoder"]), ("components[0]='decoder'", *ROLES)
    ),
    "residents": Refused(small, layer(components=["resident"]), ("components[0]='resident'", "'dit'")),
    "unknown mode": Refused(
        small,
        lambda pipe: pipe.enable_offload({"mode": "layers"}, device="cpu"),
        ("mode='layers'", "'layer', 'module'", "Did you mean 'layer'?"),
    ),
    "unknown field": Refused(
        small,
        lambda pipe: pipe.enable_offload('{"mode": "layer", "component": ["dit"]}', device="cpu"),
        ("component=['dit']", "'components'"),
    ),
    "pin_memory of another type": Refused(small, layer(pin_memory="yes"), ("pin_memory='yes'", "true or false")),
    "allgather": Refused(
        small,
        layer(**options(dit={"weight_transfer": "allgather"})),
        ("layer_options.dit.weight_transfer='allgather'", "'rank-local'"),
    ),
    "unknown weight transfer": Refused(
        small,
        layer(**options(dit={"weight_transfer": "broadcast"})),
        ("layer_options.dit.weight_transfer='broadcast'", "'rank-local', 'allgather'"),
    ),
    "options for a component that is not named": Refused(
        small,
        layer(components=["text_encoder"], **options(dit={"resident_layers": 1})),
        ("layer_options.dit", "'text_encoder'"),
    ),
    "empty options": Refused(small, layer(**options(dit={})), ("layer_options.dit={}", "'resident_layers'")),
    "unknown option": Refused(
        small, layer(**options(dit={"residents": 1})), ("layer_options.dit.residents=1", "'resident_layers'")
    ),
    "negative count": Refused(
        small, layer(**options(dit={"resident_layers": -1})), ("layer_options.dit.resident_layers=-1", "0 or more")
    ),
    "nothing left to stream": Refused(
        small,
        layer(**options(dit={"resident_layers": 3})),
        ("layer_options.transformer.resident_layers=3", "transformer has 3 units", "components"),
    ),
    "layer options in mode module": Refused(
        small,
        lambda pipe: pipe.enable_offload(
            {"mode": "module", "layer_options": {"dit": {"resident_layers": 1}}}, device="cpu"
        ),
        ("layer_options=", "mode='module'", "mode='layer'"),
    ),
    # what the device is
    "device that is no device": Refused(small, layer(device="gpu"), ("device='gpu'",)),
    "meta device": Refused(small, layer(device="meta"), ("device='meta'", "'cpu'")),
    "accelerator that is not there": Refused(small, layer(device="cuda:0"), ("device='cuda:0'", "this machine has")),
    "gpu_id without an accelerator": Refused(
        small, module(device=None, gpu_id=0), ("gpu_id=0", "no accelerator on this machine")
    ),
    # what the pipeline declares
    "attribute that does not exist": Refused(
        lambda: small(_dit_modules=["transformer_9"]),
        layer(),
        ("ThisPipeline._dit_modules='transformer_9'", "'text_encoder', 'transformer', 'vae'", "No such attribute"),
    ),
    "nested attribute that does not exist": Refused(
        lambda: small(_vae_modules=["vae.decoder"]), layer(), ("ThisPipeline._vae_modules='vae.decoder'", "'vae'")
    ),
    "attribute that is no module": Refused(
        lambda: small(_resident_modules=["training"]), layer(), ("ThisPipeline._resident_modules='training'", "bool")
    ),
    "declaration that is a string": Refused(
        lambda: small(_dit_modules="transformer"), layer(), ("ThisPipeline._dit_modules='transformer'", "list")
    ),
    "doubled declaration": Refused(
        lambda: small(_dit_modules=["transformer", "transformer"]),
        layer(),
        ("ThisPipeline._dit_modules", "'transformer'", "twice"),
    ),
    "plan of another type": Refused(
        lambda: small(_offload_plan={"block_attrs": {}}),
        layer(),
        ("ThisPipeline._offload_plan={'block_attrs': {}}", "OffloadPlan"),
    ),
    "plan for an unknown component": Refused(
        lambda: small(_offload_plan=OffloadPlan(block_attrs={"unet": ["blocks"]})),
        layer(),
        ("_offload_plan.block_attrs='unet'", "'transformer'"),
    ),
    "empty block list": Refused(
        with_module(
            "transformer.none", nn.ModuleList, _offload_plan=OffloadPlan(block_attrs={"transformer": ["none"]})
        ),
        layer(),
        ("_offload_plan.block_attrs['transformer']='none'", "no block with weights", "transformer"),
    ),
    "block list without weights": Refused(
        with_module(
            "transformer.none",
            lambda: nn.ModuleList([nn.GELU(), nn.Identity()]),
            _offload_plan=OffloadPlan(block_attrs={"transformer": ["none"]}),
        ),
        layer(),
        ("_offload_plan.block_attrs['transformer']='none'", "no block with weights"),
    ),
    "block list that does not exist": Refused(
        lambda: small(_offload_plan=OffloadPlan(block_attrs={"transformer": ["layers"]})),
        layer(),
        ("_offload_plan.block_attrs['transformer']='layers'", "Denoiser", "'blocks'"),
    ),
    "block list that is no list": Refused(
        lambda: small(_offload_plan=OffloadPlan(block_attrs={"transformer": ["proj_in"]})),
        layer(),
        ("_offload_plan.block_attrs['transformer']='proj_in'", "Linear", "ModuleList"),
    ),
    "block list of the class that does not exist": Refused(
        with_module("transformer", lambda: class_with_blocks(("layers",))),
        layer(),
        ("ThisModel._layerwise_offload_blocks_attrs='layers'", "'blocks'"),
    ),
    "empty declaration of the class": Refused(
        with_module("transformer", lambda: class_with_blocks(())),
        layer(),
        ("ThisModel._layerwise_offload_blocks_attrs=()", "not empty"),
    ),
    "large table that does not exist": Refused(
        lambda: small(_offload_plan=OffloadPlan(offload_submodules={"transformer": ["embedding"]})),
        layer(),
        ("_offload_plan.offload_submodules['transformer']='embedding'", "transformer"),
    ),
    "encoder without blocks": Refused(
        with_module("text_encoder", lambda: nn.Linear(models.WIDTH, models.WIDTH), _offload_plan=None),
        layer(components=["dit", "text_encoder"]),
        ("components='text_encoder'", "no list of blocks", "Linear", "encoder_block_attrs={'text_encoder'"),
    ),
    "DiT without blocks": Refused(
        with_module("transformer", lambda: nn.Linear(models.WIDTH, models.WIDTH)),
        layer(),
        ("components='transformer'", "no list of blocks", "Linear", "block_attrs={'transformer'"),
    ),
    # nothing to manage
    "no modules": Refused(Nothing, layer(), ("Nothing", "no modules", "nothing to offload")),
    "only a VAE": Refused(OnlyVae, layer(), ("components[0]='dit'",)),
    "only a VAE, module": Refused(OnlyVae, module(), ("OnlyVae", "no DiT", "_dit_modules")),
    "module without an encoder": Refused(
        OnlyDit, module(), ("OnlyDit", "no encoder", "'transformer'", "_encoder_modules", "enable_layerwise_offload")
    ),
    "module without a DiT": Refused(OnlyEncoder, module(), ("OnlyEncoder", "no DiT", "_dit_modules")),
    # other people's offload
    "device_map of the pipeline": Refused(
        with_attribute("hf_device_map", {"transformer": 0, "vae": 1}), layer(), ("device_map", "reset_device_map()")
    ),
    "device_map of a component": Refused(
        with_attribute("hf_device_map", {"blocks.0": 0, "blocks.1": "cpu"}, "text_encoder"),
        layer(),
        ("text_encoder", "device_map"),
    ),
    "accelerate's hooks": Refused(
        with_accelerate_hooks, layer(), ("text_encoder", "accelerate hooks", "remove_all_hooks()")
    ),
    "accelerate's hooks, module": Refused(with_accelerate_hooks, module(), ("text_encoder", "remove_all_hooks()")),
    "group offloading": Refused(
        with_group_offloading, layer(), ("transformer", "group offloading", "remove_hook('group_offloading'")
    ),
    "use_hsdp": Refused(
        small,
        lambda pipe: pipe.enable_omni_model_cpu_offload(device="cpu", use_hsdp=True),
        ("use_hsdp=True", "use_hsdp=False"),
    ),
    # weights that a flat copy cannot move
    "tensor subclass": Refused(
        marked, layer(), ("transformer (Denoiser)", "blocks.1.up.weight", "Marked", "tensor subclass")
    ),
    "tensor subclass, module": Refused(marked, module(), ("transformer (Denoiser)", "Marked")),
    "meta tensor": Refused(
        with_parameter(torch.empty(56, models.WIDTH, device="meta")),
        layer(),
        ("transformer (Denoiser)", "blocks.1.up.weight", "meta device", "no data"),
    ),
    "sparse tensor": Refused(
        with_parameter(torch.eye(models.WIDTH).to_sparse()), layer(), ("transformer (Denoiser)", "sparse")
    ),
    "conjugated view": Refused(
        with_parameter(torch.randn(4, 4, dtype=torch.complex64).conj()),
        layer(),
        ("transformer (Denoiser)", "conjugated"),
    ),
    # split models
    "one part only": Refused(split({"all": ["layers"]}), module(), ("ThisSplit._offload_components", "two or more")),
    "part without modules": Refused(
        split({"reasoner": [], "generator": ["gen_layers"]}),
        module(),
        ("ThisSplit._offload_components['reasoner']=[]", "not empty"),
    ),
    "part that does not exist": Refused(
        split({"reasoner": ["layers"], "generator": ["generator_layers"]}),
        module(),
        ("ThisSplit._offload_components['generator']='generator_layers'", "no such module in transformer"),
    ),
    "module in two parts": Refused(
        split({"reasoner": ["layers", "head"], "generator": ["gen_layers", "head"]}),
        module(),
        ("ThisSplit._offload_components", "stands in two parts"),
    ),
}


def small_with_second_vae() -> Any:
    pipe = small(_vae_modules=["vae", "decoder"])
    pipe.decoder = nn.Linear(3, 3)
    return pipe


def class_with_blocks(attrs: Any) -> nn.Module:
    return type("ThisModel", (Denoiser,), {"_layerwise_offload_blocks_attrs": attrs})([Block(8)])


@pytest.fixture(autouse=True)
def _no_accelerator() -> None:
    assert torch.accelerator.current_accelerator() is None or torch.cuda.is_available()


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_is_touched(name: str) -> None:
    case = REFUSED[name]
    if name == "gpu_id without an accelerator" and torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    pipe = case.make()
    before = state(pipe)
    with pytest.raises(case.error) as refusal:
        case.call(pipe)
    message = str(refusal.value)
    assert [words for words in case.says if words not in message] == [], message
    assert state(pipe) == before
    if "declaration" not in name:
        with pytest.raises(OffloadStateError, match=r"offload_report\(\) needs offload to be on"):
            pipe.offload_report()


@pytest.mark.parametrize("mode", models.MODES)
@pytest.mark.parametrize(
    "call", [layer(components=["dti"]), module(components=["dti"]), layer(device="meta"), module(device="cuda:99")]
)
def test_a_refused_second_enable_leaves_the_first_one_on(mode: str, call: Callable[[Any], Any]) -> None:
    pipe = small()
    expected = models.run(models.resident(pipe, CPU), CPU)
    models.enable(pipe, mode, CPU)
    before, report = state(pipe), pipe.offload_report()
    with pytest.raises(OffloadConfigError):
        call(pipe)
    assert state(pipe) == before
    assert pipe.offload_report() == report
    assert torch.equal(models.run(pipe, CPU), expected)
    assert pipe.offload_report().copies > report.copies


def test_the_advice_against_accelerate_hooks_works() -> None:
    from accelerate.hooks import remove_hook_from_module

    pipe = with_accelerate_hooks()
    remove_hook_from_module(pipe.text_encoder, recurse=True)
    assert pipe.enable_model_cpu_offload(device="cpu").streamed_bytes > 0


def test_the_advice_against_group_offloading_works() -> None:
    pipe = with_group_offloading()
    for hook in ("group_offloading", "lazy_prefetch_group_offloading"):
        pipe.transformer._diffusers_hook.remove_hook(hook, recurse=True)
    assert pipe.enable_layerwise_offload(device="cpu").streamed_bytes > 0
    expected = models.run(models.resident(small(), CPU), CPU)
    assert torch.equal(models.run(pipe, CPU), expected)


def test_sharded_parameters_are_refused(tmp_path: Path) -> None:
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available():
        pytest.skip("torch was built without distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        pipe = small()
        block = pipe.transformer.blocks[1]
        block.up.weight = nn.Parameter(distribute_tensor(block.up.weight.detach(), init_device_mesh("cpu", (1,))))
        for call in (layer(), module()):
            with pytest.raises(OffloadConfigError, match=r"transformer holds sharded parameters \(DTensor\)"):
                call(pipe)
        assert type(pipe.transformer) is Denoiser
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("thing", [object(), nn.ReLU, {"transformer": nn.Linear(2, 2)}, None])
def test_what_is_no_pipeline_is_refused(thing: Any) -> None:
    with pytest.raises(OffloadConfigError, match=r"is neither a DiffusionPipeline nor a torch\.nn\.Module"):
        with_offload(thing)


def test_an_unknown_part_is_refused_on_or_off() -> None:
    pipe = split({"reasoner": ["layers", "head"], "generator": ["gen_layers"]})()
    for _ in range(2):
        with (
            pytest.raises(OffloadConfigError, match=r"'painter' is not one of: 'reasoner', 'generator'"),
            pipe.transformer._offload_context("painter"),
        ):
            raise AssertionError("the body ran")
        pipe.enable_model_cpu_offload(device="cpu")


def test_loading_with_two_contradictory_options_is_refused_before_loading() -> None:
    from omni_offload import OffloadWanPipeline

    nowhere = "a/path/that/does/not/exist"
    config = {"mode": "layer"}
    for arguments, words in (
        ({"enable_cpu_offload": True, "diffusion_offload_config": config}, "enable_cpu_offload and diffusion_offload"),
        ({"enable_cpu_offload": 1}, "enable_cpu_offload=1"),
        ({"diffusion_offload_config": {"mode": "layers"}}, "mode='layers'"),
        ({"offload_device": "cpu"}, "offload_device='cpu'"),
        ({"enable_cpu_offload": True, "offload_device": "cpu", "device_map": "balanced"}, "device_map='balanced'"),
        ({"enable_cpu_offload": True, "offload_device": "meta"}, "device='meta'"),
    ):
        with pytest.raises(OffloadConfigError, match=re.escape(words)):
            OffloadWanPipeline.from_pretrained(nowhere, **arguments)


@pytest.fixture(scope="module")
def wan() -> Any:
    return models.offloadable("wan", layers=2)


def test_diffusers_own_offload_is_refused_beside_ours(wan: Any) -> None:
    wan.enable_layerwise_offload(device="cpu")
    try:
        before = state(wan)
        for call in (
            lambda: wan.enable_sequential_cpu_offload(device="cpu"),
            lambda: wan.enable_group_offload(onload_device=CPU),
        ):
            with pytest.raises(OffloadStateError, match=r"disable_offload\(\) first"):
                call()
        assert state(wan) == before
    finally:
        wan.disable_offload()


def test_calls_that_need_offload_say_so_where_it_is_off() -> None:
    pipe = small()
    before = state(pipe)
    for call, name in ((pipe.offload_report, "offload_report"), (pipe.offload_refresh, "offload_refresh")):
        with pytest.raises(OffloadStateError, match=rf"{name}\(\) needs offload to be on; call enable_"):
            call()
    pipe.disable_offload()  # does nothing where it is off
    assert state(pipe) == before


# --- the report -------------------------------------------------------------------------------------------------------


def test_report_of_layerwise_offload_says_what_was_done() -> None:
    pipe = small(_resident_modules=["extra"])
    pipe.extra = nn.Linear(5, 5)
    report = pipe.enable_layerwise_offload(device="cpu")
    assert (report.pipeline, report.mode, report.device) == ("ThisPipeline", "layer", "cpu")
    blocks, parts = pipe.transformer.blocks, {c.path: c for c in report.components}
    assert {path: (c.role, c.class_name, c.placement) for path, c in parts.items()} == {
        "transformer": ("dit", "Denoiser", "streamed"),
        "text_encoder": ("text_encoder", "Denoiser", "stays"),
        "vae": ("vae", "Sequential", "stays"),
        "extra": ("resident", "Linear", "stays"),
    }
    dit = parts["transformer"]
    assert (dit.units, dit.streamed_bytes) == (3, models.nbytes(blocks))
    assert dit.resident_bytes == models.nbytes(pipe.transformer) - models.nbytes(blocks)
    assert dit.streamed_bytes <= dit.host_bytes < dit.streamed_bytes + 3 * 256 * 6
    assert dit.pinned_bytes == 0  # copies on the CPU need no locked memory
    for path in ("text_encoder", "vae", "extra"):
        size = models.nbytes(getattr(pipe, path))
        assert (parts[path].units, parts[path].streamed_bytes, parts[path].host_bytes) == (0, 0, 0)
        assert parts[path].resident_bytes == size
    assert report.streamed_bytes == dit.streamed_bytes and report.host_bytes == dit.host_bytes
    largest = max(u.nbytes for u in unit_stores(pipe))
    assert report.window_bytes == report.peak_window_bytes == 2 * largest
    assert report.idle_device_bytes == sum(c.resident_bytes for c in report.components) + report.window_bytes
    assert (report.copies, report.copied_bytes, report.hits, report.misses) == (0, 0, 0, 0)
    models.run(pipe, CPU, steps=3)
    after = pipe.offload_report()
    assert after.copies == after.components[0].copies == 3 * 3 + 1
    assert after.hits + after.misses == 9 and after.misses == 1
    assert 3 * dit.host_bytes < after.copied_bytes <= 3 * dit.host_bytes + largest


def unit_stores(pipe: Any) -> list[Any]:
    from omni_offload.policies.memory import offloads_on

    return [unit.store for c in offloads_on(pipe)[0].components for unit in c.units]


def test_report_of_model_level_offload_says_what_was_done() -> None:
    pipe = small()
    report = pipe.enable_model_cpu_offload(device="cpu")
    parts = {c.path: c for c in report.components}
    assert {path: c.placement for path, c in parts.items()} == {
        "transformer": "swapped",
        "text_encoder": "swapped",
        "vae": "stays",
    }
    for path in ("transformer", "text_encoder"):
        assert parts[path].streamed_bytes == models.nbytes(getattr(pipe, path))
        assert (parts[path].units, parts[path].resident_bytes) == (4, 0)  # three blocks and the rest
    assert report.idle_device_bytes == models.nbytes(pipe.vae)
    assert report.window_bytes == 0
    models.run(pipe, CPU, steps=3)
    after = pipe.offload_report()
    assert (after.copies, after.copied_bytes) == (8, report.host_bytes)
    assert after.window_bytes == 0 and after.peak_window_bytes == max(parts[p].host_bytes for p in list(parts)[:2])


def test_report_is_data_and_a_table() -> None:
    pipe = small()
    report = pipe.enable_layerwise_offload(device="cpu")
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict() | {
        "components": [dict(c) for c in report.to_dict()["components"]],
        "notices": list(report.notices),
    }
    text = str(report)
    for words in ("ThisPipeline", "mode layer on cpu", "transformer", "Denoiser", "streamed", "stays", "vae", "KiB"):
        assert words in text
    assert len(text.splitlines()) >= 3 + len(report.components)
    assert pipe.offload_report() == report
    assert pipe.enable_layerwise_offload(device="cpu").components == report.components


def test_notices_tell_what_was_guessed(caplog: pytest.LogCaptureFixture) -> None:
    class Undeclared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transformer = class_without_declarations()
            self.text_encoder = class_without_declarations()
            self.something = nn.Linear(3, 3)

    pipe = with_offload(seeded(Undeclared))
    with caplog.at_level(logging.WARNING, logger="omni_offload"):
        report = pipe.enable_layerwise_offload(device="cpu")
    notices = "\n".join(report.notices)
    for words in ("transformer as dit", "text_encoder as text_encoder", "something as resident", "by structure"):
        assert words in notices
    assert all(notice in caplog.text for notice in report.notices)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="omni_offload"):
        assert evenly().enable_layerwise_offload(device="cpu").notices == ()
    assert caplog.text == ""
    undeclared = evenly(_offload_plan=OffloadPlan(encoder_block_attrs={"text_encoder": ["blocks"]}))
    with caplog.at_level(logging.WARNING, logger="omni_offload"):
        (notice,) = undeclared.enable_layerwise_offload(device="cpu").notices
        undeclared.disable_offload()
        assert undeclared.enable_layerwise_offload(device="cpu").notices == (notice,)
    assert "text_encoder is taken for a text_encoder by its name" in notice
    assert len(caplog.records) == 1  # told once for a class, and in every report
    assert notice in caplog.text


def test_few_large_blocks_are_said_to_save_little() -> None:
    (notice,) = small().enable_layerwise_offload(device="cpu").notices
    assert "its largest block is 51% of it" in notice


def evenly(**attributes: Any) -> SmallPipeline:
    """A small pipeline with so many equal blocks that two of them are a small part."""
    cls = type("ThisPipeline", (SmallPipeline,), attributes)
    return seeded(lambda: cls(Denoiser(Block(16) for _ in range(12))))


def class_without_declarations() -> nn.Module:
    return type("Plain", (Denoiser,), {"_layerwise_offload_blocks_attrs": None})([Block(8), Block(16)])


# --- one component's policy leaves the others alone -------------------------------------------------------------------


def experts() -> models.ExpertsPipeline:
    return seeded(lambda: models.ExpertsPipeline(*(Denoiser(map(Block, models.unequal(n))) for n in (4, 4, 2))))


def test_naming_one_component_leaves_the_others_where_they_were() -> None:
    pipe = experts()
    report = pipe.enable_layerwise_offload(["transformer"], device="cpu")
    assert {c.path: c.placement for c in report.components} == {
        "transformer": "streamed",
        "transformer_2": "stays",
        "text_encoder": "stays",
        "vae": "stays",
    }
    assert type(pipe.transformer_2) is Denoiser and type(pipe.transformer_2.blocks[0]) is Block
    models.run(pipe, CPU)
    assert [c.copies > 0 for c in pipe.offload_report().components] == [True, False, False, False]


def test_options_of_one_component_are_not_those_of_another() -> None:
    pipe = experts()
    chosen = {"transformer": {"resident_layers": 3}, "dit": {"resident_layers": 1}}
    report = pipe.enable_layerwise_offload(["dit", "transformer"], device="cpu", layer_options=chosen)
    assert {c.path: c.units for c in report.components if c.role == "dit"} == {"transformer": 1, "transformer_2": 3}


def test_module_mode_of_some_components_leaves_the_others_on_the_device() -> None:
    pipe = experts()
    report = pipe.enable_model_cpu_offload(device="cpu", components=["dit"])
    assert {c.path: c.placement for c in report.components} == {
        "transformer": "swapped",
        "transformer_2": "swapped",
        "text_encoder": "stays",
        "vae": "stays",
    }
    expected = models.run(models.resident(experts(), CPU), CPU)
    assert torch.equal(models.run(pipe, CPU), expected)


def test_every_way_to_ask_gives_the_same(wan: Any) -> None:
    configs = [
        {"mode": "layer"},
        '{"mode": "layer", "components": ["dit"]}',
        OffloadConfig("layer", components=("dit",)),
    ]
    reports = []
    for config in configs:
        reports.append(small().enable_offload(config, device="cpu").to_dict())
    reports.append(small().enable_layerwise_offload(device="cpu").to_dict())
    assert all(report == reports[0] for report in reports)
    assert isinstance(wan, OffloadMixin) and SplitOffloadMixin._offload_components == {}
