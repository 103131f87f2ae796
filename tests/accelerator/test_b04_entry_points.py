"""B04: whatever pipelines and people call besides `forward` works from enable on, before any call of the pipeline."""

from __future__ import annotations

from collections.abc import Callable
from pipes import DIT_LAYERS, LAYER, MODULE, both_modes, device_bytes, offloaded, output, resident
from typing import Any

import pytest
import torch

all_modes = pytest.mark.parametrize("config", [LAYER, DIT_LAYERS, MODULE], ids=["layer", "dit", "module"])
Call = Callable[[Any, torch.device], Any]


def ids(pipe: Any, device: torch.device) -> torch.Tensor:
    vocabulary = pipe.text_encoder.get_input_embeddings().weight.shape[0]
    return (torch.arange(8, device=device) * 7 % vocabulary).unsqueeze(0)


def pixels(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0)) * 2 - 1


def encode_wan_prompt(pipe: Any, device: torch.device) -> Any:
    return pipe.encode_prompt("a boat", "a ship", max_sequence_length=8)


def encode_flux_prompt(pipe: Any, device: torch.device) -> Any:
    return pipe.encode_prompt("a boat", max_sequence_length=16, text_encoder_out_layers=(1, 3, 5))


def encode_wan_video(pipe: Any, device: torch.device) -> Any:
    return pipe.vae.encode(pixels(1, 3, 5, 32, 32).to(device)).latent_dist.mode()


def decode_wan_video(pipe: Any, device: torch.device) -> Any:
    return pipe.vae.decode(pixels(1, 16, 2, 4, 4).to(device), return_dict=False)[0]


def tiles_of_a_wan_video(pipe: Any, device: torch.device) -> Any:
    pipe.vae.enable_tiling(32, 32, 24, 24)
    pipe.vae.enable_slicing()
    latents = pipe.vae.encode(pixels(1, 3, 5, 64, 64).to(device)).latent_dist.mode()
    return pipe.vae.decode(latents, return_dict=False)[0]


def encode_and_decode_an_image(pipe: Any, device: torch.device) -> Any:
    latents = pipe.vae.encode(pixels(1, 3, 64, 64).to(device)).latent_dist.mode()
    return pipe.vae.decode(latents, return_dict=False)[0]


def tiles_of_an_image(pipe: Any, device: torch.device) -> Any:
    pipe.vae.enable_tiling()
    pipe.vae.tile_sample_min_size, pipe.vae.tile_latent_min_size = 32, 4
    return encode_and_decode_an_image(pipe, device)


def call_text_encoder(pipe: Any, device: torch.device) -> Any:
    return pipe.text_encoder(ids(pipe, device))[0]


def call_embeddings(pipe: Any, device: torch.device) -> Any:
    return pipe.text_encoder.get_input_embeddings()(ids(pipe, device))


def read_embeddings(pipe: Any, device: torch.device) -> Any:
    return pipe.text_encoder.get_input_embeddings().weight[3:7]


def call_stack(pipe: Any, device: torch.device) -> Any:
    return pipe.text_encoder.encoder(input_ids=ids(pipe, device))[0]


def call_language_model(pipe: Any, device: torch.device) -> Any:
    return pipe.text_encoder.model.language_model(input_ids=ids(pipe, device)).last_hidden_state


def call_inner_model(pipe: Any, device: torch.device) -> Any:
    return pipe.text_encoder.model(input_ids=ids(pipe, device)).last_hidden_state


def call_head(pipe: Any, device: torch.device) -> Any:
    return pipe.text_encoder.lm_head(pixels(1, 4, 32).to(device))


def generate(pipe: Any, device: torch.device) -> Any:
    return pipe.text_encoder.generate(
        ids(pipe, device), attention_mask=torch.ones(1, 8, dtype=torch.long, device=device), max_new_tokens=6,
        do_sample=False, use_cache=True,
    )  # fmt: skip


def generate_without_cache(pipe: Any, device: torch.device) -> Any:
    return pipe.text_encoder.generate(
        ids(pipe, device), attention_mask=torch.ones(1, 8, dtype=torch.long, device=device), max_new_tokens=3,
        do_sample=False, use_cache=False,
    )  # fmt: skip


def wan_block_inputs(pipe: Any, device: torch.device) -> tuple[torch.Tensor, ...]:
    hidden = pixels(1, 4, 64).to(device)
    rotary = pipe.transformer.rope(torch.zeros(1, 16, 1, 4, 4, device=device))
    return hidden, pixels(1, 8, 64).to(device), pixels(1, 6, 64).to(device), rotary


def call_first_block(pipe: Any, device: torch.device) -> Any:
    return pipe.transformer.blocks[0](*wan_block_inputs(pipe, device))


def call_blocks_backwards(pipe: Any, device: torch.device) -> Any:
    hidden, *rest = wan_block_inputs(pipe, device)
    for block in reversed(pipe.transformer.blocks):
        hidden = block(hidden, *rest)
    return hidden


def call_forward_of_a_block(pipe: Any, device: torch.device) -> Any:
    return pipe.transformer.blocks[1].forward(*wan_block_inputs(pipe, device))


def call_embedder(pipe: Any, device: torch.device) -> Any:
    return pipe.transformer.condition_embedder(torch.tensor([500], device=device), pixels(1, 8, 32).to(device), None)[0]


def call_projection(pipe: Any, device: torch.device) -> Any:
    return pipe.transformer.proj_out(pixels(1, 4, 64).to(device))


def call_patches(pipe: Any, device: torch.device) -> Any:
    return pipe.transformer.patch_embedding(pixels(1, 16, 1, 4, 4).to(device))


def call_transformer(pipe: Any, device: torch.device) -> Any:
    return pipe.transformer(
        pixels(1, 16, 1, 4, 4).to(device), torch.tensor([500], device=device), pixels(1, 8, 32).to(device)
    ).sample


def call_transformers_forward(pipe: Any, device: torch.device) -> Any:
    return pipe.transformer.forward(
        pixels(1, 16, 1, 4, 4).to(device), torch.tensor([500], device=device), pixels(1, 8, 32).to(device)
    ).sample


WAN = [
    encode_wan_prompt,
    encode_wan_video,
    decode_wan_video,
    tiles_of_a_wan_video,
    call_text_encoder,
    call_embeddings,
    read_embeddings,
    call_stack,
    call_first_block,
    call_blocks_backwards,
    call_forward_of_a_block,
    call_embedder,
    call_projection,
    call_patches,
    call_transformer,
    call_transformers_forward,
]
FLUX2 = [
    encode_flux_prompt,
    encode_and_decode_an_image,
    tiles_of_an_image,
    call_text_encoder,
    call_embeddings,
    read_embeddings,
    call_language_model,
    call_inner_model,
    call_head,
    generate,
    generate_without_cache,
]
KLEIN = [encode_flux_prompt, call_text_encoder, call_embeddings, read_embeddings, call_inner_model, call_head, generate]
CASES = [(family, call) for family, calls in (("wan", WAN), ("flux2", FLUX2), ("flux2-klein", KLEIN)) for call in calls]


def on_host(value: Any) -> list[torch.Tensor]:
    values = value if isinstance(value, (tuple, list)) else [value]
    return [tensor.detach().cpu() for tensor in values if isinstance(tensor, torch.Tensor)]


@all_modes
@pytest.mark.parametrize(("family", "call"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_call_works_before_any_call_of_the_pipeline(
    family: str, call: Call, config: dict[str, Any], device: torch.device
) -> None:
    reference, pipe = resident(device, family, layers=2), offloaded(config, device, family, layers=2)
    with torch.no_grad():
        expected = on_host(call(reference, device))
        assert expected and all(torch.isfinite(tensor).all() for tensor in expected if tensor.is_floating_point())
        for _ in range(2):
            got = on_host(call(pipe, device))
            assert len(got) == len(expected)
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, expected, strict=True))


@pytest.mark.parametrize("family", ["wan", "flux2"])
@both_modes
def test_calls_between_and_behind_calls_of_the_pipeline(
    family: str, config: dict[str, Any], device: torch.device
) -> None:
    reference, pipe = resident(device, family, layers=2), offloaded(config, device, family, layers=2)
    calls = [call for name, call in CASES if name == family and "tiles" not in call.__name__]
    expected = output(reference, family)
    for call in calls:
        with torch.no_grad():
            theirs, ours = on_host(call(reference, device)), on_host(call(pipe, device))
        assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True)), call.__name__
    assert torch.equal(output(pipe, family), expected)
    for call in calls:
        with torch.no_grad():
            theirs, ours = on_host(call(reference, device)), on_host(call(pipe, device))
        assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True)), call.__name__
    assert torch.equal(output(pipe, family), expected)


@both_modes
def test_direct_calls_leave_nothing_on_the_device_behind_the_next_pipeline_call(
    config: dict[str, Any], device: torch.device
) -> None:
    pipe = offloaded(config, device, layers=2)
    output(pipe)
    idle = device_bytes(device, pipe)
    with torch.no_grad():
        for call in WAN:
            call(pipe, device)
    output(pipe)
    assert device_bytes(device, pipe) == idle


@both_modes
def test_gradients_asked_for_are_no_trouble(config: dict[str, Any], device: torch.device) -> None:
    reference, pipe = resident(device, layers=2), offloaded(config, device, layers=2)
    assert any(parameter.requires_grad for parameter in pipe.text_encoder.parameters())
    theirs = pipe_embeds(reference)
    ours = pipe_embeds(pipe)  # encode_prompt has no no_grad of its own
    assert torch.equal(ours, theirs)


def pipe_embeds(pipe: Any) -> torch.Tensor:
    return pipe.encode_prompt("a boat", "a ship", max_sequence_length=8)[0].detach().cpu()


@both_modes
def test_small_buffers_are_where_they_are_needed(config: dict[str, Any], device: torch.device) -> None:
    pipe = offloaded(config, device, "flux2", layers=2)
    with torch.no_grad():
        call_language_model(pipe, device)
    assert pipe.text_encoder.device == device
    assert next(iter(pipe.text_encoder.model.language_model.rotary_emb.buffers())) is not None
    assert pipe.vae.bn.running_mean.device == device
