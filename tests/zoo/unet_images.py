"""U-Nets that make pictures: Stable Diffusion and XL with their variants, latent consistency, class-free diffusion."""

from __future__ import annotations

from typing import Any

import diffusers

from . import case, generator, module
from .parts import (
    NEGATIVE_PROMPT,
    PROMPT,
    autoencoder_kl,
    clip_image_processor,
    clip_text,
    clip_tokenizer,
    clip_vision,
    sample_image,
)

SIZE = 32


def call(**changes: Any) -> dict[str, Any]:
    common = {
        "prompt": PROMPT,
        "negative_prompt": NEGATIVE_PROMPT,
        "height": SIZE,
        "width": SIZE,
        "num_inference_steps": 2,
        "guidance_scale": 5.0,
        "generator": generator(),
        "output_type": "pt",
    }
    return {key: value for key, value in (common | changes).items() if value is not ...}


def picture(seed: int = 0) -> Any:
    return sample_image(SIZE, SIZE, seed)


def mask() -> Any:
    return picture(5).convert("L").point(lambda value: 255 if value > 128 else 0)


def from_picture(**changes: Any) -> dict[str, Any]:
    return call(image=picture(), strength=0.9, num_inference_steps=3, height=..., width=..., **changes)


UNET: dict[str, Any] = {
    "block_out_channels": (16, 32),
    "layers_per_block": 2,
    "sample_size": 16,
    "in_channels": 4,
    "out_channels": 4,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "cross_attention_dim": 32,
    "attention_head_dim": 4,
    "norm_num_groups": 4,
    "transformer_layers_per_block": (1, 2),
}


def unet(**changes: Any) -> Any:
    return module("unet", diffusers.UNet2DConditionModel, **(UNET | changes))


def scheduler() -> Any:
    return diffusers.DDIMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")


def sd_parts(**changes: Any) -> dict[str, Any]:
    return {
        "unet": unet(**changes),
        "scheduler": scheduler(),
        "vae": autoencoder_kl(),
        "text_encoder": clip_text(length=77),
        "tokenizer": clip_tokenizer(77),
        "safety_checker": None,
        "feature_extractor": None,
    }


def plus_image_encoder(parts: dict[str, Any]) -> dict[str, Any]:
    return parts | {"image_encoder": None}


def sd() -> dict[str, Any]:
    return plus_image_encoder(sd_parts())


case("StableDiffusionPipeline", call)(sd)
case("StableDiffusionImg2ImgPipeline", from_picture)(sd)
case("StableDiffusionInpaintPipeline", lambda: call(image=picture(), mask_image=mask()))(
    lambda: plus_image_encoder(sd_parts(in_channels=9))
)
case("StableDiffusionInstructPix2PixPipeline", lambda: call(image=picture(), height=..., width=...))(
    lambda: plus_image_encoder(sd_parts(in_channels=8))
)
case("StableDiffusionPAGPipeline", lambda: call(pag_scale=0.7))(lambda: sd() | {"pag_applied_layers": ["mid"]})


@case("StableDiffusionImageVariationPipeline", lambda: call(image=picture(), prompt=..., negative_prompt=...))
def _variation() -> dict[str, Any]:
    parts = sd_parts()
    del parts["text_encoder"], parts["tokenizer"]
    return parts | {"image_encoder": clip_vision(), "feature_extractor": clip_image_processor()}


@case("LatentConsistencyModelPipeline", lambda: call(negative_prompt=...))
def _lcm() -> dict[str, Any]:
    return plus_image_encoder(sd_parts(time_cond_proj_dim=16)) | {"scheduler": diffusers.LCMScheduler()}


def controlnet(**changes: Any) -> Any:
    keys = (
        "block_out_channels",
        "layers_per_block",
        "in_channels",
        "down_block_types",
        "cross_attention_dim",
        "attention_head_dim",
        "norm_num_groups",
        "transformer_layers_per_block",
    )
    config = {key: UNET[key] for key in keys} | {"conditioning_embedding_out_channels": (8, 16)}
    return module("controlnet", diffusers.ControlNetModel, **(config | changes))


case("StableDiffusionControlNetPipeline", lambda: call(image=picture()))(lambda: sd() | {"controlnet": controlnet()})
case("StableDiffusionControlNetPipeline:two", lambda: call(image=[picture(), picture(1)]))(
    lambda: sd() | {"controlnet": [controlnet(), controlnet(block_out_channels=(16, 32))]}
)
case("StableDiffusionControlNetImg2ImgPipeline", lambda: from_picture(control_image=picture(2)))(
    lambda: sd() | {"controlnet": controlnet()}
)
case(
    "StableDiffusionControlNetInpaintPipeline",
    lambda: from_picture(mask_image=mask(), control_image=picture(2)) | {"strength": 1.0},
)(lambda: sd() | {"controlnet": controlnet()})


# An adapter's features meet the U-Net in front of each level's downsampling, so its last level has none.
ADAPTED = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "transformer_layers_per_block": (2, 1),
}


def adapter() -> Any:
    return module(
        "adapter",
        diffusers.T2IAdapter,
        in_channels=3,
        channels=[16, 32],
        num_res_blocks=1,
        downscale_factor=2,
        adapter_type="full_adapter",
    )


case("StableDiffusionAdapterPipeline", lambda: call(image=picture()))(
    lambda: sd_parts(**ADAPTED) | {"adapter": adapter()}
)


XL: dict[str, Any] = {
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 6 * 8 + 32,
    "cross_attention_dim": 64,
}


def xl_parts(**changes: Any) -> dict[str, Any]:
    return {
        "unet": unet(**(XL | changes)),
        "scheduler": diffusers.EulerDiscreteScheduler(beta_schedule="scaled_linear"),
        "vae": autoencoder_kl(),
        "text_encoder": clip_text(length=77),
        "tokenizer": clip_tokenizer(77),
        "text_encoder_2": clip_text("text_encoder_2", projection=True, length=77),
        "tokenizer_2": clip_tokenizer(77),
    }


def xl() -> dict[str, Any]:
    return xl_parts() | {"image_encoder": None, "feature_extractor": None}


case("StableDiffusionXLPipeline", call)(xl)
case("StableDiffusionXLImg2ImgPipeline", from_picture)(xl)
case("StableDiffusionXLInpaintPipeline", lambda: from_picture(mask_image=mask()))(xl)
case("StableDiffusionXLPAGPipeline", lambda: call(pag_scale=0.7))(lambda: xl() | {"pag_applied_layers": ["mid"]})
case("StableDiffusionXLControlNetPipeline", lambda: call(image=picture()))(
    lambda: xl() | {"controlnet": controlnet(**XL)}
)
case("StableDiffusionXLControlNetImg2ImgPipeline", lambda: from_picture(control_image=picture(2)))(
    lambda: xl() | {"controlnet": controlnet(**XL)}
)
case("StableDiffusionXLAdapterPipeline", lambda: call(image=picture()))(
    lambda: xl_parts(**ADAPTED) | {"adapter": adapter(), "image_encoder": None, "feature_extractor": None}
)
case("StableDiffusionXLInstructPix2PixPipeline", lambda: call(image=picture()))(lambda: xl_parts(in_channels=8))


def pixels(**changes: Any) -> Any:
    config = {
        "block_out_channels": (16, 32),
        "layers_per_block": 2,
        "sample_size": 16,
        "in_channels": 3,
        "out_channels": 3,
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        "norm_num_groups": 4,
    }
    return module("unet", diffusers.UNet2DModel, **(config | changes))


def _plain_arguments() -> dict[str, Any]:
    return {"batch_size": 2, "num_inference_steps": 2, "generator": generator(), "output_type": "np"}


case("DDIMPipeline", _plain_arguments)(lambda: {"unet": pixels(), "scheduler": diffusers.DDIMScheduler()})
case("DDPMPipeline", _plain_arguments)(lambda: {"unet": pixels(), "scheduler": diffusers.DDPMScheduler()})
