"""Runs each file of tests/accelerator in a process of its own.

The simulated device is an accelerator for the whole process that loads it, so those tests can share a
process neither with the plain CPU tests nor with CUDA.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from simdev.build import SimdevUnavailable, library

ACCELERATOR_TESTS = Path(__file__).resolve().parent / "accelerator"
TIMEOUT_S = 1800
TAIL_LINES = 60
# What a parent run would leave behind in a child: its options, its place among xdist's workers, settings of
# simdev.
DROPPED_PREFIXES = ("PYTEST_", "SIM_", "COV_CORE_")


@functools.cache
def cuda_is_available() -> bool:
    """Ask in a child, since a process that has touched CUDA cannot fork safely."""
    if torch.version.cuda is None and torch.version.hip is None:
        return False
    probe = [sys.executable, "-c", "import torch; raise SystemExit(not torch.cuda.is_available())"]
    return subprocess.run(probe, capture_output=True, timeout=300).returncode == 0


def devices() -> list[str]:
    return ["simulated", "cuda"] if cuda_is_available() else ["simulated"]


def child_environment() -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(DROPPED_PREFIXES)}
    env.update(OMP_NUM_THREADS="1", MKL_CBWR="COMPATIBLE")
    return env


def require_simulated_device() -> None:
    """Build it before a child needs it; skip, or on CI fail, if that is impossible."""
    try:
        library()
    except SimdevUnavailable as error:
        message = f"NO SIMULATED ACCELERATOR, NOTHING TESTED ON ONE: {error}"
        if os.environ.get("CI"):
            pytest.fail(message, pytrace=False)
        pytest.skip(message)


@pytest.mark.parametrize("device", devices())
@pytest.mark.parametrize("path", sorted(ACCELERATOR_TESTS.glob("test_*.py")), ids=lambda path: path.stem)
def test_file(path: Path, device: str, tmp_path: Path) -> None:
    if device == "simulated":
        require_simulated_device()
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", str(path), "--device", device, "-q", "-p", "no:cacheprovider"]
    command += [f"--junitxml={report}", f"--basetemp={tmp_path / 'child'}"]
    child = subprocess.run(
        command,
        cwd=ACCELERATOR_TESTS.parent.parent,
        env=child_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    tail = "\n".join(child.stdout.splitlines()[-TAIL_LINES:])
    if child.returncode != 0:
        pytest.fail(f"{path.name} on {device} ended with {child.returncode}:\n{tail}", pytrace=False)
    suites = list(ET.parse(report).getroot().iter("testsuite"))
    total, skipped = (sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "skipped"))
    if total == 0:
        pytest.fail(f"{path.name} on {device} has no tests:\n{tail}", pytrace=False)
    if skipped == total:
        pytest.skip(f"all {total} tests of {path.name} were skipped on {device}")
