"""Video transformers: Wan's relatives, LTX, CogVideoX, Latte, Mochi, Allegro, HunyuanVideo."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler

from . import case, configured, generator, module
from .parts import (
    NEGATIVE_PROMPT,
    PROMPT,
    autoencoder_kl,
    clip_image_processor,
    clip_text,
    clip_tokenizer,
    clip_vision,
    flow_scheduler,
    qwen2_tokenizer,
    sample_image,
    t5_encoder,
    t5_tokenizer,
)

FRAMES = 9


def frames(count: int = FRAMES, size: int = 32) -> list[Any]:
    return [sample_image(size, size, seed) for seed in range(count)]


def call(**changes: Any) -> dict[str, Any]:
    """The arguments that most of these pipelines take."""
    common = {
        "prompt": PROMPT,
        "negative_prompt": NEGATIVE_PROMPT,
        "height": 32,
        "width": 32,
        "num_frames": FRAMES,
        "num_inference_steps": 2,
        "guidance_scale": 4.0,
        "generator": generator(),
        "output_type": "pt",
        "max_sequence_length": 24,
    }
    return {key: value for key, value in (common | changes).items() if value is not ...}


def wan_vae() -> Any:
    return module(
        "vae",
        AutoencoderKLWan,
        base_dim=4,
        z_dim=16,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
    )


def wan_scheduler() -> Any:
    return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0)


WAN: dict[str, Any] = {
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "text_dim": 32,
    "freq_dim": 64,
    "ffn_dim": 128,
    "num_layers": 4,
    "rope_max_seq_len": 32,
}


def wan_parts(transformer: Any) -> dict[str, Any]:
    return {
        "tokenizer": t5_tokenizer(),
        "text_encoder": t5_encoder(cls=transformers.UMT5EncoderModel, config=transformers.UMT5Config),
        "vae": wan_vae(),
        "scheduler": wan_scheduler(),
        "transformer": transformer,
    }


@case("WanVideoToVideoPipeline", lambda: call(video=frames(), num_frames=..., strength=0.9, num_inference_steps=3))
def _wan_video_to_video() -> dict[str, Any]:
    return wan_parts(module("transformer", diffusers.WanTransformer3DModel, **WAN))


@case("WanVACEPipeline", lambda: call(video=frames(), mask=[sample_image(32, 32, 9).convert("L")] * FRAMES))
def _wan_vace() -> dict[str, Any]:
    config = {"vace_layers": [0, 2], "vace_in_channels": 96}
    transformer = module("transformer", diffusers.WanVACETransformer3DModel, **WAN, **config)
    return wan_parts(transformer) | {"transformer_2": None}


@case("SkyReelsV2Pipeline", call)
def _sky_reels() -> dict[str, Any]:
    return wan_parts(module("transformer", diffusers.SkyReelsV2Transformer3DModel, **WAN))


@case("SkyReelsV2DiffusionForcingPipeline", lambda: call(max_sequence_length=..., addnoise_condition=20))
def _sky_reels_forcing() -> dict[str, Any]:
    return wan_parts(module("transformer", diffusers.SkyReelsV2Transformer3DModel, **WAN))


def _animate_arguments() -> dict[str, Any]:
    return call(
        image=sample_image(32, 32),
        pose_video=frames(),
        face_video=frames(),
        num_frames=...,
        segment_frame_length=FRAMES,
        guidance_scale=2.0,
    )


@case("WanAnimatePipeline", _animate_arguments)
def _wan_animate() -> dict[str, Any]:
    transformer = module(
        "transformer",
        diffusers.WanAnimateTransformer3DModel,
        **WAN,
        in_channels=36,
        latent_channels=16,
        image_dim=32,
        motion_encoder_channel_sizes={"4": 8, "8": 8, "16": 8, "32": 8},
        motion_encoder_size=32,
        motion_style_dim=8,
        motion_dim=4,
        motion_encoder_dim=16,
        face_encoder_hidden_dim=16,
        face_encoder_num_heads=2,
        inject_face_latents_blocks=2,
    )
    return wan_parts(transformer) | {
        "image_encoder": clip_vision(projection=False),
        "image_processor": clip_image_processor(),
    }


def ltx_parts() -> dict[str, Any]:
    vae = module(
        "vae",
        diffusers.AutoencoderKLLTXVideo,
        latent_channels=8,
        block_out_channels=(8, 8, 8, 8),
        decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1),
        decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        patch_size=1,
    )
    transformer = module(
        "transformer",
        diffusers.LTXVideoTransformer3DModel,
        in_channels=8,
        out_channels=8,
        num_attention_heads=4,
        attention_head_dim=8,
        cross_attention_dim=32,
        num_layers=3,
        caption_channels=32,
    )
    return {
        "scheduler": flow_scheduler(),
        "vae": vae,
        "text_encoder": t5_encoder(),
        "tokenizer": t5_tokenizer(),
        "transformer": transformer,
    }


case("LTXPipeline", call)(ltx_parts)
case("LTXImageToVideoPipeline", lambda: call(image=sample_image(32, 32)))(ltx_parts)
case("LTXConditionPipeline", lambda: call(image=sample_image(32, 32)))(ltx_parts)


def cog_parts(channels: int = 4) -> dict[str, Any]:
    vae = module(
        "vae",
        diffusers.AutoencoderKLCogVideoX,
        down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
    )
    transformer = module(
        "transformer",
        diffusers.CogVideoXTransformer3DModel,
        num_attention_heads=4,
        attention_head_dim=16,
        in_channels=channels,
        out_channels=4,
        time_embed_dim=8,
        text_embed_dim=32,
        num_layers=3,
        sample_width=4,
        sample_height=4,
        sample_frames=9,
        max_text_seq_length=24,
        use_rotary_positional_embeddings=True,
    )
    return {
        "tokenizer": t5_tokenizer(),
        "text_encoder": t5_encoder(),
        "vae": vae,
        "transformer": transformer,
        "scheduler": diffusers.CogVideoXDDIMScheduler(),
    }


case("CogVideoXPipeline", call)(cog_parts)
case("CogVideoXImageToVideoPipeline", lambda: call(image=sample_image(32, 32)))(lambda: cog_parts(8))
case("CogVideoXVideoToVideoPipeline", lambda: call(video=frames(), num_frames=..., num_inference_steps=3))(cog_parts)


def _latte_arguments() -> dict[str, Any]:
    return call(num_frames=..., max_sequence_length=..., video_length=3, clean_caption=False)


@case("LattePipeline", _latte_arguments)
def _latte() -> dict[str, Any]:
    transformer = module(
        "transformer",
        diffusers.LatteTransformer3DModel,
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=8,
        num_layers=3,
        cross_attention_dim=32,
        attention_bias=True,
        sample_size=16,
        patch_size=2,
        activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        caption_channels=32,
        video_length=3,
    )
    return {
        "tokenizer": t5_tokenizer(),
        "text_encoder": t5_encoder(),
        "vae": autoencoder_kl(),
        "transformer": transformer,
        "scheduler": diffusers.DDIMScheduler(),
    }


@case("MochiPipeline", lambda: call(num_frames=7))
def _mochi() -> dict[str, Any]:
    vae = module(
        "vae",
        diffusers.AutoencoderKLMochi,
        latent_channels=12,
        encoder_block_out_channels=(32, 32, 32, 32),
        decoder_block_out_channels=(32, 32, 32, 32),
        layers_per_block=(1, 1, 1, 1, 1),
    )
    transformer = module(
        "transformer",
        diffusers.MochiTransformer3DModel,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=3,
        pooled_projection_dim=16,
        text_embed_dim=32,
        time_embed_dim=8,
        max_sequence_length=24,
    )
    return {
        "scheduler": flow_scheduler(),
        "vae": vae,
        "text_encoder": t5_encoder(),
        "tokenizer": t5_tokenizer(),
        "transformer": transformer,
    }


@case("AllegroPipeline", lambda: call(num_frames=8, clean_caption=False, output_type="latent"))
def _allegro() -> dict[str, Any]:
    vae = module(
        "vae",
        diffusers.AutoencoderKLAllegro,
        down_block_types=("AllegroDownBlock3D",) * 4,
        up_block_types=("AllegroUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=2,
        sample_size=32,
    )
    transformer = module(
        "transformer",
        diffusers.AllegroTransformer3DModel,
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=3,
        cross_attention_dim=24,
        caption_channels=32,
        sample_width=4,
        sample_height=4,
        sample_frames=2,
    )
    return {
        "tokenizer": t5_tokenizer(),
        "text_encoder": t5_encoder(),
        "vae": vae,
        "transformer": transformer,
        "scheduler": diffusers.EulerAncestralDiscreteScheduler(),
    }


def _hunyuan_arguments() -> dict[str, Any]:
    template = {"template": "{}", "crop_start": 0}
    return call(num_frames=5, negative_prompt=..., max_sequence_length=16, prompt_template=template)


@case("HunyuanVideoPipeline", _hunyuan_arguments)
def _hunyuan_video() -> dict[str, Any]:
    tokenizer = qwen2_tokenizer()
    llama = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=5,
        num_attention_heads=4,
        bos_token_id=None,
        pad_token_id=0,
    )
    vae = module(
        "vae",
        diffusers.AutoencoderKLHunyuanVideo,
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
    )
    transformer = module(
        "transformer",
        diffusers.HunyuanVideoTransformer3DModel,
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        num_single_layers=3,
        num_refiner_layers=1,
        text_embed_dim=32,
        pooled_projection_dim=32,
        rope_axes_dim=(4, 6, 6),
    )
    return {
        "text_encoder": configured("text_encoder", transformers.LlamaModel, llama),
        "tokenizer": tokenizer,
        "transformer": transformer,
        "vae": vae,
        "scheduler": flow_scheduler(shift=7.0),
        "text_encoder_2": clip_text("text_encoder_2", length=77),
        "tokenizer_2": clip_tokenizer(),
    }


def _sana_arguments() -> dict[str, Any]:
    return call(num_frames=..., frames=FRAMES, use_resolution_binning=False, complex_human_instruction=None)


@case("SanaVideoPipeline", _sana_arguments)
def _sana_video() -> dict[str, Any]:
    transformer = module(
        "transformer",
        diffusers.SanaVideoTransformer3DModel,
        num_attention_heads=2,
        attention_head_dim=12,
        num_layers=3,
        num_cross_attention_heads=2,
        cross_attention_head_dim=12,
        cross_attention_dim=24,
        caption_channels=32,
        sample_size=8,
        rope_max_seq_len=32,
    )
    tokenizer = qwen2_tokenizer()
    gemma = transformers.Gemma2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return {
        "tokenizer": tokenizer,
        "text_encoder": configured("text_encoder", transformers.Gemma2Model, gemma),
        "vae": wan_vae(),
        "transformer": transformer,
        "scheduler": flow_scheduler(),
    }


def _audio_arguments() -> dict[str, Any]:
    return {
        "prompt": PROMPT,
        "negative_prompt": NEGATIVE_PROMPT,
        "num_inference_steps": 2,
        "generator": generator(),
        "audio_end_in_s": 0.1,
    }


@case("StableAudioPipeline", _audio_arguments)
def _stable_audio() -> dict[str, Any]:
    transformer = module(
        "transformer",
        diffusers.StableAudioDiTModel,
        sample_size=4,
        in_channels=3,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        num_key_value_attention_heads=2,
        out_channels=3,
        cross_attention_dim=32,
        time_proj_dim=8,
        global_states_input_dim=64,
        cross_attention_input_dim=32,
    )
    vae = module(
        "vae",
        diffusers.AutoencoderOobleck,
        encoder_hidden_size=6,
        downsampling_ratios=[1, 2],
        channel_multiples=[1, 2],
        decoder_channels=3,
        decoder_input_channels=3,
        audio_channels=2,
        sampling_rate=40,
    )
    projection = module(
        "projection_model",
        diffusers.StableAudioProjectionModel,
        text_encoder_dim=32,
        conditioning_dim=32,
        min_value=0,
        max_value=32,
    )
    tokenizer = t5_tokenizer()
    tokenizer.model_max_length = 24
    return {
        "vae": vae,
        "text_encoder": t5_encoder(),
        "projection_model": projection,
        "tokenizer": tokenizer,
        "transformer": transformer,
        "scheduler": diffusers.DDIMScheduler(),
    }
