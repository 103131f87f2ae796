"""What tests of whole pipelines share: small pipelines, their output, and what is left on a module."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Mapping
from typing import Any

import pytest
import simdev
import torch
from torch import nn

from omni_offload import OffloadFlux2KleinPipeline, OffloadFlux2Pipeline, OffloadMixin, OffloadWanPipeline
from omni_offload.demo import small_pipelines as small
from omni_offload.demo.split_model import SmallSplitPipeline


class OffloadSplitPipeline(OffloadMixin, SmallSplitPipeline):
    """The split model with the mixin."""


CLASSES: dict[str, Any] = {
    "wan": OffloadWanPipeline,
    "wan22": OffloadWanPipeline,
    "flux2": OffloadFlux2Pipeline,
    "flux2-klein": OffloadFlux2KleinPipeline,
    "split": OffloadSplitPipeline,
}
LAYER = {"mode": "layer", "components": ["dit", "text_encoder"]}
DIT_LAYERS = {"mode": "layer", "components": ["dit"]}
MODULE = {"mode": "module"}
both_modes = pytest.mark.parametrize("config", [LAYER, MODULE], ids=["layer", "module"])


@functools.cache
def _components(family: str, **options: Any) -> dict[str, Any]:
    return small.components(family, **options)


def _make(cls: Any, family: str, options: dict[str, Any]) -> Any:
    """A pipeline of weights of its own; making them anew each time would take longer than most tests."""
    parts = _components(family, **options).items()
    tokenizers = ("tokenizer", "image_processor")
    pipe = cls(**{name: part if name in tokenizers else copy.deepcopy(part) for name, part in parts})
    pipe.set_progress_bar_config(disable=True)
    return pipe


def build(family: str = "wan", **options: Any) -> Any:
    """A small pipeline with the mixin, on the CPU."""
    return _make(CLASSES[family], family, options)


def offloaded(config: Mapping[str, Any], device: torch.device, family: str = "wan", **options: Any) -> Any:
    """A small pipeline with offload on."""
    pipe = build(family, **options)
    pipe.enable_offload(config, device=device)
    return pipe


def resident(device: torch.device, family: str = "wan", **options: Any) -> Any:
    """The plain pipeline with the same weights, all of it on the device."""
    return _make(small.pipeline_class(family), family, options).to(device)


def output(pipe: Any, family: str = "wan", *, steps: int = 2, **changes: Any) -> torch.Tensor:
    """The output of one short call, on the CPU; the same arguments give the same noise."""
    result = pipe(**(small.call_arguments(family, steps=steps) | changes))
    return (result.frames if "frames" in result else result.images).cpu()


def brief(pipe: Any, **changes: Any) -> torch.Tensor:
    """The latents of the shortest call of a Wan pipeline that runs every part of it but the VAE."""
    tiny = {
        "output_type": "latent",
        "guidance_scale": 1.0,
        "num_frames": 1,
        "height": 16,
        "width": 16,
        "max_sequence_length": 8,
    }
    return output(pipe, "wan", **({"steps": 1} | tiny | changes))


def device_bytes(device: torch.device, *pipes: Any) -> int:
    """Bytes on the device once it is idle, without what schedulers keep of the last call and errors of their frames."""
    for pipe in pipes:
        pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)
    gc.collect()
    torch.accelerator.synchronize(device)
    return torch.accelerator.memory_allocated(device)


def pinned_bytes(device: torch.device) -> int:
    """Host memory that is locked, where the device says so; else 0."""
    gc.collect()
    counters: dict[str, int] = simdev.counters() if device.type == simdev.NAME else {}
    return counters.get("pinned_bytes", 0)


def modules_of(pipe: Any) -> dict[str, nn.Module]:
    """Every module of a pipeline, by dotted path."""
    return {
        f"{name}.{path}" if path else name: module
        for name, part in pipe.components.items()
        if isinstance(part, nn.Module)
        for path, module in part.named_modules()
    }


def tensors_of(pipe: Any) -> dict[str, torch.Tensor]:
    """Every parameter and buffer of a pipeline, by dotted path; one that two names share under both."""
    return {
        f"{path}.{name}": tensor
        for path, module in modules_of(pipe).items()
        for name, tensor in [
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),
        ]
    }


Traces = dict[str, dict[str, Any]]


def traces(pipe: Any) -> Traces:
    """What offload could leave behind on each module: its class, its own attributes, its hooks."""
    return {
        path: {"class": type(module)}
        | {name: len(value) if name.endswith("_hooks") else True for name, value in vars(module).items() if value}
        for path, module in modules_of(pipe).items()
    }


def changes(before: Traces, after: Traces) -> Traces:
    """What of `after` is not as it was `before`, by module."""
    return {
        path: {
            key: after.get(path, {}).get(key)
            for key in keys.keys() | after.get(path, {}).keys()
            if keys.get(key) != after.get(path, {}).get(key)
        }
        for path, keys in before.items()
        if keys != after.get(path)
    }
