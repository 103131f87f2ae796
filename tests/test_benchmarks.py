"""Each benchmark runs, and says in its last line what it promises to say."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_accelerator_suite import require_simulated_device

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 600

KEYS = {
    "streaming": {
        "benchmark",
        "steady_pass_over_ideal",
        "steady_pass_over_ideal_target",
        "first_pass_behind_encoder_over_ideal",
        "first_pass_behind_encoder_over_ideal_target",
        "omni_offload_copies_per_block_and_pass",
        "omni_offload_copies_back_per_pass",
        "omni_offload_host_syncs_per_pass",
        "omni_offload_races_in_four_schedules",
        "outputs_equal_resident_bit_for_bit",
    },
    "overhead": {
        "benchmark",
        "block_host_time_over_diffusers_stream",
        "block_host_time_over_diffusers_stream_record",
        "block_host_time_target",
        "enable_time_over_plain_copy",
        "enable_time_target",
        "enable_peak_memory_over_weights_plus_unit",
        "enable_peak_memory_over_weights_plus_unit_from_heap",
        "enable_peak_memory_target",
    },
}


def run_smoke(name: str, output: Path) -> dict[str, Any]:
    """Run a benchmark's `--smoke` in a process of its own; answers its last line, which the file repeats."""
    require_simulated_device()
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / f"{name}.py"), "--smoke", "--output", str(output)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    last: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert set(last) == KEYS[name]
    document = json.loads(output.read_text())
    assert {"benchmark": document["benchmark"], **document["results"]} == last
    assert set(document["machine"]) >= {"system", "cpu", "torch", "diffusers"}
    return last


@pytest.mark.slow
def test_streaming_meets_its_targets_in_virtual_time(tmp_path: Path) -> None:
    last = run_smoke("streaming", tmp_path / "streaming.json")
    # Virtual time is the same on every machine, so these are tests and not only measurements.
    for by_ratio in last["steady_pass_over_ideal"].values():
        for ratio, by_mode in by_ratio.items():
            assert by_mode["omni_offload"] <= last["steady_pass_over_ideal_target"][ratio]
            assert by_mode["omni_offload"] < by_mode["diffusers_group_stream_record"]
    first_passes = last["first_pass_behind_encoder_over_ideal"].values()
    assert max(first_passes) <= last["first_pass_behind_encoder_over_ideal_target"]
    assert last["omni_offload_copies_per_block_and_pass"] == 1
    assert last["omni_offload_copies_back_per_pass"] == 0
    assert last["omni_offload_host_syncs_per_pass"] == 0
    assert last["omni_offload_races_in_four_schedules"] == 0
    assert last["outputs_equal_resident_bit_for_bit"] is True


@pytest.mark.slow
def test_overhead_measures_time_and_memory(tmp_path: Path) -> None:
    last = run_smoke("overhead", tmp_path / "overhead.json")
    # Wall clocks on a shared machine: what they say is for the benchmark's own report.
    assert all(math.isfinite(value) and value > 0 for key, value in last.items() if key != "benchmark")
