"""More of Stable Diffusion, XL and their films: perturbed attention, the union ControlNet, IP-Adapters, the refiner,
depth, upscalers, unCLIP, and what is older.

The most used of them, and the parts that all share, are in unet_images.py and unet_films.py.
"""

from __future__ import annotations

from typing import Any

import diffusers
import torch
import transformers
from diffusers.pipelines.deprecated.paint_by_example import PaintByExampleImageEncoder

from . import case, configured, generator, module
from .parts import autoencoder_kl, clip_image_processor, clip_text, clip_tokenizer, clip_vision
from .unet_films import FRAMES, animate_parts, motion_adapter
from .unet_images import (
    UNET,
    XL,
    call,
    controlnet,
    from_picture,
    mask,
    picture,
    plus_image_encoder,
    sd,
    sd_parts,
    unet,
    xl,
    xl_parts,
)

# --- Guidance by perturbed attention ----------------------------------------------------------------------------------

PERTURBED = {"pag_scale": 0.7}
MIDDLE = {"pag_applied_layers": ["mid"]}


def sd_controlled() -> dict[str, Any]:
    return sd() | {"controlnet": controlnet()}


def xl_controlled() -> dict[str, Any]:
    return xl() | {"controlnet": controlnet(**XL)}


def repainted(**changes: Any) -> dict[str, Any]:
    return from_picture(mask_image=mask(), **changes)


case("StableDiffusionPAGImg2ImgPipeline", lambda: from_picture(**PERTURBED))(lambda: sd() | MIDDLE)
case("StableDiffusionPAGInpaintPipeline", lambda: repainted(**PERTURBED))(lambda: sd() | MIDDLE)
case("StableDiffusionXLPAGImg2ImgPipeline", lambda: from_picture(**PERTURBED))(lambda: xl() | MIDDLE)
case("StableDiffusionXLPAGInpaintPipeline", lambda: repainted(**PERTURBED))(lambda: xl() | MIDDLE)
case("StableDiffusionControlNetPAGPipeline", lambda: call(image=picture(2), **PERTURBED))(
    lambda: sd_controlled() | MIDDLE
)
case("StableDiffusionControlNetPAGInpaintPipeline", lambda: repainted(control_image=picture(2), **PERTURBED))(
    lambda: sd_controlled() | MIDDLE
)
case("StableDiffusionXLControlNetPAGPipeline", lambda: call(image=picture(2), **PERTURBED))(
    lambda: xl_controlled() | MIDDLE
)
case("StableDiffusionXLControlNetPAGImg2ImgPipeline", lambda: from_picture(control_image=picture(2), **PERTURBED))(
    lambda: xl_controlled() | MIDDLE
)

# --- ControlNets ------------------------------------------------------------------------------------------------------

case("StableDiffusionXLControlNetInpaintPipeline", lambda: repainted(control_image=picture(2)))(xl_controlled)


def xl_union() -> dict[str, Any]:
    keys = set(UNET) - {"sample_size", "out_channels", "up_block_types"}
    union = module(
        "controlnet",
        diffusers.ControlNetUnionModel,
        **{key: UNET[key] for key in keys} | XL,
        conditioning_embedding_out_channels=(8, 16),
        num_trans_channel=16,
        num_proj_channel=16,
        num_trans_head=2,
        num_trans_layer=2,
    )
    return xl() | {"controlnet": union}


UNITED = {"control_mode": [0, 3]}
case("StableDiffusionXLControlNetUnionPipeline", lambda: call(control_image=[picture(2), picture(3)], **UNITED))(
    xl_union
)
case(
    "StableDiffusionXLControlNetUnionImg2ImgPipeline",
    lambda: from_picture(control_image=[picture(2), picture(3)], **UNITED),
)(xl_union)
case(
    "StableDiffusionXLControlNetUnionInpaintPipeline",
    lambda: repainted(control_image=[picture(2), picture(3)], **UNITED),
)(xl_union)


def crossing(net: Any) -> Any:
    """A ControlNet-XS adapter, which the pipeline grafts onto the U-Net `net`."""
    config = net.config
    return module(
        "controlnet",
        diffusers.ControlNetXSAdapter,
        conditioning_embedding_out_channels=(8, 16),
        num_attention_heads=config.attention_head_dim,
        block_out_channels=(8, 16),
        base_block_out_channels=config.block_out_channels,
        cross_attention_dim=config.cross_attention_dim,
        down_block_types=config.down_block_types,
        sample_size=config.sample_size,
        transformer_layers_per_block=config.transformer_layers_per_block,
        upcast_attention=False,
        max_norm_num_groups=4,
        use_linear_projection=config.use_linear_projection,
    )


@case("StableDiffusionControlNetXSPipeline", lambda: call(image=picture(2)))
def _crossed() -> dict[str, Any]:
    parts = sd_parts(use_linear_projection=True)
    return parts | {"controlnet": crossing(parts["unet"])}


@case("StableDiffusionXLControlNetXSPipeline", lambda: call(image=picture(2)))
def _xl_crossed() -> dict[str, Any]:
    parts = xl_parts()
    return parts | {"controlnet": crossing(parts["unet"])}


# --- IP-Adapters and the refiner --------------------------------------------------------------------------------------


def with_adapter(parts: dict[str, Any]) -> dict[str, Any]:
    """`parts` with an image encoder and an IP-Adapter inside the U-Net, as `load_ip_adapter` leaves them."""
    net, width = parts["unet"], parts["unet"].config.cross_attention_dim
    sizes = [net.get_submodule(name.rpartition(".")[0]).inner_dim for name in net.attn_processors if "attn2" in name]
    random = generator(7)
    heads = {
        f"{2 * index + 1}.to_{kind}_ip.weight": torch.randn(size, width, generator=random) * 0.2
        for index, size in enumerate(sizes)
        for kind in "kv"
    }
    tokens = 4
    projection = {
        "proj.weight": torch.randn(tokens * width, 32, generator=random) * 0.2,
        "proj.bias": torch.randn(tokens * width, generator=random) * 0.2,
        "norm.weight": 1 + torch.randn(width, generator=random) * 0.2,
        "norm.bias": torch.randn(width, generator=random) * 0.2,
    }
    net._load_ip_adapter_weights([{"image_proj": projection, "ip_adapter": heads}], low_cpu_mem_usage=False)
    return parts | {"image_encoder": clip_vision(), "feature_extractor": clip_image_processor()}


case("StableDiffusionPipeline:ip adapter", lambda: call(ip_adapter_image=picture(3)))(lambda: with_adapter(sd()))
case("StableDiffusionXLPipeline:ip adapter", lambda: call(ip_adapter_image=picture(3)))(lambda: with_adapter(xl()))


@case("StableDiffusionXLImg2ImgPipeline:refiner", from_picture)
def _refiner() -> dict[str, Any]:
    text = {"text_encoder": None, "tokenizer": None, "requires_aesthetics_score": True}
    return xl() | text | {"unet": unet(**XL | {"cross_attention_dim": 32, "projection_class_embeddings_input_dim": 72})}


# --- Few steps, depth, upscaling --------------------------------------------------------------------------------------

case("LatentConsistencyModelImg2ImgPipeline", lambda: from_picture(negative_prompt=...))(
    lambda: plus_image_encoder(sd_parts(time_cond_proj_dim=16)) | {"scheduler": diffusers.LCMScheduler()}
)


@case("StableDiffusionDepth2ImgPipeline", from_picture)
def _depth() -> dict[str, Any]:
    config = transformers.DPTConfig(
        image_size=32,
        patch_size=16,
        hidden_size=32,
        num_hidden_layers=4,
        backbone_out_indices=(0, 1, 2, 3),
        num_attention_heads=4,
        intermediate_size=64,
        neck_hidden_sizes=[8, 8, 16, 16],
        fusion_hidden_size=16,
    )
    parts = sd_parts(in_channels=5)
    del parts["safety_checker"]
    return parts | {
        "depth_estimator": configured("depth_estimator", transformers.DPTForDepthEstimation, config),
        "feature_extractor": transformers.DPTImageProcessorPil(size={"height": 32, "width": 32}),
    }


@case("StableDiffusionUpscalePipeline", lambda: call(image=picture(), height=..., width=...))
def _upscale() -> dict[str, Any]:
    parts = sd_parts(in_channels=7, num_class_embeds=1000)
    return parts | {"low_res_scheduler": diffusers.DDPMScheduler(), "max_noise_level": 350}


@case("StableDiffusionLatentUpscalePipeline", lambda: call(image=picture(), height=..., width=...))
def _latent_upscale() -> dict[str, Any]:
    parts = sd_parts(in_channels=8, time_cond_proj_dim=128 + 32, out_channels=5)
    for name in ("safety_checker", "feature_extractor"):
        del parts[name]
    return parts | {"scheduler": diffusers.EulerDiscreteScheduler(prediction_type="sample")}


# --- unCLIP -----------------------------------------------------------------------------------------------------------


def noised_parts(width: int = 32) -> dict[str, Any]:
    parts = sd_parts(class_embed_type="projection", projection_class_embeddings_input_dim=2 * width)
    for name in ("safety_checker", "feature_extractor"):
        del parts[name]
    return parts | {
        "image_normalizer": module(
            "image_normalizer",
            diffusers.pipelines.stable_diffusion.StableUnCLIPImageNormalizer,
            embedding_dim=width,
        ),
        "image_noising_scheduler": diffusers.DDPMScheduler(beta_schedule="squaredcos_cap_v2"),
    }


def prior(**changes: Any) -> Any:
    config = {
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "embedding_dim": 32,
        "num_layers": 3,
        "num_embeddings": 77,
    }
    return module("prior", diffusers.PriorTransformer, **(config | changes))


@case("StableUnCLIPPipeline", lambda: call(prior_num_inference_steps=2, noise_level=10))
def _unclip() -> dict[str, Any]:
    return noised_parts() | {
        "prior_tokenizer": clip_tokenizer(77),
        "prior_text_encoder": clip_text("prior_text_encoder", projection=True, length=77),
        "prior": prior(),
        "prior_scheduler": diffusers.UnCLIPScheduler(variance_type="fixed_small_log", prediction_type="sample"),
    }


@case("StableUnCLIPImg2ImgPipeline", lambda: call(image=picture(), noise_level=10))
def _unclip_picture() -> dict[str, Any]:
    return noised_parts() | {"image_encoder": clip_vision(), "feature_extractor": clip_image_processor()}


# --- Older variants ---------------------------------------------------------------------------------------------------

BOXES = {
    "gligen_phrases": ["a red boat", "a lake"],
    "gligen_boxes": [[0.1, 0.2, 0.6, 0.8], [0.0, 0.5, 1.0, 1.0]],
    "gligen_scheduled_sampling_beta": 1.0,
}
case("StableDiffusionGLIGENPipeline", lambda: call(**BOXES))(lambda: sd_parts(attention_type="gated"))
case("StableDiffusionPanoramaPipeline", lambda: call(view_batch_size=2, width=64))(sd)
case("StableDiffusionSAGPipeline", lambda: call(sag_scale=0.7))(sd)
case("StableDiffusionLDM3DPipeline", lambda: call(output_type="np"))(
    lambda: sd() | {"vae": autoencoder_kl(in_channels=6, out_channels=6)}
)
case("SemanticStableDiffusionPipeline", lambda: call(editing_prompt=["a green boat"], edit_warmup_steps=1))(sd_parts)


@case(
    "PaintByExamplePipeline",
    lambda: call(image=picture(), mask_image=mask(), example_image=picture(3), prompt=..., negative_prompt=...),
)
def _paint_by_example() -> dict[str, Any]:
    parts = sd_parts(in_channels=9)
    del parts["text_encoder"], parts["tokenizer"]
    config = clip_vision().config
    return parts | {
        "image_encoder": configured("image_encoder", PaintByExampleImageEncoder, config),
        "feature_extractor": clip_image_processor(),
    }


# --- Films ------------------------------------------------------------------------------------------------------------


@case("AnimateDiffSDXLPipeline", lambda: call(**FRAMES))
def _animate_xl() -> dict[str, Any]:
    parts = xl_parts(transformer_layers_per_block=(1, 2))
    return parts | {"motion_adapter": motion_adapter(), "image_encoder": None, "feature_extractor": None}


@case(
    "AnimateDiffSparseControlNetPipeline",
    lambda: call(conditioning_frames=picture(2), controlnet_frame_indices=[0], **FRAMES),
)
def _animate_sparse() -> dict[str, Any]:
    sparse = module(
        "controlnet",
        diffusers.SparseControlNetModel,
        block_out_channels=UNET["block_out_channels"],
        layers_per_block=UNET["layers_per_block"],
        down_block_types=("DownBlockMotion", "CrossAttnDownBlockMotion"),
        cross_attention_dim=32,
        attention_head_dim=4,
        norm_num_groups=4,
        conditioning_embedding_out_channels=(8, 8),
        motion_num_attention_heads=4,
        conditioning_channels=3,
        concat_conditioning_mask=True,
        use_simplified_condition_embedding=False,
    )
    return animate_parts() | {"controlnet": sparse}


case(
    "AnimateDiffVideoToVideoControlNetPipeline",
    lambda: call(
        height=...,
        width=...,
        video=[picture(seed) for seed in range(4)],
        conditioning_frames=[picture(seed) for seed in range(4, 8)],
        strength=0.9,
        num_inference_steps=3,
    ),
)(lambda: animate_parts() | {"controlnet": controlnet(transformer_layers_per_block=1)})


FILM: dict[str, Any] = {
    "block_out_channels": (16, 32),
    "layers_per_block": 2,
    "sample_size": 16,
    "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
    "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
    "cross_attention_dim": 32,
    "norm_num_groups": 4,
}


def film_parts(cls: Any = diffusers.UNet3DConditionModel, **changes: Any) -> dict[str, Any]:
    parts = sd_parts()
    for name in ("safety_checker", "feature_extractor"):
        del parts[name]
    return parts | {"unet": module("unet", cls, **(FILM | changes))}


case("TextToVideoSDPipeline", lambda: call(**FRAMES))(lambda: film_parts(attention_head_dim=4))
case(
    "VideoToVideoSDPipeline",
    lambda: (
        call(video=[picture(seed) for seed in range(4)], height=..., width=..., strength=0.9)
        | {"num_inference_steps": 3}
    ),
)(lambda: film_parts(attention_head_dim=4))


@case("I2VGenXLPipeline", lambda: call(image=picture(), target_fps=8, clip_skip=None, **FRAMES))
def _i2v() -> dict[str, Any]:
    parts = film_parts(diffusers.I2VGenXLUNet, attention_head_dim=4)
    return parts | {"image_encoder": clip_vision(), "feature_extractor": clip_image_processor()}


@case("PIAPipeline", lambda: call(image=picture(), motion_scale=1, **FRAMES))
def _pia() -> dict[str, Any]:
    parts = sd_parts(transformer_layers_per_block=1)
    del parts["safety_checker"]
    adapter = module(
        "motion_adapter",
        diffusers.MotionAdapter,
        block_out_channels=UNET["block_out_channels"],
        motion_layers_per_block=2,
        motion_norm_num_groups=2,
        motion_num_attention_heads=4,
        conv_in_channels=9,
    )
    return parts | {"motion_adapter": adapter, "image_encoder": None}
