"""How close streaming comes to the ideal, in virtual time on the simulated device.

Ideal is max(compute, copy): the time of a resident pass, or the time in which the link can carry the weights
that stream, whichever is longer. Costs are set so that copying a block takes 0.5, 1 and 2 times as long as
computing it. Everything is a ratio of virtual times of one run; the costs themselves are invented.
"""

from __future__ import annotations

import _common  # isort: skip -- sets what torch reads on import

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from torch import nn
from transformers import UMT5Config, UMT5EncoderModel

from omni_offload import OffloadMixin

RATIOS = (0.5, 1.0, 2.0)
TARGETS = {0.5: 1.02, 1.0: 1.04, 2.0: 1.02}  # steady pass, as a multiple of ideal
FIRST_PASS_TARGET = 1.05

# Floating-point operations per virtual microsecond. A block is some 90 operations, each of at least 5 us.
# Large blocks compute for about 10 ms, where what an operation costs by itself hardly shows, as in a large
# model; small ones compute for about 0.8 ms, half of which is that, so all that is added shows.
FLOPS = {"large": 4e3, "small": 1e5}
BLOCKS = 12  # of the steady passes
BLOCKS_AFTER_ENCODER = 40  # as in Wan 14B: the first block's copy has nothing to hide behind, and weighs 1/40

_SYNCS = (
    "stream_syncs",
    "event_syncs",
    "device_syncs",
    "item_syncs",
    "sync_ops",
    "blocking_h2d",
    "blocking_d2h",
)

OURS = "omni_offload"
RESIDENT = "resident"
GROUP = "diffusers_group"
GROUP_STREAM = "diffusers_group_stream"
GROUP_RECORD = "diffusers_group_stream_record"


class Denoising(OffloadMixin, nn.Module):
    """A pipeline that consists of an encoder, if there is one, and a loop over the transformer."""

    _dit_modules = ("transformer",)
    _encoder_modules = ("text_encoder",)

    def __init__(self, transformer: Any, text_encoder: Any = None) -> None:
        super().__init__()
        self.transformer = transformer
        self.text_encoder = text_encoder

    @torch.no_grad()
    def forward(self, inputs: dict[str, torch.Tensor], passes: int, behind_pass: Callable[[int], None]) -> torch.Tensor:
        """Run `passes` passes, each on what the last one left; call `behind_pass(n)` behind pass `n`."""
        latents = inputs["latents"]
        text = inputs["text"]
        if self.text_encoder is not None:
            text = self.text_encoder(input_ids=inputs["ids"]).last_hidden_state
        behind_pass(0)
        for number in range(1, passes + 1):
            arguments = {
                "hidden_states": latents,
                "timestep": inputs["timestep"],
                "encoder_hidden_states": text,
            }
            latents = latents - 0.1 * self.transformer(**arguments).sample
            behind_pass(number)
        return latents


@dataclass
class Measured:
    """One mode at one ratio.

    Args:
        pass_time: virtual microseconds of a pass.
        copies, copied_bytes: host to device, per pass.
        copied_back: device to host, per pass.
        syncs: how often the host waited for the device, per pass.
        output: of the last pass, on the host.
    """

    pass_time: float
    copies: float
    copied_bytes: float
    copied_back: float
    syncs: float
    output: torch.Tensor


@dataclass
class Costs:
    """What the ideal is made of, in virtual microseconds."""

    compute: float
    copy: float

    @property
    def ideal(self) -> float:
        return max(self.compute, self.copy)


class Bench:
    """The models, their inputs and the device.

    Args:
        flops: what a block costs; see `FLOPS`.
        blocks: of the transformer.
        encoder: whether there is a text encoder.
    """

    def __init__(
        self, sim: Any, device: torch.device, flops: float, blocks: int = BLOCKS, *, encoder: bool = False
    ) -> None:
        self.sim = sim
        self.device = device
        self.flops = flops
        self.blocks = blocks
        self.encoder = encoder
        generator = torch.Generator().manual_seed(0)
        self._inputs = {
            "latents": torch.randn(1, 4, 2, 16, 16, generator=generator),
            "text": torch.randn(1, 16, 32, generator=generator),
            "timestep": torch.tensor([7]),
            "ids": torch.randint(0, 128, (1, 16), generator=generator),
        }

    def settings(self, **values: float) -> AbstractContextManager[None]:
        """Set costs for a while; without race detection, which takes real time and no virtual time."""
        context: AbstractContextManager[None] = self.sim.settings(**{"flops": self.flops, "race_mode": 0, **values})
        return context

    def pipeline(self) -> Denoising:
        """A new pipeline on the host, with the same weights each time."""
        torch.manual_seed(0)
        heads, head_dim = 4, 24
        transformer = WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=heads,
            attention_head_dim=head_dim,
            in_channels=4,
            out_channels=4,
            text_dim=32,
            freq_dim=32,
            ffn_dim=4 * heads * head_dim,
            num_layers=self.blocks,
            cross_attn_norm=True,
            qk_norm="rms_norm_across_heads",
            rope_max_seq_len=32,
        )
        text_encoder = None
        if self.encoder:
            config = UMT5Config(
                vocab_size=128, d_model=32, d_kv=8, d_ff=128, num_layers=4, num_heads=4, dropout_rate=0.0
            )
            text_encoder = UMT5EncoderModel(config)
        return Denoising(transformer, text_encoder).eval().requires_grad_(False)

    def run(self, pipeline: Denoising, passes: int, *, first: bool = False) -> Measured:
        """Call the pipeline once and measure its passes from the second on, or the first one alone."""
        start, end = (0, 1) if first else (1, passes)
        marks: dict[int, torch.Event] = {}
        counts: dict[int, dict[str, int]] = {}

        def behind_pass(number: int) -> None:
            if number in (start, end):
                marks[number] = torch.Event(device=self.device, enable_timing=True)
                marks[number].record()
                counts[number] = self.sim.counters()

        inputs = {name: tensor.to(self.device) for name, tensor in self._inputs.items()}
        output = pipeline(inputs, passes, behind_pass)
        torch.accelerator.synchronize(self.device)

        def per_pass(*names: str) -> float:
            return sum(counts[end].get(n, 0) - counts[start].get(n, 0) for n in names) / (end - start)

        return Measured(
            pass_time=marks[start].elapsed_time(marks[end]) * 1e3 / (end - start),
            copies=per_pass("h2d", "h2d_pageable"),
            copied_bytes=per_pass("h2d_bytes", "h2d_pageable_bytes"),
            copied_back=per_pass("d2h", "d2h_pageable"),
            syncs=per_pass(*_SYNCS),
            output=output.cpu(),
        )

    def block_time(self, pipeline: Denoising) -> float:
        """Virtual microseconds that a block of the resident `pipeline` computes."""
        marks: list[torch.Event] = []

        def mark(*_: object) -> None:
            marks.append(torch.Event(device=self.device, enable_timing=True))
            marks[-1].record()

        block = pipeline.transformer.blocks[self.blocks // 2]
        handles = [block.register_forward_pre_hook(mark), block.register_forward_hook(mark)]
        self.run(pipeline, 2)
        for handle in handles:
            handle.remove()
        return marks[-2].elapsed_time(marks[-1]) * 1e3


def weight_bytes(module: nn.Module) -> int:
    """Bytes of all parameters and buffers."""
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def link_speed(ratio: float, block_bytes: float, block_time: float) -> float:
    """Bytes per virtual microsecond at which copying a block takes `ratio` times as long as computing it."""
    return block_bytes / (ratio * block_time)


# --- steady passes ----------------------------------------------------------------------------------


def _resident(pipeline: Denoising, device: torch.device) -> None:
    pipeline.to(device)


def _ours(pipeline: Denoising, device: torch.device) -> None:
    pipeline.enable_layerwise_offload(device=device)


def _ours_whole(pipeline: Denoising, device: torch.device) -> None:
    pipeline.enable_model_cpu_offload(device=device)


def _group(**options: bool) -> Callable[[Denoising, torch.device], None]:
    def enable(pipeline: Denoising, device: torch.device) -> None:
        pipeline.transformer.enable_group_offload(
            onload_device=device,
            offload_device=torch.device("cpu"),
            offload_type="block_level",
            num_blocks_per_group=1,
            non_blocking=bool(options),
            **options,
        )

    return enable


MODES: dict[str, Callable[[Denoising, torch.device], None]] = {
    RESIDENT: _resident,
    OURS: _ours,
    GROUP: _group(),
    GROUP_STREAM: _group(use_stream=True),
    GROUP_RECORD: _group(use_stream=True, record_stream=True),
}


def steady(bench: Bench, ratios: Sequence[float], passes: int) -> tuple[dict[float, dict[str, dict[str, float]]], bool]:
    """Per ratio and mode the figures of a steady pass; and whether all outputs equal the resident one."""
    figures: dict[float, dict[str, dict[str, float]]] = {}
    equal = True
    with bench.settings():
        pipeline = bench.pipeline()
        block_bytes = weight_bytes(pipeline.transformer.blocks) / bench.blocks
        all_bytes = weight_bytes(pipeline.transformer)
        pipeline.to(bench.device)
        block_time = bench.block_time(pipeline)
        resident = bench.run(pipeline, passes)
        del pipeline
    for ratio in ratios:
        speed = link_speed(ratio, block_bytes, block_time)
        figures[ratio] = {}
        for mode, enable in MODES.items():
            with bench.settings(h2d_bw=speed, d2h_bw=speed):
                pipeline = bench.pipeline()
                enable(pipeline, bench.device)
                measured = bench.run(pipeline, passes)
                pipeline.disable_offload()
                del pipeline
                gc.collect()
            streamed = {RESIDENT: 0.0, OURS: block_bytes * bench.blocks}.get(mode, float(all_bytes))
            costs = Costs(resident.pass_time, streamed / speed)
            equal = equal and torch.equal(measured.output, resident.output)
            figures[ratio][mode] = {
                "over_ideal": measured.pass_time / costs.ideal,
                "over_resident": measured.pass_time / resident.pass_time,
                "copies": measured.copies,
                "copied_over_weights": measured.copied_bytes / all_bytes,
                "copied_back": measured.copied_back,
                "host_syncs": measured.syncs,
            }
    return figures, equal


def count_races(bench: Bench, passes: int, enable: Callable[[Denoising, torch.device], None]) -> tuple[int, bool]:
    """Races over all four schedules, and whether every output equals the resident one."""
    with bench.settings():
        pipeline = bench.pipeline()
        _resident(pipeline, bench.device)
        expected = bench.run(pipeline, passes).output
    races, equal = 0, True
    for schedule in bench.sim.schedules():
        bench.sim.races(clear=True)
        with bench.settings(race_mode=1, **schedule):
            pipeline = bench.pipeline()
            enable(pipeline, bench.device)
            equal = equal and torch.equal(bench.run(pipeline, passes).output, expected)
            pipeline.disable_offload()
            del pipeline
            gc.collect()
            torch.accelerator.synchronize(bench.device)
        races += len(bench.sim.races(clear=True))
    return races, equal


# --- the first pass behind an encoder ---------------------------------------------------------------


def after_encoder(bench: Bench, ratios: Sequence[float]) -> tuple[dict[float, dict[str, float]], bool]:
    """Per ratio the first denoising pass behind the encoder; and whether outputs equal the resident one."""
    figures: dict[float, dict[str, float]] = {}
    equal = True
    with bench.settings():
        pipeline = bench.pipeline()
        streamed = weight_bytes(pipeline.transformer)
        block_bytes = weight_bytes(pipeline.transformer.blocks) / bench.blocks
        pipeline.to(bench.device)
        block_time = bench.block_time(pipeline)
        resident = bench.run(pipeline, 2)
        del pipeline
    for ratio in ratios:
        speed = link_speed(ratio, block_bytes, block_time)
        with bench.settings(h2d_bw=speed, d2h_bw=speed):
            pipeline = bench.pipeline()
            _ours_whole(pipeline, bench.device)
            measured = [bench.run(pipeline, 2, first=True) for _ in range(2)][-1]
            pipeline.disable_offload()
            del pipeline
            gc.collect()
        costs = Costs(resident.pass_time, streamed / speed)
        equal = equal and torch.equal(measured.output, resident.output)
        figures[ratio] = {
            "over_ideal": measured.pass_time / costs.ideal,
            "sum_over_ideal": (costs.compute + costs.copy) / costs.ideal,
            "copies": measured.copies,
            "copied_back": measured.copied_back,
            "host_syncs": measured.syncs,
        }
    return figures, equal


def main() -> None:
    """See the module."""
    options = _common.arguments(__doc__).parse_args()
    _common.quiet()
    sim, device = _common.simulated_device()
    ratios = (1.0,) if options.smoke else RATIOS
    passes = 3 if options.smoke else 9

    steady_figures: dict[str, dict[float, dict[str, dict[str, float]]]] = {}
    equal = True
    for size, flops in FLOPS.items():
        steady_figures[size], as_resident = steady(Bench(sim, device, flops), ratios, passes)
        equal = equal and as_resident
    races = 0
    for encoder, enable in ((False, _ours), (True, _ours_whole)):
        found, as_resident = count_races(Bench(sim, device, FLOPS["large"], encoder=encoder), 2, enable)
        races += found
        equal = equal and as_resident
    after = Bench(sim, device, FLOPS["large"], BLOCKS_AFTER_ENCODER, encoder=True)
    first_figures, as_resident = after_encoder(after, ratios)
    equal = equal and as_resident

    for size, by_ratio in steady_figures.items():
        for ratio, by_mode in by_ratio.items():
            _common.print_table(
                f"{BLOCKS} {size} Wan blocks, copy/compute {ratio:g}: a steady pass in virtual time",
                ("mode", "x ideal", "x resident", "copies", "copied/weights", "copied back", "host syncs"),
                [(mode, *figures.values()) for mode, figures in by_mode.items()],
            )
    _common.print_table(
        f"{BLOCKS_AFTER_ENCODER} large Wan blocks, model-level offload: the first pass behind a text encoder",
        ("copy/compute", "x ideal", "copy, then compute", "copies", "copied back", "host syncs"),
        [(f"{ratio:g}", *figures.values()) for ratio, figures in first_figures.items()],
    )

    ours = [by_mode[OURS] for by_ratio in steady_figures.values() for by_mode in by_ratio.values()]
    first = list(first_figures.values())
    results = {
        "steady_pass_over_ideal": {
            f"{size}_blocks": {
                _key(ratio): {mode: round(figures["over_ideal"], 4) for mode, figures in by_mode.items()}
                for ratio, by_mode in by_ratio.items()
            }
            for size, by_ratio in steady_figures.items()
        },
        "steady_pass_over_ideal_target": {_key(ratio): TARGETS[ratio] for ratio in ratios},
        "first_pass_behind_encoder_over_ideal": {
            _key(ratio): round(figures["over_ideal"], 4) for ratio, figures in first_figures.items()
        },
        "first_pass_behind_encoder_over_ideal_target": FIRST_PASS_TARGET,
        "omni_offload_copies_per_block_and_pass": max(figures["copies"] for figures in ours) / BLOCKS,
        "omni_offload_copies_back_per_pass": max(figures["copied_back"] for figures in ours + first),
        "omni_offload_host_syncs_per_pass": max(figures["host_syncs"] for figures in ours + first),
        "omni_offload_races_in_four_schedules": races,
        "outputs_equal_resident_bit_for_bit": equal,
    }
    details = {
        "blocks": BLOCKS,
        "blocks_behind_encoder": BLOCKS_AFTER_ENCODER,
        "measured_passes": passes - 1,
        "steady_pass": {
            f"{size}_blocks": {_key(ratio): by_mode for ratio, by_mode in by_ratio.items()}
            for size, by_ratio in steady_figures.items()
        },
        "first_pass_behind_encoder": {_key(ratio): figures for ratio, figures in first_figures.items()},
    }
    _common.finish("streaming", results, details, options)


def _key(ratio: float) -> str:
    return f"copy_over_compute_{ratio:g}"


if __name__ == "__main__":
    main()
