"""A large embedding table stays on the host: rows that a call asks for are gathered there, and they alone travel."""

from __future__ import annotations

import copy
from pipes import build, output, resident
from typing import Any

import pytest
import torch
import transformers
from conftest import DeviceMemory
from torch import nn

from omni_offload.demo.small_pipelines import make_module, qwen2_tokenizer, t5_tokenizer

ENCODER = {"mode": "layer", "components": ["text_encoder"]}
MODULE = {"mode": "module"}
modes = pytest.mark.parametrize("config", [ENCODER, MODULE], ids=["layer", "module"])
ROWS = 4000


def umt5() -> Any:
    """An encoder whose table is larger than all its blocks together, held by two modules, as UMT5's is."""
    config = transformers.UMT5Config(
        vocab_size=ROWS, d_model=32, d_kv=8, d_ff=64, num_heads=4, num_layers=3, pad_token_id=0, eos_token_id=1
    )
    return make_module("text_encoder", lambda: transformers.UMT5EncoderModel(config), torch.float32, 0)


def qwen3(tied: bool = True) -> Any:
    """A language model whose head is tied to its table."""
    config = transformers.Qwen3Config(
        vocab_size=ROWS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return make_module("text_encoder", lambda: transformers.Qwen3ForCausalLM(config), torch.float32, 0)


def pair(family: str, encoder: nn.Module, device: torch.device) -> tuple[Any, Any]:
    """A pipeline with `encoder` on the host, and a resident one."""
    pipe, reference = build(family, layers=1), resident(device, family, layers=1)
    pipe.text_encoder, reference.text_encoder = encoder, copy.deepcopy(encoder).to(device)
    return pipe, reference


def size(table: nn.Module) -> int:
    return table.weight.nbytes


@modes
def test_a_table_that_two_modules_hold_stays_on_the_host(
    config: dict[str, Any], device: torch.device, schedule: dict[str, bool], memory: DeviceMemory
) -> None:
    pipe, reference = pair("wan", umt5(), device)
    expected = output(reference, "wan", steps=1)
    del reference
    encoder = pipe.text_encoder
    assert encoder.shared.weight is encoder.encoder.embed_tokens.weight
    pipe.enable_offload(config, device=device)
    assert torch.equal(output(pipe, "wan", steps=1), expected)
    entry = next(entry for entry in pipe.offload_report().components if entry.path == "text_encoder")
    assert entry.copies > 0
    assert entry.streamed_bytes + entry.resident_bytes < size(encoder.shared) <= entry.host_bytes
    memory.reset_peak()
    before = memory.allocated()
    pipe.encode_prompt("a boat", do_classifier_free_guidance=False, max_sequence_length=8, device=device)
    assert memory.peak() - before < size(encoder.shared)


def test_a_tied_head_fetches_the_table_and_the_embedding_does_not(device: torch.device) -> None:
    pipe, reference = pair("flux2-klein", qwen3(), device)
    ids = torch.tensor([[5, 17, 5, ROWS - 1]], device=device)
    pipe.enable_offload(ENCODER, device=device)
    with torch.no_grad():
        expected = reference.text_encoder.model(ids).last_hidden_state.cpu()
        before = pipe.offload_report().copied_bytes
        assert torch.equal(pipe.text_encoder.model(ids).last_hidden_state.cpu(), expected)
        blocks = pipe.offload_report().copied_bytes - before
        assert torch.equal(pipe.text_encoder(ids).logits.cpu(), reference.text_encoder(ids).logits.cpu())
        head = size(pipe.text_encoder.lm_head)
        assert 0 < blocks < head
        assert head <= pipe.offload_report().copied_bytes - before - blocks < 2 * head


@modes
def test_generating_text(config: dict[str, Any], device: torch.device) -> None:
    pipe, reference = pair("flux2-klein", qwen3(tied=False), device)
    pipe.enable_offload(config, device=device)
    ids = qwen2_tokenizer()("a boat", return_tensors="pt").input_ids.to(device)
    expected = reference.text_encoder.generate(ids, max_new_tokens=6, do_sample=False).cpu()
    before = pipe.offload_report().copies
    assert torch.equal(pipe.text_encoder.generate(ids, max_new_tokens=6, do_sample=False).cpu(), expected)
    if config["mode"] == "module":
        units = next(entry.units for entry in pipe.offload_report().components if entry.path == "text_encoder")
        assert pipe.offload_report().copies - before == units, "one phase, however many tokens"


@modes
def test_called_by_itself_and_edited(config: dict[str, Any], device: torch.device) -> None:
    pipe, reference = pair("wan", umt5(), device)
    pipe.enable_offload(config, device=device)
    ids = t5_tokenizer()("a red boat", return_tensors="pt").input_ids.to(device)
    hooked: list[torch.Size] = []
    table = pipe.text_encoder.get_input_embeddings()
    handle = table.register_forward_hook(lambda module, args, rows: hooked.append(rows.shape))

    def rows(of: Any) -> torch.Tensor:
        found = of.text_encoder.get_input_embeddings()(ids)
        assert found.device == device
        return found.cpu()

    with torch.no_grad():
        assert torch.equal(rows(pipe), rows(reference))
        for change in (lambda weight: weight.mul_(2), lambda weight: setattr(weight, "data", weight.data + 1)):
            for each in (pipe, reference):
                change(each.text_encoder.shared.weight)
            assert torch.equal(rows(pipe), rows(reference))
            assert torch.equal(output(pipe, "wan", steps=1), output(reference, "wan", steps=1))
    assert len(hooked) >= 3 and hooked[0] == (*ids.shape, 32)
    handle.remove()
    pipe.disable_offload()
    assert type(pipe.text_encoder.shared) is nn.Embedding
    assert "_offload_entry" not in vars(pipe.text_encoder.shared)


def test_a_table_with_a_norm_limit_is_no_plain_one(device: torch.device) -> None:
    """Looking rows up in such a table writes to it, so it is fetched as a whole, and what was written is kept."""
    encoder = umt5()
    table = nn.Embedding(ROWS, 32, max_norm=1.0, _weight=encoder.shared.weight.detach().clone())
    encoder.set_input_embeddings(table)
    encoder.encoder.embed_tokens = table
    pipe, reference = pair("wan", encoder.requires_grad_(False), device)
    pipe.enable_offload(ENCODER, device=device)
    with torch.no_grad():
        assert torch.equal(output(pipe, "wan", steps=1), output(reference, "wan", steps=1))
    assert torch.equal(pipe.text_encoder.shared.weight.cpu(), reference.text_encoder.shared.weight.cpu())
