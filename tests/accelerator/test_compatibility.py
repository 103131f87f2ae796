"""Every pipeline of the zoo in every mode: the resident output bit for bit, or a refusal by name.

docs/compatibility.md is written from a run of this file (`--write-compatibility`) and is what the other runs expect.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from zoo import CASES, Case

from omni_offload import OffloadConfigError, with_offload

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "compatibility.md"
MODES: dict[str, dict[str, Any]] = {
    "module": {"mode": "module"},
    "dit": {"mode": "layer", "components": ["dit"]},
    "dit+text": {"mode": "layer", "components": ["dit", "text_encoder"]},
}
REASONS = {
    r"has no DiT|components\[0\]='dit' is not|nothing here is a DiT": "no DiT",
    r"has no encoder": "no encoder",
    r"components\[1\]='text_encoder' is not": "no text encoder",
    r"no list of blocks": "no list of blocks",
}
# These are run in every order that the device may choose; the others in the ordinary one.
IN_ALL_SCHEDULES = (
    "WanPipeline:two experts",
    "Flux2KleinPipeline",
    "StableDiffusionPipeline",
    "StableDiffusionXLPipeline",
    "FluxPipeline",
    "StableDiffusion3Pipeline",
    "SanaPipeline",
    "DiTPipeline",
    "Lumina2Pipeline",
    "ZImagePipeline",
    "QwenImagePipeline",
    "LattePipeline",
    "WanVACEPipeline",
    "LTXPipeline",
)


@dataclass(frozen=True)
class Outcome:
    """What a mode gives: `equal` or a refusal, the units that stream, and their share of the selected components."""

    result: str
    units: int = 0
    share: float = 0.0

    def __str__(self) -> str:
        return f"{self.result}, {self.units} units, {self.share:.0%}" if self.units else self.result


HEAD = f"""# Compatibility

Small pipelines of real classes, with seeded weights and tiny configurations, run resident and in three modes on the
simulated accelerator, and every output is compared bit for bit. Written by a run of
`tests/accelerator/test_compatibility.py` (Diffusers {diffusers.__version__}, transformers {transformers.__version__});
each later run of the tests compares with it.

*equal*: the resident output bit for bit, twice in a row. Behind it the number of units that stream and their share of
the bytes of the selected components, in these small models: real ones have more blocks and a larger share. *refused*:
enabling raises an error that says why, and nothing was touched. A word behind a class name marks another configuration.

| pipeline | `mode="module"` | layerwise, dit | layerwise, dit and text_encoder |
|---|---|---|---|
"""


@functools.cache
def documented() -> dict[str, tuple[str, ...]]:
    """Class -> the three cells of its row."""
    text = DOCUMENT.read_text() if DOCUMENT.exists() else ""
    rows = [re.split(r"\s*\|\s*", line.strip(" |")) for line in text.splitlines() if line.startswith("| ")]
    return {row[0]: tuple(row[1:]) for row in rows if row[0] in CASES}


@pytest.fixture(scope="module")
def outcomes(pytestconfig: pytest.Config) -> Iterator[dict[str, dict[str, Outcome]]]:
    """What was found out; written down at the end where that was asked for."""
    found: dict[str, dict[str, Outcome]] = {}
    yield found
    if pytestconfig.getoption("--write-compatibility"):
        rows = [
            f"| {name} | {' | '.join(str(found[name][mode]) for mode in MODES)} |"
            for name in sorted(found, key=str.lower)
            if len(found[name]) == len(MODES)
        ]
        classes = {name.partition(":")[0] for name in found}
        DOCUMENT.write_text(HEAD + "\n".join(rows) + f"\n\n{len(classes)} classes, {len(rows)} configurations.\n")


@functools.lru_cache(maxsize=2)
def resident_output(name: str, device: torch.device) -> list[torch.Tensor]:
    case = CASES[name]
    return case.run(case.build().to(device))


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) > 0 and all(map(torch.equal, one, other))


def bytes_on_host(module: torch.nn.Module) -> int:
    return sum(tensor.nbytes for tensor in [*module.parameters(), *module.buffers()] if tensor.device.type == "cpu")


def refusal(error: OffloadConfigError) -> Outcome:
    message = str(error)
    reason = next((reason for pattern, reason in REASONS.items() if re.search(pattern, message)), None)
    assert reason is not None, f"a refusal that nobody expected: {message}"
    return Outcome(f"refused: {reason}")


def offloaded_run(case: Case, config: dict[str, Any], device: torch.device) -> Outcome:
    """Two runs with offload on, compared with the resident one; what Diffusers expects behind each is looked at too."""
    pipe = with_offload(case.build())
    try:
        pipe.enable_offload(config, device=device)
    except OffloadConfigError as error:
        return refusal(error)
    expected = resident_output(case.name, device)
    for _ in range(2):
        assert pipe._execution_device == device
        assert same(case.run(pipe), expected)
        for entry in pipe.offload_report().components:
            if entry.units:
                assert bytes_on_host(pipe.components[entry.path]) >= entry.streamed_bytes, f"{entry.path} is not back"
    report = pipe.offload_report()
    streamed = [entry for entry in report.components if entry.units]
    assert all(entry.copies for entry in streamed if entry.role == "dit"), "a DiT that streams was copied"
    assert all(
        tensor.device.type != "meta" for entry in streamed for tensor in pipe.components[entry.path].parameters()
    )
    whole = sum(entry.streamed_bytes + entry.resident_bytes for entry in streamed)
    units = sum(entry.units for entry in streamed)
    return Outcome("equal", units, sum(entry.streamed_bytes for entry in streamed) / whole)


@pytest.mark.parametrize("name", sorted(CASES))
def test_output_is_the_resident_one(
    name: str, device: torch.device, outcomes: dict[str, dict[str, Outcome]], pytestconfig: pytest.Config
) -> None:
    found = outcomes.setdefault(name, {})
    for mode, config in MODES.items():
        found[mode] = offloaded_run(CASES[name], config, device)
    if not pytestconfig.getoption("--write-compatibility"):
        assert tuple(map(str, found.values())) == documented().get(name), (
            f"{DOCUMENT.name} says otherwise: run this file with --write-compatibility and read the difference"
        )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [name for name in IN_ALL_SCHEDULES if name in CASES])
def test_output_in_every_schedule(name: str, mode: str, device: torch.device, schedule: dict[str, bool]) -> None:
    found = offloaded_run(CASES[name], MODES[mode], device)
    assert found.result == "equal" or found.result.startswith("refused")


def test_document_has_no_other_rows(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--write-compatibility"):
        pytest.skip("it is being written")
    assert set(documented()) == set(CASES)
    assert len({name.partition(":")[0] for name in CASES}) >= 60
