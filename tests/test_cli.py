"""The command line does what it says, ends with its verdict, and refuses before it does anything."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from typer.testing import CliRunner, Result

import omni_offload
from omni_offload import OffloadConfigError, OffloadStateError, cli
from omni_offload.demo import comparison, saved
from omni_offload.demo import small_pipelines as small

ROOT = Path(__file__).resolve().parent.parent
WAN_CALL = ["--prompt", "boat", "--steps", "1", "--height", "16", "--width", "16", "--num-frames", "5"]
KLEIN_MORE = json.dumps({"text_encoder_out_layers": [1, 3, 5], "max_sequence_length": 32})
KLEIN_CALL = ["--prompt", "boat", "--steps", "1", "--height", "32", "--width", "32", "--call-arguments", KLEIN_MORE]


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run a command line in an empty folder."""
    folder = tmp_path / "cwd"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return lambda *arguments: CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


@pytest.fixture(scope="session")
def saved_wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "wan"
    small.build("wan").save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def saved_klein(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "klein"
    small.build("flux2-klein").save_pretrained(folder)
    return folder


def last_line(result: Result) -> str:
    return result.stdout.rstrip("\n").split("\n")[-1]


def assert_identical(result: Result) -> None:
    assert result.exit_code == 0, result.output
    assert last_line(result) == "identical: True"
    assert result.stdout.count("identical:") == 1
    copies = re.search(r"^copies to cpu: (\d+)$", result.stdout, re.MULTILINE)
    assert copies is not None and int(copies[1]) > 0


def assert_refused(result: Result, *words: str) -> None:
    """Exit status 2, one line, and nothing on stdout that looks like a verdict."""
    assert result.exit_code == 2, result.output
    error = result.stderr.strip().split("\n")[-1]
    assert error.lower().startswith("error: "), result.stderr
    for word in words:
        assert word in error, error
    assert "Traceback" not in result.output
    assert "identical" not in result.stdout


def edit_index(source: Path, target: Path, **changes: Any) -> Path:
    """A folder like `source`, of links, with another model_index.json."""
    target.mkdir()
    for entry in source.iterdir():
        if entry.name != "model_index.json":
            (target / entry.name).symlink_to(entry)
    index = json.loads((source / "model_index.json").read_text()) | changes
    (target / "model_index.json").write_text(json.dumps(index))
    return target


# --- demo ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        "",
        "--components dit,text_encoder --dtype bfloat16 --seed 3",
        "--pipeline wan22 --mode module",
        "--pipeline wan-i2v --mode module --components transformer,image_encoder",
        "--pipeline flux2 --components text_encoder",
        "--pipeline flux2-klein --mode module",
        "--pipeline split",
        "--pipeline split --mode split --components dit",
        "--pipeline split --mode layer",
    ],
)
def test_demo_is_identical_and_writes_nothing(invoke: Callable[..., Result], options: str) -> None:
    steps = 2 if "wan22" in options else 1  # both experts of wan22
    result = invoke("demo", "--device", "cpu", "--steps", steps, *options.split())
    assert_identical(result)
    assert "mode " in result.stdout and " on cpu" in result.stdout
    assert list(Path.cwd().iterdir()) == []


def test_demo_without_a_device_says_which_one_it_takes(
    invoke: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    result = invoke("demo", "--steps", 1)
    assert_identical(result)
    assert result.stdout.startswith("device: cpu (no accelerator was found)\n")
    assert not caplog.records


def test_default_device_is_one_that_can_be_offloaded_to(monkeypatch: pytest.MonkeyPatch) -> None:
    current = torch.device("mps")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: current)
    device, reason = comparison.choose_device(None)
    assert device == torch.device("cpu")
    assert "mps" in reason


def test_demo_writes_the_frames_and_an_animation_of_a_video(invoke: Callable[..., Result], tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    result = invoke("demo", "--steps", 1, "--device", "cpu", "--output", folder)
    assert_identical(result)
    assert f"to {folder}" in result.stdout.replace("\n", "")
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["animation.gif", *(f"frame_{i:04d}.png" for i in range(9))]
    expected = small.build("wan")(**small.call_arguments("wan", steps=1)).frames
    frame = np.asarray(PIL.Image.open(folder / "frame_0004.png"))
    assert np.array_equal(frame, (expected[0, 4].permute(1, 2, 0) * 255).round().to(torch.uint8).numpy())
    with PIL.Image.open(folder / "animation.gif") as animation:
        assert animation.n_frames > 1


def test_demo_writes_one_picture_of_an_image(invoke: Callable[..., Result], tmp_path: Path) -> None:
    result = invoke("demo", "--pipeline", "split", "--steps", 1, "--device", "cpu", "--output", tmp_path / "out")
    assert_identical(result)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["frame_0000.png"]


def test_steps_and_seed_reach_the_pipeline(invoke: Callable[..., Result], tmp_path: Path) -> None:
    pictures = {}
    for number, options in enumerate([(1, 0), (2, 0), (1, 1)]):
        folder = tmp_path / str(number)
        steps, seed = options
        call = ("demo", "--pipeline", "split", "--device", "cpu", "--steps", steps, "--seed", seed, "--output", folder)
        assert_identical(invoke(*call))
        pictures[options] = (folder / "frame_0000.png").read_bytes()
    assert len(set(pictures.values())) == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--mode split", ["--mode='split'", "--pipeline='wan'"]),
        ("--mode split --pipeline flux2", ["--mode='split'", "--pipeline='flux2'"]),
        ("--components vae", ["vae", "cannot be offloaded"]),
        ("--components dit,dit", ["dit"]),
        ("--components ,", ["components[0]"]),
        ("--components ditt", ["'ditt'", "Did you mean 'dit'?"]),
        ("--pipeline split --components text_encoder", ["text_encoder"]),
        ("--pipeline wam", ["--pipeline", "wan22"]),
        ("--mode blocks", ["--mode", "layer"]),
        ("--dtype float64", ["--dtype", "bfloat16"]),
        ("--steps 0", ["--steps"]),
        ("--seed -1", ["--seed"]),
        ("--device nonsense", ["nonsense"]),
        ("--device meta", ["meta"]),
        ("--output file", ["--output='file'"]),
    ],
)
def test_demo_refuses(invoke: Callable[..., Result], options: str, words: list[str]) -> None:
    Path("file").touch()
    assert_refused(invoke("demo", "--device", "cpu", *options.split()), *words)
    assert [path.name for path in Path.cwd().iterdir()] == ["file"]


@pytest.mark.parametrize("error", [OffloadConfigError, OffloadStateError])
def test_an_error_of_this_package_is_one_line(
    invoke: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error("first line\nand second")

    monkeypatch.setattr(comparison, "demonstrate", fail)
    result = invoke("demo", "--device", "cpu")
    assert_refused(result)
    assert result.stderr == "error: first line and second\n"


def test_any_other_error_keeps_its_traceback(invoke: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a bug")

    monkeypatch.setattr(comparison, "demonstrate", fail)
    assert isinstance(invoke("demo", "--device", "cpu").exception, RuntimeError)


# --- a verdict that can be trusted -----------------------------------------------------------------------------------


def test_one_wrong_bit_is_seen(invoke: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = comparison.run, []

    def run(*args: Any, **kwargs: Any) -> torch.Tensor:
        pictures = real(*args, **kwargs)
        calls.append(None)
        if len(calls) == 2:
            pictures.view(torch.int32).flatten()[-1] ^= 1
        return pictures

    monkeypatch.setattr(comparison, "run", run)
    result = invoke("demo", "--pipeline", "split", "--steps", 1, "--device", "cpu")
    assert len(calls) == 2
    assert result.exit_code == 1
    assert last_line(result) == "identical: False"


def test_a_block_with_another_weight_is_seen(invoke: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    real = comparison.small_offload_pipeline

    def build(*args: Any, **kwargs: Any) -> Any:
        pipe = real(*args, **kwargs)
        with torch.no_grad():
            pipe.transformer.blocks[3].ffn.net[2].weight.mul_(1.01)
        return pipe

    monkeypatch.setattr(comparison, "small_offload_pipeline", build)
    result = invoke("demo", "--steps", 1, "--device", "cpu")
    assert result.exit_code == 1
    assert last_line(result) == "identical: False"


def test_an_engine_that_does_nothing_does_not_pass(
    invoke: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(family: str, **options: Any) -> Any:
        pipe = small.build(family, **options)
        report = SimpleNamespace(copies=0, device="cpu")
        type(pipe).enable_offload = lambda *args, **kwargs: report
        type(pipe).offload_report = lambda self: report
        return pipe

    plain = small.pipeline_class("split")
    for name in ("enable_offload", "offload_report"):
        monkeypatch.setattr(plain, name, None, raising=False)  # taken away again behind the test
    monkeypatch.setattr(comparison, "small_offload_pipeline", build)
    result = invoke("demo", "--pipeline", "split", "--steps", 1, "--device", "cpu")
    assert result.exit_code == 1
    assert result.stdout.rstrip().split("\n")[-2].startswith("nothing was copied to cpu")
    assert last_line(result) == "identical: False"


def test_same_bits_compares_bits() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert comparison.same_bits(nan, nan.clone())
    assert comparison.same_bits(torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.bfloat16))
    assert comparison.same_bits(torch.ones(3, 2).t(), torch.ones(2, 3))
    assert not comparison.same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not comparison.same_bits(torch.ones(2), torch.ones(2, dtype=torch.float64))
    assert not comparison.same_bits(torch.ones(2), torch.ones(1, 2))
    assert comparison.same_bits(np.ones(2), np.ones(2)) and not comparison.same_bits(np.ones(2), np.zeros(2))
    picture = small.sample_image(4, 4)
    assert comparison.same_bits([[picture]], [[picture.copy()]])
    assert not comparison.same_bits([picture], [small.sample_image(4, 4, seed=1)])
    assert not comparison.same_bits([picture], [picture, picture])
    with pytest.raises(TypeError, match="cannot compare"):
        comparison.same_bits(torch.ones(2), np.ones(2))


# --- run -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "offload",
    [
        ["--enable-cpu-offload"],
        ["--diffusion-offload-config", '{"mode": "layer", "components": ["dit", "text_encoder"]}'],
    ],
    ids=["cpu-offload", "config"],
)
def test_run_compares_and_writes(
    invoke: Callable[..., Result], saved_wan: Path, tmp_path: Path, offload: list[str]
) -> None:
    options = ["--negative-prompt", "dark", "--guidance-scale", 3, "--output", tmp_path / "out", "--dtype", "float32"]
    result = invoke("run", saved_wan, *WAN_CALL, *offload, *options, "--device", "cpu")
    assert_identical(result)
    assert "OffloadWanPipeline: mode" in result.stdout
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["animation.gif", *(f"frame_{i:04d}.png" for i in range(5))]
    assert list(Path.cwd().iterdir()) == []


def test_run_without_comparing_gives_no_verdict_and_writes_nothing(
    invoke: Callable[..., Result], saved_wan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved.SavedPipeline, "run_resident", None)
    result = invoke("run", saved_wan, *WAN_CALL, "--enable-cpu-offload", "--no-compare", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "identical" not in result.stdout
    assert last_line(result).startswith("copies to cpu: ")
    assert list(Path.cwd().iterdir()) == []


def test_run_sees_a_difference(invoke: Callable[..., Result], saved_wan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = saved.SavedPipeline.run_resident
    monkeypatch.setattr(saved.SavedPipeline, "run_resident", lambda *args: real(*args) * 0.5)
    result = invoke("run", saved_wan, *WAN_CALL, "--enable-cpu-offload", "--device", "cpu")
    assert result.exit_code == 1
    assert last_line(result) == "identical: False"


def test_run_serves_an_image_to_video_pipeline(invoke: Callable[..., Result], tmp_path: Path) -> None:
    small.build("wan-i2v").save_pretrained(tmp_path / "saved")
    call = ["run", tmp_path / "saved", *WAN_CALL, "--enable-cpu-offload", "--device", "cpu"]
    assert_refused(invoke(*call), "--image")
    small.sample_image(16, 16).save(tmp_path / "first.png")
    assert_identical(invoke(*call, "--image", tmp_path / "first.png"))
    (tmp_path / "none.png").write_text("no picture")
    assert_refused(invoke(*call, "--image", tmp_path / "none.png"), "--image")


def test_run_serves_a_class_that_has_no_ready_made_one(
    invoke: Callable[..., Result], saved_klein: Path, tmp_path: Path
) -> None:
    folder = edit_index(saved_klein, tmp_path / "kv", _class_name="Flux2KleinKVPipeline")
    result = invoke("run", folder, *KLEIN_CALL, "--diffusion-offload-config", '{"mode": "layer"}', "--device", "cpu")
    assert_identical(result)
    assert "Flux2KleinKVPipeline: mode layer" in result.stdout


def test_run_serves_the_small_split_pipeline(invoke: Callable[..., Result], tmp_path: Path) -> None:
    small.build("split").save_pretrained(tmp_path / "saved")
    call = ["--prompt", "boat", "--steps", 1, "--height", 32, "--width", 32, "--seed", 5, "--device", "cpu"]
    assert_identical(invoke("run", tmp_path / "saved", *call, "--enable-cpu-offload"))


def nothing_loads(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("something was loaded")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], ["both missing"]),
        (["--enable-cpu-offload", "--diffusion-offload-config", '{"mode": "layer"}'], ["exclude each other"]),
        (["--diffusion-offload-config", "layer"], ["not JSON"]),
        (["--diffusion-offload-config", '{"mode": "layr"}'], ["'layr'", "Did you mean 'layer'?"]),
        (["--diffusion-offload-config", '{"mode": "layer", "mode": "layer"}'], ["twice"]),
        (["--enable-cpu-offload", "--num-frames", 5], ["--num-frames=5", "num_frames"]),
        (["--enable-cpu-offload", "--negative-prompt", "dark"], ["--negative-prompt='dark'"]),
        (["--enable-cpu-offload", "--call-arguments", '{"wide": 1}'], ["--call-arguments.wide=1"]),
        (["--enable-cpu-offload", "--call-arguments", '{"prompt": "x"}'], ["'prompt'"]),
        (["--enable-cpu-offload", "--call-arguments", '{"output_type": "pil"}'], ["'output_type'"]),
        (["--enable-cpu-offload", "--call-arguments", "[1]"], ["JSON object"]),
        (["--enable-cpu-offload", "--call-arguments", "{"], ["not JSON"]),
        (["--enable-cpu-offload", "--device", "nonsense"], ["nonsense"]),
        (["--enable-cpu-offload", "--output", "file"], ["--output='file'"]),
    ],
)
def test_run_refuses_before_anything_loads(
    invoke: Callable[..., Result], saved_klein: Path, options: list[Any], words: list[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr(saved.SavedPipeline, "_load", nothing_loads)
    Path("file").touch()
    assert_refused(invoke("run", saved_klein, "--prompt", "boat", "--device", "cpu", *options), *words)


def test_run_needs_a_prompt_where_the_pipeline_takes_one(invoke: Callable[..., Result], saved_klein: Path) -> None:
    assert_refused(invoke("run", saved_klein, "--enable-cpu-offload", "--device", "cpu"), "--prompt")


def test_run_refuses_what_is_no_pipeline_folder(
    invoke: Callable[..., Result], saved_klein: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved.SavedPipeline, "_load", nothing_loads)
    call = ["--prompt", "boat", "--enable-cpu-offload", "--device", "cpu"]
    assert_refused(invoke("run", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", *call), "nothing is downloaded")
    assert_refused(invoke("run", tmp_path, *call), "model_index.json")
    for number, name in enumerate(["NoSuchPipeline", "AutoencoderKL", ["pipeline", "MyPipeline"], None]):
        folder = edit_index(saved_klein, tmp_path / str(number), _class_name=name)
        assert_refused(invoke("run", folder, *call), "_class_name")
    (tmp_path / "broken").mkdir()
    for text in ("{", "[]", "{}"):
        (tmp_path / "broken" / "model_index.json").write_text(text)
        assert_refused(invoke("run", tmp_path / "broken", *call), "cannot be read")


class Trap:
    """Unpickling this leaves a file behind."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (Path.touch, (self.mark,))


def test_run_never_loads_a_pickle_or_code(invoke: Callable[..., Result], saved_klein: Path, tmp_path: Path) -> None:
    call = [*KLEIN_CALL, "--enable-cpu-offload", "--device", "cpu"]
    mark = tmp_path / "executed"

    pickled = edit_index(saved_klein, tmp_path / "pickled")
    for component, weights in (("transformer", "diffusion_pytorch_model.bin"), ("text_encoder", "pytorch_model.bin")):
        (pickled / component).unlink()
        (pickled / component).mkdir()
        (pickled / component / "config.json").symlink_to(saved_klein / component / "config.json")
        (pickled / component / weights).write_bytes(pickle.dumps(Trap(mark)))
    coded = edit_index(saved_klein, tmp_path / "coded", transformer=["own_model", "OwnModel"])
    (coded / "transformer").unlink()
    (coded / "transformer").mkdir()
    (coded / "transformer" / "config.json").write_text("{}")
    (coded / "transformer" / "own_model.py").write_text(f"open({str(mark)!r}, 'w')\nclass OwnModel: pass\n")

    for folder in (pickled, coded):
        result = invoke("run", folder, *call)
        assert result.exit_code == 1, result.output
        assert result.stderr.strip().split("\n")[-1].startswith(f"error: {folder} could not be loaded")
        assert "identical" not in result.stdout
        assert not mark.exists()


def test_run_says_what_the_pipeline_finds_wrong(invoke: Callable[..., Result], saved_wan: Path) -> None:
    call = ["--prompt", "boat", "--steps", 1, "--height", 17, "--width", 16, "--enable-cpu-offload", "--device", "cpu"]
    result = invoke("run", saved_wan, *call)
    assert result.exit_code == 1
    error = result.stderr.strip().split("\n")[-1]
    assert error.startswith("error: the pipeline failed with offload on cpu: ") and "17" in error


def test_run_says_when_the_resident_run_does_not_fit(
    invoke: Callable[..., Result], saved_wan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import diffusers

    def no_room(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(diffusers.WanPipeline, "to", no_room)
    monkeypatch.setattr(omni_offload.OffloadWanPipeline, "to", diffusers.DiffusionPipeline.to)
    result = invoke("run", saved_wan, *WAN_CALL, "--enable-cpu-offload", "--device", "cpu")
    assert result.exit_code == 1
    assert "--no-compare" in result.stderr.strip().split("\n")[-1]
    assert "identical" not in result.stdout


# --- around the commands -----------------------------------------------------------------------------------------


def test_version_and_help(invoke: Callable[..., Result]) -> None:
    assert invoke("--version").stdout == f"omni-offload {omni_offload.__version__}\n"
    assert "demo" in invoke("--help").stdout
    assert "identical: True" in invoke("demo", "--help").stdout
    assert "--diffusion-offload-config" in invoke("run", "--help").stdout


def test_choices_are_those_that_exist() -> None:
    assert tuple(cli.Pipeline) == small.FAMILIES
    assert {mode.value for mode in cli.Mode} == {*omni_offload.config.MODES, "split"}
    assert {dtype.value for dtype in cli.Dtype} == set(comparison.DTYPES)


@pytest.mark.parametrize("options", [["--help"], ["--version"], ["demo", "--help"], ["run", "--help"]], ids=" ".join)
def test_help_is_quick_to_come(options: list[str]) -> None:
    code = (
        "import atexit, sys; from omni_offload.cli import main\n"
        "heavy = ('torch', 'diffusers', 'transformers', 'numpy')\n"
        "atexit.register(lambda: print('loaded:', [name for name in heavy if name in sys.modules])); main()"
    )
    command = [sys.executable, "-c", code, *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.rstrip().split("\n")[-1] == "loaded: []"


def test_python_m_is_the_console_script() -> None:
    command = [sys.executable, "-m", "omni_offload", "demo", "--mode", "blocks"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert result.returncode == 2
    assert "omni-offload demo" in result.stderr and "--mode" in result.stderr


def test_main_sets_the_environment_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str | None] = {}
    os: ModuleType = cli.os
    monkeypatch.delenv("MKL_CBWR")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    names = ("MKL_CBWR", "HF_HUB_OFFLINE")
    monkeypatch.setattr(cli, "app", lambda **_: seen.update({name: os.environ.get(name) for name in names}))
    cli.main()
    assert seen == {"MKL_CBWR": "COMPATIBLE", "HF_HUB_OFFLINE": "1"}
