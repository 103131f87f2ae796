"""What offloading costs the host: time per streamed block, time to enable, and memory while enabling.

All figures are ratios of what was measured side by side in one run, each part in processes of its own.
  - time per block: what a call of a Wan block takes longer when it is streamed, its forward emptied, against
    the same with Diffusers' group offload with a stream; on the simulated device, whose share burdens both.
  - enabling: the wall time of `enable_layerwise_offload` against one copy of the same bytes to fresh memory.
  - memory: the peak of anonymous memory while enabling, against the weights plus one unit.
"""

from __future__ import annotations

import _common  # isort: skip -- sets what torch reads on import

import contextlib
import gc
import json
import mmap
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from diffusers.hooks import apply_group_offloading
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from torch import nn

from omni_offload import OffloadMixin

BLOCK_TIME_TARGET = 1 / 3
ENABLE_TIME_TARGET = 2.0
MEMORY_TARGET = 1.05

OURS = "omni_offload"
RESIDENT = "resident"
GROUP_STREAM = "diffusers_group_stream"
GROUP_RECORD = "diffusers_group_stream_record"


# --- time per block ----------------------------------------------------------------------------------


class EmptyBlock(WanTransformerBlock):
    """A Wan block with all its weights that computes nothing, so that what is left is what surrounds it."""

    def forward(self, hidden_states: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return hidden_states


class Chain(nn.Module):
    """Calls its blocks one after another, as a transformer does, and notes how long each call takes."""

    _layerwise_offload_blocks_attrs = ("blocks",)

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            EmptyBlock(dim=48, ffn_dim=96, num_heads=2, qk_norm="rms_norm_across_heads", cross_attn_norm=True)
            for _ in range(blocks)
        )
        self.seconds: list[float] = []

    def forward(self, hidden_states: torch.Tensor, text: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            start = time.perf_counter()
            hidden_states = block(hidden_states, text, temb)
            self.seconds.append(time.perf_counter() - start)
        return hidden_states


class ChainPipeline(OffloadMixin, nn.Module):
    """The smallest pipeline around a chain."""

    _dit_modules = ("transformer",)

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer

    @torch.no_grad()
    def forward(self, passes: int, *inputs: torch.Tensor) -> None:
        for _ in range(passes):
            self.transformer(*inputs)


def block_times(smoke: bool) -> dict[str, float]:
    """Median seconds of a block's call, per mode."""
    sim, device = _common.simulated_device()
    sim.set(race_mode=0)
    _assign_data_in_cpp()
    blocks, rounds, passes = (8, 4, 2) if smoke else (12, 40, 3)
    pipelines = {mode: ChainPipeline(Chain(blocks).eval().requires_grad_(False)) for mode in _MODES}
    for mode, pipeline in pipelines.items():
        _MODES[mode](pipeline, device)
    inputs = [torch.zeros(shape, device=device) for shape in ((1, 64, 48), (1, 16, 48), (1, 6, 48))]
    seconds: dict[str, list[float]] = {mode: [] for mode in pipelines}
    gc.disable()
    for number in range(rounds + 1):
        for mode, pipeline in pipelines.items():
            chain = pipeline.transformer
            pipeline(1, *inputs)  # Diffusers sets its prefetching up in the first pass; ours fills its window
            chain.seconds.clear()
            pipeline(passes, *inputs)
            # What was fetched ahead is dropped when a call ends: the first pass of a call is no steady one.
            steady = chain.seconds[blocks:]
            if number:
                seconds[mode] += steady
            torch.accelerator.synchronize(device)
        gc.collect()
    return {mode: statistics.median(values) for mode, values in seconds.items()}


def _assign_data_in_cpp() -> None:
    """Have `tensor.data = other` be one call into C++, as it is on a device that torch knows.

    The simulated device has a Python function there, several times as slow, which would be half of our time.
    """
    setter: Any = torch.ops.simdev.set_data.default._op
    torch.Tensor.data = property(torch._C.TensorBase.data.__get__, setter)


def _enable_ours(pipeline: ChainPipeline, device: torch.device) -> None:
    pipeline.enable_layerwise_offload(device=device)


def _group(**options: bool) -> Callable[[ChainPipeline, torch.device], None]:
    def enable(pipeline: ChainPipeline, device: torch.device) -> None:
        apply_group_offloading(
            pipeline.transformer,
            onload_device=device,
            offload_device=torch.device("cpu"),
            offload_type="block_level",
            num_blocks_per_group=1,
            use_stream=True,
            **options,
        )

    return enable


_MODES: dict[str, Callable[[ChainPipeline, torch.device], Any]] = {
    RESIDENT: lambda pipeline, device: pipeline.to(device),
    OURS: _enable_ours,
    GROUP_STREAM: _group(),
    GROUP_RECORD: _group(record_stream=True),
}


# --- enabling ----------------------------------------------------------------------------------------


class LargePipeline(OffloadMixin, nn.Module):
    """A Wan transformer with enough weights to measure, in ordinary memory, all of it touched.

    Args:
        heap: have the weights in the C library's heap. What is freed goes back to the system by itself only
            if it was mapped for one tensor, and glibc no longer maps anything smaller than the largest mapped
            block that was freed (up to 32 MiB); as a rule, loading a model has freed such blocks.
    """

    _dit_modules = ("transformer",)

    def __init__(self, smoke: bool, *, heap: bool = False) -> None:
        super().__init__()
        if heap:
            torch.empty(31 * 2**20, dtype=torch.uint8)  # freed at once
        heads, layers = (4, 6) if smoke else (8, 12)
        with torch.device("meta"):
            self.transformer = WanTransformer3DModel(
                num_attention_heads=heads, attention_head_dim=128, ffn_dim=4 * heads * 128, num_layers=layers
            )
        self.transformer.to(torch.bfloat16).to_empty(device="cpu").requires_grad_(False)
        for tensor in (*self.parameters(), *self.buffers()):
            tensor.fill_(0.01)
        self.eval()

    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(tensor.nbytes for tensor in (*self.parameters(), *self.buffers()))

    def unit_bytes(self) -> int:
        """Bytes of a block."""
        return sum(p.nbytes for p in self.transformer.blocks[0].parameters())


def enable_time(smoke: bool) -> dict[str, float]:
    """Seconds that enabling takes."""
    pipeline = LargePipeline(smoke)
    _warm_up(pipeline.weight_bytes())
    start = time.perf_counter()
    pipeline.enable_layerwise_offload(device="cpu")
    return {"seconds": time.perf_counter() - start}


def copy_time(smoke: bool) -> dict[str, float]:
    """Seconds that a copy of all weights into fresh memory takes."""
    pipeline = LargePipeline(smoke)
    _warm_up(pipeline.weight_bytes())
    tensors = [*pipeline.parameters(), *pipeline.buffers()]
    start = time.perf_counter()
    copies = [torch.empty_like(tensor).copy_(tensor) for tensor in tensors]
    seconds = time.perf_counter() - start
    del copies
    return {"seconds": seconds}


def _warm_up(memory_bytes: int = 0) -> None:
    """Have imports and first calls behind us, on a pipeline too small to matter, and as much memory at hand.

    A virtual machine pays several times over for memory that it has never used before, and large pages come
    from such memory sooner than small ones do: without this the time is the machine's, not the copy's.
    """
    chain = ChainPipeline(Chain(2).requires_grad_(False))
    chain.enable_layerwise_offload(device="cpu")
    chain.disable_offload()
    gc.collect()
    for large_pages in (False, True) if memory_bytes else ():
        with mmap.mmap(-1, 2 * memory_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as pages:
            if large_pages and hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):
                    pages.madvise(mmap.MADV_HUGEPAGE)
            for offset in range(0, len(pages), mmap.PAGESIZE):
                pages[offset] = 1


class Anonymous:
    """The process's anonymous memory in bytes: now, and its peak while a `watching` block runs."""

    def __init__(self) -> None:
        self.peak = 0

    @staticmethod
    def now() -> int:
        found = re.search(r"RssAnon:\s*(\d+) kB", Path("/proc/self/status").read_text())
        assert found is not None
        return int(found[1]) * 1024

    @contextmanager
    def watching(self) -> Iterator[None]:
        done = threading.Event()

        def sample() -> None:
            while not done.wait(0.0005):
                self.peak = max(self.peak, self.now())

        self.peak = self.now()
        thread = threading.Thread(target=sample)
        thread.start()
        try:
            yield
        finally:
            self.peak = max(self.peak, self.now())
            done.set()
            thread.join()


def mapped_memory(smoke: bool) -> dict[str, float]:
    """See `_memory`; each weight in memory mapped for it."""
    return _memory(smoke, heap=False)


def heap_memory(smoke: bool) -> dict[str, float]:
    """See `_memory`; the weights in the heap."""
    return _memory(smoke, heap=True)


def _memory(smoke: bool, *, heap: bool) -> dict[str, float]:
    """Anonymous bytes on top of what the process had before: with weights, at the peak, with offload on."""
    anonymous = Anonymous()
    _warm_up()
    before = anonymous.now()
    pipeline = LargePipeline(smoke, heap=heap)
    loaded = anonymous.now() - before
    with anonymous.watching():
        pipeline.enable_layerwise_offload(device="cpu")
    return {
        "weights": pipeline.weight_bytes(),
        "unit": pipeline.unit_bytes(),
        "loaded": loaded,
        "peak": anonymous.peak - before,
        "enabled": anonymous.now() - before,
    }


# --- all of it ---------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[bool], dict[str, float]]] = {
    "block_times": block_times,
    "enable_time": enable_time,
    "copy_time": copy_time,
    "mapped_memory": mapped_memory,
    "heap_memory": heap_memory,
}


def in_child(part: str, smoke: bool) -> dict[str, float]:
    """Run one part in a new process."""
    command = [sys.executable, __file__, "--part", part, *(["--smoke"] if smoke else [])]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    result: dict[str, float] = json.loads(answer.splitlines()[-1])
    return result


def main() -> None:
    """See the module."""
    parser = _common.arguments(__doc__)
    parser.add_argument("--part", choices=PARTS, help="run one part in this process and print what it measured")
    options = parser.parse_args()
    _common.quiet()
    if options.part is not None:
        print(json.dumps(PARTS[options.part](options.smoke)))
        return

    smoke = options.smoke
    times = in_child("block_times", smoke)
    extra = {mode: seconds - times[RESIDENT] for mode, seconds in times.items() if mode != RESIDENT}
    quickest = min(extra[GROUP_STREAM], extra[GROUP_RECORD])
    _common.print_table(
        "Host time per streamed Wan block on the simulated device (median)",
        ("mode", "us", "x the quicker Diffusers one"),
        [(mode, f"{seconds * 1e6:.1f}", seconds / quickest) for mode, seconds in extra.items()],
    )

    enabling, copying = [], []
    for _ in range(1 if smoke else 5):
        enabling.append(in_child("enable_time", smoke)["seconds"])
        copying.append(in_child("copy_time", smoke)["seconds"])
    # The quickest of each: what else goes on in the machine only ever adds.
    enable_seconds, copy_seconds = min(enabling), min(copying)
    mapped, heap = in_child("mapped_memory", smoke), in_child("heap_memory", smoke)
    weights, limit = mapped["weights"], mapped["weights"] + mapped["unit"]
    mib = 2**20
    _common.print_table(
        f"Enabling: {weights / mib:.0f} MiB of weights, {mapped['unit'] / mib:.0f} MiB a unit",
        ("what", "measured", "against", "ratio"),
        [
            (
                "time",
                f"{enable_seconds:.3f} s",
                f"plain copy {copy_seconds:.3f} s",
                enable_seconds / copy_seconds,
            ),
            *(
                (
                    f"peak memory, weights {where}",
                    f"{held['peak'] / mib:.0f} MiB",
                    f"weights + unit {limit / mib:.0f} MiB",
                    held["peak"] / limit,
                )
                for where, held in (("mapped", mapped), ("in the heap", heap))
            ),
        ],
    )
    results = {
        "block_host_time_over_diffusers_stream": round(extra[OURS] / extra[GROUP_STREAM], 4),
        "block_host_time_over_diffusers_stream_record": round(extra[OURS] / extra[GROUP_RECORD], 4),
        "block_host_time_target": round(BLOCK_TIME_TARGET, 4),
        "enable_time_over_plain_copy": round(enable_seconds / copy_seconds, 4),
        "enable_time_target": ENABLE_TIME_TARGET,
        "enable_peak_memory_over_weights_plus_unit": round(mapped["peak"] / limit, 4),
        "enable_peak_memory_over_weights_plus_unit_from_heap": round(heap["peak"] / limit, 4),
        "enable_peak_memory_target": MEMORY_TARGET,
    }
    details = {
        "block_call_seconds": times,
        "enable_seconds": enabling,
        "copy_seconds": copying,
        "anonymous_bytes": {"mapped": mapped, "heap": heap},
    }
    _common.finish("overhead", results, details, options)


if __name__ == "__main__":
    main()
