"""B11: weights that are away are real to the outside: read, saved, copied and edited like any others."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from pipes import MODULE, both_modes, brief, build, offloaded, output, resident, tensors_of
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from omni_offload import OffloadMixin

LAYERS = 3
Edit = Callable[[Any], None]


def first_linear(pipe: Any) -> Any:
    """A layer of the first block, whose weights are fetched ahead."""
    return pipe.transformer.blocks[0].attn1.to_v


def arrival(pipe: Any) -> Any:
    """Where new weights come from: the host, as far as the pipeline does not want them on the device."""
    return "cpu" if isinstance(pipe, OffloadMixin) else pipe.device


@torch.no_grad()
def multiplied_in_place(pipe: Any) -> None:
    first_linear(pipe).weight.mul_(1.5)


@torch.no_grad()
def copied_over(pipe: Any) -> None:
    weight = pipe.transformer.blocks[1].ffn.net[0].proj.weight
    weight.copy_(weight.cpu() * 1.5)


@torch.no_grad()
def added_in_place(pipe: Any) -> None:
    pipe.transformer.blocks[2].attn2.to_out[0].bias.add_(0.5)


@torch.no_grad()
def edited_through_a_view(pipe: Any) -> None:
    pipe.transformer.blocks[0].attn1.to_v.weight[:8].zero_()


def assigned_data(pipe: Any) -> None:
    weight = first_linear(pipe).weight
    weight.data = weight.data * 1.5


def edited_data(pipe: Any) -> None:
    first_linear(pipe).weight.data += 0.05


def edited_data_everywhere(pipe: Any) -> None:
    for parameter in pipe.transformer.parameters():
        parameter.data *= 1.1


def edited_data_of_all_encoder_blocks(pipe: Any) -> None:
    for parameter in pipe.text_encoder.encoder.block.parameters():
        parameter.data *= 1.1


def edited_as_numpy(pipe: Any) -> None:
    weight = first_linear(pipe).weight
    if weight.device.type == "cpu":
        weight.detach().numpy()[:] *= 1.5
    else:  # a resident one has no numpy
        weight.data *= 1.5


def rounded_block(pipe: Any) -> None:
    pipe.transformer.blocks[0].bfloat16().float()


def rounded_component(pipe: Any) -> None:
    pipe.transformer.to(torch.bfloat16).to(torch.float32)


def cast_component(pipe: Any) -> None:
    pipe.transformer.to(torch.bfloat16)


def cast_component_by_name(pipe: Any) -> None:
    pipe.transformer.to(dtype=torch.float16)


def cast_pipeline(pipe: Any) -> None:
    pipe.to(torch.bfloat16)


def cast_encoder_by_method(pipe: Any) -> None:
    pipe.text_encoder.bfloat16()


def set_parameter(pipe: Any) -> None:
    layer = first_linear(pipe)
    layer.weight = nn.Parameter(layer.weight.detach() * 1.5)


def set_parameter_from_the_host(pipe: Any) -> None:
    layer = pipe.transformer.blocks[1].attn1.to_v
    layer.weight = nn.Parameter(layer.weight.detach().to(arrival(pipe)) * 1.5)


def removed_bias(pipe: Any) -> None:
    first_linear(pipe).bias = None


def loaded_block(pipe: Any) -> None:
    block = pipe.transformer.blocks[1]
    block.load_state_dict({name: tensor.cpu() * 1.1 for name, tensor in block.state_dict().items()})


def loaded_block_by_assignment(pipe: Any) -> None:
    block = pipe.transformer.blocks[1]
    block.load_state_dict({name: tensor * 1.1 for name, tensor in block.state_dict().items()}, assign=True)


def loaded_component(pipe: Any) -> None:
    state = {name: tensor.cpu() * 1.1 for name, tensor in pipe.transformer.state_dict().items()}
    pipe.transformer.load_state_dict(state)


def loaded_component_by_assignment(pipe: Any) -> None:
    state = {name: tensor * 1.1 for name, tensor in pipe.transformer.state_dict().items()}
    pipe.transformer.load_state_dict(state, assign=True)


def replaced_layer(pipe: Any) -> None:
    attention = pipe.transformer.blocks[0].attn1
    twin = copy.deepcopy(attention.to_v)
    twin.weight.data *= 1.5
    attention.to_v = twin


def replaced_block(pipe: Any) -> None:
    twin = copy.deepcopy(pipe.transformer.blocks[1])
    twin.ffn.net[2].weight.data *= 1.5
    pipe.transformer.blocks[1] = twin


def removed_block(pipe: Any) -> None:
    del pipe.transformer.blocks[1]


def swapped_blocks(pipe: Any) -> None:
    blocks = pipe.transformer.blocks
    blocks[0], blocks[2] = blocks[2], blocks[0]


class Scaled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 1.5


def parametrized(pipe: Any) -> None:
    parametrize.register_parametrization(first_linear(pipe), "weight", Scaled())


def parametrized_and_back(pipe: Any) -> None:
    parametrized(pipe)
    parametrize.remove_parametrizations(first_linear(pipe), "weight")


def parametrized_block(pipe: Any) -> None:
    block = pipe.transformer.blocks[1]
    parametrize.register_parametrization(block, "scale_shift_table", Scaled())


def weight_normalised(pipe: Any) -> None:
    layer = parametrizations.weight_norm(first_linear(pipe))
    layer.parametrizations.weight.original0.data *= 1.5


def pruned(pipe: Any) -> None:
    prune.l1_unstructured(first_linear(pipe), "weight", amount=0.5)


def pruned_for_good(pipe: Any) -> None:
    pruned(pipe)
    prune.remove(first_linear(pipe), "weight")


def fused_projections(pipe: Any) -> None:
    pipe.transformer.fuse_qkv_projections()
    for block in pipe.transformer.blocks:
        block.attn1.to_qkv.weight.data *= 1.1


def fused_and_unfused(pipe: Any) -> None:
    pipe.transformer.fuse_qkv_projections()
    pipe.transformer.unfuse_qkv_projections()
    multiplied_in_place(pipe)


@torch.no_grad()
def edited_shell(pipe: Any) -> None:
    pipe.transformer.scale_shift_table.mul_(1.5)
    pipe.transformer.proj_out.weight.mul_(1.2)


def replaced_in_shell(pipe: Any) -> None:
    table = pipe.transformer.scale_shift_table.detach().to(arrival(pipe))
    pipe.transformer.scale_shift_table = nn.Parameter(table * 1.5)
    twin = copy.deepcopy(pipe.transformer.proj_out).to(arrival(pipe))
    twin.weight.data *= 1.2
    pipe.transformer.proj_out = twin


@torch.no_grad()
def edited_encoder(pipe: Any) -> None:
    pipe.text_encoder.shared.weight.mul_(1.2)
    pipe.text_encoder.encoder.block[0].layer[0].SelfAttention.q.weight.mul_(1.2)


EDITS: list[Edit] = [
    multiplied_in_place,
    copied_over,
    added_in_place,
    edited_through_a_view,
    assigned_data,
    edited_data,
    edited_data_everywhere,
    edited_data_of_all_encoder_blocks,
    edited_as_numpy,
    rounded_block,
    rounded_component,
    cast_component,
    cast_component_by_name,
    cast_pipeline,
    cast_encoder_by_method,
    set_parameter,
    set_parameter_from_the_host,
    removed_bias,
    loaded_block,
    loaded_block_by_assignment,
    loaded_component,
    loaded_component_by_assignment,
    replaced_layer,
    replaced_block,
    removed_block,
    swapped_blocks,
    parametrized,
    parametrized_and_back,
    parametrized_block,
    weight_normalised,
    pruned,
    pruned_for_good,
    fused_projections,
    fused_and_unfused,
    edited_shell,
    replaced_in_shell,
    edited_encoder,
]


def same_weights(pipe: Any, reference: Any) -> None:
    """Both hold the same tensors under the same names, none of them a placeholder."""
    ours, theirs = tensors_of(pipe), tensors_of(reference)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert not tensor.is_meta
        assert (tensor.dtype, tensor.shape) == (theirs[name].dtype, theirs[name].shape), name
        assert torch.equal(tensor.cpu(), theirs[name].cpu()), name


@pytest.mark.parametrize("when", ["before the first pass", "between passes"])
@both_modes
@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_edit_shows_in_the_next_pass(edit: Edit, config: dict[str, Any], when: str, device: torch.device) -> None:
    reference, pipe = resident(device, layers=LAYERS), offloaded(config, device, layers=LAYERS)
    plain = brief(reference)
    if when == "between passes":
        assert torch.equal(brief(pipe), plain)
    edit(reference)
    edit(pipe)
    expected = brief(reference)
    assert not torch.equal(expected, plain)
    assert torch.equal(brief(pipe), expected)
    same_weights(pipe, reference)
    pipe.disable_offload()
    same_weights(pipe, reference)


def refreshed(edit: Edit) -> Edit:
    """The edit, and then what makes one without a trace known."""

    def edit_and_refresh(pipe: Any) -> None:
        edit(pipe)
        if hasattr(pipe, "offload_refresh"):
            pipe.offload_refresh()

    return edit_and_refresh


IN_CALL = [
    multiplied_in_place,
    copied_over,
    edited_through_a_view,
    assigned_data,
    set_parameter,
    loaded_block,
    loaded_component,
    loaded_component_by_assignment,
    rounded_component,
    replaced_layer,
    parametrized,
    fused_projections,
    edited_shell,
]


@both_modes
@pytest.mark.parametrize("edit", IN_CALL, ids=lambda edit: edit.__name__)
def test_edit_between_the_steps_of_a_call_shows_in_the_next_step(
    edit: Edit, config: dict[str, Any], device: torch.device
) -> None:
    edit_in_step(edit, config, device)


@both_modes
@pytest.mark.parametrize("edit", [edited_data, edited_data_everywhere, edited_as_numpy])
def test_edit_without_a_trace_shows_after_a_refresh(edit: Edit, config: dict[str, Any], device: torch.device) -> None:
    edit_in_step(refreshed(edit), config, device)


def edit_in_step(edit: Edit, config: dict[str, Any], device: torch.device) -> None:
    def at_second_step(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step == 1:
            edit(pipe)
        return tensors

    reference, pipe = resident(device, layers=LAYERS), offloaded(config, device, layers=LAYERS)
    plain = brief(reference, steps=3)
    expected = brief(reference, steps=3, callback_on_step_end=at_second_step)
    assert not torch.equal(expected, plain)
    assert torch.equal(brief(pipe, steps=3, callback_on_step_end=at_second_step), expected)
    after = brief(reference)
    assert torch.equal(brief(pipe), after)
    same_weights(pipe, reference)


@both_modes
def test_resident_vae_may_be_edited(config: dict[str, Any], device: torch.device) -> None:
    reference, pipe = resident(device, layers=1), offloaded(config, device, layers=1)
    plain = output(reference)
    for each in (reference, pipe):
        each.vae.decoder.conv_out.bias.data += 0.1
    expected = output(reference)
    assert not torch.equal(plain, expected)
    assert torch.equal(output(pipe), expected)


@pytest.mark.parametrize("family", ["wan", "flux2-klein", "flux2", "split"])
@both_modes
def test_parked_weights_read_as_resident_ones(family: str, config: dict[str, Any], device: torch.device) -> None:
    if family == "split":
        config = config if config is MODULE else {"mode": "layer", "components": ["dit"]}
    plain, pipe = build(family, layers=2), offloaded(config, device, family, layers=2)
    for _ in range(2):
        same_weights(pipe, plain)
        for name, part in plain.components.items():
            if isinstance(part, nn.Module):
                ours = getattr(pipe, name)
                assert [n for n, _ in ours.named_parameters()] == [n for n, _ in part.named_parameters()]
                assert ours.state_dict().keys() == part.state_dict().keys()
                assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in part.parameters())
                assert [p.requires_grad for p in ours.parameters()] == [p.requires_grad for p in part.parameters()]
                assert ours.dtype == part.dtype
        output(pipe, family)


@both_modes
def test_saved_components_and_pipelines_are_whole(config: dict[str, Any], device: torch.device, tmp_path: Path) -> None:
    pipe = offloaded(config, device, layers=2)
    output(pipe)
    pipe.save_pretrained(tmp_path / "pipe")
    pipe.transformer.save_pretrained(tmp_path / "part")
    loaded = type(pipe).from_pretrained(tmp_path / "pipe")
    same_weights(pipe, loaded)
    part = type(loaded.transformer).from_pretrained(tmp_path / "part")
    for name, tensor in pipe.transformer.state_dict().items():
        assert torch.equal(part.state_dict()[name], tensor.cpu()), name


def assert_plain(twin: nn.Module, original: nn.Module) -> None:
    """`twin` is of the plain class, has nothing of offload on it, and shares no memory with `original`."""
    addresses = {tensor.data_ptr() for tensor in original.state_dict().values() if tensor.numel()}
    for module, ours in zip(twin.modules(), original.modules(), strict=True):
        assert type(module) is ours.__class__
        assert not [key for key in vars(module) if "offload" in key]
        assert not module._forward_pre_hooks and not module._forward_hooks
    for name, tensor in twin.state_dict().items():
        assert torch.equal(tensor.cpu(), original.state_dict()[name].cpu()), name
        assert tensor.data_ptr() not in addresses, name


def wan_inputs(device: torch.device | str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "hidden_states": torch.randn(1, 16, 1, 4, 4, generator=generator).to(device),
        "timestep": torch.tensor([500], device=device),
        "encoder_hidden_states": torch.randn(1, 8, 32, generator=generator).to(device),
        "return_dict": False,
    }


def pickled(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(module))


def saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@both_modes
@pytest.mark.parametrize("twin_of", [copy.deepcopy, pickled, saved], ids=lambda function: function.__name__)
@torch.no_grad()
def test_copy_is_plain_and_works_by_itself(
    twin_of: Callable[[nn.Module], Any], config: dict[str, Any], device: torch.device
) -> None:
    pipe, reference = offloaded(config, device, layers=2), resident(device, layers=2)
    for _ in range(2):
        twin = twin_of(pipe.transformer)
        assert_plain(twin, pipe.transformer)
        expected = reference.transformer(**wan_inputs(device))[0].cpu()
        assert torch.equal(twin.to(device)(**wan_inputs(device))[0].cpu(), expected)
        twin.cpu()(**wan_inputs("cpu"))  # on the host as well
        twin.blocks[0].attn1.to_q.weight.mul_(2.0)
        assert torch.equal(pipe.transformer(**wan_inputs(device))[0].cpu(), expected)
        assert_plain(twin_of(pipe.transformer.blocks[1]), pipe.transformer.blocks[1])
        assert_plain(twin_of(pipe.text_encoder), pipe.text_encoder)
        assert_plain(twin_of(pipe.vae), pipe.vae)
        brief(pipe)


@both_modes
def test_copied_component_may_be_offloaded_itself(config: dict[str, Any], device: torch.device) -> None:
    pipe = offloaded(config, device, layers=2)
    expected = brief(pipe)
    other = build(layers=2, seed=1)
    other.transformer = copy.deepcopy(pipe.transformer)
    other.text_encoder = copy.deepcopy(pipe.text_encoder)
    other.enable_offload(config, device=device)
    assert torch.equal(brief(other), expected)
    assert torch.equal(brief(pipe), expected)


@both_modes
def test_one_saved_parameter_carries_its_own_bytes(config: dict[str, Any], device: torch.device) -> None:
    pipe = offloaded(config, device, layers=2)
    for _ in range(2):
        for tensor in (
            pipe.transformer.blocks[0].attn1.to_q.bias,
            pipe.transformer.blocks[1].attn1.norm_q.weight,
            pipe.text_encoder.encoder.block[0].layer[0].layer_norm.weight,
        ):
            file = io.BytesIO()
            torch.save(tensor, file)
            assert len(file.getvalue()) < tensor.nbytes + 4096
            assert len(pickle.dumps(tensor)) < tensor.nbytes + 4096
            assert copy.deepcopy(tensor).untyped_storage().nbytes() < tensor.nbytes + 512
        brief(pipe)


@both_modes
def test_saved_component_is_no_larger_than_a_plain_one(config: dict[str, Any], device: torch.device) -> None:
    def size(module: nn.Module) -> int:
        file = io.BytesIO()
        torch.save(module, file)
        return len(file.getvalue())

    plain, pipe = build(layers=2), offloaded(config, device, layers=2)
    for name in ("transformer", "text_encoder"):
        assert size(getattr(pipe, name)) < 1.05 * size(getattr(plain, name))
        assert size(getattr(pipe, name).state_dict()) < 1.05 * size(getattr(plain, name).state_dict())


@both_modes
def test_copied_pipeline_is_not_offloaded(config: dict[str, Any], device: torch.device) -> None:
    pipe = offloaded(config, device, layers=2)
    expected = brief(pipe)
    twin = copy.deepcopy(pipe)
    if config is MODULE:
        twin.to("cpu")  # its VAE was on the device
    twin.enable_offload(config, device=device)
    assert torch.equal(brief(twin), expected)
    twin.disable_offload()
    assert torch.equal(brief(pipe), expected)
