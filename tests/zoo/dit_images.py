"""Picture transformers: Sana, PixArt, DiT, AuraFlow, Lumina, Qwen-Image, Z-Image, CogView, HunyuanDiT, HiDream."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers

from . import case, configured, generator, module
from .parts import (
    NEGATIVE_PROMPT,
    PROMPT,
    autoencoder_kl,
    clip_tokenizer,
    flow_scheduler,
    qwen2_tokenizer,
    sample_image,
    t5_encoder,
    t5_tokenizer,
)

SIZE = 32


def call(**changes: Any) -> dict[str, Any]:
    common = {
        "prompt": PROMPT,
        "negative_prompt": NEGATIVE_PROMPT,
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


def decoder(name: str, config: Any, cls: Any, **changes: Any) -> tuple[Any, Any]:
    """A small decoder of transformers with its tokenizer."""
    tokenizer = qwen2_tokenizer()
    settings = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return tokenizer, configured(name, cls, config(**(settings | changes)))


def gemma2() -> tuple[Any, Any]:
    return decoder("text_encoder", transformers.Gemma2Config, transformers.Gemma2Model)


def t5_parts(transformer: Any, **vae: Any) -> dict[str, Any]:
    return {
        "tokenizer": t5_tokenizer(),
        "text_encoder": t5_encoder(),
        "vae": autoencoder_kl(**vae),
        "transformer": transformer,
        "scheduler": diffusers.DDIMScheduler(),
    }


# --- Sana -------------------------------------------------------------------------------------------------------------

SANA: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 3,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 8,
    "cross_attention_dim": 16,
    "caption_channels": 32,
    "sample_size": 32,
}


def sana_parts(**changes: Any) -> dict[str, Any]:
    tokenizer, text_encoder = gemma2()
    vae = module(
        "vae",
        diffusers.AutoencoderDC,
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
        scaling_factor=0.41407,
    )
    return {
        "tokenizer": tokenizer,
        "text_encoder": text_encoder,
        "vae": vae,
        "transformer": module("transformer", diffusers.SanaTransformer2DModel, **(SANA | changes)),
        "scheduler": flow_scheduler(shift=7.0),
    }


PLAIN_SANA = {"complex_human_instruction": None, "use_resolution_binning": False}
case("SanaPipeline", lambda: call(**PLAIN_SANA))(sana_parts)
case("SanaPAGPipeline", lambda: call(pag_scale=0.7, **PLAIN_SANA))(
    lambda: sana_parts() | {"pag_applied_layers": ["blocks.1"]}
)
case("SanaSprintPipeline", lambda: call(negative_prompt=..., **PLAIN_SANA))(
    lambda: sana_parts(guidance_embeds=True, qk_norm="rms_norm_across_heads") | {"scheduler": diffusers.SCMScheduler()}
)


# --- PixArt, DiT and others with a T5 ---------------------------------------------------------------------------------


def pixart(**changes: Any) -> Any:
    config = {
        "num_attention_heads": 2,
        "attention_head_dim": 8,
        "in_channels": 4,
        "out_channels": 8,
        "num_layers": 3,
        "cross_attention_dim": 16,
        "sample_size": 16,
        "norm_num_groups": 1,
        "caption_channels": 32,
        "use_additional_conditions": False,
    }
    return module("transformer", diffusers.PixArtTransformer2DModel, **(config | changes))


BINNED = {"use_resolution_binning": False, "clean_caption": False}
case("PixArtAlphaPipeline", lambda: call(**BINNED))(lambda: t5_parts(pixart()))
case("PixArtSigmaPipeline", lambda: call(**BINNED))(lambda: t5_parts(pixart()))
case("PixArtSigmaPAGPipeline", lambda: call(pag_scale=0.7, **BINNED))(
    lambda: t5_parts(pixart()) | {"pag_applied_layers": ["blocks.1"]}
)


def _classes() -> dict[str, Any]:
    return {
        "class_labels": [1, 7],
        "guidance_scale": 4.0,
        "num_inference_steps": 2,
        "generator": generator(),
        "output_type": "np",
    }


@case("DiTPipeline", _classes)
def _dit() -> dict[str, Any]:
    transformer = module(
        "transformer",
        diffusers.DiTTransformer2DModel,
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=4,
        sample_size=16,
        num_embeds_ada_norm=1000,
    )
    return {"transformer": transformer, "vae": autoencoder_kl(), "scheduler": diffusers.DDIMScheduler()}


@case("AuraFlowPipeline", call)
def _aura_flow() -> dict[str, Any]:
    transformer = module(
        "transformer",
        diffusers.AuraFlowTransformer2DModel,
        sample_size=16,
        num_mmdit_layers=2,
        num_single_dit_layers=3,
        attention_head_dim=8,
        num_attention_heads=4,
        joint_attention_dim=32,
        caption_projection_dim=32,
        pos_embed_max_size=64,
    )
    tokenizer, text_encoder = (
        t5_tokenizer(),
        t5_encoder(cls=transformers.UMT5EncoderModel, config=transformers.UMT5Config),
    )
    return t5_parts(transformer) | {
        "tokenizer": tokenizer,
        "text_encoder": text_encoder,
        "scheduler": flow_scheduler(),
    }


LARGER = {"height": 64, "width": 64}  # HunyuanDiT takes the autoencoder to shrink by 8, whatever it does


@case("HunyuanDiTPipeline", lambda: call(max_sequence_length=..., use_resolution_binning=False, **LARGER))
def _hunyuan_dit() -> dict[str, Any]:
    transformer = module(
        "transformer",
        diffusers.HunyuanDiT2DModel,
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        patch_size=2,
        sample_size=16,
        hidden_size=16,
        num_layers=4,
        cross_attention_dim=32,
        cross_attention_dim_t5=32,
        pooled_projection_dim=16,
        text_len=77,
        text_len_t5=256,
    )
    bert_tokenizer = clip_tokenizer(77)
    config = transformers.BertConfig(
        vocab_size=600, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4
    )
    return {
        "vae": autoencoder_kl(levels=4),
        "text_encoder": configured("text_encoder", transformers.BertModel, config),
        "tokenizer": bert_tokenizer,
        "transformer": transformer,
        "scheduler": diffusers.DDPMScheduler(),
        "safety_checker": None,
        "feature_extractor": None,
        "text_encoder_2": t5_encoder("text_encoder_2"),
        "tokenizer_2": t5_tokenizer(),
    }


# --- Lumina -----------------------------------------------------------------------------------------------------------


@case("Lumina2Pipeline", call)
def _lumina2() -> dict[str, Any]:
    tokenizer, text_encoder = gemma2()
    transformer = module(
        "transformer",
        diffusers.Lumina2Transformer2DModel,
        sample_size=16,
        in_channels=4,
        hidden_size=32,
        num_layers=3,
        num_refiner_layers=2,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=16,
        scaling_factor=1.0,
        axes_dim_rope=(4, 6, 6),
        axes_lens=(300, 64, 64),
        cap_feat_dim=32,
    )
    return {
        "transformer": transformer,
        "scheduler": flow_scheduler(),
        "vae": autoencoder_kl(shift_factor=0.1),
        "text_encoder": text_encoder,
        "tokenizer": tokenizer,
    }


@case("LuminaPipeline", lambda: call(clean_caption=False, output_type="np"))
def _lumina() -> dict[str, Any]:
    tokenizer, text_encoder = gemma2()
    transformer = module(
        "transformer",
        diffusers.LuminaNextDiT2DModel,
        sample_size=16,
        in_channels=4,
        hidden_size=32,
        num_layers=3,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=16,
        cross_attention_dim=32,
    )
    return {
        "transformer": transformer,
        "scheduler": flow_scheduler(),
        "vae": autoencoder_kl(),
        "text_encoder": text_encoder,
        "tokenizer": tokenizer,
    }


# --- Qwen-Image -------------------------------------------------------------------------------------------------------

QWEN: dict[str, Any] = {
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 3,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "axes_dims_rope": (8, 4, 4),
}


def qwen_vl(tokenizer: Any) -> Any:
    text = {
        "hidden_size": 32,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": len(tokenizer),
        "initializer_range": 0.2,
        "rope_scaling": {"mrope_section": [1, 1, 2], "rope_type": "default", "type": "default"},
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    vision |= {"patch_size": 4, "intermediate_size": 32}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    return configured("text_encoder", transformers.Qwen2_5_VLForConditionalGeneration, config)


def qwen_parts() -> dict[str, Any]:
    vae = module(
        "vae",
        diffusers.AutoencoderKLQwenImage,
        base_dim=24,
        z_dim=4,
        dim_mult=[1, 2, 4],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
    )
    tokenizer = qwen2_tokenizer()
    return {
        "scheduler": flow_scheduler(),
        "vae": vae,
        "text_encoder": qwen_vl(tokenizer),
        "tokenizer": tokenizer,
        "transformer": module("transformer", diffusers.QwenImageTransformer2DModel, **QWEN),
    }


def qwen_call(**changes: Any) -> dict[str, Any]:
    return call(guidance_scale=..., true_cfg_scale=2.0, **changes)


case("QwenImagePipeline", qwen_call)(qwen_parts)
case("QwenImageImg2ImgPipeline", lambda: qwen_call(image=picture(), strength=0.9, num_inference_steps=3))(qwen_parts)
case("QwenImageInpaintPipeline", lambda: qwen_call(image=picture(), mask_image=mask(), strength=0.9))(qwen_parts)
case("QwenImageControlNetPipeline", lambda: qwen_call(control_image=picture()))(
    lambda: qwen_parts() | {"controlnet": module("controlnet", diffusers.QwenImageControlNetModel, **QWEN)}
)


# --- Z-Image ----------------------------------------------------------------------------------------------------------


def z_parts() -> dict[str, Any]:
    tokenizer, text_encoder = decoder("text_encoder", transformers.Qwen3Config, transformers.Qwen3Model)
    transformer = module(
        "transformer",
        diffusers.ZImageTransformer2DModel,
        in_channels=16,
        dim=32,
        n_layers=3,
        n_refiner_layers=2,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=32,
        axes_dims=[8, 4, 4],
        axes_lens=[256, 32, 32],
    )
    return {
        "scheduler": flow_scheduler(),
        "vae": autoencoder_kl(latents=16, use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.1),
        "text_encoder": text_encoder,
        "tokenizer": tokenizer,
        "transformer": transformer,
    }


case("ZImagePipeline", call)(z_parts)
case("ZImageImg2ImgPipeline", lambda: call(image=picture(), strength=0.9, num_inference_steps=3))(z_parts)


@case("ZImageControlNetPipeline", lambda: call(control_image=picture(), controlnet_conditioning_scale=0.7))
def _z_controlnet() -> dict[str, Any]:
    controlnet = module(
        "controlnet",
        diffusers.ZImageControlNetModel,
        control_layers_places=[0, 2],
        control_refiner_layers_places=[0, 1],
        control_in_dim=16,
        add_control_noise_refiner=None,
        dim=32,
        n_refiner_layers=2,
        n_heads=2,
        n_kv_heads=2,
    )
    return z_parts() | {"controlnet": controlnet}


# --- CogView ----------------------------------------------------------------------------------------------------------

COGVIEW: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 3,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "text_embed_dim": 32,
    "time_embed_dim": 16,
    "condition_dim": 4,
    "pos_embed_max_size": 16,
    "sample_size": 16,
}


@case("CogView4Pipeline", call)
def _cogview4() -> dict[str, Any]:
    tokenizer, text_encoder = decoder("text_encoder", transformers.GlmConfig, transformers.GlmModel)
    tokenizer.padding_side = "left"
    return {
        "tokenizer": tokenizer,
        "text_encoder": text_encoder,
        "vae": autoencoder_kl(),
        "transformer": module("transformer", diffusers.CogView4Transformer2DModel, **COGVIEW, rope_axes_dim=(16, 16)),
        "scheduler": flow_scheduler(),
    }


case("CogView3PlusPipeline", call)(
    lambda: (
        t5_parts(module("transformer", diffusers.CogView3PlusTransformer2DModel, **COGVIEW))
        | {"scheduler": diffusers.CogVideoXDDIMScheduler()}
    )
)
