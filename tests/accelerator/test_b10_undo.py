"""B10: turning offload off, or dropping the pipeline, leaves nothing behind."""

from __future__ import annotations

import gc
import weakref
from pipes import (
    DIT_LAYERS,
    LAYER,
    MODULE,
    both_modes,
    brief,
    build,
    changes,
    device_bytes,
    modules_of,
    offloaded,
    output,
    pinned_bytes,
    resident,
    tensors_of,
    traces,
)
from typing import Any

import pytest
import torch
from torch import nn

from omni_offload import OffloadStateError

FAMILIES = ["wan", "wan22", "flux2-klein", "flux2", "split"]


def config_for(family: str, config: dict[str, Any]) -> dict[str, Any]:
    return DIT_LAYERS if family == "split" and config is LAYER else config


@pytest.mark.parametrize("family", FAMILIES)
@both_modes
def test_disable_gives_everything_back(family: str, config: dict[str, Any], device: torch.device) -> None:
    expected = output(resident(device, family, layers=2), family)
    pipe = build(family, layers=2)
    output(pipe, family)  # which leaves traces of its own
    before, tensors = traces(pipe), tensors_of(pipe)
    values = {name: tensor.clone() for name, tensor in tensors.items()}
    forwards = {path: module.forward for path, module in modules_of(pipe).items()}
    empty, locked = device_bytes(device, pipe), pinned_bytes(device)
    for run in (False, True):
        pipe.enable_offload(config_for(family, config), device=device)
        if run:
            assert torch.equal(output(pipe, family), expected)
        pipe.disable_offload()
        assert not changes(before, traces(pipe))
        assert {path: module.forward for path, module in modules_of(pipe).items()} == forwards
        now = tensors_of(pipe)
        assert now.keys() == tensors.keys()
        for name, tensor in now.items():
            assert tensor is tensors[name] or name in _buffers_of(pipe), name
            assert tensor.device.type == "cpu" and not tensor.is_pinned(), name
            assert tensor.dtype == values[name].dtype and torch.equal(tensor, values[name]), name
            assert tensor.is_leaf and tensor.stride() == values[name].stride(), name
        assert device_bytes(device, pipe) == empty and pinned_bytes(device) == locked
    pipe.disable_offload()  # again is harmless
    assert torch.equal(output(pipe.to(device), family), expected)
    pipe.to("cpu")
    assert all(tensor.device.type == "cpu" for tensor in tensors_of(pipe).values())


def _buffers_of(pipe: Any) -> set[str]:
    """Names of buffers, which `module.to()` replaces by other objects, with offload or without."""
    return {
        f"{path}.{name}" for path, module in modules_of(pipe).items() for name, _ in module.named_buffers(recurse=False)
    }


@both_modes
def test_ties_survive(config: dict[str, Any], device: torch.device) -> None:
    pipe = build("flux2-klein", layers=2)
    encoder = pipe.text_encoder
    assert encoder.lm_head.weight is encoder.model.embed_tokens.weight
    for _ in range(2):
        pipe.enable_offload(config, device=device)
        assert encoder.lm_head.weight is encoder.model.embed_tokens.weight
        pipe.disable_offload()
        assert encoder.lm_head.weight is encoder.model.embed_tokens.weight


@both_modes
def test_gradients_and_training_work_again(config: dict[str, Any], device: torch.device) -> None:
    pipe = offloaded(config, device, layers=2)
    brief(pipe)
    pipe.disable_offload()
    weight = pipe.transformer.blocks[0].attn1.to_v.weight
    optimizer = torch.optim.SGD([weight], lr=0.1)
    before = weight.detach().clone()
    result = pipe.transformer(torch.ones(1, 16, 1, 4, 4), torch.tensor([500]), torch.ones(1, 8, 32), return_dict=False)[
        0
    ]
    result.sum().backward()
    optimizer.step()
    assert weight.grad is not None and not torch.equal(weight, before)


@both_modes
def test_user_hooks_and_attributes_survive(config: dict[str, Any], device: torch.device) -> None:
    pipe = build(layers=2)
    block, calls = pipe.transformer.blocks[0], []
    early = block.register_forward_pre_hook(lambda module, args: calls.append("early"))
    pipe.enable_offload(config, device=device)
    late = block.register_forward_pre_hook(lambda module, args: calls.append("late"))
    block.mine = "kept"
    pipe.disable_offload()
    brief(pipe, guidance_scale=1.0)
    assert calls == ["early", "late"] and block.mine == "kept"
    early.remove()
    late.remove()
    assert not block._forward_pre_hooks


@both_modes
@pytest.mark.parametrize("way", ["disable_offload", "remove_all_hooks", "a refused move first"])
def test_either_way_of_turning_it_off(way: str, config: dict[str, Any], device: torch.device) -> None:
    plain, locked = build(layers=2), pinned_bytes(device)
    pipe = offloaded(config, device, layers=2)
    brief(pipe)
    if way == "a refused move first":
        with pytest.raises(OffloadStateError, match="disable_offload"):
            pipe.to("cpu")
        pipe.disable_offload()
    else:
        getattr(pipe, way)()
    assert device_bytes(device, pipe) == 0 and pinned_bytes(device) == locked
    assert torch.equal(brief(pipe), brief(plain))


@both_modes
def test_moving_while_on(config: dict[str, Any], device: torch.device) -> None:
    pipe = offloaded(config, device, layers=2)
    expected, idle = brief(pipe), device_bytes(device, pipe)
    places = {name: tensor.data_ptr() for name, tensor in tensors_of(pipe).items()}
    for each in (pipe, pipe.transformer, pipe.text_encoder):
        assert each.to(device) is each
        assert each.to(device.type) is each
        for refused in ("cpu", "meta", torch.device("cpu")):
            with pytest.raises(OffloadStateError, match=r"disable_offload\(\)"):
                each.to(refused)
    with pytest.raises(OffloadStateError, match=r"disable_offload\(\)"):
        pipe.transformer.cpu()
    assert {name: tensor.data_ptr() for name, tensor in tensors_of(pipe).items()} == places
    assert torch.equal(brief(pipe), expected)
    assert device_bytes(device, pipe) == idle


def references(pipe: Any) -> list[weakref.ref[Any]]:
    parts = [*modules_of(pipe).values(), *tensors_of(pipe).values()]
    return [weakref.ref(part) for part in [pipe, *parts]]


@pytest.mark.parametrize("when", ["fresh", "behind a call", "behind an error", "disabled", "enabled twice"])
@pytest.mark.parametrize("family", ["wan", "flux2-klein"])
@both_modes
def test_dropped_pipeline_is_gone(config: dict[str, Any], family: str, when: str, device: torch.device) -> None:
    locked = pinned_bytes(device)
    pipe = offloaded(config, device, family, layers=2)
    if when == "enabled twice":
        pipe.enable_offload(MODULE if config is LAYER else LAYER, device=device)
    if when != "fresh":
        output(pipe, family)
    if when == "behind an error":
        with pytest.raises(ZeroDivisionError):
            output(pipe, family, callback_on_step_end=lambda *_: 1 / 0)
    if when == "disabled":
        pipe.disable_offload()
    alive = references(pipe)
    del pipe
    gc.collect()
    assert not [ref() for ref in alive if ref() is not None]
    assert device_bytes(device) == 0 and pinned_bytes(device) == locked


@both_modes
def test_component_that_outlives_its_pipeline_still_works(config: dict[str, Any], device: torch.device) -> None:
    pipe = offloaded(config, device, layers=2)
    expected = brief(pipe)
    parts = dict(pipe.components)
    kind = type(pipe)
    del pipe
    gc.collect()
    again = kind(**parts)
    again.set_progress_bar_config(disable=True)
    assert torch.equal(brief(again), expected)
    again.disable_offload()
    assert torch.equal(brief(again), brief(build(layers=2)))


def run_without_waiting(pipe: Any, device: torch.device) -> torch.Tensor:
    """One forward of the transformer, outside of a pipeline call: the next copies are under way behind it."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 16, 1, 4, 4, generator=generator), torch.randn(1, 8, 32, generator=generator)]
    with torch.no_grad():
        latents, text = (tensor.to(device) for tensor in inputs)
        return pipe.transformer(latents, torch.tensor([500], device=device), text, return_dict=False)[0]


@pytest.mark.parametrize("way", ["dropped", "disabled", "parked"])
@both_modes
def test_copies_under_way_make_no_race(
    config: dict[str, Any], way: str, schedule: dict[str, bool], device: torch.device
) -> None:
    expected = run_without_waiting(resident(device, layers=3), device).cpu()
    pipe: Any = offloaded(config, device, layers=3)
    result = run_without_waiting(pipe, device)
    if way == "dropped":
        del pipe
        gc.collect()
    elif way == "disabled":
        pipe.disable_offload()
    else:
        pipe.maybe_free_model_hooks()
    # Whoever gets the memory next writes to it at once.
    fillers = [torch.full((size,), 7.0, device=device) for size in (64, 4096, 65536, 1 << 18) for _ in range(4)]
    assert torch.equal(result.cpu(), expected)
    assert all(bool((filler == 7.0).all()) for filler in fillers)


def test_plain_module_pipeline_is_undone(device: torch.device) -> None:
    from omni_offload import OffloadMixin

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    class Pipe(OffloadMixin, nn.Module):
        _dit_modules = ["model"]

        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x)

    pipe = Pipe()
    keys = {name: sorted(vars(module)) for name, module in pipe.named_modules()}
    kinds = {name: type(module) for name, module in pipe.named_modules()}
    pipe.enable_layerwise_offload(device=device)
    with torch.no_grad():
        pipe(torch.ones(1, 8, device=device))
    pipe.disable_offload()
    assert {name: sorted(vars(module)) for name, module in pipe.named_modules()} == keys
    assert {name: type(module) for name, module in pipe.named_modules()} == kinds
    alive = [weakref.ref(module) for module in pipe.modules()]
    del pipe
    gc.collect()
    assert not [ref for ref in alive if ref() is not None]
    assert device_bytes(device) == 0
