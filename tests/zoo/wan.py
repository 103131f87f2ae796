"""Wan, its experts and FLUX.2: the pipelines that the package's own demo builds."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from omni_offload.demo import small_pipelines

from . import case

_FAMILIES: Mapping[str, tuple[str, int]] = {
    "WanPipeline": ("wan", 4),
    "WanPipeline:two experts": ("wan22", 3),
    "WanImageToVideoPipeline": ("wan-i2v", 3),
    "Flux2Pipeline": ("flux2", 2),
    "Flux2KleinPipeline": ("flux2-klein", 2),
}

for _name, (_family, _layers) in _FAMILIES.items():
    case(_name, functools.partial(small_pipelines.call_arguments, _family))(
        functools.partial(small_pipelines.components, _family, layers=_layers)
    )
