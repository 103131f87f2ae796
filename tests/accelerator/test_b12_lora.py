"""B12: adapters, before or after offload is turned on, give what they give on a resident pipeline."""

from __future__ import annotations

from pathlib import Path
from pipes import both_modes, brief, build, changes, device_bytes, offloaded, pinned_bytes, resident, tensors_of, traces
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict

LAYERS = 2
orders = pytest.mark.parametrize("order", ["adapter first", "offload first"])


def add_adapter(pipe: Any, name: str = "style", seed: int = 0) -> None:
    """An adapter with weights that matter, seeded, on whatever device PEFT puts it."""
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["to_q", "to_k", "to_v", "to_out.0"], init_lora_weights=False)
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    pipe.transformer.add_adapter(config, adapter_name=name)
    torch.random.set_rng_state(state)


def save_adapter(tmp_path: Path, seed: int = 0) -> Path:
    """A LoRA file of Diffusers' form."""
    pipe = build(layers=LAYERS)
    add_adapter(pipe, seed=seed)
    layers = get_peft_model_state_dict(pipe.transformer, adapter_name="style")
    folder = tmp_path / f"lora{seed}"
    pipe.save_lora_weights(folder, transformer_lora_layers=layers)
    return folder


def ready(config: dict[str, Any], order: str, device: torch.device) -> Any:
    """An offloaded pipeline with the adapter, added before or after."""
    if order == "offload first":
        pipe = offloaded(config, device, layers=LAYERS)
        brief(pipe)
        add_adapter(pipe)
        return pipe
    pipe = build(layers=LAYERS)
    add_adapter(pipe)
    pipe.enable_offload(config, device=device)
    return pipe


@orders
@both_modes
def test_adapter_through_its_whole_life(config: dict[str, Any], order: str, device: torch.device) -> None:
    reference = resident(device, layers=LAYERS)
    plain = brief(reference)
    add_adapter(reference)
    pipe = ready(config, order, device)
    mode = pipe.offload_report().mode

    def both(action: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        for each in (reference, pipe):
            getattr(each.transformer, action)(*args, **kwargs)
        expected = brief(reference)
        assert torch.equal(brief(pipe), expected), action
        assert pipe.offload_report().mode == mode
        return expected

    expected = brief(reference)
    assert not torch.equal(expected, plain)
    assert torch.equal(brief(pipe), expected)
    assert torch.equal(both("disable_adapters"), plain)
    assert torch.equal(both("enable_adapters"), expected)
    assert not torch.equal(both("set_adapters", ["style"], weights=[0.3]), expected)
    both("set_adapters", ["style"], weights=[1.0])
    fused = both("fuse_lora")
    assert not torch.equal(fused, plain)
    both("unfuse_lora")
    both("fuse_lora", lora_scale=0.5, safe_fusing=True)
    both("unfuse_lora")
    both("delete_adapters", "style")
    for name, tensor in tensors_of(pipe).items():
        assert torch.equal(tensor.cpu(), tensors_of(reference)[name].cpu()), name


@orders
@both_modes
def test_two_adapters_at_once(config: dict[str, Any], order: str, device: torch.device) -> None:
    reference = resident(device, layers=LAYERS)
    add_adapter(reference)
    pipe = ready(config, order, device)
    for each in (reference, pipe):
        add_adapter(each, "other", seed=1)
        each.set_adapters(["style", "other"], adapter_weights=[0.7, 0.4])
    expected = brief(reference)
    assert torch.equal(brief(pipe), expected)
    for each in (reference, pipe):
        each.set_adapters("other")
    assert not torch.equal(brief(reference), expected)
    assert torch.equal(brief(pipe), brief(reference))


@pytest.mark.parametrize("level", ["pipeline", "transformer"])
@both_modes
def test_fusing_between_the_steps_of_a_call(config: dict[str, Any], level: str, device: torch.device) -> None:
    reference, pipe = resident(device, layers=LAYERS), ready(config, "adapter first", device)
    add_adapter(reference)

    def change(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        target = pipe if level == "pipeline" else pipe.transformer
        if step == 0:
            target.fuse_lora(lora_scale=2.0)
        elif step == 1:
            target.unfuse_lora()
        return tensors

    expected = brief(reference, steps=3, callback_on_step_end=change)
    assert not torch.equal(expected, brief(reference, steps=3))
    assert torch.equal(brief(pipe, steps=3, callback_on_step_end=change), expected)


@both_modes
def test_loading_fusing_and_unloading_a_file(config: dict[str, Any], device: torch.device, tmp_path: Path) -> None:
    first, second = save_adapter(tmp_path), save_adapter(tmp_path, seed=1)
    reference, pipe = resident(device, layers=LAYERS), offloaded(config, device, layers=LAYERS)
    plain, idle, locked = brief(pipe), device_bytes(device, pipe), pinned_bytes(device)

    def same() -> torch.Tensor:
        expected = brief(reference)
        assert torch.equal(brief(pipe), expected)
        return expected

    for each in (reference, pipe):
        each.load_lora_weights(first, adapter_name="first")
    loaded = same()
    assert not torch.equal(loaded, plain)
    for each in (reference, pipe):
        each.fuse_lora(lora_scale=0.5)
    same()
    for each in (reference, pipe):
        each.unfuse_lora()
        each.load_lora_weights(second, adapter_name="second")
        each.set_adapters(["first", "second"], adapter_weights=[0.5, 0.5])
    same()
    for each in (reference, pipe):
        each.delete_adapters("first")
    same()
    for each in (reference, pipe):
        each.unload_lora_weights()
    same()
    # Unfusing rounds the base weights; apart from that all is as before, memory too.
    brief(pipe)
    assert abs(device_bytes(device, pipe) - idle) <= 0.01 * idle
    assert pinned_bytes(device) == locked


@both_modes
def test_hotswap(config: dict[str, Any], device: torch.device, tmp_path: Path) -> None:
    first, second = save_adapter(tmp_path), save_adapter(tmp_path, seed=1)
    reference, pipe = resident(device, layers=LAYERS), offloaded(config, device, layers=LAYERS)
    for each in (reference, pipe):
        each.load_lora_weights(first, adapter_name="only")
    expected = brief(reference)
    assert torch.equal(brief(pipe), expected)
    for each in (reference, pipe):
        each.load_lora_weights(second, adapter_name="only", hotswap=True)
    assert not torch.equal(brief(reference), expected)
    assert torch.equal(brief(pipe), brief(reference))


@orders
@both_modes
def test_disabling_with_an_adapter_on(config: dict[str, Any], order: str, device: torch.device) -> None:
    reference = build(layers=LAYERS)
    add_adapter(reference)
    pipe = ready(config, order, device)
    brief(reference)
    brief(pipe)
    pipe.disable_offload()
    assert device_bytes(device, pipe) == 0
    assert not changes(traces(reference), traces(pipe))
    assert all(tensor.device.type == "cpu" for tensor in tensors_of(pipe).values())
    assert torch.equal(brief(pipe), brief(reference))


@both_modes
def test_base_weights_have_one_host_copy(config: dict[str, Any], device: torch.device) -> None:
    pipe = offloaded(config, device, layers=LAYERS)
    before = pipe.offload_report().host_bytes
    add_adapter(pipe)
    adapter = sum(tensor.nbytes for name, tensor in tensors_of(pipe).items() if "lora" in name)
    count = sum("lora" in name for name in tensors_of(pipe))
    brief(pipe)
    assert before < pipe.offload_report().host_bytes <= before + adapter + 256 * count
