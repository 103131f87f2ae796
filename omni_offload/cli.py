"""The command line: `omni-offload demo` and `omni-offload run`.

Owns options, help texts and exit statuses (0 fine, 1 not identical or not runnable, 2 refused). The work is in `demo`,
which is imported inside the commands, so that asking for help does not load Diffusers.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Run Diffusers pipelines that are larger than the accelerator, with the same output bit for bit.",
)


class Pipeline(str, enum.Enum):
    """The small pipelines that the demonstration can build."""

    WAN = "wan"
    WAN22 = "wan22"
    WAN_I2V = "wan-i2v"
    FLUX2 = "flux2"
    FLUX2_KLEIN = "flux2-klein"
    SPLIT = "split"


class Mode(str, enum.Enum):
    """Ways to offload."""

    LAYER = "layer"
    MODULE = "module"
    SPLIT = "split"


class Dtype(str, enum.Enum):
    """Of the weights."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


DeviceOption = Annotated[
    str | None,
    typer.Option(help="Where to compute, such as cuda:0 or cpu. [default: the accelerator if there is one, else cpu]"),
]
OutputOption = Annotated[
    Path | None,
    typer.Option(help="Folder for the pictures of the offloaded run. Nothing is written without it.", metavar="DIR"),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        from . import __version__

        typer.echo(f"omni-offload {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command(short_help="Compare a small pipeline with and without offload.")
def demo(
    pipeline: Annotated[Pipeline, typer.Option(help="Which small pipeline to build.")] = Pipeline.WAN,
    mode: Annotated[
        Mode | None,
        typer.Option(
            help="layer streams blocks, module lets components take turns, split lets the parts of one model do so. "
            "[default: layer; split for --pipeline split]",
            show_default=False,
        ),
    ] = None,
    components: Annotated[
        str | None,
        typer.Option(
            help="What to offload, roles or paths, such as dit,text_encoder. [default: dit; all in the other modes]",
            metavar="NAME,NAME",
        ),
    ] = None,
    device: DeviceOption = None,
    output: OutputOption = None,
    steps: Annotated[int, typer.Option(min=1, help="Denoising steps.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Of the starting noise.")] = 0,
    dtype: Annotated[Dtype, typer.Option(help="Of the weights.")] = Dtype.FLOAT32,
) -> None:
    """Run a small pipeline twice, on the device and offloaded, and compare the outputs.

    The pipeline is made on the spot from its real classes with random weights; nothing is downloaded. The last line
    is `identical: True`, or `identical: False` with exit status 1.
    """
    with _one_line_errors():
        from .demo import comparison

        names = None if components is None else [name.strip() for name in components.split(",")]
        config = comparison.demo_config(pipeline.value, mode and mode.value, names)
        comparison.check_output_folder(output)
        onload, reason = comparison.choose_device(device)
        typer.echo(f"device: {onload} ({reason})")
        result = comparison.demonstrate(
            pipeline.value, config, onload, steps=steps, seed=seed, dtype=comparison.DTYPES[dtype.value]
        )
        typer.echo(f"{result.pipeline} ({pipeline.value}), {dtype.value}, steps: {steps}, seed: {seed}")
        typer.echo(str(result.report))
        if output is not None:
            typer.echo(comparison.write_pictures(result.offloaded, output))
        raise typer.Exit(comparison.conclude(result.resident, result.offloaded, result.report))


@app.command(short_help="Run a pipeline saved on disk, and compare.")
def run(
    model_dir: Annotated[Path, typer.Argument(help="A pipeline saved with save_pretrained, on this machine.")],
    prompt: Annotated[str | None, typer.Option(help="What to make.")] = None,
    enable_cpu_offload: Annotated[
        bool, typer.Option("--enable-cpu-offload", help="Model-level offload: components take turns.")
    ] = False,
    diffusion_offload_config: Annotated[
        str | None,
        typer.Option(help='What to offload and how, such as {"mode": "layer", "components": ["dit"]}.', metavar="JSON"),
    ] = None,
    negative_prompt: Annotated[str | None, typer.Option(help="What to keep away from.")] = None,
    image: Annotated[Path | None, typer.Option(help="First frame, for image to video.", metavar="FILE")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Denoising steps.")] = None,
    height: Annotated[int | None, typer.Option(min=1, help="In pixels.")] = None,
    width: Annotated[int | None, typer.Option(min=1, help="In pixels.")] = None,
    num_frames: Annotated[int | None, typer.Option(min=1, help="Of a video.")] = None,
    guidance_scale: Annotated[float | None, typer.Option(help="How closely to follow the prompt.")] = None,
    call_arguments: Annotated[
        str | None, typer.Option(help="Anything else that the pipeline's call takes, by name.", metavar="JSON")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the starting noise. [default: 0]")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of the weights.")] = Dtype.BFLOAT16,
    device: DeviceOption = None,
    output: OutputOption = None,
    compare: Annotated[
        bool, typer.Option(help="Load it again, run it without offload, and compare the outputs.")
    ] = True,
) -> None:
    """Run a pipeline saved on disk with offload, and compare it with the same pipeline without.

    Only local files are read, only safetensors, and no code from the folder is run. Options that are not given are
    left to the pipeline. The last line is `identical: True`, or `identical: False` with exit status 1; there is none
    with --no-compare.
    """
    with _one_line_errors():
        from .demo import comparison, saved

        config = saved.offload_wanted(enable_cpu_offload, diffusion_offload_config)
        more = saved.json_object("--call-arguments", call_arguments)
        comparison.check_output_folder(output)
        model = saved.SavedPipeline.at(model_dir)
        options: dict[str, Any] = {
            "prompt": prompt,
            "negative_prompt": negative_prompt,
            "image": None if image is None else saved.picture_at(image),
            "num_inference_steps": steps,
            "height": height,
            "width": width,
            "num_frames": num_frames,
            "guidance_scale": guidance_scale,
        }
        call = model.call_arguments(options, more, seed)
        onload, reason = comparison.choose_device(device)
        typer.echo(f"device: {onload} ({reason})")
        weights = comparison.DTYPES[dtype.value]
        pictures, report = model.run_offloaded(config, onload, weights, call)
        typer.echo(str(report))
        if output is not None:
            typer.echo(comparison.write_pictures(pictures, output))
        if compare:
            resident = model.run_resident(onload, weights, call)
            raise typer.Exit(comparison.conclude(resident, pictures, report))
        complaint = comparison.nothing_copied(report)
        typer.echo(complaint or f"copies to {report.device}: {report.copies}")
        raise typer.Exit(1 if complaint else 0)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Errors that the user can do something about, as one line and an exit status instead of a traceback."""
    from .errors import OffloadError

    try:
        yield
    except OffloadError as error:
        status, message = 2, str(error)
    except RuntimeError as error:
        from .demo.saved import RunError

        if not isinstance(error, RunError):
            raise
        status, message = 1, str(error)
    else:
        return
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    raise typer.Exit(status)


def main() -> None:
    """Entry of the console script."""
    # On the CPU, MKL picks its code by the alignment of an operand, so that equal numbers in other memory can give
    # another last bit. Read by MKL at its first call.
    os.environ.setdefault("MKL_CBWR", "COMPATIBLE")
    # Nothing is ever fetched, whatever a library would like to look up.
    os.environ["HF_HUB_OFFLINE"] = "1"
    app(prog_name="omni-offload")
