"""What is built like FLUX.1 and is not in flux1.py: inpainting variants, Redux, Bria, Ovis-Image."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers
from diffusers import AutoencoderKLWan
from diffusers.pipelines.flux.modeling_flux import ReduxImageEncoder

from . import case, configured, module
from .flux1 import SIZE, TRUE_CFG, call, flux_parts, flux_vae, mask, picture, with_encoder
from .parts import (
    NEGATIVE_PROMPT,
    PROMPT,
    autoencoder_kl,
    clip_text,
    clip_tokenizer,
    flow_scheduler,
    qwen2_tokenizer,
    t5_encoder,
    t5_tokenizer,
)

# A part of the steps is run from the picture on: two of three.
FROM_PICTURE: dict[str, Any] = {"strength": 0.9, "num_inference_steps": 3}

case(
    "FluxControlInpaintPipeline",
    lambda: call(image=picture(1), control_image=picture(), mask_image=mask(), **FROM_PICTURE),
)(lambda: flux_parts(in_channels=32, out_channels=16))
case(
    "FluxKontextInpaintPipeline",
    lambda: call(
        image=picture(),
        mask_image=mask(),
        image_reference=picture(2),
        max_area=SIZE * SIZE,
        _auto_resize=False,
        **TRUE_CFG,
        **FROM_PICTURE,
    ),
)(lambda: with_encoder(flux_parts(guidance_embeds=True)))


@case("FluxPriorReduxPipeline", lambda: {"image": picture(), "prompt": PROMPT})
def _redux() -> dict[str, Any]:
    vision = transformers.SiglipVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
    )
    return {
        "image_encoder": configured("image_encoder", transformers.SiglipVisionModel, vision),
        "feature_extractor": transformers.SiglipImageProcessorPil(size={"height": 32, "width": 32}),
        "image_embedder": module("image_embedder", ReduxImageEncoder, redux_dim=32, txt_in_features=32),
        "text_encoder": clip_text(length=77),
        "text_encoder_2": t5_encoder("text_encoder_2"),
        "tokenizer": clip_tokenizer(77),
        "tokenizer_2": t5_tokenizer(),
    }


BRIA: dict[str, Any] = {
    "patch_size": 1,
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "axes_dims_rope": (4, 4, 8),
}


@case("BriaPipeline", lambda: call(negative_prompt=NEGATIVE_PROMPT))
def _bria() -> dict[str, Any]:
    return {
        "transformer": module(
            "transformer", diffusers.BriaTransformer2DModel, **BRIA, in_channels=16, joint_attention_dim=32
        ),
        "scheduler": flow_scheduler(use_dynamic_shifting=True),
        "vae": autoencoder_kl(shift_factor=0.06),
        "text_encoder": t5_encoder(),
        "tokenizer": t5_tokenizer(),
    }


def language_model(name: str, cls: Any, config: Any, *, layers: int = 3, **changes: Any) -> Any:
    """A decoder-only model `cls` for `qwen2_tokenizer()`, 32 wide."""
    settings: dict[str, Any] = {
        "vocab_size": len(qwen2_tokenizer()),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return configured(name, cls, config(**(settings | changes)))


def _fibo_arguments() -> dict[str, Any]:
    return call(negative_prompt=NEGATIVE_PROMPT, height=64, width=64)


@case("BriaFiboPipeline", _fibo_arguments)
def _bria_fibo() -> dict[str, Any]:
    """Each block takes the states of one layer of the text encoder, through its own entry of a list that runs first."""
    vae = module(
        "vae", AutoencoderKLWan, base_dim=4, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
        temperal_downsample=[False, True, True],
    )  # fmt: skip
    transformer = module(
        "transformer",
        diffusers.BriaFiboTransformer2DModel,
        **BRIA,
        in_channels=16,
        joint_attention_dim=64,
        text_encoder_dim=32,
    )
    return {
        "transformer": transformer,
        "scheduler": flow_scheduler(use_dynamic_shifting=True),
        "vae": vae,
        "text_encoder": language_model(
            "text_encoder", transformers.SmolLM3ForCausalLM, transformers.SmolLM3Config, layers=5
        ),
        "tokenizer": qwen2_tokenizer(),
    }


@case("OvisImagePipeline", lambda: call(negative_prompt=NEGATIVE_PROMPT, max_sequence_length=64))
def _ovis() -> dict[str, Any]:
    transformer = module(
        "transformer",
        diffusers.OvisImageTransformer2DModel,
        **BRIA,
        in_channels=16,
        out_channels=16,
        joint_attention_dim=32,
    )
    return {
        "scheduler": flow_scheduler(use_dynamic_shifting=True),
        "vae": flux_vae(),
        "text_encoder": language_model("text_encoder", transformers.Qwen3Model, transformers.Qwen3Config, head_dim=8),
        "tokenizer": qwen2_tokenizer(),
        "transformer": transformer,
    }
