"""Tests that need an accelerator: the simulated one by default, a real one with ``--device cuda``.

Run a file by itself (``pytest tests/accelerator/test_x.py``): the simulated device is an accelerator for
the whole process. tests/test_accelerator_suite.py does so for every file.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

# Before torch comes in: MKL otherwise picks its kernels by alignment, and fp32 results differ in the last
# bit.
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pytest
import simdev
import torch

SIMULATED, CUDA = "simulated", "cuda"
DEVICE_KEY = pytest.StashKey[str]()
UNAVAILABLE_KEY = pytest.StashKey[str]()


class DeviceMemory:
    """Bytes of the device's memory that torch's allocator has handed out."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def allocated(self) -> int:
        """Return the bytes in use now."""
        return torch.accelerator.memory_allocated(self.device)

    def peak(self) -> int:
        """Return the most bytes in use since `reset_peak`."""
        return torch.accelerator.max_memory_allocated(self.device)

    def reset_peak(self) -> None:
        """Start a new peak at what is in use now."""
        torch.accelerator.reset_peak_memory_stats(self.device)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=(SIMULATED, CUDA), default=SIMULATED, help="what to test on")
    parser.addoption("--write-compatibility", action="store_true", help="write docs/compatibility.md")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "expects_race: the test provokes races, which are not held against it")
    config.addinivalue_line("markers", "simulated_only: the test needs the simulated device")
    torch.set_num_threads(1)
    config.stash[DEVICE_KEY] = config.getoption("--device")
    reason = _prepare(config.stash[DEVICE_KEY])
    if reason is None:
        return
    if os.environ.get("CI"):
        pytest.exit(f"NO ACCELERATOR TO TEST ON: {reason}", returncode=1)
    config.stash[UNAVAILABLE_KEY] = reason


def _prepare(kind: str) -> str | None:
    """Make the accelerator ready; return why that cannot be done, or None."""
    if kind == CUDA:
        return None if torch.cuda.is_available() else "torch sees no CUDA device"
    try:
        simdev.load()
    except simdev.SimdevUnavailable as error:
        return f"the simulated device cannot be built: {error}"
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reason = config.stash.get(UNAVAILABLE_KEY, None)
    for item in items:
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))
        elif config.stash[DEVICE_KEY] != SIMULATED and item.get_closest_marker("simulated_only"):
            item.add_marker(pytest.mark.skip(reason="needs the simulated device"))


def pytest_collection_finish() -> None:
    importlib.import_module("torch._dynamo")  # some meta kernel brings it in, with thousands of objects
    gc.collect()
    gc.freeze()  # what the imports made need not be looked at again after each test


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    reason = config.stash.get(UNAVAILABLE_KEY, None)
    if reason is not None:
        terminalreporter.section("NOTHING WAS TESTED: NO ACCELERATOR", sep="!", red=True, bold=True)
        terminalreporter.line(reason)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "schedule" not in metafunc.fixturenames:
        return
    if metafunc.config.getoption("--device") == SIMULATED:
        schedules = simdev.schedules()
        names = ["+".join(name for name, on in schedule.items() if on) or "eager" for schedule in schedules]
    else:
        schedules, names = [{}], ["hardware"]
    metafunc.parametrize("schedule", schedules, ids=names, indirect=True)


@pytest.fixture(scope="session")
def simulated(pytestconfig: pytest.Config) -> bool:
    """Whether the accelerator is the simulated one."""
    return pytestconfig.stash[DEVICE_KEY] == SIMULATED


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> torch.device:
    """The first accelerator."""
    return torch.device(simdev.NAME if pytestconfig.stash[DEVICE_KEY] == SIMULATED else CUDA, 0)


@pytest.fixture(autouse=True)
def clean_device(request: pytest.FixtureRequest, device: torch.device, simulated: bool) -> Iterator[None]:
    """Give each test a device with default settings; afterwards, hold unexpected races against it."""
    if simulated:
        simdev.reset()
    torch.accelerator.reset_peak_memory_stats(device)
    yield
    if simulated:
        simdev.set(race_mode=1)
    torch.accelerator.synchronize(device)
    gc.collect()  # what is freed late is checked for races too
    torch.accelerator.synchronize(device)
    if not simulated:
        return
    races = simdev.races()
    simdev.reset()
    torch.accelerator.empty_cache()
    if not request.node.get_closest_marker("expects_race"):
        assert not races, "races on the simulated device:\n" + "\n".join(races)


@pytest.fixture
def schedule(request: pytest.FixtureRequest, clean_device: None, simulated: bool) -> dict[str, bool]:
    """When deferred work runs: the test runs once for each schedule, and on a real device once."""
    settings: dict[str, bool] = request.param
    if simulated:
        simdev.set(**settings)
    return settings


@pytest.fixture
def sim(simulated: bool) -> ModuleType:
    """The module `simdev`; skips the test on a real device."""
    if not simulated:
        pytest.skip("needs the simulated device")
    return simdev


@pytest.fixture
def memory(device: torch.device) -> DeviceMemory:
    """What is allocated on the device."""
    return DeviceMemory(device)
