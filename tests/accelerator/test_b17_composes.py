"""B17: step caches, layerwise casting, hooks and the modes of torch work together with offload, in either order."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable
from pipes import (
    DIT_LAYERS,
    LAYER,
    MODULE,
    both_modes,
    build,
    changes,
    device_bytes,
    offloaded,
    output,
    resident,
    traces,
)
from typing import Any

import pytest
import torch
from diffusers import FirstBlockCacheConfig, MagCacheConfig, PyramidAttentionBroadcastConfig, TaylorSeerCacheConfig
from diffusers.hooks import apply_first_block_cache
from diffusers.hooks._helpers import TransformerBlockRegistry
from diffusers.models.attention_processor import AttentionProcessor

STEPS = 5
LAYERS = 4
orders = pytest.mark.parametrize("order", ["feature first", "offload first"])
families = pytest.mark.parametrize("family", ["wan", "flux2-klein"])


def first_block_cache(pipe: Any) -> None:
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=1000.0))


def taylor_seer(pipe: Any) -> None:
    pipe.transformer.enable_cache(TaylorSeerCacheConfig(cache_interval=2, disable_cache_before_step=1))


def taylor_seer_lite(pipe: Any) -> None:
    config = TaylorSeerCacheConfig(cache_interval=2, disable_cache_before_step=1, use_lite_mode=True)
    pipe.transformer.enable_cache(config)


def pyramid_attention(pipe: Any) -> None:
    config = PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(-1, 1001),
        current_timestep_callback=lambda: pipe.current_timestep,
    )
    pipe.transformer.enable_cache(config)


def mag_cache(pipe: Any) -> None:
    ratios = [1.0] * STEPS
    pipe.transformer.enable_cache(MagCacheConfig(0.5, 2, 0.2, num_inference_steps=STEPS, mag_ratios=ratios))


def layerwise_casting(pipe: Any) -> None:
    pipe.transformer.enable_layerwise_casting(torch.float16, torch.float32)


Feature = Callable[[Any], None]
WAN_FEATURES: list[Feature] = [
    first_block_cache,
    taylor_seer_lite,
    pyramid_attention,
    mag_cache,
    layerwise_casting,
]
FLUX_FEATURES: list[Feature] = [taylor_seer, layerwise_casting]
CASES = [("wan", feature) for feature in WAN_FEATURES] + [("flux2-klein", feature) for feature in FLUX_FEATURES]


@orders
@both_modes
@pytest.mark.parametrize(("family", "feature"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_feature_gives_what_it_gives_on_a_resident_pipeline(
    family: str, feature: Feature, config: dict[str, Any], order: str, device: torch.device
) -> None:
    reference = resident(device, family, layers=LAYERS)
    plain = output(reference, family, steps=STEPS)
    feature(reference)
    expected = output(reference, family, steps=STEPS)
    assert not torch.equal(expected, plain)  # so that the feature does something here
    pipe = build(family, layers=LAYERS)
    if order == "feature first":
        feature(pipe)
        pipe.enable_offload(config, device=device)
    else:
        pipe.enable_offload(config, device=device)
        feature(pipe)
    for _ in range(2):
        assert torch.equal(output(pipe, family, steps=STEPS), expected)
    assert pipe.offload_report().copies > 0


@orders
@both_modes
def test_cache_taken_off_while_offloaded(config: dict[str, Any], order: str, device: torch.device) -> None:
    expected = output(resident(device, layers=LAYERS), steps=STEPS)
    pipe = build(layers=LAYERS)
    if order == "feature first":
        first_block_cache(pipe)
        pipe.enable_offload(config, device=device)
    else:
        pipe.enable_offload(config, device=device)
        first_block_cache(pipe)
    assert not torch.equal(output(pipe, steps=STEPS), expected)
    pipe.transformer.disable_cache()
    assert torch.equal(output(pipe, steps=STEPS), expected)
    pipe.disable_offload()
    assert torch.equal(output(pipe.to(device), steps=STEPS), expected)


@orders
@both_modes
def test_cache_stays_when_offload_goes(config: dict[str, Any], order: str, device: torch.device) -> None:
    reference = resident(device, layers=LAYERS)
    plain = output(reference, steps=STEPS)
    first_block_cache(reference)
    expected = output(reference, steps=STEPS)
    pipe = build(layers=LAYERS)
    output(pipe)  # which leaves traces of its own
    untouched = traces(pipe)
    if order == "feature first":
        first_block_cache(pipe)
        pipe.enable_offload(config, device=device)
    else:
        pipe.enable_offload(config, device=device)
        first_block_cache(pipe)
    assert torch.equal(output(pipe, steps=STEPS), expected)
    pipe.disable_offload()
    pipe.to(device)
    assert torch.equal(output(pipe, steps=STEPS), expected)
    pipe.transformer.disable_cache()
    assert torch.equal(output(pipe, steps=STEPS), plain)
    left = {key for module in changes(untouched, traces(pipe)).values() for key in module}
    assert left <= {"forward", "_diffusers_hook", "_is_hf_initialized", "_cache_config", "_internal_dict"}
    assert not any("_offload" in key for key in left)


@orders
def test_a_cached_step_moves_no_more_than_the_blocks_it_runs(order: str, device: torch.device) -> None:
    pipe = build(layers=6)
    if order == "feature first":
        apply_first_block_cache(pipe.transformer, FirstBlockCacheConfig(threshold=1000.0))
        pipe.enable_layerwise_offload(device=device)
    else:
        pipe.enable_layerwise_offload(device=device)
        apply_first_block_cache(pipe.transformer, FirstBlockCacheConfig(threshold=1000.0))
    copies: list[int] = []

    def count(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        copies.append(pipe.offload_report().copies)
        return tensors

    output(pipe, steps=STEPS, callback_on_step_end=count, guidance_scale=1.0)
    moved = [after - before for before, after in itertools.pairwise(copies)]
    # A first cached step may find out that what it fetched ahead is not wanted; then block 0 stays where it is.
    assert moved[0] <= 2 and all(count <= 1 for count in moved[1:]), moved


@both_modes
def test_user_hooks_fire_once_and_can_be_removed(config: dict[str, Any], device: torch.device) -> None:
    reference, pipe = resident(device, layers=LAYERS), build(layers=LAYERS)
    output(pipe)  # which leaves traces of its own
    before = traces(pipe)
    paths = ["", "blocks.0", "blocks.1", "blocks.1.attn1", "blocks.1.ffn.net.0.proj", "proj_out"]

    def watch(each: Any) -> tuple[dict[tuple[str, str], int], list[Any]]:
        seen: dict[tuple[str, str], int] = {}
        handles = []
        for path in paths:
            module = each.transformer.get_submodule(path)

            def pre(module: Any, args: Any, path: str = path) -> None:
                seen[path, "before"] = seen.get((path, "before"), 0) + 1

            def behind(module: Any, args: Any, result: Any, path: str = path) -> None:
                seen[path, "behind"] = seen.get((path, "behind"), 0) + 1

            handles += [module.register_forward_pre_hook(pre), module.register_forward_hook(behind)]
        return seen, handles

    expected, _ = watch(reference)
    early, early_handles = watch(pipe)
    pipe.enable_offload(config, device=device)
    late, late_handles = watch(pipe)
    assert torch.equal(output(pipe), output(reference))
    assert early == expected and late == expected and len(expected) == 2 * len(paths)
    for handle in early_handles + late_handles:
        handle.remove()
    counts = [dict(early), dict(late)]
    output(pipe)
    assert counts == [early, late]
    pipe.disable_offload()
    assert not changes(before, traces(pipe))


@both_modes
def test_hook_of_a_block_sees_and_may_change_weights_and_output(config: dict[str, Any], device: torch.device) -> None:
    reference, pipe = resident(device, layers=LAYERS), offloaded(config, device, layers=LAYERS)
    places = set()

    def add_weight(module: Any, args: Any, result: Any) -> Any:
        places.add(module.attn1.to_q.weight.device)
        return result + module.attn1.to_q.weight.mean()

    for each in (reference, pipe):
        each.transformer.blocks[1].register_forward_hook(add_weight)
    assert torch.equal(output(pipe), output(reference))
    assert places == {device}


@both_modes
def test_global_hooks_fire_once(config: dict[str, Any], device: torch.device) -> None:
    def calls(pipe: Any) -> dict[str, int]:
        names = {id(module): name for name, module in pipe.transformer.named_modules()}
        seen: dict[str, int] = {}

        def hook(module: Any, args: Any) -> None:
            if id(module) in names:
                seen[names[id(module)]] = seen.get(names[id(module)], 0) + 1

        handle = torch.nn.modules.module.register_module_forward_pre_hook(hook)
        output(pipe)
        handle.remove()
        return seen

    assert calls(offloaded(config, device, layers=2)) == calls(resident(device, layers=2))


@families
@both_modes
def test_blocks_and_components_answer_as_before(family: str, config: dict[str, Any], device: torch.device) -> None:
    plain, pipe = build(family), offloaded(config, device, family)
    for name in ("transformer", "text_encoder", "vae"):
        for path, module in getattr(plain, name).named_modules():
            ours = getattr(pipe, name).get_submodule(path)
            assert ours.__class__ is type(module), (name, path)
            assert isinstance(ours, type(module))
            assert inspect.signature(ours.forward) == inspect.signature(module.forward)
            assert (type(ours).__name__, type(ours).__module__) == (type(module).__name__, type(module).__module__)
    assert type(pipe.transformer) == type(plain.transformer)  # noqa: E721 -- what from_pipe asks
    assert {type(plain.transformer): 1}[type(pipe.transformer)] == 1
    for block in pipe.transformer.modules():
        with contextlib.suppress(ValueError):
            TransformerBlockRegistry.get(block.__class__)
    first = pipe.transformer.get_submodule("blocks.0" if family == "wan" else "transformer_blocks.0")
    assert TransformerBlockRegistry.get(first.__class__) is not None


class Doubling:
    """An attention processor that doubles what another one computes."""

    def __init__(self, inner: AttentionProcessor) -> None:
        self.inner: Any = inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs) * 2


@both_modes
def test_attention_processors_may_be_set_and_reset(config: dict[str, Any], device: torch.device) -> None:
    reference, pipe = resident(device, layers=LAYERS), offloaded(config, device, layers=LAYERS)
    plain = output(reference)
    for each in (reference, pipe):
        attention = each.transformer.blocks[0].attn1
        each.original = attention.processor
        attention.set_processor(Doubling(attention.processor))
    expected = output(reference)
    assert not torch.equal(expected, plain)
    assert torch.equal(output(pipe), expected)
    pipe.transformer.blocks[0].attn1.set_processor(pipe.original)
    assert torch.equal(output(pipe), plain)


def wan_inputs(pipe: Any, device: torch.device, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    config = pipe.transformer.config
    return {
        "hidden_states": torch.randn(1, config.in_channels, 1, 4, 4, generator=generator).to(device, dtype),
        "timestep": torch.tensor([500], device=device),
        "encoder_hidden_states": torch.randn(1, 8, config.text_dim, generator=generator).to(device, dtype),
        "return_dict": False,
    }


@both_modes
def test_grad_modes_and_autocast_alternate(config: dict[str, Any], device: torch.device) -> None:
    reference, pipe = resident(device, layers=LAYERS), offloaded(config, device, layers=LAYERS)
    modes: list[Callable[[], Any]] = [
        torch.no_grad,
        torch.inference_mode,
        contextlib.nullcontext,
        lambda: torch.autocast(device.type, torch.bfloat16),
        lambda: torch.autocast(device.type, torch.float16),
    ]
    inputs = wan_inputs(pipe, device)
    with torch.no_grad():
        plain = reference.transformer(**inputs)[0].cpu()
    for index in [0, 1, 2, 3, 4, 3, 1, 3, 2, 4, 0]:
        with modes[index]():
            expected = reference.transformer(**inputs)[0].detach().cpu()
            got = pipe.transformer(**inputs)[0].detach().cpu()
        assert torch.equal(got, expected), index
        assert torch.equal(got, plain) == (index < 3)


@both_modes
def test_autocast_around_calls_sees_edits_between_them(config: dict[str, Any], device: torch.device) -> None:
    reference, pipe = resident(device, layers=LAYERS), offloaded(config, device, layers=LAYERS)
    inputs = wan_inputs(pipe, device)
    results = []
    for each in (reference, pipe):
        with torch.autocast(device.type, torch.bfloat16):
            first = each.transformer(**inputs)[0].detach().cpu()
        with torch.no_grad():
            each.transformer.blocks[1].attn1.to_q.weight.mul_(1.5)
        with torch.autocast(device.type, torch.bfloat16):
            results.append((first, each.transformer(**inputs)[0].detach().cpu()))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert not torch.equal(results[0][0], results[0][1])


def test_autocast_keeps_no_casts_of_blocks_that_have_left(device: torch.device) -> None:
    pipe = offloaded(DIT_LAYERS, device, layers=6)
    inputs = wan_inputs(pipe, device)
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
        pipe.transformer(**inputs)
        first = device_bytes(device)
        torch.clear_autocast_cache()
        kept = first - device_bytes(device)
    streamed = next(c.streamed_bytes for c in pipe.offload_report().components if c.path == "transformer")
    assert kept < streamed / 2 / 6  # one block's, at half the size


@both_modes
def test_pipeline_in_inference_mode_and_autocast(config: dict[str, Any], device: torch.device) -> None:
    reference, pipe = resident(device, layers=LAYERS), offloaded(config, device, layers=LAYERS)
    plain = output(reference)
    with torch.inference_mode():
        assert torch.equal(output(pipe), plain)
    with torch.autocast(device.type, torch.bfloat16):
        assert torch.equal(output(pipe), output(reference))
    assert torch.equal(output(pipe), plain)


@both_modes
def test_enabled_inside_inference_mode(config: dict[str, Any], device: torch.device) -> None:
    expected = output(resident(device, layers=LAYERS))
    pipe = build(layers=LAYERS)
    with torch.inference_mode():
        pipe.enable_offload(config, device=device)
        assert torch.equal(output(pipe), expected)
    assert torch.equal(output(pipe), expected)
    pipe.disable_offload()
    assert torch.equal(output(pipe.to(device)), expected)


@both_modes
def test_gradient_checkpointing_flag(config: dict[str, Any], device: torch.device) -> None:
    reference, pipe = resident(device, layers=LAYERS), offloaded(config, device, layers=LAYERS)
    for each in (reference, pipe):
        each.transformer.enable_gradient_checkpointing()
        each.transformer.train()
    inputs = wan_inputs(pipe, device)
    for mode in (torch.enable_grad, torch.no_grad):
        with mode():
            expected = reference.transformer(**inputs)[0].detach().cpu()
            assert torch.equal(pipe.transformer(**inputs)[0].detach().cpu(), expected)


@pytest.mark.parametrize("config", [LAYER, MODULE], ids=["layer", "module"])
def test_cache_and_casting_and_hooks_at_once(config: dict[str, Any], device: torch.device) -> None:
    reference = resident(device, layers=LAYERS)
    pipe = build(layers=LAYERS)
    layerwise_casting(pipe)
    pipe.enable_offload(config, device=device)
    layerwise_casting(reference)
    for each in (reference, pipe):
        first_block_cache(each)
        each.transformer.blocks[0].register_forward_hook(lambda module, args, result: result * 1.01)
    assert torch.equal(output(pipe, steps=STEPS), output(reference, steps=STEPS))
