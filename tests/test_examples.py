"""Each example runs as it is, without an accelerator, and says that both outputs are the same bits."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from omni_offload.demo import small_pipelines as small

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NAMES = sorted(path.name for path in EXAMPLES.glob("*.py"))
each = pytest.mark.parametrize("name", NAMES)


def start(name: str, *options: str | Path, cwd: Path, before: str = "") -> subprocess.CompletedProcess[str]:
    """Run an example in `cwd`; `before` is Python that runs first, in the same process."""
    path = EXAMPLES / name
    code = (
        f"{before}\nimport runpy, sys; sys.argv[0] = {str(path)!r}; runpy.run_path({str(path)!r}, run_name='__main__')"
    )
    command = [sys.executable, *(["-c", code] if before else [str(path)]), *map(str, options)]
    # As for a user who has the package installed: found from anywhere.
    found = os.pathsep.join(filter(None, [str(EXAMPLES.parent), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": found, "PYTHONWARNINGS": "default"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=cwd, env=environment)


def last_line(result: subprocess.CompletedProcess[str]) -> str:
    return result.stdout.rstrip("\n").split("\n")[-1]


def test_the_examples_are_there() -> None:
    assert {"flux2_text_encoder.py", "opt_in_your_own.py", "split_model.py"} <= set(NAMES)
    assert {"wan22_model_level.py", "wan_layerwise.py"} <= set(NAMES)


@each
def test_example_is_identical(name: str, tmp_path: Path) -> None:
    result = start(name, "--device", "cpu", "--output", tmp_path / "out", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert last_line(result) == "identical: True"
    copies = re.search(r"^copies to cpu: (\d+)$", result.stdout, re.MULTILINE)
    assert copies is not None and int(copies[1]) > 0
    assert (tmp_path / "out" / "frame_0000.png").is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_split_example_shows_each_part_in_its_phase(tmp_path: Path) -> None:
    small.build("split").save_pretrained(tmp_path / "saved")
    result = start("split_model.py", "--device", "cpu", "--model", tmp_path / "saved", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    phases = [line for line in result.stdout.split("\n") if line.startswith("while ")]
    assert phases == [f"while {part} ran, on the device: {part}" for part in ("reasoner", "generator")]
    assert last_line(result) == "identical: True"


def test_an_example_fails_where_the_output_differs(tmp_path: Path) -> None:
    spoil = (
        "from omni_offload.demo import comparison\n"
        "real, calls = comparison.run, []\n"
        "def run(*args, **kwargs):\n"
        "    calls.append(None)\n"
        "    return real(*args, **kwargs) * (1 if len(calls) == 1 else 0.999)\n"
        "comparison.run = run\n"
    )
    result = start("wan_layerwise.py", "--device", "cpu", cwd=tmp_path, before=spoil)
    assert result.returncode == 1
    assert last_line(result) == "identical: False"


@pytest.mark.parametrize(
    ("options", "word"), [(["--model", "missing"], "--model"), (["--device", "nonsense"], "nonsense")]
)
def test_an_example_refuses_what_is_not_there(options: list[str], word: str, tmp_path: Path) -> None:
    result = start("wan_layerwise.py", *options, cwd=tmp_path)
    assert result.returncode == 2
    assert word in result.stderr.strip().split("\n")[-1]
    assert "Traceback" not in result.stderr
