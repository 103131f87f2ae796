"""B09: enabling again, otherwise, elsewhere or with other components is as enabling once."""

from __future__ import annotations

import gc
import weakref
from pipes import (
    DIT_LAYERS,
    LAYER,
    MODULE,
    both_modes,
    brief,
    build,
    changes,
    device_bytes,
    modules_of,
    offloaded,
    output,
    pinned_bytes,
    resident,
    tensors_of,
    traces,
)
from typing import Any

import pytest
import torch
from diffusers import UniPCMultistepScheduler, WanPipeline, WanVideoToVideoPipeline

from omni_offload import OffloadConfigError, OffloadMixin, OffloadStateError, OffloadWanPipeline

FRAMES = 5


class OffloadWanVideoToVideoPipeline(OffloadMixin, WanVideoToVideoPipeline):
    """Shares its components with text to video."""

    _dit_modules = ["transformer"]
    _encoder_modules = ["text_encoder"]
    _vae_modules = ["vae"]


def state_of(pipe: Any, device: torch.device) -> dict[str, Any]:
    """What may not grow by enabling more than once."""
    report = pipe.offload_report()
    return {
        "device": device_bytes(device, pipe),
        "locked": pinned_bytes(device),
        "mode": report.mode,
        "components": [(c.path, c.placement, c.units, c.streamed_bytes, c.host_bytes) for c in report.components],
        "hooks": {
            path: [len(getattr(module, name)) for name in ("_forward_pre_hooks", "_forward_hooks")]
            for path, module in modules_of(pipe).items()
        },
        "classes": {path: len(type(module).__mro__) for path, module in modules_of(pipe).items()},
    }


@both_modes
def test_enabling_twice_is_enabling_once(config: dict[str, Any], device: torch.device) -> None:
    pipe = offloaded(config, device, layers=2)
    expected, once = brief(pipe), state_of(pipe, device)
    addresses = {name: tensor.data_ptr() for name, tensor in tensors_of(pipe).items()}
    copies = pipe.offload_report().copies
    for _ in range(3):
        pipe.enable_offload(config, device=device)
        assert state_of(pipe, device) == once
    assert pipe.offload_report().copies == copies  # and nothing was moved for it
    assert {name: tensor.data_ptr() for name, tensor in tensors_of(pipe).items()} == addresses
    assert torch.equal(brief(pipe), expected)


@pytest.mark.parametrize(
    ("first", "second"), [(LAYER, MODULE), (MODULE, LAYER), (LAYER, DIT_LAYERS), (DIT_LAYERS, MODULE)]
)
def test_there_and_back_is_enabling_once(first: dict[str, Any], second: dict[str, Any], device: torch.device) -> None:
    pipe = build(layers=2)
    brief(pipe)
    plain, tensors = traces(pipe), tensors_of(pipe)
    pipe.enable_offload(first, device=device)
    expected = brief(pipe)
    once = state_of(pipe, device)
    for _ in range(2):
        pipe.enable_offload(second, device=device)
        assert pipe.offload_report().mode == second["mode"]
        assert torch.equal(brief(pipe), expected)
        pipe.enable_offload(first, device=device)
        assert state_of(pipe, device) == once
        assert torch.equal(brief(pipe), expected)
    pipe.disable_offload()
    assert not changes(plain, traces(pipe))
    assert all(tensors_of(pipe)[name] is tensor for name, tensor in tensors.items() if tensor.requires_grad)


@pytest.mark.parametrize("second_config", [LAYER, MODULE], ids=["second layer", "second module"])
@both_modes
def test_two_pipelines_on_the_same_components(
    config: dict[str, Any], second_config: dict[str, Any], device: torch.device
) -> None:
    first = offloaded(config, device, layers=2)
    expected, once = brief(first), state_of(first, device)
    second = OffloadWanPipeline(**first.components)
    second.set_progress_bar_config(disable=True)
    assert torch.equal(brief(second), expected)  # without being told
    assert second.device == device and second.offload_report().mode == config["mode"]
    second.enable_offload(second_config, device=device)
    for _ in range(2):
        assert torch.equal(brief(second), expected)
        assert torch.equal(brief(first), expected)
    first.enable_offload(config, device=device)
    assert torch.equal(brief(second), expected)
    device_bytes(device, second)  # forgets what its scheduler keeps
    assert state_of(first, device) == once
    second.disable_offload()
    with pytest.raises(OffloadStateError):
        first.offload_report()
    assert device_bytes(device, first, second) == 0


def video_to_video(pipe: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    video = [torch.rand(3, 32, 32, generator=generator) for _ in range(FRAMES)]
    return pipe(
        video=video, prompt="a boat", height=32, width=32, num_inference_steps=2, generator=generator,
        output_type="pt", max_sequence_length=8, strength=0.8,
    ).frames.cpu()  # fmt: skip


@pytest.mark.parametrize("kind", [WanVideoToVideoPipeline, OffloadWanVideoToVideoPipeline])
@both_modes
def test_from_pipe_loses_no_component(kind: Any, config: dict[str, Any], device: torch.device) -> None:
    parts = dict(build(layers=2).components)
    parts.pop("transformer_2")
    plain = WanVideoToVideoPipeline(**parts).to(device)
    plain.set_progress_bar_config(disable=True)
    expected = video_to_video(plain)
    pipe = offloaded(config, device, layers=2)
    before = output(pipe)
    other = kind.from_pipe(pipe)
    other.set_progress_bar_config(disable=True)
    for name in ("transformer", "text_encoder", "vae", "tokenizer"):
        assert getattr(other, name) is getattr(pipe, name), name
    assert isinstance(other.scheduler, UniPCMultistepScheduler)
    assert torch.equal(video_to_video(other), expected)
    assert torch.equal(output(pipe), before)


@pytest.mark.parametrize("kind", [WanPipeline, OffloadWanPipeline])
@both_modes
def test_from_pipe_casts_as_with_a_resident_pipeline(kind: Any, config: dict[str, Any], device: torch.device) -> None:
    reference = resident(device, layers=2, dtype=torch.bfloat16)
    pipe = offloaded(config, device, layers=2, dtype=torch.bfloat16)
    for dtype in (torch.bfloat16, None):  # without one, Diffusers casts to float32
        options = {} if dtype is None else {"dtype": dtype}
        plain = WanPipeline.from_pipe(reference, **options)
        other = kind.from_pipe(pipe, **options)
        for each in (plain, other):
            each.set_progress_bar_config(disable=True)
        assert other.transformer is pipe.transformer and other.transformer.dtype == plain.transformer.dtype
        assert torch.equal(brief(other), brief(plain))


@both_modes
def test_from_pipe_of_a_plain_pipeline_to_ours(config: dict[str, Any], device: torch.device) -> None:
    plain = resident(device, layers=2)
    expected = brief(plain)
    plain.to("cpu")
    pipe = OffloadWanPipeline.from_pipe(plain)
    pipe.set_progress_bar_config(disable=True)
    pipe.enable_offload(config, device=device)
    assert torch.equal(brief(pipe), expected)


@both_modes
def test_swapped_component_is_managed_and_the_old_one_is_plain(config: dict[str, Any], device: torch.device) -> None:
    pipe = offloaded(config, device, layers=2)
    brief(pipe)
    other = build(layers=3, seed=1)
    expected = brief(resident(device, layers=3, seed=1))
    for name in ("transformer", "text_encoder"):
        setattr(pipe, name, getattr(other, name))
    assert torch.equal(brief(pipe), expected)
    once = offloaded(config, device, layers=3, seed=1)
    brief(once)
    assert state_of(pipe, device)["components"] == state_of(once, device)["components"]


@pytest.mark.parametrize("at_once", ["DiT", "encoder", "both"])
@pytest.mark.parametrize("config", [DIT_LAYERS, LAYER, MODULE], ids=["dit", "layer", "module"])
def test_any_swap_is_as_enabling_afterwards(config: dict[str, Any], at_once: str, device: torch.device) -> None:
    names = {"DiT": ["transformer"], "encoder": ["text_encoder"], "both": ["transformer", "text_encoder"]}[at_once]
    plain, pipe = build(layers=2), offloaded(config, device, layers=2)
    brief(pipe)
    old = [getattr(pipe, name) for name in names]
    for each in (plain, pipe):
        other = build(layers=3, seed=1)
        for name in names:
            setattr(each, name, getattr(other, name))
    plain.enable_offload(config, device=device)
    assert torch.equal(brief(pipe), brief(plain))
    assert state_of(pipe, device)["components"] == state_of(plain, device)["components"]
    pipe.disable_offload()
    plain.disable_offload()
    assert device_bytes(device, pipe, plain) == 0
    assert all(type(module) is module.__class__ for part in old for module in part.modules())


@both_modes
def test_component_that_was_swapped_out_is_plain_and_collectable(config: dict[str, Any], device: torch.device) -> None:
    pipe = offloaded(config, device, layers=2)
    brief(pipe)
    untouched = traces(build(layers=2))
    old = pipe.transformer
    pipe.transformer = build(layers=2, seed=1).transformer
    brief(pipe)
    for path, module in old.named_modules():
        name = f"transformer.{path}" if path else "transformer"
        assert type(module) is untouched[name]["class"], name
        assert not [key for key in vars(module) if "offload" in key], name
        assert not module._forward_pre_hooks and not module._forward_hooks, name
    assert all(tensor.device.type == "cpu" for tensor in old.state_dict().values())
    old.to(device).to("cpu")
    alive = [weakref.ref(module) for module in old.modules()]
    del old, module
    gc.collect()
    assert not [ref for ref in alive if ref() is not None]


@both_modes
def test_component_set_to_none_behind_its_use(config: dict[str, Any], device: torch.device) -> None:
    pipe = offloaded(config, device, layers=2)
    expected = brief(pipe)
    embeds = pipe.encode_prompt(
        prompt=small_prompt()["prompt"], negative_prompt=small_prompt()["negative_prompt"], max_sequence_length=8
    )
    encoder = weakref.ref(pipe.text_encoder)
    pipe.text_encoder = None
    got = brief(
        pipe, prompt=None, negative_prompt=None, prompt_embeds=embeds[0], negative_prompt_embeds=embeds[1]
    )  # fmt: skip
    assert torch.equal(got, expected)
    gc.collect()
    assert encoder() is None


def small_prompt() -> dict[str, Any]:
    from omni_offload.demo import small_pipelines as small

    return {key: small.call_arguments("wan")[key] for key in ("prompt", "negative_prompt")}


@both_modes
def test_added_component_is_managed(config: dict[str, Any], device: torch.device) -> None:
    expected = output(resident(device, "wan22", layers=2), "wan22")
    full = build("wan22", layers=2)
    second = full.transformer_2
    full.transformer_2 = None
    full.enable_offload(config, device=device)
    full.transformer_2 = second
    assert torch.equal(output(full, "wan22"), expected)
    paths = [component.path for component in full.offload_report().components]
    assert "transformer_2" in paths
    assert all(parameter.device.type == "cpu" for parameter in second.blocks.parameters())


@both_modes
@pytest.mark.parametrize("method", ["enable_model_cpu_offload", "enable_sequential_cpu_offload"])
def test_accelerate_hooks_are_refused_by_name(method: str, config: dict[str, Any], device: torch.device) -> None:
    pipe = build(layers=2)
    getattr(WanPipeline, method)(pipe, device=device)
    before = traces(pipe)
    with pytest.raises(OffloadConfigError, match=r"accelerate.*remove_all_hooks\(\)"):
        pipe.enable_offload(config, device=device)
    assert not changes(before, traces(pipe))
    pipe.remove_all_hooks()
    pipe.to("cpu")
    pipe.enable_offload(config, device=device)
    assert torch.equal(brief(pipe), brief(resident(device, layers=2)))


@both_modes
@pytest.mark.parametrize("kind", ["block_level", "leaf_level"])
def test_group_offload_is_refused_by_name(kind: str, config: dict[str, Any], device: torch.device) -> None:
    pipe = build(layers=2)
    blocks = {"num_blocks_per_group": 1} if kind == "block_level" else {}
    pipe.transformer.enable_group_offload(device, offload_type=kind, **blocks)
    before = traces(pipe)
    with pytest.raises(OffloadConfigError, match=r"group offloading.*remove_hook\('group_offloading'"):
        pipe.enable_offload(config, device=device)
    assert not changes(before, traces(pipe))
    pipe.transformer._diffusers_hook.remove_hook("group_offloading", recurse=True)
    pipe.transformer._diffusers_hook.remove_hook("lazy_prefetch_group_offloading", recurse=True)
    pipe.enable_offload(config, device=device)
    assert torch.equal(brief(pipe), brief(resident(device, layers=2)))


@both_modes
def test_diffusers_offload_is_refused_beside_ours(config: dict[str, Any], device: torch.device) -> None:
    pipe = offloaded(config, device, layers=2)
    expected = brief(pipe)
    for call in (
        lambda: pipe.enable_sequential_cpu_offload(device=device),
        lambda: pipe.enable_group_offload(device, offload_type="leaf_level"),
    ):
        with pytest.raises(OffloadStateError, match=r"disable_offload\(\)"):
            call()
    assert torch.equal(brief(pipe), expected)
