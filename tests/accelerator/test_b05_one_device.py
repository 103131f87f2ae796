"""B05: from enable to disable there is one answer to where the pipeline computes: the onload device."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
from models import MODES, enable, generate, offloadable, run

from omni_offload import OffloadStateError
from omni_offload.demo import small_pipelines

modes = pytest.mark.parametrize("mode", MODES)


def components(pipe: Any) -> dict[str, torch.nn.Module]:
    return {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}


def answers(pipe: Any) -> set[torch.device]:
    """Everything that says where the pipeline computes."""
    return {pipe._execution_device, pipe.device} | {part.device for part in components(pipe).values()}


def state(pipe: Any) -> dict[str, tuple[int, int, torch.device, torch.dtype, type]]:
    """What must not change when something is refused."""
    parts = components(pipe) if hasattr(pipe, "components") else dict(pipe.named_children())
    return {
        f"{path}.{name}": (id(tensor), tensor.data_ptr(), tensor.device, tensor.dtype, type(part))
        for path, part in parts.items()
        for name, tensor in models.tensors(part)
    }


@modes
@pytest.mark.parametrize("family", ["wan", "split"])
def test_one_answer_from_enable_to_disable(family: str, mode: str, device: torch.device) -> None:
    pipe = offloadable(family, layers=2)
    enable(pipe, mode, device)
    assert answers(pipe) == {device}
    seen: list[set[torch.device]] = []
    for part in (pipe.transformer, pipe.vae):
        part.register_forward_pre_hook(lambda *_: seen.append(answers(pipe)))
    generate(pipe, family)
    assert seen and all(each == {device} for each in seen)
    assert answers(pipe) == {device}
    pipe.disable_offload()
    assert answers(pipe) == {torch.device("cpu")}


@modes
@pytest.mark.parametrize(
    "where", ["transformer", "transformer.blocks.1", "vae.decoder", "text_encoder.encoder.block.1"]
)
def test_one_answer_after_an_exception(where: str, mode: str, device: torch.device) -> None:
    pipe = offloadable("wan", layers=2)
    expected = generate(small_pipelines.build("wan", layers=2).to(device), "wan")
    enable(pipe, mode, device)

    def fail(*_: Any) -> None:
        raise RuntimeError("on purpose")

    component, _, path = where.partition(".")
    module = getattr(pipe, component).get_submodule(path)
    handle = module.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        generate(pipe, "wan")
    assert answers(pipe) == {device}
    handle.remove()
    assert torch.equal(generate(pipe, "wan"), expected)
    assert answers(pipe) == {device}


@modes
def test_same_seed_same_latents(mode: str, device: torch.device) -> None:
    """Noise that is drawn on the pipeline's device, or on the host from the caller's generator, is the same noise."""
    plain = small_pipelines.build("wan", layers=2).to(device)
    pipe = offloadable("wan", layers=2)
    enable(pipe, mode, device)
    for number in range(2):
        for place in ("cpu", device):
            arguments = {"output_type": "latent", "seed": number}
            latents = [
                generate(one, "wan", generator=torch.Generator(place).manual_seed(number), **arguments)
                for one in (plain, pipe)
            ]
            assert torch.equal(*latents)
        torch.manual_seed(number)
        expected = generate(plain, "wan", generator=None, output_type="latent")
        torch.manual_seed(number)
        assert torch.equal(generate(pipe, "wan", generator=None, output_type="latent"), expected)


@modes
def test_no_tensor_is_ever_meta(mode: str, device: torch.device) -> None:
    pipe = offloadable("wan", layers=2)
    seen: set[str] = set()

    def look(*_: Any) -> None:
        seen.update(t.device.type for part in components(pipe).values() for _, t in models.tensors(part))

    enable(pipe, mode, device)
    look()
    for part in components(pipe).values():
        part.register_forward_pre_hook(look)
    generate(pipe, "wan")
    look()
    assert seen == {"cpu", device.type}


# --- .to() ------------------------------------------------------------------------------------------------------------


@modes
def test_to_the_onload_device_changes_nothing(mode: str, device: torch.device, memory: Any) -> None:
    pipe = offloadable("wan", layers=2)
    expected = generate(small_pipelines.build("wan", layers=2).to(device), "wan")
    enable(pipe, mode, device)
    before, allocated = state(pipe), memory.allocated()
    for where in (device, str(device), device.type):
        assert pipe.to(where) is pipe
        assert pipe.to(device=where) is pipe
        for part in components(pipe).values():
            assert part.to(where) is part
            assert part.to(device=where) is part
    assert (state(pipe), memory.allocated()) == (before, allocated)
    assert torch.equal(generate(pipe, "wan"), expected)


OTHER_PLACES = ("cpu", "meta")


@modes
@pytest.mark.parametrize("where", OTHER_PLACES)
def test_to_another_device_is_refused_before_anything_is_touched(where: str, mode: str, device: torch.device) -> None:
    pipe = offloadable("wan", layers=2)
    expected = generate(small_pipelines.build("wan", layers=2).to(device), "wan")
    enable(pipe, mode, device)
    before = state(pipe)
    attempts = [lambda: pipe.to(where), lambda: pipe.to(device=where), lambda: pipe.to(where, torch.bfloat16)]
    attempts += [lambda: pipe.transformer.to(where), lambda: pipe.transformer.to(torch.bfloat16, device=where)]
    if where == "cpu":
        attempts += [lambda: pipe.transformer.cpu(), lambda: pipe.to(torch.device("cpu"), dtype=torch.float16)]
    for attempt in attempts:
        with pytest.raises((OffloadStateError, TypeError), match=r"disable_offload|invalid combination") as refusal:
            attempt()
        if refusal.type is OffloadStateError:
            assert str(device) in str(refusal.value) and where in str(refusal.value)
        assert state(pipe) == before
    assert torch.equal(generate(pipe, "wan"), expected)


@modes
def test_another_index_is_refused(mode: str, device: torch.device) -> None:
    pipe = models.small(3)
    enable(pipe, mode, device)
    before = state(pipe)
    for attempt in (lambda: pipe.to(f"{device.type}:1"), lambda: pipe.transformer.to(f"{device.type}:1")):
        with pytest.raises(OffloadStateError, match=f"{device.type}:1.*disable_offload"):
            attempt()
    assert state(pipe) == before


@modes
def test_to_a_dtype_is_served(mode: str, device: torch.device) -> None:
    plain, pipe = small_pipelines.build("wan", layers=2).to(device), offloadable("wan", layers=2)
    enable(pipe, mode, device)
    generate(pipe, "wan")
    parameters = dict(pipe.transformer.named_parameters())
    for dtype in (torch.bfloat16, torch.float32):
        plain.to(dtype)
        assert pipe.to(dtype) is pipe
        assert answers(pipe) == {device}
        assert {p.dtype for p in pipe.transformer.parameters()} == {p.dtype for p in plain.transformer.parameters()}
        assert all(p is parameters[name] for name, p in pipe.transformer.named_parameters())
        for _ in range(2):
            assert torch.equal(generate(pipe, "wan"), generate(plain, "wan"))
    plain.transformer.to(torch.bfloat16)
    pipe.transformer.to(device, torch.bfloat16)
    assert torch.equal(pipe.transformer.state_dict()["proj_out.weight"].cpu(), plain.transformer.proj_out.weight.cpu())


@modes
def test_a_plain_module_pipeline_answers_too(mode: str, device: torch.device) -> None:
    pipe = models.small(3)
    expected = run(models.resident(pipe, device), device)
    enable(pipe, mode, device)
    assert pipe.device == pipe.transformer.device == device
    # What the caller sends, the component takes wherever it lies.
    with torch.no_grad():
        assert torch.equal(pipe.transformer(models.sample()).cpu(), pipe.transformer(models.sample().to(device)).cpu())
    assert torch.equal(run(pipe, device), expected)
    pipe.disable_offload()
    assert not models.on_device(pipe)
    assert torch.equal(run(pipe.to(device), device), expected)
