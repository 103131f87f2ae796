"""B01: offloaded output equals the resident output bit for bit, under every legal order of copies and computes."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import models
import pytest
import torch
from models import MODES, Block, Denoiser, MixedBlock, SmallPipeline, enable, generate, offloadable, run, seeded

from omni_offload.demo import small_pipelines
from omni_offload.policies import layerwise

modes = pytest.mark.parametrize("mode", MODES)
RUNS = 3


def assert_as_resident(
    pipe: Any, mode: str, device: torch.device, units: int, *, runs: int = RUNS, **options: Any
) -> None:
    """Three runs in a row equal the resident ones, and the weights were really copied for them."""
    expected = [run(models.resident(pipe, device), device, models.sample(i)) for i in range(runs)]
    enable(pipe, mode, device, **options)
    for i in range(runs):
        before = pipe.offload_report().copies
        assert torch.equal(run(pipe, device, models.sample(i)), expected[i])
        assert pipe.offload_report().copies - before >= units
        if "layer_options" not in options:
            assert not any("transformer.blocks." in name for name in models.on_device(pipe))


@modes
@pytest.mark.parametrize("count", range(1, 10))
def test_any_number_of_unequal_blocks(count: int, mode: str, device: torch.device, schedule: dict[str, bool]) -> None:
    assert_as_resident(models.small(count), mode, device, count)


@pytest.mark.parametrize("depth", [1, 2, 3, 7])
@pytest.mark.parametrize("count", [3, 6])
def test_any_number_of_slots(
    count: int, depth: int, device: torch.device, schedule: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layerwise, "DEPTH", depth)
    assert_as_resident(models.small(count), "layer", device, count)


@pytest.mark.parametrize("staying", range(1, 6))
def test_any_number_of_resident_blocks(staying: int, device: torch.device, schedule: dict[str, bool]) -> None:
    options = {"layer_options": {"dit": {"resident_layers": staying}}}
    assert_as_resident(models.small(6), "layer", device, 6 - staying, **options)


def test_encoder_and_dit_stream_through_one_window(device: torch.device, schedule: dict[str, bool]) -> None:
    assert_as_resident(models.small(4), "layer", device, 7, components=["dit", "text_encoder"])


@pytest.mark.parametrize("pin", [None, False])
@modes
def test_mixed_dtypes_and_strides(mode: str, pin: bool | None, device: torch.device, schedule: dict[str, bool]) -> None:
    pipe = models.small(4, MixedBlock)
    before = {name: (t.dtype, t.shape, t.stride(), t.clone()) for name, t in models.tensors(pipe.transformer.blocks)}
    assert_as_resident(pipe, mode, device, 4, pin_memory=pin)
    for name, tensor in models.tensors(pipe.transformer.blocks):
        dtype, shape, stride, values = before[name]
        assert (tensor.dtype, tensor.shape, tensor.stride()) == (dtype, shape, stride), name
        if dtype == torch.float8_e4m3fn:
            tensor, values = tensor.float(), values.float()
        assert torch.equal(tensor, values), name


@modes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype: torch.dtype, mode: str, device: torch.device) -> None:
    pipe = models.small(5).to(dtype)
    expected = run(models.resident(pipe, device), device, models.sample().to(dtype))
    enable(pipe, mode, device)
    for _ in range(RUNS):
        assert torch.equal(run(pipe, device, models.sample().to(dtype)), expected)


@modes
def test_two_models_of_one_class_keep_their_own_weights(
    mode: str, device: torch.device, schedule: dict[str, bool]
) -> None:
    def make() -> models.ExpertsPipeline:
        first, second, encoder = (Denoiser([Block(24) for _ in range(3)]) for _ in range(3))
        return models.ExpertsPipeline(first, second, encoder)

    pipe = seeded(make)
    expected = run(models.resident(pipe, device), device)
    enable(pipe, mode, device)
    for _ in range(RUNS):
        assert torch.equal(run(pipe, device), expected)


def test_parts_of_a_split_model(device: torch.device, schedule: dict[str, bool]) -> None:
    pipe = seeded(
        lambda: models.SplitPipeline(models.SplitModel(map(Block, models.unequal(3)), map(Block, models.unequal(4))))
    )
    assert_as_resident(pipe, "module", device, 9)  # 3 + 4 blocks, the reasoner's head, and the shell


# --- small pipelines of real Diffusers and transformers classes -------------------------------------------------------


@pytest.fixture(scope="module")
def references() -> Iterator[dict[str, torch.Tensor]]:
    cache: dict[str, torch.Tensor] = {}
    yield cache
    cache.clear()


def reference(cache: dict[str, torch.Tensor], family: str, device: torch.device) -> torch.Tensor:
    """What the plain pipeline makes with all its weights on the device."""
    if family not in cache:
        cache[family] = generate(small_pipelines.build(family).to(device), family)
    return cache[family]


@modes
def test_wan(mode: str, device: torch.device, schedule: dict[str, bool], references: dict[str, torch.Tensor]) -> None:
    expected = reference(references, "wan", device)
    pipe = offloadable("wan")
    report = enable(pipe, mode, device)
    assert report.streamed_bytes >= small_pipelines.parameter_bytes(pipe.transformer.blocks)
    for _ in range(2):
        assert torch.equal(generate(pipe, "wan"), expected)
        assert not models.on_device(pipe.transformer.blocks)
    assert pipe.offload_report().copies >= 2 * 6


@modes
@pytest.mark.parametrize("family", [family for family in small_pipelines.FAMILIES if family != "wan"])
def test_family(
    family: str, mode: str, device: torch.device, simulated: bool, references: dict[str, torch.Tensor]
) -> None:
    expected = reference(references, family, device)
    if simulated:
        import simdev

        simdev.set(lazy_copy=True, lazy_compute=True)
    pipe = offloadable(family)
    enable(pipe, mode, device)
    for _ in range(2):
        assert torch.equal(generate(pipe, family), expected)
    assert pipe.offload_report().copies >= 2 * sum(c.units for c in pipe.offload_report().components)


@modes
def test_text_encoder_rewrites_the_prompt(mode: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """FLUX.2 with `caption_upsample_temperature` calls `text_encoder.generate`, a loop over the whole encoder."""
    arguments = {"caption_upsample_temperature": 0.7}

    def rewrite(pipe: Any) -> torch.Tensor:
        torch.manual_seed(3)  # it samples, from the global generator
        return generate(pipe, "flux2", **arguments)

    generated: list[torch.Tensor] = []

    def watch(pipe: Any) -> Any:
        plain = pipe.text_encoder.generate

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["max_new_tokens"] = 6  # instead of hundreds
            generated.append(plain(*args, **kwargs))
            return generated[-1]

        monkeypatch.setattr(pipe.text_encoder, "generate", call)
        if not hasattr(pipe.tokenizer, "tokenizer"):  # without torchvision it is no processor, only its tokenizer
            pipe.tokenizer.tokenizer = pipe.tokenizer
        return pipe

    expected = rewrite(watch(small_pipelines.build("flux2").to(device)))
    pipe = offloadable("flux2")
    components = {"components": ["dit", "text_encoder"]} if mode == "layer" else {}
    enable(watch(pipe), mode, device, **components)
    for _ in range(2):
        assert torch.equal(rewrite(pipe), expected)
    assert len(generated) == 3 and torch.equal(generated[0].cpu(), generated[1].cpu())
    plain = generate(pipe, "flux2")
    assert not torch.equal(plain, expected)  # the rewriting shows


@modes
@pytest.mark.simulated_only
def test_weights_were_copied_and_not_only_present(mode: str, device: torch.device, sim: ModuleType) -> None:
    """The device's own count of bytes agrees with the report."""
    pipe = seeded(lambda: SmallPipeline(Denoiser(map(Block, models.unequal(5)))))
    enable(pipe, mode, device)
    x = models.sample().to(device)
    sim.counters(clear=True)
    with torch.no_grad():
        pipe(x)
    counted, report = sim.counters(), pipe.offload_report()
    assert counted["h2d"] == report.copies
    assert counted["h2d_bytes"] == report.copied_bytes
    assert counted.get("h2d_pageable", 0) == 0
