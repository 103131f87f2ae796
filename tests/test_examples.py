"""Each example runs as it is, without an accelerator, and says that both outputs are the same bits."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from omni_offload.demo import comparison
from omni_offload.demo import small_pipelines as small

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NAMES = sorted(path.name for path in EXAMPLES.glob("*.py"))
each = pytest.mark.parametrize("name", NAMES)


def last_line(text: str) -> str:
    return text.rstrip("\n").split("\n")[-1]


def run_here(name: str, monkeypatch: pytest.MonkeyPatch, *options: str | Path) -> int | str | None:
    """Run an example in this process, which saves the imports; returns its exit status."""
    monkeypatch.setattr(sys, "argv", [name, *map(str, options)])
    with pytest.raises(SystemExit) as ending:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return ending.value.code


def test_the_examples_are_there() -> None:
    assert {"flux2_text_encoder.py", "opt_in_your_own.py", "split_model.py"} <= set(NAMES)
    assert {"wan22_model_level.py", "wan_layerwise.py"} <= set(NAMES)


@each
def test_example_is_identical(name: str, tmp_path: Path) -> None:
    # As for a user who has the package installed: found from anywhere.
    found = os.pathsep.join(filter(None, [str(EXAMPLES.parent), os.environ.get("PYTHONPATH")]))
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / name), "--device", "cpu", "--output", "out"],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": found},
    )
    assert result.returncode == 0, result.stderr
    assert last_line(result.stdout) == "identical: True"
    copies = re.search(r"^copies to cpu: (\d+)$", result.stdout, re.MULTILINE)
    assert copies is not None and int(copies[1]) > 0
    assert (tmp_path / "out" / "frame_0000.png").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_split_example_shows_each_part_in_its_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small.build("split").save_pretrained(tmp_path / "saved")
    status = run_here("split_model.py", monkeypatch, "--device", "cpu", "--model", tmp_path / "saved")
    printed = capsys.readouterr().out
    phases = [line for line in printed.split("\n") if line.startswith("while ")]
    assert phases == [f"while {part} ran, on the device: {part}" for part in ("reasoner", "generator")]
    assert (status, last_line(printed)) == (0, "identical: True")


@each
def test_an_example_fails_where_the_output_differs(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, calls = comparison.run, []

    def run(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(None)
        return real(*args, **kwargs) * (1 if len(calls) == 1 else 0.999)

    monkeypatch.setattr(comparison, "run", run)
    status = run_here(name, monkeypatch, "--device", "cpu")
    assert len(calls) == 2
    assert (status, last_line(capsys.readouterr().out)) == (1, "identical: False")


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--model", "missing"], "--model"),
        (["--device", "nonsense"], "nonsense"),
        (["--output", __file__], "--output"),
    ],
)
def test_an_example_refuses_what_is_not_there(
    options: list[str], word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here("wan_layerwise.py", monkeypatch, *options) == 2
    assert word in last_line(capsys.readouterr().err)
