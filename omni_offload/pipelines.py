"""Ready-made pipelines: Diffusers' classes with the mixin and their declarations."""

from __future__ import annotations

from diffusers import Flux2KleinPipeline, Flux2Pipeline, WanImageToVideoPipeline, WanPipeline

from .mixin import OffloadMixin
from .plan import OffloadPlan


class OffloadWanPipeline(OffloadMixin, WanPipeline):
    """Wan text to video, 2.1 and 2.2 (two experts)."""

    _dit_modules = ("transformer", "transformer_2")
    _encoder_modules = ("text_encoder",)
    _vae_modules = ("vae",)


class OffloadWanImageToVideoPipeline(OffloadMixin, WanImageToVideoPipeline):
    """Wan image to video, 2.1 (with an image encoder) and 2.2 (two experts)."""

    _dit_modules = ("transformer", "transformer_2")
    _encoder_modules = ("text_encoder", "image_encoder")
    _vae_modules = ("vae",)


class OffloadFlux2Pipeline(OffloadMixin, Flux2Pipeline):
    """FLUX.2 with its Mistral text encoder, which also rewrites prompts (`caption_upsample_temperature`)."""

    _dit_modules = ("transformer",)
    _encoder_modules = ("text_encoder",)
    _vae_modules = ("vae",)


class OffloadFlux2KleinPipeline(OffloadMixin, Flux2KleinPipeline):
    """FLUX.2 Klein with its Qwen3 text encoder."""

    _dit_modules = ("transformer",)
    _encoder_modules = ("text_encoder",)
    _vae_modules = ("vae",)


__all__ = [
    "OffloadFlux2KleinPipeline",
    "OffloadFlux2Pipeline",
    "OffloadPlan",
    "OffloadWanImageToVideoPipeline",
    "OffloadWanPipeline",
]
