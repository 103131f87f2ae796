"""B14: out of memory and errors in anybody's code leave a pipeline whose next call works, unasked."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from pipes import (
    LAYER,
    MODULE,
    both_modes,
    brief,
    build,
    changes,
    device_bytes,
    offloaded,
    output,
    pinned_bytes,
    tensors_of,
    traces,
)
from types import ModuleType
from typing import Any

import pytest
import torch

LAYERS = 3


class Mishap(Exception):
    """An error in somebody else's code."""


def raise_once_at(count: int) -> Callable[..., None]:
    """A function that raises when called for the `count`-th time, and never again."""
    calls = itertools.count(1)

    def maybe(*_: Any, **__: Any) -> None:
        if next(calls) == count:
            raise Mishap

    return maybe


def in_a_block_before(pipe: Any, mishap: Callable[..., None]) -> Callable[[], None]:
    return pipe.transformer.blocks[1].register_forward_pre_hook(mishap).remove


def in_a_block_behind(pipe: Any, mishap: Callable[..., None]) -> Callable[[], None]:
    def hook(module: Any, args: Any, result: Any) -> None:
        mishap()

    return pipe.transformer.blocks[1].register_forward_hook(hook).remove


def in_a_layer_of_a_block(pipe: Any, mishap: Callable[..., None]) -> Callable[[], None]:
    return pipe.transformer.blocks[2].ffn.net[2].register_forward_pre_hook(mishap).remove


def in_the_transformer_before(pipe: Any, mishap: Callable[..., None]) -> Callable[[], None]:
    return pipe.transformer.register_forward_pre_hook(mishap).remove


def in_the_transformers_shell(pipe: Any, mishap: Callable[..., None]) -> Callable[[], None]:
    return pipe.transformer.proj_out.register_forward_pre_hook(mishap).remove


def in_the_text_encoder(pipe: Any, mishap: Callable[..., None]) -> Callable[[], None]:
    return pipe.text_encoder.encoder.block[1].register_forward_pre_hook(mishap).remove


def in_an_attention_processor(pipe: Any, mishap: Callable[..., None]) -> Callable[[], None]:
    attention = pipe.transformer.blocks[0].attn1
    original = attention.processor

    def processor(*args: Any, **kwargs: Any) -> Any:
        mishap()
        return original(*args, **kwargs)

    attention.processor = processor
    return lambda: setattr(attention, "processor", original)


def in_the_scheduler(pipe: Any, mishap: Callable[..., None]) -> Callable[[], None]:
    original = type(pipe.scheduler).step

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        mishap()
        return original(self, *args, **kwargs)

    type(pipe.scheduler).step = step
    return lambda: setattr(type(pipe.scheduler), "step", original)


def in_the_tokenizer(pipe: Any, mishap: Callable[..., None]) -> Callable[[], None]:
    original = pipe.tokenizer

    def tokenizer(*args: Any, **kwargs: Any) -> Any:
        mishap()
        return original(*args, **kwargs)

    pipe.tokenizer = tokenizer
    return lambda: setattr(pipe, "tokenizer", original)


PLACES = [
    in_a_block_before,
    in_a_block_behind,
    in_a_layer_of_a_block,
    in_the_transformer_before,
    in_the_transformers_shell,
    in_the_text_encoder,
    in_an_attention_processor,
    in_the_scheduler,
    in_the_tokenizer,
]


@pytest.mark.parametrize("count", [1, 2])
@both_modes
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_next_call_works_after_an_error(
    place: Callable[..., Any], config: dict[str, Any], count: int, device: torch.device
) -> None:
    pipe = offloaded(config, device, layers=LAYERS)
    expected, idle = brief(pipe, steps=2, guidance_scale=4.0), device_bytes(device, pipe)
    for _ in range(2):
        undo = place(pipe, raise_once_at(count))
        try:
            with pytest.raises(Mishap):
                brief(pipe, steps=2, guidance_scale=4.0)
            assert pipe.device == device  # also right behind an error
            assert torch.equal(brief(pipe, steps=2, guidance_scale=4.0), expected)
        finally:
            undo()
        assert device_bytes(device, pipe) == idle
    assert all(tensor.device.type == "cpu" for tensor in pipe.transformer.blocks.parameters())


@both_modes
def test_error_in_a_step_callback(config: dict[str, Any], device: torch.device) -> None:
    pipe = offloaded(config, device, layers=LAYERS)
    expected, idle = brief(pipe, steps=2), device_bytes(device, pipe)
    for _ in range(2):
        with pytest.raises(Mishap):
            brief(pipe, steps=2, callback_on_step_end=raise_once_at(1))
        assert torch.equal(brief(pipe, steps=2), expected)
        assert device_bytes(device, pipe) == idle


@both_modes
def test_error_leaves_the_device_at_its_idle_level_at_once(config: dict[str, Any], device: torch.device) -> None:
    pipe = offloaded(config, device, layers=LAYERS)
    brief(pipe)
    idle = device_bytes(device, pipe)
    undo = in_a_layer_of_a_block(pipe, raise_once_at(1))
    with contextlib.suppress(Mishap):
        brief(pipe)
    pipe._current_timestep = None  # the pipeline's own
    assert device_bytes(device, pipe) == idle
    undo()


@both_modes
def test_wrong_inputs_leave_no_trace(config: dict[str, Any], device: torch.device) -> None:
    pipe = offloaded(config, device, layers=LAYERS)
    expected, idle = brief(pipe), device_bytes(device, pipe)
    with pytest.raises((ValueError, TypeError)):
        brief(pipe, height=17)
    with pytest.raises(Exception):  # noqa: B017, PT011 -- whatever a layer says to the wrong width
        pipe.transformer(
            torch.zeros(1, 16, 1, 4, 4, device=device),
            torch.tensor([1], device=device),
            torch.zeros(1, 8, 7, device=device),
        )
    assert torch.equal(brief(pipe), expected)
    assert device_bytes(device, pipe) == idle


@pytest.mark.simulated_only
@both_modes
def test_next_call_works_after_out_of_memory_anywhere_in_a_call(
    config: dict[str, Any], device: torch.device, sim: ModuleType
) -> None:
    pipe = offloaded(config, device, layers=LAYERS)
    torch.accelerator.reset_peak_memory_stats(device)
    expected = brief(pipe)
    idle, peak = device_bytes(device, pipe), torch.accelerator.max_memory_allocated(device)
    failures = 0
    for part in range(12):
        with sim.settings(capacity=idle + (peak - idle) * part // 12):
            try:
                brief(pipe)
            except torch.OutOfMemoryError:
                failures += 1
        assert torch.equal(brief(pipe), expected), part
        assert device_bytes(device, pipe) == idle, part
    assert failures >= 6


@pytest.mark.simulated_only
@both_modes
def test_out_of_memory_in_a_call_that_repeats(config: dict[str, Any], device: torch.device, sim: ModuleType) -> None:
    pipe = offloaded(config, device, layers=LAYERS)
    torch.accelerator.reset_peak_memory_stats(device)
    expected = brief(pipe)
    idle, peak = device_bytes(device, pipe), torch.accelerator.max_memory_allocated(device)
    with sim.settings(capacity=(idle + peak) // 2):
        for _ in range(4):
            with pytest.raises(torch.OutOfMemoryError):
                brief(pipe)
    assert torch.equal(brief(pipe), expected)
    assert device_bytes(device, pipe) == idle


@pytest.mark.simulated_only
@both_modes
def test_enable_rolls_back_when_the_device_is_full(
    config: dict[str, Any], device: torch.device, sim: ModuleType
) -> None:
    pipe = build(layers=LAYERS)
    on_cpu = brief(pipe)
    plain, tensors = traces(pipe), tensors_of(pipe)
    values = {name: tensor.clone() for name, tensor in tensors.items()}
    empty, locked = device_bytes(device, pipe), pinned_bytes(device)
    torch.accelerator.reset_peak_memory_stats(device)
    pipe.enable_offload(config, device=device)
    peak = torch.accelerator.max_memory_allocated(device)
    expected = brief(pipe)
    pipe.disable_offload()
    for part in range(8):
        with sim.settings(capacity=empty + (peak - empty) * part // 8), pytest.raises(torch.OutOfMemoryError):
            pipe.enable_offload(config, device=device)
        assert not changes(plain, traces(pipe)), part
        assert all(tensor is tensors[name] for name, tensor in tensors_of(pipe).items())
        assert all(torch.equal(tensor, values[name]) for name, tensor in tensors_of(pipe).items())
        assert device_bytes(device, pipe) == empty and pinned_bytes(device) == locked, part
        assert pipe.device.type == "cpu"
        assert torch.equal(brief(pipe), on_cpu), part
    pipe.enable_offload(config, device=device)
    assert torch.equal(brief(pipe), expected)


@pytest.mark.simulated_only
def test_failed_change_of_mode_gives_the_former_mode_back(device: torch.device, sim: ModuleType) -> None:
    pipe = offloaded(MODULE, device, layers=LAYERS)
    expected, idle = brief(pipe), device_bytes(device, pipe)
    with sim.settings(capacity=idle), pytest.raises(torch.OutOfMemoryError):
        pipe.enable_offload(LAYER, device=device)
    assert pipe.offload_report().mode == "module"
    assert torch.equal(brief(pipe), expected)
    assert device_bytes(device, pipe) == idle


@both_modes
def test_failing_load_of_weights_leaves_the_old_ones(config: dict[str, Any], device: torch.device) -> None:
    pipe = offloaded(config, device, layers=LAYERS)
    expected, idle = brief(pipe), device_bytes(device, pipe)
    with pytest.raises(RuntimeError, match="Missing key"):
        pipe.transformer.load_state_dict({})
    name = "transformer.blocks.0.attn1.to_q"
    misfit = {f"{name}.lora_A.weight": torch.zeros(4, 7), f"{name}.lora_B.weight": torch.zeros(5, 4)}
    with pytest.raises(Exception):  # noqa: B017, PT011 -- whatever Diffusers says
        pipe.load_lora_weights(misfit)
    assert torch.equal(brief(pipe), expected)
    assert device_bytes(device, pipe) == idle


@both_modes
def test_error_while_somebody_elses_pipeline_runs_inside(config: dict[str, Any], device: torch.device) -> None:
    outer, inner = offloaded(config, device, layers=LAYERS), offloaded(config, device, layers=LAYERS, seed=1)
    expected, other = brief(outer, steps=2), brief(inner)

    def run_inner(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        undo = in_a_layer_of_a_block(inner, raise_once_at(1))
        with pytest.raises(Mishap):
            brief(inner)
        undo()
        assert torch.equal(brief(inner), other)
        return tensors

    assert torch.equal(brief(outer, steps=2, callback_on_step_end=run_inner), expected)
    assert torch.equal(output(outer), output(outer))
