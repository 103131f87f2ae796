"""U-Nets that make films: AnimateDiff and Stable Video Diffusion."""

from __future__ import annotations

from typing import Any

import diffusers

from . import case, generator, module
from .parts import clip_image_processor, clip_vision, sample_image
from .unet_images import UNET, call, controlnet, picture, sd_parts


def motion_adapter() -> Any:
    return module(
        "motion_adapter",
        diffusers.MotionAdapter,
        block_out_channels=UNET["block_out_channels"],
        motion_layers_per_block=2,
        motion_norm_num_groups=2,
        motion_num_attention_heads=4,
    )


def animate_parts() -> dict[str, Any]:
    parts = sd_parts(transformer_layers_per_block=1)
    del parts["safety_checker"]
    return parts | {"motion_adapter": motion_adapter(), "image_encoder": None}


FRAMES = {"num_frames": 4}
case("AnimateDiffPipeline", lambda: call(**FRAMES))(animate_parts)
case(
    "AnimateDiffVideoToVideoPipeline",
    lambda: call(
        video=[picture(seed) for seed in range(4)], height=..., width=..., strength=0.9, num_inference_steps=3
    ),
)(animate_parts)
case("AnimateDiffPAGPipeline", lambda: call(pag_scale=0.7, **FRAMES))(
    lambda: animate_parts() | {"pag_applied_layers": ["mid"]}
)
case(
    "AnimateDiffControlNetPipeline",
    lambda: call(conditioning_frames=[picture(seed) for seed in range(4)], **FRAMES),
)(lambda: animate_parts() | {"controlnet": controlnet(transformer_layers_per_block=1)})


def _video_arguments() -> dict[str, Any]:
    return {
        "image": sample_image(32, 32),
        "height": 32,
        "width": 32,
        "num_frames": 2,
        "num_inference_steps": 2,
        "min_guidance_scale": 1.0,
        "max_guidance_scale": 2.5,
        "fps": 7,
        "motion_bucket_id": 127,
        "noise_aug_strength": 0.02,
        "generator": generator(),
        "output_type": "pt",
    }


@case("StableVideoDiffusionPipeline", _video_arguments)
def _stable_video() -> dict[str, Any]:
    unet = module(
        "unet",
        diffusers.UNetSpatioTemporalConditionModel,
        block_out_channels=(32, 64),
        layers_per_block=2,
        sample_size=16,
        in_channels=8,
        out_channels=4,
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        cross_attention_dim=32,
        num_attention_heads=8,
        projection_class_embeddings_input_dim=96,
        addition_time_embed_dim=32,
    )
    vae = module(
        "vae",
        diffusers.AutoencoderKLTemporalDecoder,
        block_out_channels=(32, 32),
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        latent_channels=4,
    )
    scheduler = diffusers.EulerDiscreteScheduler(
        beta_schedule="scaled_linear",
        prediction_type="v_prediction",
        sigma_max=700.0,
        sigma_min=0.002,
        timestep_spacing="leading",
        timestep_type="continuous",
        use_karras_sigmas=True,
        interpolation_type="linear",
    )
    return {
        "vae": vae,
        "image_encoder": clip_vision(image=224),
        "unet": unet,
        "scheduler": scheduler,
        "feature_extractor": clip_image_processor(),
    }
