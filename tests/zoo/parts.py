"""Small parts that many pipelines share: tokenizers, text and image encoders, autoencoders, schedulers."""

from __future__ import annotations

from typing import Any

import transformers
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler

from omni_offload.demo.small_pipelines import (
    NEGATIVE_PROMPT,
    PROMPT,
    byte_level_bpe,
    qwen2_tokenizer,
    sample_image,
    t5_tokenizer,
)

from . import configured, module

__all__ = [
    "NEGATIVE_PROMPT",
    "PROMPT",
    "autoencoder_kl",
    "clip_image_processor",
    "clip_text",
    "clip_tokenizer",
    "clip_vision",
    "flow_scheduler",
    "qwen2_tokenizer",
    "sample_image",
    "t5_encoder",
    "t5_tokenizer",
]


def clip_tokenizer(length: int = 24) -> Any:
    """A `CLIPTokenizer` over bytes and the words of the demo's prompts; texts are cut at `length` tokens."""
    start, end = "<|startoftext|>", "<|endoftext|>"
    vocabulary: dict[str, int] = {}
    letters, _ = byte_level_bpe([])
    for letter in (one for one in letters if len(one) == 1):
        vocabulary[letter] = len(vocabulary)
        vocabulary[f"{letter}</w>"] = len(vocabulary)
    for token in (start, end):
        vocabulary[token] = len(vocabulary)
    tokenizer = transformers.CLIPTokenizer(vocab=vocabulary, merges=[])
    tokenizer.model_max_length = length
    return tokenizer


def clip_text(
    name: str = "text_encoder",
    *,
    width: int = 32,
    layers: int = 3,
    projection: bool = False,
    vocabulary: int = 600,
    length: int = 24,
    **config: Any,
) -> Any:
    """A `CLIPTextModel`, or with `projection` a `CLIPTextModelWithProjection`, `width` wide."""
    settings = transformers.CLIPTextConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=length,
        **{"bos_token_id": 512, "eos_token_id": 513, "pad_token_id": 513} | config,
    )
    cls = transformers.CLIPTextModelWithProjection if projection else transformers.CLIPTextModel
    return configured(name, cls, settings)


def clip_vision(
    name: str = "image_encoder", *, width: int = 32, layers: int = 3, projection: bool = True, image: int = 32
) -> Any:
    """A `CLIPVisionModelWithProjection` (or without) for pictures of `image` pixels."""
    settings = transformers.CLIPVisionConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        image_size=image,
        patch_size=8,
    )
    cls = transformers.CLIPVisionModelWithProjection if projection else transformers.CLIPVisionModel
    return configured(name, cls, settings)


def clip_image_processor(image: int = 32) -> Any:
    """Pictures to `image` x `image` pixels, as `clip_vision` takes them."""
    size = {"height": image, "width": image}
    return transformers.CLIPImageProcessorPil(size={"shortest_edge": image}, crop_size=size)


def t5_encoder(
    name: str = "text_encoder", *, width: int = 32, layers: int = 3, cls: Any = None, config: Any = None
) -> Any:
    """A `T5EncoderModel`, or `cls` with a `config` of its own, for `t5_tokenizer()`."""
    settings = (config or transformers.T5Config)(
        vocab_size=len(t5_tokenizer()),
        d_model=width,
        d_kv=8,
        d_ff=2 * width,
        num_heads=4,
        num_layers=layers,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=32,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )
    return configured(name, cls or transformers.T5EncoderModel, settings)


def autoencoder_kl(name: str = "vae", *, latents: int = 4, levels: int = 2, **config: Any) -> Any:
    """An `AutoencoderKL` that shrinks by 2 at each level but the last."""
    settings: dict[str, Any] = {
        "in_channels": 3,
        "out_channels": 3,
        "down_block_types": ("DownEncoderBlock2D",) * levels,
        "up_block_types": ("UpDecoderBlock2D",) * levels,
        "block_out_channels": (8, 16, 16, 16)[:levels],
        "layers_per_block": 1,
        "latent_channels": latents,
        "norm_num_groups": 4,
        "sample_size": 32,
    }
    return module(name, AutoencoderKL, **(settings | config))


def flow_scheduler(**config: Any) -> Any:
    """A `FlowMatchEulerDiscreteScheduler`."""
    return FlowMatchEulerDiscreteScheduler(**config)
