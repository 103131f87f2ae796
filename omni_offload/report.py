"""What offloading has done to a pipeline, in figures. Plain data: it holds no module and no tensor."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def readable_bytes(count: int) -> str:
    """`count` bytes with a unit: `1.50 GiB`."""
    for size, unit in _UNITS:
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


@dataclass(frozen=True)
class ComponentReport:
    """One component. All sizes in bytes.

    Args:
        path: dotted path from the pipeline.
        role: dit, text_encoder, image_encoder, vae or resident.
        class_name: of the module.
        placement: `streamed` (blocks stream, the rest stays on the device), `swapped` (on the device as a whole while
            no other swapped one is) or `stays`.
        units: number of units that come and go.
        streamed_bytes: what comes and goes.
        resident_bytes: what is on the device for as long as offload is on.
        host_bytes: host memory held for it, embedding tables that stay there included; `pinned_bytes` are locked.
        copies: unit copies to the device so far.
    """

    path: str
    role: str
    class_name: str
    placement: str
    units: int
    streamed_bytes: int
    resident_bytes: int
    host_bytes: int
    pinned_bytes: int
    copies: int


@dataclass(frozen=True)
class OffloadReport:
    """What `offload_report()` answers; prints as a table. All sizes in bytes.

    Args:
        pipeline: class name.
        mode: `layer` or `module`.
        device: the onload device.
        components: one entry each.
        window_bytes: device memory for streamed units just now; `peak_window_bytes` the most so far.
        idle_device_bytes: what offloading leaves on the device between pipeline calls.
        copies, copied_bytes: host to device so far.
        hits, misses: acquired units whose copy had been issued ahead, and those whose had not.
        notices: what was guessed or could not be had.
    """

    pipeline: str
    mode: str
    device: str
    components: tuple[ComponentReport, ...]
    window_bytes: int
    peak_window_bytes: int
    idle_device_bytes: int
    copies: int
    copied_bytes: int
    hits: int
    misses: int
    notices: tuple[str, ...] = field(default=())

    @property
    def streamed_bytes(self) -> int:
        """Bytes that come and go, over all components."""
        return sum(component.streamed_bytes for component in self.components)

    @property
    def host_bytes(self) -> int:
        """Host memory held for streamed weights."""
        return sum(component.host_bytes for component in self.components)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data that JSON can hold."""
        return asdict(self)

    def __str__(self) -> str:
        head = ("component", "role", "class", "placement", "units", "streamed", "resident", "host", "pinned", "copies")
        rows = [
            (
                c.path,
                c.role,
                c.class_name,
                c.placement,
                str(c.units),
                readable_bytes(c.streamed_bytes),
                readable_bytes(c.resident_bytes),
                readable_bytes(c.host_bytes),
                readable_bytes(c.pinned_bytes),
                str(c.copies),
            )
            for c in self.components
        ]
        widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
        lines = [
            f"{self.pipeline}: mode {self.mode} on {self.device}",
            *(line.rstrip() for line in table),
            f"window {readable_bytes(self.window_bytes)} (at most {readable_bytes(self.peak_window_bytes)} so far), "
            f"on the device between calls {readable_bytes(self.idle_device_bytes)}",
            f"copied {readable_bytes(self.copied_bytes)} in {self.copies} copies; {self.hits} units were there or on "
            f"their way when they were needed, {self.misses} were not",
            *(f"note: {notice}" for notice in self.notices),
        ]
        return "\n".join(lines)
