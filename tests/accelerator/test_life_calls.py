"""Calls of a pipeline's life besides the plain one: each gives what it gives on a resident pipeline, bit for bit.

Parts called by themselves, callbacks that interfere, batches, sibling pipelines on the same components, the caller's
defaults, hooks inside encoders, and a text encoder that generates.
"""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from pipes import DIT_LAYERS, LAYER, MODULE
from typing import Any

import pytest
import torch
from diffusers import (
    AutoPipelineForImage2Image,
    FluxImg2ImgPipeline,
    FluxInpaintPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
)
from zoo import module, parts

from omni_offload import OffloadStateError, with_offload
from omni_offload.demo import small_pipelines as small

Action = Callable[[Any, torch.device], Any]
all_modes = pytest.mark.parametrize("config", [MODULE, DIT_LAYERS, LAYER], ids=["module", "dit", "dit+text"])
SIZE = 16


# --- small pipelines ------------------------------------------------------------------------------------------------


def flux_components() -> dict[str, Any]:
    """Constructor arguments of the Flux pipelines: two text encoders, two lists of blocks."""
    transformer = module(
        "transformer",
        FluxTransformer2DModel,
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    return {
        "scheduler": parts.flow_scheduler(),
        "vae": parts.autoencoder_kl(shift_factor=0.1, scaling_factor=0.4),
        "text_encoder": parts.clip_text(layers=2),
        "tokenizer": parts.clip_tokenizer(),
        "text_encoder_2": parts.t5_encoder("text_encoder_2", layers=2),
        "tokenizer_2": parts.t5_tokenizer(),
        "transformer": transformer,
    }


@functools.cache
def _components(family: str) -> dict[str, Any]:
    with torch.device("cpu"):
        return flux_components() if family == "flux" else small.components(family, layers=2)


def plain(family: str) -> Any:
    """A small pipeline with weights of its own, on the CPU."""
    own = {
        name: copy.deepcopy(part) if isinstance(part, torch.nn.Module) else part
        for name, part in _components(family).items()
    }
    own["scheduler"] = type(own["scheduler"]).from_config(own["scheduler"].config)
    pipe = (FluxPipeline if family == "flux" else small.pipeline_class(family))(**own)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def both(family: str, config: dict[str, Any], device: torch.device) -> tuple[Any, Any]:
    """The resident pipeline, and one with offload on."""
    pipe = with_offload(plain(family))
    pipe.enable_offload(config, device=device)
    return plain(family).to(device), pipe


def arguments(family: str) -> dict[str, Any]:
    """Of the shortest call that runs every part of the pipeline."""
    seeded = {"generator": torch.Generator("cpu").manual_seed(0), "num_inference_steps": 2, "output_type": "pt"}
    size = {"height": SIZE, "width": SIZE}
    if family == "flux":
        cfg = {"negative_prompt": small.NEGATIVE_PROMPT, "true_cfg_scale": 3.0}
        return {"prompt": small.PROMPT, "max_sequence_length": 16} | cfg | size | seeded
    return small.call_arguments(family) | seeded | size | ({"num_frames": 1} if family == "wan" else {})


def run(pipe: Any, family: str = "flux", **changes: Any) -> torch.Tensor:
    """The output of one short call, on the CPU."""
    result = pipe(**(arguments(family) | changes))
    return (result.frames if "frames" in result else result.images).cpu()


def on_host(value: Any) -> list[torch.Tensor]:
    """The tensors in a result, on the CPU."""
    values = value if isinstance(value, (tuple, list)) else [value]
    return [tensor.detach().cpu() for tensor in values if isinstance(tensor, torch.Tensor)]


def assert_equal(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(got) == len(expected) > 0
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, expected, strict=True))


# --- parts called by themselves -------------------------------------------------------------------------------------


def numbers(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0), device="cpu").to(device) * 2 - 1


def ids(device: torch.device) -> torch.Tensor:
    return (torch.arange(8, device="cpu") * 7 % 60).unsqueeze(0).to(device)


def encode_prompt(pipe: Any, device: torch.device) -> Any:
    return pipe.encode_prompt("a boat", None, max_sequence_length=16)


def encode_with_one_encoder(pipe: Any, device: torch.device) -> Any:
    return pipe._get_t5_prompt_embeds("a boat", max_sequence_length=16, device=device)


def both_encoders_in_turns(pipe: Any, device: torch.device) -> Any:
    results = []
    for _ in range(2):
        results += [pipe.text_encoder(ids(device)).pooler_output, pipe.text_encoder_2(ids(device))[0]]
    return results


def embeddings_of_both(pipe: Any, device: torch.device) -> Any:
    encoders = (pipe.text_encoder, pipe.text_encoder_2)
    return [encoder.get_input_embeddings()(ids(device)) for encoder in encoders]


def rows_of_the_embeddings(pipe: Any, device: torch.device) -> Any:
    return [encoder.get_input_embeddings().weight[3:7] for encoder in (pipe.text_encoder, pipe.text_encoder_2)]


def clip_embeddings_module(pipe: Any, device: torch.device) -> Any:
    return clip_body(pipe).embeddings(ids(device))


def clip_body(pipe: Any) -> Any:
    return getattr(pipe.text_encoder, "text_model", pipe.text_encoder)


def first(result: Any) -> Any:
    """A layer of transformers gives a tensor, or a tuple that begins with it, as versions differ."""
    return result[0] if isinstance(result, tuple) else result


def loop_over_the_layers_of_clip(pipe: Any, device: torch.device) -> Any:
    hidden = clip_body(pipe).embeddings(ids(device))
    for layer in clip_body(pipe).encoder.layers:
        hidden = first(layer(hidden, None))
    return clip_body(pipe).final_layer_norm(hidden)


def rotary(pipe: Any, device: torch.device, tokens: int = 12) -> Any:
    positions = torch.arange(3 * tokens, device="cpu").reshape(tokens, 3).float()
    return pipe.transformer.pos_embed(positions.to(device))


def positions(pipe: Any, device: torch.device) -> Any:
    return rotary(pipe, device)


def time_and_text(pipe: Any, device: torch.device) -> Any:
    return pipe.transformer.time_text_embed(torch.tensor([500.0]).to(device), numbers(device, 1, 32))


def time_projection(pipe: Any, device: torch.device) -> Any:
    embedder = pipe.transformer.time_text_embed
    return embedder.timestep_embedder(embedder.time_proj(torch.tensor([500.0]).to(device)))


def projections(pipe: Any, device: torch.device) -> Any:
    transformer = pipe.transformer
    image = transformer.x_embedder(numbers(device, 1, 8, 16))
    return [image, transformer.context_embedder(numbers(device, 1, 4, 32)), transformer.proj_out(image)]


def loop_over_both_lists_of_blocks(pipe: Any, device: torch.device) -> Any:
    transformer, time = pipe.transformer, time_and_text(pipe, device)
    image, text = transformer.x_embedder(numbers(device, 1, 8, 16)), numbers(device, 1, 4, 32)
    for block in transformer.transformer_blocks:
        text, image = block(image, text, time, rotary(pipe, device))
    for block in transformer.single_transformer_blocks:
        text, image = block(image, text, time, rotary(pipe, device))
    return [image, text]


def child_of_a_block(pipe: Any, device: torch.device) -> Any:
    return pipe.transformer.transformer_blocks[1].norm1(numbers(device, 1, 8, 32), emb=time_and_text(pipe, device))


def attention_of_a_block(pipe: Any, device: torch.device) -> Any:
    attention = pipe.transformer.transformer_blocks[0].attn
    return attention(numbers(device, 1, 8, 32), numbers(device, 1, 4, 32), image_rotary_emb=rotary(pipe, device))


def weights_of_a_block(pipe: Any, device: torch.device) -> Any:
    block = pipe.transformer.single_transformer_blocks[1]
    return [block.attn.to_q.weight.mean(), block.proj_out.weight.sum(), block.norm.linear.bias.abs().max()]


def previews(pipe: Any, device: torch.device) -> Any:
    pipe.vae.enable_slicing()
    pipe.vae.enable_tiling()
    pipe.vae.tile_sample_min_size, pipe.vae.tile_latent_min_size = 16, 8
    latents = pipe.vae.encode(numbers(device, 2, 3, 32, 32)).latent_dist.mode()
    return [latents, pipe.vae.decode(latents, return_dict=False)[0]]


def latents_of_the_pipeline(pipe: Any, device: torch.device) -> Any:
    generator = torch.Generator("cpu").manual_seed(0)
    return pipe.prepare_latents(1, 4, SIZE, SIZE, torch.float32, device, generator)


def cached_context(pipe: Any, device: torch.device) -> Any:
    with pipe.transformer.cache_context("cond"):
        return loop_over_both_lists_of_blocks(pipe, device)


FLUX = [
    encode_prompt,
    encode_with_one_encoder,
    both_encoders_in_turns,
    embeddings_of_both,
    rows_of_the_embeddings,
    clip_embeddings_module,
    loop_over_the_layers_of_clip,
    positions,
    time_and_text,
    time_projection,
    projections,
    loop_over_both_lists_of_blocks,
    child_of_a_block,
    attention_of_a_block,
    weights_of_a_block,
    previews,
    latents_of_the_pipeline,
    cached_context,
]


def loop_over_the_layers_of_a_language_model(pipe: Any, device: torch.device) -> Any:
    model = pipe.text_encoder.model
    hidden = pipe.text_encoder.get_input_embeddings()(ids(device))
    places = torch.arange(8, device="cpu").unsqueeze(0).to(device)
    phases = model.rotary_emb(hidden, places)
    for layer in model.layers:
        hidden = first(layer(hidden, position_embeddings=phases, position_ids=places))
    return pipe.text_encoder.lm_head(model.norm(hidden))


def loop_over_the_layers_of_t5(pipe: Any, device: torch.device) -> Any:
    stack = pipe.text_encoder.encoder
    hidden = stack.embed_tokens(ids(device))
    mask = torch.zeros(1, 1, 8, 8).to(device)
    for block in stack.block:
        hidden = first(block(hidden, mask))
    return stack.final_layer_norm(hidden)


CALLS = [("flux", call) for call in FLUX] + [
    ("flux2-klein", loop_over_the_layers_of_a_language_model),
    ("wan", loop_over_the_layers_of_t5),
]


@all_modes
@pytest.mark.parametrize(("family", "call"), CALLS, ids=lambda value: getattr(value, "__name__", value))
@torch.no_grad()
def test_part_called_by_itself(family: str, call: Action, config: dict[str, Any], device: torch.device) -> None:
    reference, pipe = both(family, config, device)
    expected = on_host(call(reference, device))
    for _ in range(2):
        assert_equal(on_host(call(pipe, device)), expected)
    assert torch.equal(run(pipe, family), run(reference, family))
    assert_equal(on_host(call(pipe, device)), expected)


# --- callbacks that interfere ---------------------------------------------------------------------------------------


def stop(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    if step == 0:
        pipe._interrupt = True
    return tensors


def change_latents(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    return tensors | {"latents": tensors["latents"] * 1.1 + 0.1}


def change_latents_in_place(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    tensors["latents"].mul_(1.1)
    return {}


def change_the_prompt(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    return {"prompt_embeds": tensors["prompt_embeds"] * 0.5}


def encode_another_prompt(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    return {"prompt_embeds": pipe.encode_prompt("a ship", None, max_sequence_length=16)[0]}


def decode_a_preview(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    latents = pipe._unpack_latents(tensors["latents"], SIZE, SIZE, pipe.vae_scale_factor)
    preview = pipe.vae.decode(latents / pipe.vae.config.scaling_factor, return_dict=False)[0]
    return {"latents": tensors["latents"] + preview.mean()}


def run_a_block(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    more = loop_over_both_lists_of_blocks(pipe, tensors["latents"].device)[0]
    return {"latents": tensors["latents"] + more.mean()}


def call_the_pipeline(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    inner = copy.copy(pipe)  # a scheduler of its own: that of the outer call is in the middle of its steps
    inner.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)
    return {"latents": tensors["latents"] + inner(**arguments("flux")).images.mean()}


CALLBACKS = [
    stop,
    change_latents,
    change_latents_in_place,
    change_the_prompt,
    encode_another_prompt,
    decode_a_preview,
    run_a_block,
    call_the_pipeline,
]


@all_modes
@pytest.mark.parametrize("callback", CALLBACKS, ids=lambda callback: callback.__name__)
def test_callback_that_interferes(callback: Any, config: dict[str, Any], device: torch.device) -> None:
    reference, pipe = both("flux", config, device)
    looks_at = {
        "callback_on_step_end": callback,
        "callback_on_step_end_tensor_inputs": ["latents", "prompt_embeds"],
        "num_inference_steps": 3,
    }
    simple = run(reference)
    expected = run(reference, **looks_at)
    assert not torch.equal(expected, run(reference, num_inference_steps=3))  # the callback did something
    for _ in range(2):
        assert torch.equal(run(pipe, **looks_at), expected)
        assert torch.equal(run(pipe), simple)
    assert pipe.offload_report().copies > 0


@all_modes
def test_turning_offload_off_inside_a_call_is_refused(config: dict[str, Any], device: torch.device) -> None:
    """The call goes on, and offload is as it was."""
    reference, pipe = both("flux", config, device)
    expected, report = run(reference), pipe.offload_report()
    other = LAYER if config is MODULE else MODULE
    refused: list[str] = []

    def try_all(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        for call in (
            pipe.disable_offload,
            pipe.remove_all_hooks,
            lambda: pipe.enable_offload(other, device=device),
            lambda: pipe.to("cpu"),
            lambda: pipe.transformer.to("cpu"),
        ):
            with pytest.raises(OffloadStateError) as refusal:
                call()
            refused.append(str(refusal.value))
        return tensors

    assert torch.equal(run(pipe, callback_on_step_end=try_all), expected)
    assert len(refused) == 10
    assert pipe.offload_report().mode == report.mode
    assert [c.path for c in pipe.offload_report().components] == [c.path for c in report.components]
    assert torch.equal(run(pipe), expected)


@all_modes
def test_encoder_given_up_inside_a_call(config: dict[str, Any], device: torch.device) -> None:
    """Behind the call, nothing keeps it."""
    reference, pipe = both("flux", config, device)
    encoder = weakref.ref(pipe.text_encoder_2)

    def give_up(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        pipe.text_encoder_2 = None
        return tensors

    assert torch.equal(run(pipe, callback_on_step_end=give_up), run(reference))
    gc.collect()
    assert encoder() is None


# --- batches and prompts --------------------------------------------------------------------------------------------

BATCHES: dict[str, dict[str, Any]] = {
    "two images": {"num_images_per_prompt": 2},
    "two prompts": {"prompt": ["a boat", "a ship on the sea"], "negative_prompt": ["dark", "low"]},
    "two prompts, two images": {
        "prompt": ["a boat", "a ship"], "negative_prompt": ["dark", "low"], "num_images_per_prompt": 2,
    },
    "no negative prompt": {"negative_prompt": None, "true_cfg_scale": 1.0},
    "a second prompt": {"prompt_2": "a ship", "negative_prompt_2": "dim"},
    "another size": {"height": 32, "width": 16},
}  # fmt: skip


@all_modes
def test_batches_one_after_another(config: dict[str, Any], device: torch.device) -> None:
    reference, pipe = both("flux", config, device)
    outputs = [(run(reference, **changes), run(pipe, **changes)) for changes in BATCHES.values()]
    assert all(torch.equal(expected, got) for expected, got in outputs)
    assert len({(tuple(expected.shape), float(expected.sum())) for expected, _ in outputs}) == len(BATCHES)


@all_modes
def test_embeddings_made_beforehand(config: dict[str, Any], device: torch.device) -> None:
    reference, pipe = both("flux", config, device)
    outputs = []
    for each in (reference, pipe):
        with torch.no_grad():
            embeds, pooled, _ = each.encode_prompt("a boat", None, max_sequence_length=16)
        given = {"prompt": None, "prompt_embeds": embeds, "pooled_prompt_embeds": pooled}
        outputs += [run(each, **given, negative_prompt=None, true_cfg_scale=1.0) for _ in range(2)]
    assert all(torch.equal(output, outputs[0]) for output in outputs)


# --- sibling pipelines ----------------------------------------------------------------------------------------------


def picture() -> torch.Tensor:
    return numbers(torch.device("cpu"), 1, 3, SIZE, SIZE) / 2 + 0.5


def image_to_image(pipe: Any) -> torch.Tensor:
    return run(pipe, image=picture(), strength=0.9)


def inpaint(pipe: Any) -> torch.Tensor:
    mask = torch.zeros(1, 1, SIZE, SIZE)
    mask[..., : SIZE // 2] = 1
    return run(pipe, image=picture(), mask_image=mask, strength=0.9)


SIBLINGS = [(FluxImg2ImgPipeline, image_to_image), (FluxInpaintPipeline, inpaint)]


def sibling(kind: Any, pipe: Any) -> Any:
    other = kind.from_pipe(pipe)
    other.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)
    other.set_progress_bar_config(disable=True)
    return other


@all_modes
@pytest.mark.parametrize("adopted", [True, False], ids=["with the mixin", "plain"])
def test_siblings_share_the_components(adopted: bool, config: dict[str, Any], device: torch.device) -> None:
    reference, pipe = both("flux", config, device)
    expected = [run(reference)] + [call(sibling(kind, reference)) for kind, call in SIBLINGS]
    first = pipe.offload_report()
    others = [(sibling(kind, pipe), call) for kind, call in SIBLINGS]
    if adopted:
        others = [(with_offload(other), call) for other, call in others]
        assert all(other.offload_report().components == first.components for other, _ in others)
    for _ in range(2):
        assert_equal([run(pipe)] + [call(other) for other, call in others], expected)
    pipe.disable_offload()
    pipe.to(device)
    assert_equal([run(pipe)] + [call(other) for other, call in others], expected)


@all_modes
def test_offload_enabled_through_a_sibling(config: dict[str, Any], device: torch.device) -> None:
    reference = plain("flux").to(device)
    first = with_offload(plain("flux"))
    second = with_offload(sibling(FluxImg2ImgPipeline, first))
    second.enable_offload(config, device=device)
    expected = [run(reference), image_to_image(sibling(FluxImg2ImgPipeline, reference))]
    for _ in range(2):
        assert_equal([run(first), image_to_image(second)], expected)
    assert first.offload_report().mode == config["mode"]
    del second
    assert torch.equal(run(first), expected[0])


@all_modes
def test_auto_pipeline_finds_the_sibling(config: dict[str, Any], device: torch.device) -> None:
    reference, pipe = both("flux", config, device)
    other = sibling(AutoPipelineForImage2Image, pipe)
    assert isinstance(other, FluxImg2ImgPipeline)
    assert torch.equal(image_to_image(other), image_to_image(sibling(FluxImg2ImgPipeline, reference)))


# --- what the caller has set ----------------------------------------------------------------------------------------


@pytest.fixture
def defaults() -> Iterator[None]:
    """Puts torch's default device and dtype back."""
    dtype, place = torch.get_default_dtype(), torch.get_default_device()
    yield
    torch.set_default_device(place)
    torch.set_default_dtype(dtype)


@all_modes
@pytest.mark.parametrize("when", ["before enable", "behind enable"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_default_dtype(
    dtype: torch.dtype, when: str, config: dict[str, Any], device: torch.device, defaults: None
) -> None:
    reference, pipe = plain("flux").to(device), with_offload(plain("flux"))
    if when == "before enable":
        torch.set_default_dtype(dtype)
    pipe.enable_offload(config, device=device)
    torch.set_default_dtype(dtype)
    latents = numbers(torch.device("cpu"), 1, SIZE, 16).float()
    expected, got = [
        [run(each, latents=latents.to(device)) for _ in range(2)] + on_host(encode_prompt(each, device))
        for each in (reference, pipe)
    ]
    assert_equal(got, expected)
    torch.set_default_dtype(torch.float32)
    assert torch.equal(run(pipe), run(reference))


@all_modes
@pytest.mark.parametrize("place", ["accelerator", "cpu"])
@pytest.mark.parametrize("way", ["set_default_device", "with"])
def test_default_device(way: str, place: str, config: dict[str, Any], device: torch.device, defaults: None) -> None:
    reference, pipe = plain("flux").to(device), with_offload(plain("flux"))
    expected = run(reference)
    chosen = device if place == "accelerator" else torch.device("cpu")

    def enable_and_run() -> list[torch.Tensor]:
        pipe.enable_offload(config, device=device)
        return [run(pipe), run(pipe)]

    if way == "with":
        with chosen:
            got = enable_and_run()
    else:
        torch.set_default_device(chosen)
        got = enable_and_run()
    assert_equal(got, [expected, expected])


@all_modes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_around_a_call(dtype: torch.dtype, config: dict[str, Any], device: torch.device) -> None:
    reference, pipe = both("flux", config, device)
    with torch.autocast(device.type, dtype):
        expected = run(reference)
        assert_equal([run(pipe), run(pipe)], [expected, expected])
    assert not torch.equal(expected, run(reference))
    assert torch.equal(run(pipe), run(reference))


@all_modes
def test_casts_while_on(config: dict[str, Any], device: torch.device) -> None:
    reference, pipe = both("flux", config, device)
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        for each in (reference, pipe):
            each.to(dtype)
        assert pipe.transformer.dtype == pipe.text_encoder_2.dtype == dtype
        expected = run(reference)
        assert_equal([run(pipe), run(pipe)], [expected, expected])


# --- hooks inside encoders ------------------------------------------------------------------------------------------


@all_modes
@pytest.mark.parametrize("when", ["before enable", "behind enable"])
def test_hooks_inside_encoders_and_blocks(when: str, config: dict[str, Any], device: torch.device) -> None:
    """They fire as often as on a resident pipeline, see weights on the device, and may change what is computed."""
    reference, pipe = plain("flux").to(device), with_offload(plain("flux"))
    places: set[torch.device] = set()

    def watch(each: Any) -> list[str]:
        seen: list[str] = []

        def behind(module: Any, args: Any, result: Any, name: str = "") -> Any:
            seen.append(name)
            places.update(parameter.device for parameter in module.parameters(recurse=False))
            return result * 1.01 if isinstance(result, torch.Tensor) else None

        named = {
            "clip layer": clip_body(each).encoder.layers[1],
            "clip mlp": clip_body(each).encoder.layers[0].mlp.fc1,
            "clip norm": clip_body(each).final_layer_norm,
            "t5 query": each.text_encoder_2.encoder.block[0].layer[0].SelfAttention.q,
            "t5 block": each.text_encoder_2.encoder.block[1],
            "t5 embeddings": each.text_encoder_2.encoder.embed_tokens,
            "attention": each.transformer.transformer_blocks[1].attn.to_q,
            "single": each.transformer.single_transformer_blocks[0].proj_mlp,
            "shell": each.transformer.x_embedder,
        }
        for name, one in named.items():
            one.register_forward_hook(functools.partial(behind, name=name))
        return seen

    simple = run(reference)
    theirs = watch(reference)
    ours = watch(pipe) if when == "before enable" else None
    pipe.enable_offload(config, device=device)
    ours = ours if ours is not None else watch(pipe)
    expected = run(reference)
    assert not torch.equal(expected, simple)
    assert torch.equal(run(pipe), expected)
    assert ours == theirs and len(set(ours)) == 9
    assert places == {device}


# --- a text encoder that generates ----------------------------------------------------------------------------------

TOKENS = 12


def rewrite(pipe: Any, device: torch.device) -> torch.Tensor:
    mask = torch.ones(1, 8, dtype=torch.long).to(device)
    return pipe.text_encoder.generate(ids(device), attention_mask=mask, max_new_tokens=TOKENS, min_new_tokens=TOKENS)


@torch.no_grad()
def test_one_generation_is_one_phase_of_model_level_offload(device: torch.device) -> None:
    """Each token is a call of the encoder's root: it is copied once, and not again for every token."""
    reference, pipe = both("flux2-klein", MODULE, device)
    expected = rewrite(reference, device)
    assert torch.equal(rewrite(pipe, device), expected)
    report = pipe.offload_report()
    units = next(c.units for c in report.components if c.path == "text_encoder")
    assert units <= report.copies <= units + 1  # the shell may be one more
    assert torch.equal(rewrite(pipe, device), expected)
    assert pipe.offload_report().copies == report.copies  # it was still there
    run(pipe, "flux2-klein")
    assert torch.equal(rewrite(pipe, device), expected)


@torch.no_grad()
def test_one_generation_inside_a_call_is_one_phase(device: torch.device) -> None:
    """As pipelines do that rewrite the prompt before they encode it."""
    _, pipe = both("flux2-klein", MODULE, device)
    run(pipe, "flux2-klein")
    report = pipe.offload_report()
    per_call = report.copies
    encode = pipe.encode_prompt

    def rewriting(*args: Any, **kwargs: Any) -> Any:
        rewrite(pipe, device)
        return encode(*args, **kwargs)

    pipe.encode_prompt = rewriting
    run(pipe, "flux2-klein")
    assert pipe.offload_report().copies - report.copies == per_call


@torch.no_grad()
def test_one_generation_streams_each_layer_once_a_token(device: torch.device) -> None:
    reference, pipe = both("flux2-klein", LAYER, device)
    expected = rewrite(reference, device)
    assert torch.equal(rewrite(pipe, device), expected)
    before = pipe.offload_report().copies
    assert torch.equal(rewrite(pipe, device), expected)
    units = next(c.units for c in pipe.offload_report().components if c.path == "text_encoder")
    assert pipe.offload_report().copies - before <= units * TOKENS + 1
