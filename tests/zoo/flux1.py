"""FLUX.1, Stable Diffusion 3, and what is built like them."""

from __future__ import annotations

from typing import Any

import diffusers

from . import case, generator, module
from .parts import (
    NEGATIVE_PROMPT,
    PROMPT,
    autoencoder_kl,
    clip_text,
    clip_tokenizer,
    flow_scheduler,
    sample_image,
    t5_encoder,
    t5_tokenizer,
)

SIZE = 32


def call(**changes: Any) -> dict[str, Any]:
    common = {
        "prompt": PROMPT,
        "height": SIZE,
        "width": SIZE,
        "num_inference_steps": 2,
        "guidance_scale": 4.0,
        "generator": generator(),
        "output_type": "pt",
        "max_sequence_length": 24,
    }
    return {key: value for key, value in (common | changes).items() if value is not ...}


def picture(seed: int = 0) -> Any:
    return sample_image(SIZE, SIZE, seed)


def mask() -> Any:
    return picture(5).convert("L").point(lambda value: 255 if value > 128 else 0)


FLUX: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 32,
    "axes_dims_rope": (4, 4, 8),
}


def flux_vae(latents: int = 4) -> Any:
    return autoencoder_kl(latents=latents, use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.06)


def flux_parts(**transformer: Any) -> dict[str, Any]:
    return {
        "scheduler": flow_scheduler(),
        "text_encoder": clip_text(length=77),
        "text_encoder_2": t5_encoder("text_encoder_2"),
        "tokenizer": clip_tokenizer(77),
        "tokenizer_2": t5_tokenizer(),
        "transformer": module("transformer", diffusers.FluxTransformer2DModel, **(FLUX | transformer)),
        "vae": flux_vae(),
    }


def with_encoder(parts: dict[str, Any]) -> dict[str, Any]:
    return parts | {"image_encoder": None, "feature_extractor": None}


# A second, negative pass for the pipelines that have one.
TRUE_CFG = {"negative_prompt": NEGATIVE_PROMPT, "true_cfg_scale": 2.0}

case("FluxPipeline", lambda: call(**TRUE_CFG))(lambda: with_encoder(flux_parts(guidance_embeds=True)))
case("FluxImg2ImgPipeline", lambda: call(image=picture(), strength=0.9, num_inference_steps=3))(
    lambda: with_encoder(flux_parts())
)
case("FluxInpaintPipeline", lambda: call(image=picture(), mask_image=mask(), strength=0.9, num_inference_steps=3))(
    lambda: with_encoder(flux_parts())
)
case("FluxFillPipeline", lambda: call(image=picture(), mask_image=mask()))(
    lambda: flux_parts(in_channels=16 + 16 + 4 * 4, out_channels=16)
)
case("FluxControlPipeline", lambda: call(control_image=picture()))(lambda: flux_parts(in_channels=32, out_channels=16))
case("FluxControlImg2ImgPipeline", lambda: call(image=picture(1), control_image=picture(), strength=0.9))(
    lambda: flux_parts(in_channels=32, out_channels=16)
)
case("FluxKontextPipeline", lambda: call(image=picture(), max_area=SIZE * SIZE, _auto_resize=False))(
    lambda: with_encoder(flux_parts())
)


def flux_controlnet() -> Any:
    return module("controlnet", diffusers.FluxControlNetModel, **(FLUX | {"num_layers": 2, "num_single_layers": 2}))


CONTROLLED = {"control_image": picture(), "controlnet_conditioning_scale": 0.7}
case("FluxControlNetPipeline", lambda: call(**CONTROLLED))(
    lambda: with_encoder(flux_parts() | {"controlnet": flux_controlnet()})
)
case("FluxControlNetImg2ImgPipeline", lambda: call(image=picture(1), strength=0.9, **CONTROLLED))(
    lambda: flux_parts() | {"controlnet": flux_controlnet()}
)
case("FluxControlNetInpaintPipeline", lambda: call(image=picture(1), mask_image=mask(), strength=0.9, **CONTROLLED))(
    lambda: flux_parts() | {"controlnet": flux_controlnet()}
)


def chroma_parts() -> dict[str, Any]:
    transformer = module(
        "transformer",
        diffusers.ChromaTransformer2DModel,
        patch_size=1,
        in_channels=16,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 4, 8),
        approximator_num_channels=8,
        approximator_hidden_dim=16,
        approximator_layers=2,
    )
    return {
        "scheduler": flow_scheduler(),
        "vae": flux_vae(),
        "text_encoder": t5_encoder(),
        "tokenizer": t5_tokenizer(),
        "transformer": transformer,
        "image_encoder": None,
        "feature_extractor": None,
    }


case("ChromaPipeline", lambda: call(negative_prompt=NEGATIVE_PROMPT))(chroma_parts)
case("ChromaImg2ImgPipeline", lambda: call(negative_prompt=NEGATIVE_PROMPT, image=picture(), strength=0.9))(
    chroma_parts
)

SD3: dict[str, Any] = {
    "sample_size": 16,
    "patch_size": 2,
    "in_channels": 16,
    "num_layers": 4,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "joint_attention_dim": 64,
    "caption_projection_dim": 32,
    "pooled_projection_dim": 64,
    "out_channels": 16,
    "pos_embed_max_size": 16,
}


def sd3_parts() -> dict[str, Any]:
    return {
        "scheduler": flow_scheduler(),
        "text_encoder": clip_text(projection=True, length=77),
        "text_encoder_2": clip_text("text_encoder_2", projection=True, length=77),
        "text_encoder_3": t5_encoder("text_encoder_3", width=64),
        "tokenizer": clip_tokenizer(77),
        "tokenizer_2": clip_tokenizer(77),
        "tokenizer_3": t5_tokenizer(),
        "transformer": module("transformer", diffusers.SD3Transformer2DModel, **SD3),
        "vae": flux_vae(16),
    }


def sd3_call(**changes: Any) -> dict[str, Any]:
    return call(negative_prompt=NEGATIVE_PROMPT, **changes)


SKIP = {
    "skip_guidance_layers": [1, 2],
    "skip_layer_guidance_start": 0.0,
    "skip_layer_guidance_stop": 1.0,
    "num_inference_steps": 3,
}
case("StableDiffusion3Pipeline", sd3_call)(sd3_parts)
case("StableDiffusion3Pipeline:skipped layers", lambda: sd3_call(**SKIP))(sd3_parts)
case("StableDiffusion3Img2ImgPipeline", lambda: sd3_call(image=picture(), strength=0.9, num_inference_steps=3))(
    sd3_parts
)
case(
    "StableDiffusion3InpaintPipeline",
    lambda: sd3_call(image=picture(), mask_image=mask(), strength=0.9, num_inference_steps=3),
)(lambda: with_encoder(sd3_parts()))


def sd3_controlnet() -> Any:
    return module("controlnet", diffusers.SD3ControlNetModel, **(SD3 | {"num_layers": 2, "dual_attention_layers": ()}))


case("StableDiffusion3ControlNetPipeline", lambda: sd3_call(**CONTROLLED))(
    lambda: sd3_parts() | {"controlnet": sd3_controlnet()}
)
case("StableDiffusion3PAGPipeline", lambda: sd3_call(pag_scale=0.7))(
    lambda: sd3_parts() | {"pag_applied_layers": ["blocks.1"]}
)
