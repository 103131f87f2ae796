"""Ready-made pipelines: Diffusers' classes with the mixin and their declarations."""

from __future__ import annotations

from diffusers import Flux2KleinPipeline, Flux2Pipeline, WanImageToVideoPipeline, WanPipeline

from .mixin import OffloadMixin
from .plan import OffloadPlan

_TEXT_ENCODER = OffloadPlan(encoder_component_types={"text_encoder": "text_encoder"})


class OffloadWanPipeline(OffloadMixin, WanPipeline):
    """Wan text to video, 2.1 and 2.2 (two experts)."""

    _dit_modules = ("transformer", "transformer_2")
    _encoder_modules = ("text_encoder",)
    _vae_modules = ("vae",)
    _offload_plan = _TEXT_ENCODER


class OffloadWanImageToVideoPipeline(OffloadMixin, WanImageToVideoPipeline):
    """Wan image to video, 2.1 (with an image encoder) and 2.2 (two experts)."""

    _dit_modules = ("transformer", "transformer_2")
    _encoder_modules = ("text_encoder", "image_encoder")
    _vae_modules = ("vae",)
    _offload_plan = OffloadPlan(
        encoder_component_types={"text_encoder": "text_encoder", "image_encoder": "image_encoder"}
    )


class OffloadFlux2Pipeline(OffloadMixin, Flux2Pipeline):
    """FLUX.2 with its Mistral text encoder, which also rewrites prompts (`caption_upsample_temperature`)."""

    _dit_modules = ("transformer",)
    _encoder_modules = ("text_encoder",)
    _vae_modules = ("vae",)
    _offload_plan = _TEXT_ENCODER


class OffloadFlux2KleinPipeline(OffloadMixin, Flux2KleinPipeline):
    """FLUX.2 Klein with its Qwen3 text encoder."""

    _dit_modules = ("transformer",)
    _encoder_modules = ("text_encoder",)
    _vae_modules = ("vae",)
    _offload_plan = _TEXT_ENCODER


__all__ = [
    "OffloadFlux2KleinPipeline",
    "OffloadFlux2Pipeline",
    "OffloadWanImageToVideoPipeline",
    "OffloadWanPipeline",
]
