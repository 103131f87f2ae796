"""B12: DoRA, adapters on text encoders and U-Nets, several at once, fused, swapped; and what loading one costs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from pipes import LAYER, MODULE, brief, build, device_bytes, pinned_bytes, resident, tensors_of
from typing import Any

import pytest
import torch
from conftest import DeviceMemory
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from zoo import CASES

from omni_offload import with_offload

DENOISER = {"StableDiffusionPipeline": "unet", "StableDiffusionXLPipeline": "unet", "FluxPipeline": "transformer"}
ENCODERS = {
    "StableDiffusionPipeline": ["text_encoder"],
    "StableDiffusionXLPipeline": ["text_encoder", "text_encoder_2"],
    "FluxPipeline": ["text_encoder"],
}
families = pytest.mark.parametrize("name", list(DENOISER))
configs = pytest.mark.parametrize("config", [LAYER, MODULE], ids=["layer", "module"])
kinds = pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "out_proj"]


def lora(targets: list[str], *, dora: bool = False, rank: int = 4) -> LoraConfig:
    """An adapter whose weights matter from the start."""
    return LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, init_lora_weights=False, use_dora=dora)


def seeded(action: Callable[[], Any], seed: int) -> None:
    """Run `action` with a seed of its own; the global generator is as before."""
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    action()
    torch.random.set_rng_state(state)


def saved(name: str, folder: Path, *, seed: int, dora: bool = False) -> Path:
    """A LoRA file of Diffusers' form for the denoiser and the text encoders of a case.

    DoRA for the denoiser only: transformers 5.23 does not find the magnitudes in a file and draws them at random.
    """
    pipe = CASES[name].build()
    layers = {}
    for path in [DENOISER[name], *ENCODERS[name]]:
        model, targets = getattr(pipe, path), ATTENTION if path == DENOISER[name] else PROJECTIONS
        adapter = lora(targets, dora=dora and path == DENOISER[name])
        seeded(lambda model=model, adapter=adapter: model.add_adapter(adapter, "style"), seed)
        layers[f"{path}_lora_layers"] = get_peft_model_state_dict(model, adapter_name="style")
        layers[f"{path}_lora_adapter_metadata"] = model.peft_config["style"].to_dict()
    pipe.save_lora_weights(folder / f"{name}{seed}", **layers)
    return folder / f"{name}{seed}"


class Pair:
    """The resident pipeline and the offloaded one, to which the same things happen."""

    def __init__(self, name: str, config: dict[str, Any], device: torch.device, *, file: Path | None = None) -> None:
        self.case = CASES[name]
        self.reference = self.case.build().to(device)
        self.pipe = with_offload(self.case.build())
        if file is not None:  # before offload is on
            self.reference.load_lora_weights(file, adapter_name="first")
            self.pipe.load_lora_weights(file, adapter_name="first")
        self.pipe.enable_offload(config, device=device)
        self.mode = config["mode"]

    def both(self, action: Callable[[Any], Any]) -> list[torch.Tensor]:
        """Do `action` to both; returns the output, which is the same."""
        for each in (self.reference, self.pipe):
            action(each)
        return self.same()

    def same(self) -> list[torch.Tensor]:
        expected, found = self.case.run(self.reference), self.case.run(self.pipe)
        assert len(expected) == len(found) > 0 and all(map(torch.equal, expected, found))
        assert self.pipe.offload_report().mode == self.mode
        return expected


def differ(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return not all(map(torch.equal, one, other))


@kinds
@configs
@families
def test_file_for_denoiser_and_encoders(
    name: str, config: dict[str, Any], dora: bool, device: torch.device, tmp_path: Path
) -> None:
    """Loaded, scaled, switched off and on, a second one beside it, fused, unfused, one deleted, all unloaded."""
    files = [saved(name, tmp_path, seed=seed, dora=dora) for seed in (1, 2)]
    pair = Pair(name, config, device)
    plain = pair.same()
    one = pair.both(lambda pipe: pipe.load_lora_weights(files[0], adapter_name="first"))
    assert differ(one, plain)
    for path in ENCODERS[name]:
        assert any("lora" in key for key, _ in getattr(pair.pipe, path).named_parameters())
    pair.both(lambda pipe: pipe.set_adapters("first", adapter_weights=0.5))
    assert not differ(pair.both(lambda pipe: pipe.disable_lora()), plain)
    pair.both(lambda pipe: pipe.enable_lora())
    pair.both(lambda pipe: pipe.load_lora_weights(files[1], adapter_name="second"))
    two = pair.both(lambda pipe: pipe.set_adapters(["first", "second"], adapter_weights=[0.7, 0.3]))
    assert differ(two, one)
    components = [DENOISER[name], *ENCODERS[name]]
    assert differ(pair.both(lambda pipe: pipe.fuse_lora(components=components, lora_scale=0.8)), two)
    pair.both(lambda pipe: pipe.unfuse_lora(components=components))
    pair.both(lambda pipe: pipe.delete_adapters("first"))
    pair.both(lambda pipe: pipe.unload_lora_weights())
    assert not [key for key in tensors_of(pair.pipe) if "lora" in key]
    pair.pipe.disable_offload()
    assert not [key for key, tensor in tensors_of(pair.pipe).items() if tensor.device.type != "cpu"]


@configs
@families
def test_loaded_before_offload_is_turned_on(
    name: str, config: dict[str, Any], device: torch.device, tmp_path: Path
) -> None:
    pair = Pair(name, config, device, file=saved(name, tmp_path, seed=1))
    one = pair.same()
    assert differ(pair.both(lambda pipe: pipe.disable_lora()), one)
    pair.both(lambda pipe: pipe.enable_lora())
    pair.both(lambda pipe: pipe.fuse_lora(components=[DENOISER[name], *ENCODERS[name]]))
    pair.both(lambda pipe: pipe.unload_lora_weights())


@kinds
@configs
def test_adapters_made_on_text_encoders(config: dict[str, Any], dora: bool, device: torch.device) -> None:
    """By the models' own methods, which transformers' models have too."""
    pair = Pair("StableDiffusionXLPipeline", config, device)
    plain = pair.same()

    def add(pipe: Any) -> None:
        for seed, path in enumerate(("text_encoder", "text_encoder_2")):
            model = getattr(pipe, path)
            seeded(lambda model=model: model.add_adapter(lora(PROJECTIONS, dora=dora), "style"), seed)

    def each_encoder(method: str) -> Callable[[Any], None]:
        return lambda pipe: [getattr(one, method)() for one in (pipe.text_encoder, pipe.text_encoder_2)] and None

    styled = pair.both(add)
    assert differ(styled, plain)
    assert not differ(pair.both(each_encoder("disable_adapters")), plain)
    assert not differ(pair.both(each_encoder("enable_adapters")), styled)
    pair.pipe.disable_offload()
    pair.pipe.to(device)
    assert not differ(pair.case.run(pair.pipe), styled)


@configs
@families
def test_adapter_swapped_in_place(name: str, config: dict[str, Any], device: torch.device, tmp_path: Path) -> None:
    """`hotswap=True` writes the new adapter's values into the old one's parameters (on denoisers only)."""
    files = []
    for seed in (1, 2):
        pipe = CASES[name].build()
        model = getattr(pipe, DENOISER[name])
        rank = 2 * seed  # another rank, so that enable_lora_hotswap(target_rank) has something to pad
        seeded(lambda model=model, rank=rank: model.add_adapter(lora(ATTENTION, rank=rank), "style"), seed)
        layers = {
            f"{DENOISER[name]}_lora_layers": get_peft_model_state_dict(model, adapter_name="style"),
            f"{DENOISER[name]}_lora_adapter_metadata": model.peft_config["style"].to_dict(),
        }
        pipe.save_lora_weights(tmp_path / f"swap{seed}", **layers)
        files.append(tmp_path / f"swap{seed}")
    pair = Pair(name, config, device)
    pair.both(lambda pipe: pipe.enable_lora_hotswap(target_rank=8))
    outputs = [pair.both(lambda pipe: pipe.load_lora_weights(files[0], adapter_name="only"))]
    for file in (files[1], files[0]):
        outputs.append(
            pair.both(lambda pipe, file=file: pipe.load_lora_weights(file, adapter_name="only", hotswap=True))
        )
    assert differ(outputs[0], outputs[1]) and not differ(outputs[0], outputs[2])


@kinds
@configs
def test_adapter_travels_with_its_block_and_nothing_is_copied_twice(
    config: dict[str, Any], dora: bool, device: torch.device, memory: DeviceMemory, tmp_path: Path
) -> None:
    """While a file is loaded, and from then on: no more device memory than before plus adapters, and one host copy."""
    layers = 6
    donor = build(layers=layers)
    seeded(lambda: donor.transformer.add_adapter(lora(ATTENTION, dora=dora), "style"), 1)
    state = get_peft_model_state_dict(donor.transformer, adapter_name="style")
    donor.save_lora_weights(
        tmp_path / "lora",
        transformer_lora_layers=state,
        transformer_lora_adapter_metadata=donor.transformer.peft_config["style"].to_dict(),
    )
    pipe = build(layers=layers)
    pipe.enable_offload(config, device=device)
    brief(pipe)
    idle, locked, host = device_bytes(device, pipe), pinned_bytes(device), pipe.offload_report().host_bytes
    units = next(entry for entry in pipe.offload_report().components if entry.path == "transformer").units
    memory.reset_peak()
    pipe.load_lora_weights(tmp_path / "lora", adapter_name="style")
    adapter = sum(tensor.nbytes for name, tensor in tensors_of(pipe).items() if "lora" in name)
    count = sum("lora" in name for name in tensors_of(pipe))
    # The device never holds more than it did at rest and the file: no stop of the whole model there.
    assert memory.peak() <= idle + 2 * (adapter + 512 * count)
    reference = resident(device, layers=layers)
    reference.load_lora_weights(tmp_path / "lora", adapter_name="style")
    copies = pipe.offload_report().copies
    expected = brief(reference)
    del reference
    assert torch.equal(brief(pipe), expected)
    moved = pipe.offload_report().copies - copies
    report = pipe.offload_report()
    assert host < report.host_bytes <= host + adapter + 256 * count
    if device.type != "cuda":
        assert locked < pinned_bytes(device) <= locked + adapter + 256 * count + 4096 * (units + 1)
    # The blocks of one pass, or less where some are there already; adapters do not come by themselves.
    encoder = next(entry for entry in report.components if entry.path == "text_encoder").units
    assert 0 < moved <= units + encoder + 2
    entry = next(entry for entry in report.components if entry.path == "transformer")
    assert entry.units == units
    pipe.unload_lora_weights()
    brief(pipe)
    assert abs(device_bytes(device, pipe) - idle) <= 0.01 * idle
