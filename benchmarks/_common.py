"""What both benchmarks share: options, the simulated device, the machine's description, how results leave.

Import it before torch: it sets what torch reads when it is imported.
"""

from __future__ import annotations

import os

# MKL otherwise picks kernels by the alignment of an operand, and results differ in the last bit of fp32.
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import json
import logging
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

import torch  # noqa: E402 -- behind its settings

torch.set_num_threads(1)


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="less of everything, within a minute")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the results to FILE as JSON")
    return parser


def simulated_device() -> tuple[ModuleType, torch.device]:
    """Load the simulated accelerator of the tests; answers its module and the device."""
    sys.path.insert(0, str(ROOT / "tests"))
    import simdev

    simdev.load()
    return simdev, torch.device(simdev.NAME, 0)


def quiet() -> None:
    """Keep notices of libraries out of the tables."""
    for name in ("omni_offload", "diffusers", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)


def machine() -> dict[str, str]:
    """What the figures depend on; nothing that names a host or a place on it."""
    import diffusers

    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "cpu": _cpu_model(),
        "cpus": str(os.cpu_count()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "diffusers": diffusers.__version__,
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def print_table(title: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows under a title; floats with three decimals."""
    cells = [[f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in (head, *cells)) for i in range(len(head))]
    print(f"\n{title}")
    for first, *rest in (head, *cells):
        columns = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        print("  " + "  ".join([first.ljust(widths[0]), *columns]))


def finish(name: str, results: dict[str, Any], details: dict[str, Any], options: argparse.Namespace) -> None:
    """Print `results` as one line of JSON, the last; write them and more to the output file, if any."""
    if options.output is not None:
        document = {"benchmark": name, "smoke": options.smoke, "machine": machine(), "results": results}
        document |= {"details": details}
        options.output.write_text(json.dumps(document, indent=2) + "\n")
    print()
    print(json.dumps({"benchmark": name, **results}), flush=True)
