"""Small block models and pipelines out of plain torch, for the tests of behaviours.

Owns models whose blocks, dtypes, ties and buffers are chosen to go wrong easily; knows nothing of how offload works.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from omni_offload import OffloadMixin, OffloadPlan, SplitOffloadMixin

WIDTH = 32
BATCH, TOKENS = 2, 8


class Block(nn.Module):
    """`x + down(gelu(up(norm(x))))`; `inner` sets its size."""

    def __init__(self, inner: int, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class MixedBlock(nn.Module):
    """A tensor of every kind that a unit may hold: dtypes, strides, buffers, no elements, no dimensions."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, inner, dtype=torch.bfloat16)
        self.down = nn.Linear(inner, WIDTH, dtype=torch.float16)
        self.transposed = nn.Parameter(torch.randn(WIDTH, WIDTH).t() / WIDTH**0.5)
        self.conv = nn.Conv2d(4, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.rand(()) + 0.5)
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("codes", torch.randint(-100, 100, (WIDTH,), dtype=torch.int8))
        self.register_buffer("mask", torch.rand(WIDTH) < 0.5)
        self.register_buffer("gain", (torch.rand(WIDTH) + 0.5).to(torch.float8_e4m3fn))
        self.register_buffer("index", torch.randperm(WIDTH))
        self.register_buffer("phases", torch.randn(WIDTH, dtype=torch.complex64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x) @ self.transposed
        y = self.down(nn.functional.gelu(self.up(y.bfloat16())).half()).float()
        y = self.conv(y.reshape(BATCH, 4, TOKENS, WIDTH // 4)).reshape(x.shape)
        y = torch.where(self.mask, y, -y) * self.gain.float() + self.codes.float() / 100
        y = y[..., self.index] * torch.view_as_real(self.phases).sum(-1) * self.scale
        return x + y + self.nothing.sum()


class CountingBlock(Block):
    """Its forward writes two buffers and the result depends on what earlier ones wrote; it assigns a third."""

    def __init__(self, inner: int) -> None:
        super().__init__(inner)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("last", torch.zeros(WIDTH), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        self.mean.mul_(0.5).add_(x.detach().mean((0, 1)))
        result = super().forward(x) + self.mean + 0.01 * self.calls + 0.1 * self.last
        self.last = x.detach().mean((0, 1))
        return result


class Denoiser(nn.Module):
    """Blocks between two layers of the shell, with parameters and buffers of its own at the root."""

    _layerwise_offload_blocks_attrs = ("blocks",)

    def __init__(self, blocks: Iterable[nn.Module], width: int = WIDTH) -> None:
        super().__init__()
        self.proj_in = nn.Linear(width, width)
        self.blocks = nn.ModuleList(blocks)
        self.norm_out = nn.LayerNorm(width)
        self.scale_shift_table = nn.Parameter(torch.randn(2, width) / 4)
        self.register_buffer("offset", torch.randn(width) / 4)
        self.register_buffer("cached", torch.randn(width) / 4, persistent=False)

    def forward(self, x: torch.Tensor, order: Sequence[int] | None = None) -> torch.Tensor:
        x = self.proj_in(x) + self.offset
        for index in range(len(self.blocks)) if order is None else order:
            x = self.blocks[index](x)
        scale, shift = self.scale_shift_table
        return self.norm_out(x) * (1 + scale) + shift + self.cached


class SmallPipeline(OffloadMixin, nn.Module):
    """A text encoder, a DiT that runs `steps` times, and a VAE: an `nn.Module` of three components."""

    _dit_modules = ["transformer"]
    _encoder_modules = ["text_encoder"]
    _vae_modules = ["vae"]
    _offload_plan = OffloadPlan(
        encoder_component_types={"text_encoder": "text_encoder"}, encoder_block_attrs={"text_encoder": ["blocks"]}
    )

    def __init__(self, transformer: nn.Module, text_encoder: nn.Module | None = None, vae_width: int = WIDTH) -> None:
        super().__init__()
        self.transformer = transformer
        self.text_encoder = text_encoder or Denoiser([Block(24), Block(40), Block(8)])
        self.vae = nn.Sequential(nn.Linear(WIDTH, vae_width), nn.Linear(vae_width, WIDTH))

    def forward(self, x: torch.Tensor, order: Sequence[int] | None = None, steps: int = 2) -> torch.Tensor:
        y = x + self.text_encoder(x)
        for _ in range(steps):
            y = self.transformer(y, order)
        return self.vae(y)


class ExpertsPipeline(OffloadMixin, nn.Module):
    """Two DiTs that take turns, first one for half of the steps, then the other."""

    _dit_modules = ["transformer", "transformer_2"]
    _encoder_modules = ["text_encoder"]
    _vae_modules = ["vae"]
    _offload_plan = OffloadPlan(encoder_component_types={"text_encoder": "text_encoder"})

    def __init__(self, first: nn.Module, second: nn.Module, encoder: nn.Module) -> None:
        super().__init__()
        self.transformer, self.transformer_2, self.text_encoder = first, second, encoder
        self.vae = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, steps: int = 4) -> torch.Tensor:
        y = x + self.text_encoder(x)
        for step in range(steps):
            y = (self.transformer if 2 * step < steps else self.transformer_2)(y)
        return self.vae(y)


class SplitModel(SplitOffloadMixin, nn.Module):
    """Two stacks that run in phases, and a shell that both use."""

    _offload_components = {"reasoner": ["layers", "head"], "generator": ["gen_layers"]}

    def __init__(self, reasoner: Iterable[nn.Module], generator: Iterable[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(reasoner)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.gen_layers = nn.ModuleList(generator)

    def reason(self, x: torch.Tensor) -> torch.Tensor:
        with self._offload_context("reasoner"):
            x = self.embed(x)
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        with self._offload_context("generator"):
            x = self.embed(x) + memory
            for layer in self.gen_layers:
                x = layer(x)
            return x


class SplitPipeline(OffloadMixin, nn.Module):
    """A split model and a VAE."""

    _dit_modules = ["transformer"]
    _vae_modules = ["vae"]

    def __init__(self, transformer: SplitModel) -> None:
        super().__init__()
        self.transformer = transformer
        self.vae = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, steps: int = 2) -> torch.Tensor:
        memory = self.transformer.reason(x)
        for _ in range(steps):
            x = self.transformer(x, memory)
        return self.vae(x)


# --- making and running them ------------------------------------------------------------------------------------------

MODES = ("layer", "module")


def seeded(make: Callable[[], Any], seed: int = 0) -> Any:
    """`make()` with weights of its own, in eval mode, with torch's random state left alone."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.random.default_generator.manual_seed(seed)
        return make().eval()


def unequal(count: int) -> list[int]:
    """Inner widths of `count` blocks, neighbours of different size, the largest not at an end."""
    return [(24, 56, 8, 72, 40)[i % 5] for i in range(count)]


def small(count: int = 5, block: Callable[[int], nn.Module] = Block) -> SmallPipeline:
    """A pipeline whose DiT has `count` blocks of different sizes."""
    return seeded(lambda: SmallPipeline(Denoiser([block(inner) for inner in unequal(count)])))


def sample(seed: int = 1) -> torch.Tensor:
    """An input on the host, of shape (BATCH, TOKENS, WIDTH)."""
    return torch.randn(BATCH, TOKENS, WIDTH, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")


@torch.no_grad()
def run(pipe: Any, device: torch.device, x: torch.Tensor | None = None, **arguments: Any) -> torch.Tensor:
    """One call of `pipe` with an input on `device`; the result on the host."""
    return pipe((sample() if x is None else x).to(device), **arguments).cpu()


def resident(pipe: nn.Module, device: torch.device) -> Any:
    """A copy of a pipeline whose weights are all on `device`: what offload is compared with."""
    return copy.deepcopy(pipe).to(device)


def enable(pipe: Any, mode: str, device: torch.device, **options: Any) -> Any:
    """Turn offload on in `mode`; returns the report."""
    if mode == "layer":
        return pipe.enable_layerwise_offload(device=device, **options)
    return pipe.enable_model_cpu_offload(device=device, **options)


def tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of all parameters and buffers."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def nbytes(module: nn.Module) -> int:
    """Bytes of all parameters and buffers, shared ones once."""
    return sum(t.nbytes for t in {id(t): t for _, t in tensors(module)}.values())


def on_device(module: nn.Module) -> set[str]:
    """Names of the tensors that are not on the host."""
    return {name for name, t in tensors(module) if t.device.type != "cpu"}


# --- pipelines of Diffusers' ------------------------------------------------------------------------------------------


def offloadable(family: str, **options: Any) -> Any:
    """A small pipeline of real Diffusers and transformers classes, with the mixin."""
    from omni_offload import pipelines, with_offload
    from omni_offload.demo import small_pipelines

    classes = {
        "wan": pipelines.OffloadWanPipeline,
        "wan22": pipelines.OffloadWanPipeline,
        "wan-i2v": pipelines.OffloadWanImageToVideoPipeline,
        "flux2": pipelines.OffloadFlux2Pipeline,
        "flux2-klein": pipelines.OffloadFlux2KleinPipeline,
    }
    return with_offload(small_pipelines.build(family, cls=classes.get(family), **options))


def generate(pipe: Any, family: str, **arguments: Any) -> torch.Tensor:
    """One short call of such a pipeline, on the host."""
    from omni_offload.demo import small_pipelines

    options = {key: arguments.pop(key) for key in ("steps", "seed", "output_type") if key in arguments}
    output = pipe(**(small_pipelines.call_arguments(family, **options) | arguments))
    return (output.frames if "frames" in output else output.images).cpu()
