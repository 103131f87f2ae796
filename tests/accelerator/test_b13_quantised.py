"""B13: quantised weights stream as they are, and what cannot be served is refused by component and class."""

from __future__ import annotations

from collections.abc import Callable
from pipes import LAYER, MODULE, brief, build
from typing import Any

import pytest
import torch
from torch import nn

from omni_offload import OffloadConfigError

HOST = torch.device("cpu")
Quantise = Callable[[Any], None]


def linears(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """Every linear layer inside the blocks, with its parent and name."""
    return [
        (parent, name, child)
        for block in model.blocks
        for parent in block.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]


def torchao_weights(config: str) -> Quantise:
    def quantise(model: Any) -> None:
        quantization = pytest.importorskip("torchao.quantization")
        quantization.quantize_(model.blocks, getattr(quantization, config)())

    return quantise


def bitsandbytes_4bit(nested: bool) -> Quantise:
    def quantise(model: Any) -> None:
        bnb = pytest.importorskip("bitsandbytes")
        for parent, name, layer in linears(model):
            small = bnb.nn.Linear4bit(
                layer.in_features,
                layer.out_features,
                bias=layer.bias is not None,
                compute_dtype=torch.float32,
                compress_statistics=nested,
                quant_type="nf4",
            )
            small.load_state_dict(layer.state_dict())
            setattr(parent, name, small.to(HOST).requires_grad_(False))

    return quantise


def bitsandbytes_8bit(model: Any) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    for parent, name, layer in linears(model):
        small = bnb.nn.Linear8bitLt(
            layer.in_features, layer.out_features, bias=layer.bias is not None, has_fp16_weights=False
        )
        small.load_state_dict(layer.state_dict())
        setattr(parent, name, small.to(HOST))


def quanto(model: Any) -> None:
    library = pytest.importorskip("optimum.quanto")
    library.quantize(model.blocks, weights=library.qint8)
    library.freeze(model.blocks)


def gguf(model: Any) -> None:
    library = pytest.importorskip("gguf")
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter

    kind = library.GGMLQuantizationType.Q8_0
    for parent, name, layer in linears(model):
        small = GGUFLinear(
            layer.in_features, layer.out_features, layer.bias is not None, compute_dtype=torch.float32, device=HOST
        )
        packed = library.quants.quantize(layer.weight.detach().numpy(), kind)
        small.weight = GGUFParameter(torch.from_numpy(packed), quant_type=kind)
        if layer.bias is not None:
            small.bias = layer.bias
        setattr(parent, name, small.requires_grad_(False))


KINDS: dict[str, Quantise] = {
    "torchao int8": torchao_weights("Int8WeightOnlyConfig"),
    "torchao int8 dynamic": torchao_weights("Int8DynamicActivationInt8WeightConfig"),
    "torchao float8": torchao_weights("Float8WeightOnlyConfig"),
    "bitsandbytes 4 bit": bitsandbytes_4bit(nested=False),
    "bitsandbytes 4 bit, nested": bitsandbytes_4bit(nested=True),
    "quanto int8": quanto,
    "gguf": gguf,
}
# The others have no kernels, or checks of their own, for a device that they do not know.
ANYWHERE = ("torchao int8", "torchao float8", "quanto int8", "gguf")
PLACES = [(kind, where) for kind in KINDS for where in ("cpu", "accelerator") if where == "cpu" or kind in ANYWHERE]


def quantised(kind: str) -> Any:
    pipe = build("wan", layers=3)
    KINDS[kind](pipe.transformer.requires_grad_(False))
    return pipe


@pytest.mark.parametrize("config", [LAYER, MODULE], ids=["layer", "module"])
@pytest.mark.parametrize(("kind", "where"), PLACES, ids=[f"{kind} on {where}" for kind, where in PLACES])
def test_quantised_weights_stream_and_the_output_is_the_same(
    kind: str, where: str, config: dict[str, Any], device: torch.device
) -> None:
    onload = HOST if where == "cpu" else device
    pipe = quantised(kind)
    state = {name: type(tensor) for name, tensor in pipe.transformer.state_dict().items()}
    expected = brief(quantised(kind).to(onload))
    pipe.enable_offload(config, device=onload)
    report = pipe.offload_report()
    entry = next(entry for entry in report.components if entry.path == "transformer")
    full = sum(tensor.nbytes for tensor in build("wan", layers=3).transformer.blocks.parameters())
    assert 0 < entry.streamed_bytes < 0.9 * full, "what streams is what the quantised weights hold"
    assert torch.equal(brief(pipe), expected)
    assert torch.equal(brief(pipe), expected)
    assert pipe.offload_report().copies >= 2 * entry.units
    assert {name: type(tensor) for name, tensor in pipe.transformer.state_dict().items()} == state
    pipe.disable_offload()
    assert torch.equal(brief(pipe.to(onload)), expected)


@pytest.mark.parametrize("kind", ["torchao int8", "gguf"])
def test_edited_and_replaced_while_parked(kind: str, device: torch.device) -> None:
    """Scales written in place, and a weight replaced by another layer's: both show in the next pass."""
    pipe, reference = quantised(kind), quantised(kind).to(device)
    pipe.enable_offload(LAYER, device=device)
    brief(pipe)
    for each in (pipe, reference):
        blocks = each.transformer.blocks
        if kind == "torchao int8":
            blocks[0].attn1.to_q.weight.scale.mul_(1.5)
        blocks[1].attn1.to_q.weight, blocks[2].attn1.to_q.weight = (
            blocks[2].attn1.to_q.weight,
            blocks[1].attn1.to_q.weight,
        )
    assert torch.equal(brief(pipe), brief(reference))


def test_a_kind_that_keeps_its_own_state_is_refused_by_name(device: torch.device) -> None:
    pipe = build("wan", layers=2)
    bitsandbytes_8bit(pipe.transformer)
    with pytest.raises(OffloadConfigError, match=r"transformer \(WanTransformer3DModel\): blocks.0.*Int8Params"):
        pipe.enable_offload(LAYER, device=device)
    with pytest.raises(OffloadConfigError, match="Int8Params"):
        pipe.enable_offload(MODULE, device=device)
    pipe.enable_offload({"mode": "layer", "components": ["text_encoder"]}, device=HOST)
    pipe.disable_offload()
