"""Which units and roles are found in models that nobody declared; real sizes, on the meta device."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch
import transformers

from omni_offload import OffloadPlan
from omni_offload.discovery.components import Component, _guessed_role
from omni_offload.discovery.units import UnitPlan, block_lists, blocks_at, divided, tensor_bytes

SDXL = {
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10),
    "cross_attention_dim": 2048,
    "attention_head_dim": (5, 10, 20),
    "use_linear_projection": True,
}


def units_of(module: torch.nn.Module) -> list[UnitPlan]:
    component = Component("model", "dit", module)
    lists = block_lists(component, OffloadPlan())
    return [unit for path, where in lists for unit in divided(component, blocks_at(component, path, where))]


@pytest.mark.parametrize(
    ("cls", "config"),
    [
        (diffusers.UNet2DConditionModel, {"cross_attention_dim": 768}),
        (diffusers.UNet2DConditionModel, SDXL),
        (diffusers.UNetSpatioTemporalConditionModel, {}),
        (diffusers.UNetMotionModel, {}),
        (diffusers.Kandinsky3UNet, {}),
        (diffusers.ControlNetModel, {"cross_attention_dim": 768}),
    ],
    ids=["SD 1.5", "SDXL", "SVD", "AnimateDiff", "Kandinsky 3", "ControlNet"],
)
def test_stages_of_a_unet_are_divided(cls: Any, config: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = cls(**config)
    units = units_of(model)
    whole = tensor_bytes([model])
    sizes = [tensor_bytes(unit.modules) for unit in units]
    assert len({id(unit.modules[0]) for unit in units}) == len(units) > 8
    assert sum(sizes) > 0.9 * whole
    assert max(sizes) < 0.15 * whole
    for unit in units:  # every name leads to its module
        assert model.get_submodule(unit.name.partition(".")[2]) is unit.modules[0]


def test_blocks_that_are_compiled_as_a_whole_stay_whole() -> None:
    with torch.device("meta"):
        model = diffusers.UNet2DConditionModel(**SDXL)
    compiled = [module for module in model.modules() if module.__class__.__name__ in (model._repeated_blocks or ())]
    units = [unit.modules[0] for unit in units_of(model)]
    assert compiled
    for block in compiled:
        assert any(block in unit.modules() for unit in units)


def test_blocks_of_a_transformer_are_not_divided() -> None:
    with torch.device("meta"):
        model = diffusers.SanaTransformer2DModel(num_layers=2)
    assert [unit.name for unit in units_of(model)] == ["model.transformer_blocks.0", "model.transformer_blocks.1"]


def test_a_large_table_does_not_hide_the_blocks() -> None:
    config = transformers.T5Config(vocab_size=250_000, d_model=64, d_kv=8, d_ff=128, num_heads=4, num_layers=2)
    with torch.device("meta"):
        encoder = transformers.MT5EncoderModel(config)
    component = Component("text_encoder", "text_encoder", encoder)
    assert [path for path, _ in block_lists(component, OffloadPlan())] == ["encoder.block"]


@pytest.mark.parametrize(
    ("name", "cls", "role"),
    [
        ("unet", "UNet2DConditionModel", "dit"),
        ("prior", "PriorTransformer", "dit"),
        ("prior_prior", "StableCascadeUNet", "dit"),
        ("decoder", "WuerstchenDiffNeXt", "dit"),
        ("unconditional_transformer", "Ideogram4Transformer2DModel", "dit"),
        ("transformer_2", "WanTransformer3DModel", "dit"),
        ("controlnet", "MultiControlNetModel", "controlnet"),
        ("adapter", "T2IAdapter", "resident"),
        ("motion_adapter", "MotionAdapter", "resident"),
        ("prior_text_encoder", "CLIPTextModelWithProjection", "text_encoder"),
        ("text_encoder_3", "T5EncoderModel", "text_encoder"),
        ("vision_language_encoder", "GlmImageForConditionalGeneration", "text_encoder"),
        ("feature_encoder", "SiglipVisionModel", "image_encoder"),
        ("movq", "VQModel", "vae"),
        ("audio_vae", "AutoencoderKLLTX2Audio", "vae"),
        ("vocoder", "SpeechT5HifiGan", "resident"),
        ("safety_checker", "StableDiffusionSafetyChecker", "resident"),
        ("anything", "ThatNobodyKnows", "resident"),
    ],
)
def test_roles_by_name_and_class(name: str, cls: str, role: str) -> None:
    assert _guessed_role(name, type(cls, (torch.nn.Module,), {})()) == role
