"""Models of Diffusers that do not run one plain list of blocks, and methods that are called before any forward."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
import transformers
from torch import nn

from omni_offload import OffloadConfigError, OffloadMixin, OffloadPlan
from omni_offload.demo.small_pipelines import make_module

both = pytest.mark.parametrize("config", [{"mode": "layer"}, {"mode": "module"}], ids=["layer", "module"])


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed))


class Encoder(nn.Module):
    """Stands for a text encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Around(nn.Module):
    """A pipeline around one transformer, called `use(transformer, input of the encoder)`."""

    _dit_modules = ["transformer"]
    _encoder_modules = ["text_encoder"]
    _offload_plan: OffloadPlan | None = OffloadPlan(encoder_component_types={"text_encoder": "text_encoder"})

    def __init__(self, transformer: nn.Module, use: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.transformer = transformer
        self.text_encoder = make_module("text_encoder", Encoder, torch.float32, 0)
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hint = self.text_encoder(x).mean()
        return self.use(self.transformer, hint)


class OffloadAround(OffloadMixin, Around):
    """The same with the mixin."""


def dit(transformer: Any, hint: torch.Tensor) -> torch.Tensor:
    sample = noise(2, 4, 8, 8).to(hint.device) + hint
    labels = torch.tensor([1, 3], device=hint.device)
    result: torch.Tensor = transformer(sample, timestep=torch.tensor([7, 9], device=hint.device), class_labels=labels)[
        0
    ]
    return result


def consis_id(transformer: Any, hint: torch.Tensor) -> torch.Tensor:
    device = hint.device
    result: torch.Tensor = transformer(
        hidden_states=noise(1, 1, 8, 8, 8).to(device) + hint,
        encoder_hidden_states=noise(1, 8, 16, seed=1).to(device),
        timestep=torch.tensor([5], device=device),
        id_cond=noise(1, 16, seed=2).to(device),
        id_vit_hidden=[noise(1, 4, 16, seed=3 + i).to(device) for i in range(2)],
    )[0]
    return result


def prior(transformer: Any, hint: torch.Tensor) -> torch.Tensor:
    """Reads root parameters in a method, before and behind the forward."""
    device = hint.device
    latents = transformer.post_process_latents(noise(2, 16).to(device))
    result = transformer(
        latents + hint,
        timestep=torch.tensor([1, 2], device=device),
        proj_embedding=noise(2, 16, seed=1).to(device),
        encoder_hidden_states=noise(2, 5, 16, seed=2).to(device),
        attention_mask=torch.ones(2, 5, dtype=torch.bool, device=device),
    )[0]
    processed: torch.Tensor = transformer.post_process_latents(result)
    return processed


MODELS: dict[str, tuple[Any, dict[str, Any], Callable[..., torch.Tensor]]] = {
    # `transformer_blocks[0].norm1.emb` is called again behind the last block.
    "DiT": (
        diffusers.DiTTransformer2DModel,
        {
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "in_channels": 4,
            "out_channels": 8,
            "num_layers": 4,
            "sample_size": 8,
            "num_embeds_ada_norm": 10,
        },
        dit,
    ),
    # Perceiver blocks run between the blocks; a part of the shell loops over a list of lists.
    "ConsisID": (
        diffusers.ConsisIDTransformer3DModel,
        {
            "num_attention_heads": 3,
            "attention_head_dim": 16,
            "in_channels": 8,
            "out_channels": 4,
            "time_embed_dim": 8,
            "text_embed_dim": 16,
            "num_layers": 4,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 1,
            "max_text_seq_length": 8,
            "is_train_face": True,
            "cross_attn_interval": 2,
            "cross_attn_dim_head": 8,
            "cross_attn_num_heads": 2,
            "LFE_id_dim": 16,
            "LFE_vit_dim": 16,
            "LFE_depth": 4,
            "LFE_dim_head": 8,
            "LFE_num_heads": 2,
            "LFE_num_id_token": 2,
            "LFE_num_querie": 4,
            "LFE_output_dim": 32,
            "LFE_ff_mult": 2,
            "LFE_num_scale": 2,
        },
        consis_id,
    ),
    "prior": (
        diffusers.PriorTransformer,
        {
            "num_attention_heads": 2,
            "attention_head_dim": 8,
            "num_layers": 3,
            "embedding_dim": 16,
            "num_embeddings": 5,
            "additional_embeddings": 4,
        },
        prior,
    ),
}


def pair(name: str, device: torch.device) -> tuple[Any, Any]:
    cls, config, use = MODELS[name]
    pipe = OffloadAround(make_module("transformer", lambda: cls(**config), torch.float32, 0), use)
    return pipe.requires_grad_(False), copy.deepcopy(pipe).to(device)


@both
@pytest.mark.parametrize("name", MODELS)
def test_an_irregular_model(name: str, config: dict[str, Any], device: torch.device, schedule: dict[str, bool]) -> None:
    pipe, reference = pair(name, device)
    x = noise(1, 3, 16, seed=4).to(device)
    with torch.no_grad():
        expected = reference(x).cpu()
        pipe.enable_offload(config, device=device)
        for _ in range(3):
            assert torch.equal(pipe(x).cpu(), expected)
    assert pipe.offload_report().copies > 0


def test_a_module_called_from_outside_its_block_costs_no_other_copy(device: torch.device) -> None:
    """DiT calls a part of block 0 behind the last block, when block 0 is on its way for the next pass anyway."""
    pipe, _ = pair("DiT", device)
    pipe.enable_layerwise_offload(device=device)
    copies: list[int] = []

    def passes(transformer: Any, hint: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            hint = dit(transformer, hint).mean()
            copies.append(pipe.offload_report().copies)
        return hint

    pipe.use = passes
    with torch.no_grad():
        pipe(noise(1, 3, 16).to(device))
    blocks = len(pipe.transformer.transformer_blocks)
    assert [later - earlier for earlier, later in itertools.pairwise(copies)] == [blocks] * 3


class Deep(nn.Module):
    """Calls a linear layer deep inside its first block from outside."""

    def __init__(self) -> None:
        super().__init__()
        block = {"d_model": 16, "nhead": 2, "dim_feedforward": 32, "batch_first": True}
        self.blocks = nn.ModuleList(nn.Sequential(nn.TransformerEncoderLayer(**block)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.blocks[0][0].linear2(self.blocks[0][0].linear1(x))


def test_a_model_of_ones_own_declares_what_it_calls_from_outside(device: torch.device) -> None:
    def use(transformer: Any, hint: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = transformer(noise(1, 4, 16).to(hint.device) + hint)
        return result

    class Declared(OffloadAround):
        _offload_plan = OffloadPlan(
            encoder_component_types={"text_encoder": "text_encoder"},
            outside_calls={"transformer": ["blocks.0.0.linear1", "blocks.0.0.linear2"]},
        )

    class Mistaken(OffloadAround):
        _offload_plan = OffloadPlan(
            encoder_component_types={"text_encoder": "text_encoder"},
            outside_calls={"transformer": ["blocks.0.linear9"]},
        )

    transformer = make_module("transformer", Deep, torch.float32, 0)
    x = noise(1, 3, 16).to(device)
    with torch.no_grad():
        expected = Around(copy.deepcopy(transformer), use).to(device)(x).cpu()
        pipe = Declared(transformer, use)
        pipe.enable_layerwise_offload(device=device)
        assert torch.equal(pipe(x).cpu(), expected)
        pipe.disable_offload()
        with pytest.raises(OffloadConfigError, match=r"outside_calls\['transformer'\]='blocks.0.linear9'"):
            Mistaken(transformer, use).enable_layerwise_offload(device=device)


@both
def test_features_of_a_model_that_is_never_called_itself(config: dict[str, Any], device: torch.device) -> None:
    """`get_text_features()` and the like run parts of a component whose forward is not called."""
    text = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    settings = transformers.CLIPConfig(
        text_config=text | {"vocab_size": 99, "max_position_embeddings": 8, "bos_token_id": 1, "eos_token_id": 2},
        vision_config=text | {"image_size": 8, "patch_size": 4},
        projection_dim=16,
    )

    class Features(OffloadAround):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ids = torch.tensor([[1, 5, 7, 2]], device=x.device)
            words = self.text_encoder.get_text_features(ids).pooler_output
            seen = self.text_encoder.get_image_features(noise(1, 3, 8, 8).to(x.device)).pooler_output
            return self.use(self.transformer, (words + seen).mean())

    cls, options, use = MODELS["DiT"]
    pipe = Features(make_module("transformer", lambda: cls(**options), torch.float32, 0), use)
    pipe.text_encoder = make_module("text_encoder", lambda: transformers.CLIPModel(settings), torch.float32, 0)
    reference = copy.deepcopy(pipe).to(device)
    x = noise(1).to(device)
    with torch.no_grad():
        expected = reference(x).cpu()
        pipe.enable_offload(config | ({"components": ["dit", "text_encoder"]} if config["mode"] == "layer" else {}))
        assert torch.equal(pipe(x).cpu(), expected)
        assert torch.equal(pipe(x).cpu(), expected)
