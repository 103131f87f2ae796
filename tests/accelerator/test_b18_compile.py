"""B18: compiled blocks and compiled components compute the same, and compile once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pipes import LAYER, MODULE, both_modes, build, output, resident
from typing import Any

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend


class CountingBackend:
    """Compiles as the backend `name` does, and counts."""

    def __init__(self, name: str) -> None:
        self.graphs = 0
        self._compile: Any = lookup_backend(name)

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any, **options: Any) -> Callable[..., Any]:
        self.graphs += 1
        compiled: Callable[..., Any] = self._compile(graph, inputs, **options)
        return compiled


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Forget what other tests compiled."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def block_classes(pipe: Any) -> int:
    """How many classes of blocks Diffusers compiles in the transformer."""
    repeated = pipe.transformer._repeated_blocks
    return sum(1 for kind in Counter(type(m).__name__ for m in pipe.transformer.modules()) if kind in repeated)


def compiled_reference(device: torch.device, family: str, backend: str) -> torch.Tensor:
    """What the resident pipeline computes with its blocks compiled."""
    pipe = resident(device, family, layers=2)
    pipe.transformer.compile_repeated_blocks(fullgraph=True, backend=backend)
    result = output(pipe, family)
    torch._dynamo.reset()
    return result


@pytest.mark.parametrize(("family", "compiler"), [("wan", "eager"), ("wan", "aot_eager"), ("flux2-klein", "eager")])
@pytest.mark.parametrize("order", ["compiled first", "offloaded first"])
@both_modes
def test_blocks_compile_once_in_one_graph_each(
    config: dict[str, Any], order: str, family: str, compiler: str, device: torch.device
) -> None:
    backend = CountingBackend(compiler)
    expected = output(resident(device, family, layers=2), family)
    pipe = build(family, layers=2)
    if order == "compiled first":
        pipe.transformer.compile_repeated_blocks(fullgraph=True, backend=backend)
        pipe.enable_offload(config, device=device)
    else:
        pipe.enable_offload(config, device=device)
        pipe.transformer.compile_repeated_blocks(fullgraph=True, backend=backend)
    assert torch.equal(output(pipe, family), expected)
    assert backend.graphs == block_classes(pipe)
    copies = pipe.offload_report().copies
    for steps in (2, 3):
        output(pipe, family, steps=steps)
    assert backend.graphs == block_classes(pipe)
    assert pipe.offload_report().copies > copies  # the weights still come and go
    assert torch.equal(output(pipe, family), expected)


@both_modes
def test_each_grad_mode_compiles_once(config: dict[str, Any], device: torch.device) -> None:
    backend = CountingBackend("eager")
    pipe = build(layers=2)
    pipe.enable_offload(config, device=device)
    pipe.transformer.compile_repeated_blocks(fullgraph=True, backend=backend)
    inputs = wan_inputs(pipe, device)
    results = []
    for mode in [torch.no_grad, torch.inference_mode] * 3:
        with mode():
            results.append(pipe.transformer(**inputs)[0].cpu())
    assert backend.graphs == 2
    assert all(torch.equal(result, results[0]) for result in results)


@both_modes
def test_disabling_and_enabling_again_keeps_compiled_blocks(config: dict[str, Any], device: torch.device) -> None:
    backend = CountingBackend("eager")
    expected = output(resident(device, layers=2))
    pipe = build(layers=2)
    pipe.transformer.compile_repeated_blocks(fullgraph=True, backend=backend)
    for _ in range(3):
        pipe.enable_offload(config, device=device)
        assert torch.equal(output(pipe), expected)
        pipe.disable_offload()
    assert torch.equal(output(pipe.to(device)), expected)


def wan_inputs(pipe: Any, device: torch.device) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    channels, text = pipe.transformer.config.in_channels, pipe.transformer.config.text_dim
    return {
        "hidden_states": torch.randn(1, channels, 1, 4, 4, generator=generator).to(device),
        "timestep": torch.tensor([500], device=device),
        "encoder_hidden_states": torch.randn(1, 8, text, generator=generator).to(device),
        "return_dict": False,
    }


@pytest.mark.parametrize("way", ["torch.compile(module)", "module.compile()"])
@pytest.mark.parametrize("order", ["compiled first", "offloaded first"])
@both_modes
def test_whole_compiled_transformer(config: dict[str, Any], order: str, way: str, device: torch.device) -> None:
    backend = CountingBackend("eager")
    expected = output(resident(device, layers=2))
    pipe = build(layers=2)

    def compile_it() -> None:
        if way == "module.compile()":
            pipe.transformer.compile(backend=backend)
        else:
            pipe.transformer = torch.compile(pipe.transformer, backend=backend)

    if order == "compiled first":
        compile_it()
        pipe.enable_offload(config, device=device)
    else:
        pipe.enable_offload(config, device=device)
        compile_it()
    for _ in range(2):
        assert torch.equal(output(pipe), expected)
    warm, copies = backend.graphs, pipe.offload_report().copies
    assert warm > 0
    for _ in range(2):
        assert torch.equal(output(pipe), expected)
    assert backend.graphs == warm
    assert pipe.offload_report().copies >= copies + 2 * 2
    pipe.disable_offload()
    assert torch.equal(output(pipe.to(device)), expected)


@both_modes
def test_weights_edited_under_compiled_blocks_show(config: dict[str, Any], device: torch.device) -> None:
    backend = CountingBackend("eager")
    reference, pipe = resident(device, layers=2), build(layers=2)
    pipe.transformer.compile_repeated_blocks(fullgraph=True, backend=backend)
    pipe.enable_offload(config, device=device)
    before = output(pipe)
    for each in (reference, pipe):
        with torch.no_grad():
            each.transformer.blocks[0].attn1.to_q.weight.mul_(1.5)
    expected = output(reference)
    assert not torch.equal(expected, before)
    assert torch.equal(output(pipe), expected)
    assert backend.graphs == 1


@pytest.mark.parametrize("config", [LAYER, MODULE], ids=["layer", "module"])
def test_inductor(config: dict[str, Any], device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("inductor needs CUDA")
    expected = compiled_reference(device, "wan", "inductor")
    pipe = build(layers=2)
    pipe.enable_offload(config, device=device)
    pipe.transformer.compile_repeated_blocks(fullgraph=True)
    for _ in range(2):
        assert torch.equal(output(pipe), expected)
