"""Run Diffusers pipelines that are larger than the accelerator: the same output bit for bit, in the memory there is."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .adopt import with_offload
    from .config import LayerOptions, OffloadConfig
    from .errors import OffloadConfigError, OffloadError, OffloadStateError
    from .mixin import OffloadMixin
    from .pipelines import (
        OffloadFlux2KleinPipeline,
        OffloadFlux2Pipeline,
        OffloadWanImageToVideoPipeline,
        OffloadWanPipeline,
    )
    from .plan import OffloadPlan, SupportsComponentDiscovery
    from .policies.split import SplitOffloadMixin
    from .report import ComponentReport, OffloadReport

__version__ = "0.1.0.dev0"

# Importing torch and Diffusers takes seconds; a name is looked up when it is asked for.
_HOME = {
    "ComponentReport": "report",
    "LayerOptions": "config",
    "OffloadConfig": "config",
    "OffloadConfigError": "errors",
    "OffloadError": "errors",
    "OffloadFlux2KleinPipeline": "pipelines",
    "OffloadFlux2Pipeline": "pipelines",
    "OffloadMixin": "mixin",
    "OffloadPlan": "plan",
    "OffloadReport": "report",
    "OffloadStateError": "errors",
    "OffloadWanImageToVideoPipeline": "pipelines",
    "OffloadWanPipeline": "pipelines",
    "SplitOffloadMixin": "policies.split",
    "SupportsComponentDiscovery": "plan",
    "with_offload": "adopt",
}

__all__ = [
    "ComponentReport",
    "LayerOptions",
    "OffloadConfig",
    "OffloadConfigError",
    "OffloadError",
    "OffloadFlux2KleinPipeline",
    "OffloadFlux2Pipeline",
    "OffloadMixin",
    "OffloadPlan",
    "OffloadReport",
    "OffloadStateError",
    "OffloadWanImageToVideoPipeline",
    "OffloadWanPipeline",
    "SplitOffloadMixin",
    "SupportsComponentDiscovery",
    "with_offload",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{home}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
