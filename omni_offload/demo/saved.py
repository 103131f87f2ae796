"""Loads and runs a pipeline that is saved on disk, with offload and without.

Owns what is accepted from disk (a local folder, safetensors, no code) and which arguments a pipeline's call takes.
"""

from __future__ import annotations

import gc
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import PIL.Image
import torch

from ..adopt import with_offload
from ..config import OffloadConfig, refuse_unbuilt
from ..errors import OffloadConfigError, describe
from ..report import OffloadReport
from .comparison import pictures_of

T = TypeVar("T")

# Class in model_index.json -> the ready-made class of this package.
_READY_MADE = {
    "WanPipeline": "OffloadWanPipeline",
    "WanImageToVideoPipeline": "OffloadWanImageToVideoPipeline",
    "Flux2Pipeline": "OffloadFlux2Pipeline",
    "Flux2KleinPipeline": "OffloadFlux2KleinPipeline",
}
_SET_HERE = ("generator", "output_type")
# Never a download, never a pickle, never code from the folder.
_LOADING = {"local_files_only": True, "use_safetensors": True, "trust_remote_code": False}


class RunError(RuntimeError):
    """The pipeline could not be loaded or run; the message says why, in one line."""


def offload_wanted(enable_cpu_offload: bool, diffusion_offload_config: str | None) -> OffloadConfig | None:
    """The configuration that was asked for, None for plain `enable_cpu_offload`.

    Raises:
        OffloadConfigError: both are given, or neither, or the configuration is not valid.
    """
    if enable_cpu_offload == (diffusion_offload_config is not None):
        what = "exclude each other" if enable_cpu_offload else "are both missing"
        raise OffloadConfigError(
            f"--enable-cpu-offload and --diffusion-offload-config {what}. Give one of them: the first is model-level "
            "offload, the second says which."
        )
    if diffusion_offload_config is None:
        return None
    config = OffloadConfig.parse(diffusion_offload_config)
    refuse_unbuilt(config)
    return config


def json_object(field: str, text: str | None) -> dict[str, Any]:
    """The JSON object in `text`, empty without one.

    Raises:
        OffloadConfigError: not JSON, or not an object.
    """
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OffloadConfigError(f"{describe(field, text)} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise OffloadConfigError(f"{describe(field, text)} must be a JSON object")
    return value


def picture_at(path: Path) -> PIL.Image.Image:
    """The picture in a file, in RGB.

    Raises:
        OffloadConfigError: there is none that can be read.
    """
    try:
        with PIL.Image.open(path) as picture:
            return picture.convert("RGB")
    except (OSError, ValueError) as error:
        raise OffloadConfigError(f"{describe('--image', str(path))} cannot be read: {error}") from None


@dataclass(frozen=True)
class SavedPipeline:
    """A pipeline folder whose `model_index.json` has been read, and nothing else yet.

    Args:
        folder: where it is.
        plain: the class that it was saved from.
    """

    folder: Path
    plain: type[Any]

    @classmethod
    def at(cls, folder: Path) -> SavedPipeline:
        """Look at `folder`.

        Raises:
            OffloadConfigError: not a local folder, no pipeline in it, or one that needs code of its own.
        """
        where = describe("MODEL_DIR", str(folder))
        if not folder.is_dir():
            raise OffloadConfigError(f"{where} is not a folder on this machine; nothing is downloaded")
        index = folder / "model_index.json"
        if not index.is_file():
            raise OffloadConfigError(f"{where} has no model_index.json: it is no saved Diffusers pipeline")
        try:
            saved = json.loads(index.read_text(encoding="utf-8"))
            name = saved["_class_name"]
        except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
            problem = f"{type(error).__name__}: {error}"
            raise OffloadConfigError(f"{where}: model_index.json cannot be read ({problem})") from None
        if not isinstance(name, str):
            raise OffloadConfigError(
                f"{where} names {describe('_class_name', name)}: a pipeline with code of its own, which is never run"
            )
        return cls(folder, _pipeline_class(name, where))

    def call_arguments(self, options: Mapping[str, Any], more: Mapping[str, Any], seed: int | None) -> _Call:
        """The arguments for the pipeline's call, checked against its signature.

        Args:
            options: name of an argument -> its value, None where the user did not give it.
            more: further arguments by name, from `--call-arguments`.
            seed: of the starting noise.

        Raises:
            OffloadConfigError: the pipeline does not take one of them, or needs one that is missing.
        """
        parameters = list(inspect.signature(self.plain.__call__).parameters.values())[1:]
        names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
        given = {name: value for name, value in options.items() if value is not None}
        for name in more:
            if name in given or name in _SET_HERE:
                raise OffloadConfigError(f"{describe('--call-arguments', name)}: there is an option for it already")
        flags = [(name, _flag(name), value) for name, value in given.items()]
        flags += [(name, f"--call-arguments.{name}", value) for name, value in more.items()]
        if seed is not None:
            flags.append(("generator", "--seed", seed))
        for name, flag, value in flags:
            if name not in names and not open_ended:
                raise OffloadConfigError(
                    f"{describe(flag, value)}: {self.plain.__name__} takes no {name}. Leave it out."
                )
        arguments = {**given, **more}
        needed = [p.name for p in parameters if p.name in names and (p.default is p.empty or p.name == "prompt")]
        missing = [name for name in needed if name not in arguments]
        if missing:
            flag = _flag(missing[0]) if missing[0] in options else "--call-arguments"
            raise OffloadConfigError(f"{self.plain.__name__} needs {missing[0]}; give it with {flag}")
        if "output_type" in names:
            arguments["output_type"] = "pt"
        return _Call(arguments, (seed or 0) if "generator" in names else None)

    def run_offloaded(
        self, config: OffloadConfig | None, device: torch.device, dtype: torch.dtype, call: _Call
    ) -> tuple[Any, OffloadReport]:
        """Load with offload on, and run; returns the pictures and the report.

        Raises:
            OffloadConfigError: this pipeline cannot be offloaded as asked.
            RunError: it cannot be loaded or run.
        """
        ready = _READY_MADE.get(self.plain.__name__)
        if ready is None:
            pipeline = with_offload(self._load(self.plain, dtype))
            if config is None:
                pipeline.enable_model_cpu_offload(device=device)
            else:
                pipeline.enable_offload(config, device=device)
        else:
            cls = getattr(import_module("..pipelines", __package__), ready)
            how = {"diffusion_offload_config": config} if config is not None else {"enable_cpu_offload": True}
            pipeline = self._load(cls, dtype, offload_device=device, **how)
        pictures = self._run(pipeline, call, f"with offload on {device}")
        report = pipeline.offload_report()
        del pipeline
        gc.collect()  # a pipeline holds itself; its host memory is wanted for the next one
        return pictures, report

    def run_resident(self, device: torch.device, dtype: torch.dtype, call: _Call) -> Any:
        """Load anew with the plain class, put everything on `device`, and run; returns the pictures.

        Raises:
            RunError: it cannot be loaded or run, or does not fit.
        """
        pipeline = self._load(self.plain, dtype)

        def moved_and_run() -> Any:
            return pictures_of(pipeline.to(device)(**call.arguments_now()))

        return _in_words(moved_and_run, f"without offload on {device} (--no-compare leaves this run out)")

    def _load(self, cls: type[Any], dtype: torch.dtype, **options: Any) -> Any:
        try:
            return cls.from_pretrained(self.folder, dtype=dtype, **_LOADING, **options)
        except OffloadConfigError:
            raise
        except (OSError, ValueError, ImportError, AttributeError, KeyError) as error:
            raise RunError(f"{self.folder} could not be loaded as {cls.__name__}: {error}") from error

    def _run(self, pipeline: Any, call: _Call, how: str) -> Any:
        return _in_words(lambda: pictures_of(pipeline(**call.arguments_now())), how)


@dataclass(frozen=True)
class _Call:
    """Arguments of one call, and the seed that a new generator gets each time."""

    arguments: Mapping[str, Any]
    seed: int | None

    def arguments_now(self) -> dict[str, Any]:
        given = dict(self.arguments)
        if self.seed is not None:
            given["generator"] = torch.Generator("cpu").manual_seed(self.seed)
        return given


def _in_words(work: Callable[[], T], how: str) -> T:
    """What a pipeline says about arguments that it does not like, and want of memory, as a `RunError`."""
    try:
        return work()
    except torch.OutOfMemoryError as error:
        raise RunError(f"out of device memory {how}: {error}") from error
    except (ValueError, TypeError) as error:
        raise RunError(f"the pipeline failed {how}: {error}") from error


def _flag(argument: str) -> str:
    return "--steps" if argument == "num_inference_steps" else f"--{argument.replace('_', '-')}"


def _pipeline_class(name: str, where: str) -> type[Any]:
    import diffusers

    from .split_model import SmallSplitPipeline

    cls = SmallSplitPipeline if name == SmallSplitPipeline.__name__ else getattr(diffusers, name, None)
    if not (isinstance(cls, type) and issubclass(cls, diffusers.DiffusionPipeline)):
        raise OffloadConfigError(
            f"{where} names {describe('_class_name', name)}, which diffusers {diffusers.__version__} does not have"
        )
    return cls
