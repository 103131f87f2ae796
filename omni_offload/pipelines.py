"""Ready-made pipelines: Diffusers' classes with the mixin. What they declare is in `declarations`."""

from __future__ import annotations

from diffusers import Flux2KleinPipeline, Flux2Pipeline, WanImageToVideoPipeline, WanPipeline

from .mixin import OffloadMixin


class OffloadWanPipeline(OffloadMixin, WanPipeline):
    """Wan text to video, 2.1 and 2.2 (two experts)."""


class OffloadWanImageToVideoPipeline(OffloadMixin, WanImageToVideoPipeline):
    """Wan image to video, 2.1 (with an image encoder) and 2.2 (two experts)."""


class OffloadFlux2Pipeline(OffloadMixin, Flux2Pipeline):
    """FLUX.2 with its Mistral text encoder, which also rewrites prompts (`caption_upsample_temperature`)."""


class OffloadFlux2KleinPipeline(OffloadMixin, Flux2KleinPipeline):
    """FLUX.2 Klein with its Qwen3 text encoder."""


__all__ = [
    "OffloadFlux2KleinPipeline",
    "OffloadFlux2Pipeline",
    "OffloadWanImageToVideoPipeline",
    "OffloadWanPipeline",
]
