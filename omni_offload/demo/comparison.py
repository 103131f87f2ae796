"""Runs a pipeline with offload and without, and says whether the outputs are the same bits.

Shared by the command line and the examples. Owns which class serves which small pipeline, what counts as the same
output, and the last lines that are printed; knows nothing of how offloading works.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch

from ..adopt import with_offload
from ..config import OffloadConfig
from ..devices import resolve_device, shares_memory_with_host
from ..errors import OffloadConfigError, describe
from ..report import OffloadReport
from . import small_pipelines
from .media import write_animation, write_frames

# The ready-made class of each small pipeline; "split" has none and is given the mixin as it is.
_OFFLOAD_CLASSES = {
    "wan": "OffloadWanPipeline",
    "wan22": "OffloadWanPipeline",
    "wan-i2v": "OffloadWanImageToVideoPipeline",
    "flux2": "OffloadFlux2Pipeline",
    "flux2-klein": "OffloadFlux2KleinPipeline",
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


# --- where to compute and where to write ---------------------------------------------------------------------------


def choose_device(name: str | None) -> tuple[torch.device, str]:
    """The device called `name`, or without a name the accelerator if one can be offloaded to, else the CPU; and why.

    Raises:
        OffloadConfigError: there is no such device.
    """
    if name is not None:
        return resolve_device(name), "as asked"
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return resolve_device("cpu"), "no accelerator was found"
    if shares_memory_with_host(accelerator):
        return resolve_device("cpu"), f"{accelerator.type} shares its memory with the host"
    return resolve_device(accelerator), "the accelerator that was found"


def check_output_folder(folder: Path | None) -> None:
    """Refuse a place that cannot hold pictures, before anything runs."""
    if folder is not None and folder.exists() and not folder.is_dir():
        raise OffloadConfigError(f"{describe('--output', str(folder))} is a file; name a folder")


def write_pictures(frames: Any, folder: Path) -> str:
    """Write every frame as a PNG, and several as an animation too; returns what was written, in words."""
    paths = write_frames(frames, folder)
    if len(paths) == 1:
        return f"wrote {paths[0]}"
    animation = write_animation(frames, folder / "animation.gif")
    return f"wrote {len(paths)} frames and {animation.name} to {folder}"


# --- running and comparing -----------------------------------------------------------------------------------------


def run(pipeline: Any, arguments: Mapping[str, Any], *, seed: int = 0) -> torch.Tensor:
    """Call `pipeline` from a fresh seed; returns its frames or images, values 0 to 1, on the host.

    Args:
        pipeline: called with `arguments`, a generator of this seed on the CPU, and output type "pt".
        arguments: for the pipeline's call.
        seed: of the starting noise.
    """
    given = {**arguments, "generator": torch.Generator("cpu").manual_seed(seed), "output_type": "pt"}
    return pictures_of(pipeline(**given)).cpu()


def pictures_of(output: Any) -> Any:
    """The frames or images of a pipeline's output, or the first thing in it."""
    for name in ("frames", "images"):
        if hasattr(output, name):
            return getattr(output, name)
    return output[0]


def same_bits(first: Any, second: Any) -> bool:
    """Whether two outputs are the same to the last bit: tensors, arrays, pictures, or lists of these.

    Bits, not values: two NaN of one kind are the same, 0.0 and -0.0 are not.
    """
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        if (first.dtype, first.shape) != (second.dtype, second.shape):
            return False
        raw = [t.detach().cpu().contiguous().flatten().view(torch.uint8) for t in (first, second)]
        return torch.equal(*raw)
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return (first.dtype, first.shape) == (second.dtype, second.shape) and first.tobytes() == second.tobytes()
    if isinstance(first, PIL.Image.Image) and isinstance(second, PIL.Image.Image):
        return (first.mode, first.size, first.tobytes()) == (second.mode, second.size, second.tobytes())
    if isinstance(first, Sequence) and isinstance(second, Sequence):
        return len(first) == len(second) and all(map(same_bits, first, second))
    raise TypeError(f"cannot compare a {type(first).__name__} with a {type(second).__name__}")


def nothing_copied(report: OffloadReport) -> str | None:
    """A complaint where offload was on and moved nothing: an engine that does nothing gives the same output too."""
    if report.copies:
        return None
    return f"nothing was copied to {report.device}: offload did no work, so the outputs prove nothing"


def conclude(resident: Any, offloaded: Any, report: OffloadReport) -> int:
    """Print the verdict, `identical: True` or `identical: False` as the last line, and return the exit status."""
    complaint = nothing_copied(report)
    print(complaint or f"copies to {report.device}: {report.copies}")
    identical = complaint is None and same_bits(resident, offloaded)
    print(f"identical: {identical}")
    return 0 if identical else 1


# --- the small pipelines -------------------------------------------------------------------------------------------


def small_offload_pipeline(family: str, *, dtype: torch.dtype = torch.float32) -> Any:
    """The small pipeline of `family` with the offload mixin, on the host."""
    if family not in _OFFLOAD_CLASSES:
        return with_offload(small_pipelines.build(family, dtype=dtype))
    cls = getattr(import_module("..pipelines", __package__), _OFFLOAD_CLASSES[family])
    return small_pipelines.build(family, dtype=dtype, cls=cls)


def demo_config(family: str, mode: str | None, components: Sequence[str] | None) -> OffloadConfig:
    """What the demonstration turns on. Mode "split" is model-level offload of a model whose parts take turns.

    Raises:
        OffloadConfigError: the mode does not go with the pipeline, or a component is misspelled.
    """
    mode = mode or ("split" if family == "split" else "layer")
    if mode == "split" and family != "split":
        raise OffloadConfigError(
            f"{describe('--mode', mode)} contradicts {describe('--pipeline', family)}: its model has no parts that "
            "take turns. Use --pipeline split, or --mode layer or module."
        )
    fields: dict[str, Any] = {"mode": "module" if mode == "split" else mode, "components": components}
    return OffloadConfig.from_dict(fields)


@dataclass(frozen=True)
class Demonstration:
    """One small pipeline run twice: both outputs, and the report of the offloaded run."""

    pipeline: str
    resident: torch.Tensor
    offloaded: torch.Tensor
    report: OffloadReport


def demonstrate(
    family: str, config: OffloadConfig, device: torch.device, *, steps: int, seed: int, dtype: torch.dtype
) -> Demonstration:
    """Run the small pipeline of `family` with offload, and its plain class on `device` without it.

    Two pipelines with the same weights, so that neither run can lean on what the other left behind.

    Raises:
        OffloadConfigError: this pipeline cannot be offloaded as `config` says; nothing has run.
    """
    arguments = small_pipelines.call_arguments(family, steps=steps, seed=seed)
    pipeline = small_offload_pipeline(family, dtype=dtype)
    pipeline.enable_offload(config, device=device)
    offloaded = run(pipeline, arguments, seed=seed)
    report = pipeline.offload_report()
    plain: Any = small_pipelines.build(family, dtype=dtype)
    resident = run(plain.to(device), arguments, seed=seed)
    return Demonstration(type(pipeline).__name__, resident, offloaded, report)


# --- the examples --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExampleOptions:
    """What an example was started with: a pipeline saved on disk or None, the device, a folder or None."""

    model: Path | None
    device: torch.device
    output: Path | None

    def conclude(self, resident: torch.Tensor, offloaded: torch.Tensor, report: OffloadReport) -> int:
        """Write the offloaded pictures where asked, print report and verdict, and return the exit status."""
        print(report)
        if self.output is not None:
            print(write_pictures(offloaded, self.output))
        return conclude(resident, offloaded, report)


def example_options(description: str | None, arguments: Sequence[str] | None = None) -> ExampleOptions:
    """Read an example's command line; `description` is its docstring."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a pipeline saved on disk; a small one is made without it")
    parser.add_argument("--device", help="where to compute; the accelerator if there is one, else the CPU")
    parser.add_argument("--output", type=Path, help="a folder for the pictures; nothing is written without it")
    given = parser.parse_args(arguments)
    if given.model is not None and not given.model.is_dir():
        parser.error(f"--model: {given.model} is not a folder")
    try:
        device, reason = choose_device(given.device)
        check_output_folder(given.output)
    except OffloadConfigError as error:
        parser.error(str(error))
    print(f"device: {device} ({reason})")
    return ExampleOptions(given.model, device, given.output)
