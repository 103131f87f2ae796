"""What people do with the objects of an offloaded pipeline: adapters, components and siblings that come and go.

Whatever is loaded, registered, shared or dropped while offload is on gives what it gives on a resident pipeline.
"""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from pipes import (
    DIT_LAYERS,
    LAYER,
    MODULE,
    brief,
    build,
    device_bytes,
    modules_of,
    offloaded,
    output,
    resident,
    tensors_of,
)
from typing import Any

import pytest
import torch
from diffusers import (
    ComponentsManager,
    DDIMScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    StableDiffusionPipeline,
    UNet2DConditionModel,
    WanBlocks,
    WanPipeline,
)
from torch import nn
from zoo import module, parts

from omni_offload import OffloadMixin, OffloadStateError, OffloadWanPipeline, with_offload
from omni_offload.demo import small_pipelines as small

MODES = [MODULE, DIT_LAYERS, LAYER]
NAMES = ["module", "dit", "dit+text"]
all_modes = pytest.mark.parametrize("config", MODES, ids=NAMES)
WIDTH, SIZE = 32, 16


# --- small pipelines ------------------------------------------------------------------------------------------------


def stable_diffusion() -> Any:
    """A Stable Diffusion with a place for an image encoder."""
    unet = module(
        "unet",
        UNet2DConditionModel,
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=WIDTH,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )
    return StableDiffusionPipeline(
        vae=parts.autoencoder_kl(),
        text_encoder=parts.clip_text(layers=2),
        tokenizer=parts.clip_tokenizer(),
        unet=unet,
        scheduler=DDIMScheduler(clip_sample=False, steps_offset=1),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def flux() -> Any:
    """A Flux without its second text encoder, which an adapter has nothing to do with."""
    transformer = module(
        "transformer",
        FluxTransformer2DModel,
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        axes_dims_rope=(4, 4, 8),
    )
    return FluxPipeline(
        scheduler=parts.flow_scheduler(),
        vae=parts.autoencoder_kl(shift_factor=0.1, scaling_factor=0.4),
        text_encoder=parts.clip_text(layers=2),
        tokenizer=parts.clip_tokenizer(),
        text_encoder_2=parts.t5_encoder("text_encoder_2", layers=2),
        tokenizer_2=parts.t5_tokenizer(),
        transformer=transformer,
    )


@functools.cache
def _prototype(make: Callable[[], Any]) -> Any:
    with torch.device("cpu"):
        return make()


def plain(make: Callable[[], Any]) -> Any:
    """A pipeline of `make` with weights and tokenizer of its own, on the CPU."""
    pipe = copy.deepcopy(_prototype(make))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def run(pipe: Any, **changes: Any) -> torch.Tensor:
    """The output of one short call, on the CPU."""
    arguments = {
        "prompt": "a boat",
        "negative_prompt": "dark",
        "num_inference_steps": 2,
        "height": SIZE,
        "width": SIZE,
        "output_type": "pt",
        "generator": torch.Generator("cpu").manual_seed(0),
    }
    if isinstance(pipe, FluxPipeline):
        arguments |= {"true_cfg_scale": 2.0, "max_sequence_length": 16}
    return pipe(**(arguments | changes)).images.cpu()


def arrival(pipe: Any) -> Any:
    """Where a user brings new modules to: for an offloaded pipeline they stay on the host."""
    return "cpu" if isinstance(pipe, OffloadMixin) else pipe.device


def seeded(*shape: int, seed: int = 5) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + len(shape) + shape[-1])) / 4


def assert_equal(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(got) == len(expected) > 0
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, expected, strict=True))


# --- adapters that are loaded while offload is on -------------------------------------------------------------------


def image_projection(tokens: int = 4) -> dict[str, torch.Tensor]:
    return {
        "proj.weight": seeded(tokens * WIDTH, WIDTH),
        "proj.bias": seeded(tokens * WIDTH),
        "norm.weight": seeded(WIDTH) + 1,
        "norm.bias": seeded(WIDTH, seed=6),
    }


def ip_adapter_of_a_unet(unet: Any) -> dict[str, Any]:
    """What a file of an IP-Adapter holds: a projection of the picture, and keys and values for each cross attention."""
    state: dict[str, torch.Tensor] = {}
    places = [name for name in unet.attn_processors if name.endswith("attn2.processor")]
    for number, name in enumerate(places):
        width = unet.get_submodule(name.removesuffix(".processor")).to_q.weight.shape[0]
        for key in ("to_k_ip", "to_v_ip"):
            state[f"{2 * number + 1}.{key}.weight"] = seeded(width, WIDTH, seed=number)
    return {"image_proj": image_projection(), "ip_adapter": state}


def ip_adapter_of_flux(transformer: Any) -> dict[str, Any]:
    state: dict[str, torch.Tensor] = {}
    for number in range(len(transformer.transformer_blocks)):
        for key in ("to_k_ip", "to_v_ip"):
            state[f"{number}.{key}.weight"] = seeded(WIDTH, WIDTH, seed=number)
            state[f"{number}.{key}.bias"] = seeded(WIDTH, seed=number)
    return {"image_proj": image_projection(), "ip_adapter": state}


class Adapter:
    """Something that is loaded into a pipeline, used, and unloaded."""

    make: Callable[[], Any] = staticmethod(stable_diffusion)

    def load(self, pipe: Any) -> None:
        raise NotImplementedError

    def use(self, pipe: Any) -> list[torch.Tensor]:
        raise NotImplementedError

    def unload(self, pipe: Any) -> None:
        pipe.unload_ip_adapter()


class WithImageEncoder(Adapter):
    def load(self, pipe: Any) -> None:
        encoder = parts.clip_vision(layers=2).to(arrival(pipe))
        pipe.register_modules(image_encoder=encoder, feature_extractor=parts.clip_image_processor())
        pipe.load_ip_adapter(ip_adapter_of_a_unet(pipe.unet), subfolder="", weight_name="")

    def use(self, pipe: Any) -> list[torch.Tensor]:
        results = []
        for scale in (1.0, 0.5):
            pipe.set_ip_adapter_scale(scale)
            results.append(run(pipe, ip_adapter_image=parts.sample_image(32, 32)))
        return results


class TwoWithEmbeddings(Adapter):
    def load(self, pipe: Any) -> None:
        states = [ip_adapter_of_a_unet(pipe.unet) for _ in range(2)]
        pipe.load_ip_adapter(states, subfolder="", weight_name=["", ""], image_encoder_folder=None)
        pipe.set_ip_adapter_scale([0.7, 0.3])

    def use(self, pipe: Any) -> list[torch.Tensor]:
        embeds = torch.stack([torch.zeros(1, WIDTH), seeded(1, WIDTH)]).to(pipe.device)
        return [run(pipe, ip_adapter_image_embeds=[embeds, 2 * embeds]) for _ in range(2)]


class OnFlux(Adapter):
    make = staticmethod(flux)

    def load(self, pipe: Any) -> None:
        state = ip_adapter_of_flux(pipe.transformer)
        pipe.load_ip_adapter(state, weight_name="", image_encoder_pretrained_model_name_or_path=None)

    def use(self, pipe: Any) -> list[torch.Tensor]:
        embeds = seeded(1, 1, WIDTH).to(pipe.device)
        given = {"ip_adapter_image_embeds": [embeds], "negative_ip_adapter_image_embeds": [0 * embeds]}
        return [run(pipe, **given) for _ in range(2)]


class TextualInversion(Adapter):
    def load(self, pipe: Any) -> None:
        pipe.load_textual_inversion({"<boat>": seeded(WIDTH)})
        pipe.load_textual_inversion({"<sea>": seeded(2, WIDTH)})

    def use(self, pipe: Any) -> list[torch.Tensor]:
        return [run(pipe, prompt=prompt) for prompt in ("a <boat>", "a <sea> and a <boat>")]

    def unload(self, pipe: Any) -> None:
        pipe.unload_textual_inversion()


ADAPTERS = [WithImageEncoder, TwoWithEmbeddings, OnFlux, TextualInversion]


@all_modes
@pytest.mark.parametrize("when", ["before enable", "behind enable", "behind a call"])
@pytest.mark.parametrize("kind", ADAPTERS, ids=lambda kind: kind.__name__)
def test_adapter_from_loading_to_unloading(
    kind: type[Adapter], when: str, config: dict[str, Any], device: torch.device
) -> None:
    adapter = kind()
    reference, pipe = plain(kind.make).to(device), with_offload(plain(kind.make))
    simple = run(reference)
    adapter.load(reference)
    expected = adapter.use(reference)
    assert not any(torch.equal(one, simple) for one in expected)

    if when == "before enable":
        adapter.load(pipe)
    pipe.enable_offload(config, device=device)
    if when == "behind a call":
        assert torch.equal(run(pipe), simple)
    if when != "before enable":
        adapter.load(pipe)
    assert_equal(adapter.use(pipe), expected)
    assert pipe.offload_report().copies > 0
    assert_equal(adapter.use(pipe), expected)

    for each in (reference, pipe):
        adapter.unload(each)
    expected = [run(reference)]
    assert_equal([run(pipe)], expected)
    pipe.disable_offload()
    assert {tensor.device.type for tensor in tensors_of(pipe).values()} == {"cpu"}
    assert_equal([run(pipe.to(device))], expected)


@all_modes
@pytest.mark.parametrize("kind", [WithImageEncoder, OnFlux, TextualInversion], ids=lambda kind: kind.__name__)
def test_pipeline_with_an_adapter_is_collected(
    kind: type[Adapter], config: dict[str, Any], device: torch.device
) -> None:
    adapter, pipe = kind(), with_offload(plain(kind.make))
    pipe.enable_offload(config, device=device)
    adapter.load(pipe)
    adapter.use(pipe)
    alive = [weakref.ref(module) for module in modules_of(pipe).values()]
    del pipe
    gc.collect()
    assert not [ref() for ref in alive if ref() is not None]
    assert device_bytes(device) == 0


@all_modes
def test_unloaded_adapter_gives_its_memory_back(config: dict[str, Any], device: torch.device) -> None:
    adapter, pipe = WithImageEncoder(), with_offload(plain(stable_diffusion))
    pipe.enable_offload(config, device=device)
    run(pipe)
    idle, report = device_bytes(device, pipe), pipe.offload_report()
    for _ in range(2):
        adapter.load(pipe)
        adapter.use(pipe)
        encoder = weakref.ref(pipe.image_encoder)
        adapter.unload(pipe)
        run(pipe)
        gc.collect()
        assert encoder() is None
        assert device_bytes(device, pipe) == idle
        assert [(c.path, c.units) for c in pipe.offload_report().components] == [
            (c.path, c.units) for c in report.components
        ]


# --- components that come, go and are shared ------------------------------------------------------------------------


def other_transformer() -> Any:
    return copy.deepcopy(build(layers=2, seed=1).transformer)


def latents_with(pipe: Any) -> torch.Tensor:
    """Runs every part of a Wan pipeline, the VAE too."""
    return output(pipe, num_frames=1, height=16, width=16)


@all_modes
@pytest.mark.parametrize("way", ["register_modules", "setattr"])
def test_component_swapped_for_another_one(way: str, config: dict[str, Any], device: torch.device) -> None:
    reference, pipe = resident(device, layers=2), offloaded(config, device, layers=2)
    plain_output = brief(reference)
    assert torch.equal(brief(pipe), plain_output)
    for each in (reference, pipe):
        new = other_transformer().to(arrival(each))
        if way == "setattr":
            each.transformer = new
        else:
            each.register_modules(transformer=new)
    expected = brief(reference)
    assert not torch.equal(expected, plain_output)
    assert torch.equal(brief(pipe), expected)
    before = pipe.offload_report()
    pipe.transformer = pipe.transformer  # which is nothing new
    assert torch.equal(brief(pipe), expected)
    assert pipe.offload_report().components[0].host_bytes == before.components[0].host_bytes
    assert pipe.offload_report().copies > before.copies


@all_modes
def test_component_swapped_between_the_steps_of_a_call(config: dict[str, Any], device: torch.device) -> None:
    """As long as it is on the device, where a resident pipeline would need it too."""

    def swap(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        if step == 0:
            pipe.transformer = other_transformer().to(device)
        return tensors

    reference, pipe = resident(device, layers=2), offloaded(config, device, layers=2)
    for each_call in ({"callback_on_step_end": swap}, {}):
        assert torch.equal(brief(pipe, steps=3, **each_call), brief(reference, steps=3, **each_call))
    assert "transformer" in [c.path for c in pipe.offload_report().components if c.placement != "stays"]


def pair(first: dict[str, Any], second: dict[str, Any] | None, device: torch.device) -> tuple[Any, Any]:
    """Two pipelines with one text encoder and VAE, and a transformer each."""
    one = offloaded(first, device, layers=2)
    two = OffloadWanPipeline(**(one.components | {"transformer": other_transformer()}))
    two.scheduler = type(one.scheduler).from_config(one.scheduler.config)
    two.set_progress_bar_config(disable=True)
    if second is not None:
        two.enable_offload(second, device=device)
    return one, two


def expected_of_pair(device: torch.device) -> list[torch.Tensor]:
    one = resident(device, layers=2)
    results = [latents_with(one)]
    one.transformer = other_transformer().to(device)
    return [*results, latents_with(one)]


@pytest.mark.parametrize("second", MODES, ids=[f"second {name}" for name in NAMES])
@all_modes
def test_pipelines_that_share_some_components(
    config: dict[str, Any], second: dict[str, Any], device: torch.device
) -> None:
    expected = expected_of_pair(device)
    one, two = pair(config, second, device)
    for _ in range(2):
        assert_equal([latents_with(one), latents_with(two)], expected)
    copies = one.offload_report().copies
    assert_equal([latents_with(one)], expected[:1])
    assert one.offload_report().copies > copies
    del one
    gc.collect()
    assert_equal([latents_with(two)], expected[1:])
    two.disable_offload()
    assert_equal([latents_with(two.to(device))], expected[1:])


@all_modes
def test_pipeline_behind_another_one_that_was_turned_off(config: dict[str, Any], device: torch.device) -> None:
    expected = expected_of_pair(device)
    one, two = pair(config, config, device)
    assert_equal([latents_with(one), latents_with(two)], expected)
    two.disable_offload()
    one.enable_offload(config, device=device)
    assert_equal([latents_with(one)], expected[:1])
    one.disable_offload()
    assert device_bytes(device, one, two) == 0


@all_modes
@pytest.mark.parametrize("kind", [OffloadWanPipeline, WanPipeline])
def test_pipeline_loaded_around_offloaded_components(
    kind: Any, config: dict[str, Any], device: torch.device, tmp_path: Path
) -> None:
    pipe = offloaded(config, device, layers=2)
    expected = latents_with(resident(device, layers=2))
    pipe.save_pretrained(tmp_path)
    shared = {name: getattr(pipe, name) for name in ("transformer", "text_encoder", "vae")}
    other = kind.from_pretrained(tmp_path, **shared)
    other.set_progress_bar_config(disable=True)
    for _ in range(2):
        assert_equal([latents_with(other), latents_with(pipe)], [expected, expected])
    assert other.transformer is pipe.transformer


@all_modes
def test_shallow_copy_is_the_same_offload(config: dict[str, Any], device: torch.device) -> None:
    pipe = offloaded(config, device, layers=2)
    expected = brief(pipe)
    twin = copy.copy(pipe)
    assert torch.equal(brief(twin), expected)
    assert twin.offload_report().components == pipe.offload_report().components
    twin.disable_offload()
    with pytest.raises(OffloadStateError):
        pipe.offload_report()
    twin.enable_offload(config, device=device)
    del pipe
    gc.collect()
    assert torch.equal(brief(twin), expected)


# --- copies ---------------------------------------------------------------------------------------------------------


@all_modes
@pytest.mark.parametrize("family", ["wan", "flux2-klein"])
def test_pickled_pipeline_is_plain(family: str, config: dict[str, Any], device: torch.device) -> None:
    """A language model cannot be pickled behind a call, with or without offload: transformers leaves local hooks."""
    expected = output(resident(device, family, layers=2), family)
    pipe = offloaded(config, device, family, layers=2)
    if family == "wan":
        output(pipe, family)
    twin = pickle.loads(pickle.dumps(pipe))
    twin.set_progress_bar_config(disable=True)
    with pytest.raises(OffloadStateError):
        twin.offload_report()
    assert torch.equal(output(pipe, family), expected)
    twin.enable_offload(config, device=device)
    assert torch.equal(output(twin, family), expected)
    twin.disable_offload()
    assert torch.equal(output(pipe, family), expected)


@all_modes
def test_deep_copy_made_between_the_steps_of_a_call(config: dict[str, Any], device: torch.device) -> None:
    pipe, twins = offloaded(config, device, layers=2), []

    def copy_it(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        twins.append(copy.deepcopy(pipe))
        return tensors

    expected = brief(resident(device, layers=2))
    assert torch.equal(brief(pipe, callback_on_step_end=copy_it), expected)
    (twin,) = twins
    assert {tensor.device.type for tensor in tensors_of(twin).values()} == {"cpu"}
    twin.scheduler = type(twin.scheduler).from_config(twin.scheduler.config)
    twin.enable_offload(config, device=device)
    assert torch.equal(brief(twin), expected)
    assert torch.equal(brief(pipe), expected)


@all_modes
def test_saved_between_the_steps_of_a_call(config: dict[str, Any], device: torch.device, tmp_path: Path) -> None:
    def save(pipe: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        pipe.save_pretrained(tmp_path)
        return tensors

    expected = brief(resident(device, layers=2))
    pipe = offloaded(config, device, layers=2)
    assert torch.equal(brief(pipe, callback_on_step_end=save), expected)
    loaded = WanPipeline.from_pretrained(tmp_path).to(device)
    loaded.set_progress_bar_config(disable=True)
    assert torch.equal(brief(loaded), expected)


# --- modular pipelines ----------------------------------------------------------------------------------------------


def modular(blocks: Any = None, manager: Any = None, **components: Any) -> Any:
    """A modular Wan pipeline of the same small components."""
    pipe = (blocks or WanBlocks()).init_pipeline(components_manager=manager)
    given = components or {name: part for name, part in build(layers=2).components.items() if part is not None}
    pipe.update_components(**{name: part for name, part in given.items() if name in pipe.components})
    return pipe


def videos(pipe: Any) -> torch.Tensor:
    arguments = {name: value for name, value in small.call_arguments("wan").items() if name != "guidance_scale"}
    return pipe(**arguments, output="videos").cpu()


@all_modes
def test_modular_pipeline_is_served(config: dict[str, Any], device: torch.device) -> None:
    expected = videos(modular().to(device))
    pipe = with_offload(modular())
    report = pipe.enable_offload(config, device=device)
    managed = {c.path for c in report.components if c.placement != "stays"}
    assert managed == {"transformer"} | ({"text_encoder"} if config is not DIT_LAYERS else set())
    for _ in range(2):
        copies = pipe.offload_report().copies
        assert torch.equal(videos(pipe), expected)
        assert pipe.offload_report().copies > copies
    assert pipe.device == pipe._execution_device == device
    with pytest.raises(OffloadStateError, match="disable_offload"):
        pipe.to("cpu")
    pipe.disable_offload()
    assert torch.equal(videos(pipe.to(device)), expected)


@all_modes
def test_modular_pipeline_whose_components_change(config: dict[str, Any], device: torch.device) -> None:
    reference, pipe = modular().to(device), with_offload(modular())
    pipe.enable_offload(config, device=device)
    videos(pipe)
    for each in (reference, pipe):
        each.update_components(transformer=other_transformer().to(arrival(each)))
    assert torch.equal(videos(pipe), videos(reference))
    encoder = weakref.ref(pipe.text_encoder)
    pipe.unload_components("text_encoder")
    gc.collect()
    assert encoder() is None
    assert "text_encoder" not in [c.path for c in pipe.offload_report().components]
    pipe.update_components(text_encoder=copy.deepcopy(reference.text_encoder).to("cpu"))
    assert torch.equal(videos(pipe), videos(reference))


@all_modes
def test_modular_pipeline_made_of_stages(config: dict[str, Any], device: torch.device) -> None:
    """A stage is a pipeline of its own on components that another one offloads."""
    whole = with_offload(modular())
    whole.enable_offload(config, device=device)
    expected = modular().to(device)(prompt="a boat", output="prompt_embeds", **small_call())
    stage = modular(WanBlocks().sub_blocks["text_encoder"], text_encoder=whole.text_encoder, tokenizer=whole.tokenizer)
    got = stage(prompt="a boat", output="prompt_embeds")
    assert torch.equal(got.cpu(), expected.cpu())


def small_call() -> dict[str, Any]:
    return {
        name: small.call_arguments("wan")[name] for name in ("height", "width", "num_frames", "num_inference_steps")
    }


@all_modes
def test_components_manager_does_not_offload_beside_ours(config: dict[str, Any], device: torch.device) -> None:
    manager = ComponentsManager()
    pipe = with_offload(modular(manager=manager))
    expected = videos(modular().to(device))
    pipe.enable_offload(config, device=device)
    with pytest.raises(OffloadStateError, match="disable_offload"):
        manager.enable_auto_cpu_offload(device=device)
    assert torch.equal(videos(pipe), expected)


# --- weights that are taken out for a while -------------------------------------------------------------------------


def scaled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() * 1.5


def exchanged_parameter(pipe: Any) -> Callable[[], None]:
    """Each of these puts other weights in, and gives what puts the former ones back."""
    layer = pipe.transformer.blocks[0].attn1.to_v
    former = layer.weight
    layer.weight = nn.Parameter(scaled(former))

    def back() -> None:
        layer.weight = former

    return back


def exchanged_data(pipe: Any) -> Callable[[], None]:
    weight = pipe.transformer.blocks[0].attn1.to_v.weight
    former = weight.data
    weight.data = scaled(former)

    def back() -> None:
        weight.data = former

    return back


def swapped_tensors(pipe: Any) -> Callable[[], None]:
    weight = pipe.transformer.blocks[0].attn1.to_v.weight
    other = nn.Parameter(scaled(weight))
    torch.utils.swap_tensors(weight, other)
    return lambda: torch.utils.swap_tensors(weight, other)


def exchanged_layer(pipe: Any) -> Callable[[], None]:
    attention = pipe.transformer.blocks[1].attn2
    former = attention.to_k
    attention.to_k = copy.deepcopy(former)
    attention.to_k.weight = nn.Parameter(scaled(former.weight))

    def back() -> None:
        attention.to_k = former

    return back


def exchanged_block(pipe: Any) -> Callable[[], None]:
    blocks = pipe.transformer.blocks
    former = blocks[1]
    blocks[1] = copy.deepcopy(blocks[0])

    def back() -> None:
        blocks[1] = former

    return back


def exchanged_state(pipe: Any) -> Callable[[], None]:
    former = pipe.transformer.state_dict()
    pipe.transformer.load_state_dict({name: scaled(tensor) for name, tensor in former.items()}, assign=True)
    return lambda: pipe.transformer.load_state_dict(former, assign=True)


def exchanged_shell(pipe: Any) -> Callable[[], None]:
    layer = pipe.transformer.proj_out
    former = layer.weight
    layer.weight = nn.Parameter(scaled(former))

    def back() -> None:
        layer.weight = former

    return back


def exchanged_in_an_encoder(pipe: Any) -> Callable[[], None]:
    layer = pipe.text_encoder.encoder.block[0].layer[0].SelfAttention.q
    former = layer.weight
    layer.weight = nn.Parameter(scaled(former))

    def back() -> None:
        layer.weight = former

    return back


EXCHANGES = [
    exchanged_parameter,
    exchanged_data,
    swapped_tensors,
    exchanged_layer,
    exchanged_block,
    exchanged_state,
    exchanged_shell,
    exchanged_in_an_encoder,
]


@all_modes
@pytest.mark.parametrize("exchange", EXCHANGES, ids=lambda exchange: exchange.__name__)
def test_weights_that_were_taken_out_are_as_they_were_when_they_come_back(
    exchange: Callable[[Any], Callable[[], None]], config: dict[str, Any], device: torch.device
) -> None:
    reference, pipe = resident(device, layers=2), offloaded(config, device, layers=2)
    simple = brief(reference)
    assert torch.equal(brief(pipe), simple)
    for _ in range(2):
        backs = [exchange(each) for each in (reference, pipe)]
        expected = brief(reference)
        assert not torch.equal(expected, simple)
        assert torch.equal(brief(pipe), expected)
        for back in backs:
            back()
        assert torch.equal(brief(reference), simple)
        assert torch.equal(brief(pipe), simple)
    theirs, ours = tensors_of(reference), tensors_of(pipe)
    assert all(torch.equal(tensor.cpu(), theirs[name].cpu()) for name, tensor in ours.items())


@all_modes
@torch.no_grad()
def test_functional_call_leaves_the_weights_alone(config: dict[str, Any], device: torch.device) -> None:
    reference, pipe = resident(device, layers=2), offloaded(config, device, layers=2)
    inputs = (seeded(1, 16, 1, 4, 4).to(device), torch.tensor([500], device=device), seeded(1, 8, WIDTH).to(device))
    results = []
    for each in (reference, pipe):
        given = {name: scaled(tensor).to(device) for name, tensor in each.transformer.state_dict().items()}
        results.append(torch.func.functional_call(each.transformer, given, inputs).sample.cpu())
    assert torch.equal(*results)
    assert torch.equal(brief(pipe), brief(reference))
