"""Offload for pipelines of your own: a Diffusers class, and a plain `torch.nn.Module`.

python examples/opt_in_your_own.py                                    # small pipelines, no accelerator needed
python examples/opt_in_your_own.py --model path/to/FLUX.2-klein-4B
"""

import os

# Equal numbers at other addresses may give another last bit on the CPU otherwise; read before MKL's first call.
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")

import sys

import torch
from diffusers import Flux2KleinPipeline
from torch import nn

from omni_offload import OffloadMixin, OffloadPlan
from omni_offload.demo import small_pipelines
from omni_offload.demo.comparison import example_options, run, same_bits


class MyPipeline(OffloadMixin, Flux2KleinPipeline):
    """Any Diffusers class: put the mixin first and say what is what."""

    _dit_modules = ("transformer",)
    _encoder_modules = ("text_encoder",)
    _vae_modules = ("vae",)
    # Only what the lists cannot say, or what should not be found by name: here, where the encoder's blocks are.
    _offload_plan = OffloadPlan(encoder_block_attrs={"text_encoder": ["model.layers"]})


class MyTransformer(nn.Module):
    """A model of one's own names its blocks where it is defined."""

    _layerwise_offload_blocks_attrs = ("blocks",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`: (batch, 64), as is the result."""
        for block in self.blocks:
            x = x + block(x)
        return x


class MyModulePipeline(OffloadMixin, nn.Module):
    """A pipeline that is a module: the same mixin, the same lists, nothing of Diffusers."""

    _dit_modules = ("transformer",)
    _vae_modules = ("decoder",)

    def __init__(self) -> None:
        super().__init__()
        self.transformer = MyTransformer()
        self.decoder = nn.Linear(64, 3)

    @torch.no_grad()
    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        """`noise`: (batch, 64), to (batch, 3)."""
        return self.decoder(self.transformer(noise))


def main() -> int:
    """Run both resident and offloaded, and compare."""
    options = example_options(__doc__)

    torch.manual_seed(0)
    module, noise = MyModulePipeline().to(options.device), torch.randn(8, 64).to(options.device)
    expected = module(noise)
    module.enable_layerwise_offload(device=options.device)
    assert same_bits(expected, module(noise)), "the nn.Module pipeline gives another output with offload"
    assert module.offload_report().copies, "nothing was streamed"

    if options.model:
        pipe = MyPipeline.from_pretrained(options.model, dtype=torch.bfloat16)
        arguments = {"prompt": "A cat on a surfboard", "num_inference_steps": 4}
    else:
        pipe = small_pipelines.build("flux2-klein", cls=MyPipeline)
        arguments = small_pipelines.call_arguments("flux2-klein")
    pipe.to(options.device)
    resident = run(pipe, arguments)
    pipe.enable_layerwise_offload(components=["dit", "text_encoder"], device=options.device)
    offloaded = run(pipe, arguments)
    return options.conclude(resident, offloaded, pipe.offload_report())


if __name__ == "__main__":
    sys.exit(main())
