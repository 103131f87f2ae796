"""Wan text to video, with the blocks of its transformer streamed: one computes while the next is on its way.

python examples/wan_layerwise.py                                      # small pipeline, no accelerator needed
python examples/wan_layerwise.py --model path/to/Wan2.1-T2V-1.3B-Diffusers
"""

import os

# Equal numbers at other addresses may give another last bit on the CPU otherwise; read before MKL's first call.
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")

import sys

import torch

from omni_offload import OffloadWanPipeline
from omni_offload.demo import small_pipelines
from omni_offload.demo.comparison import example_options, run


def main() -> int:
    """Run resident, then offloaded, and compare."""
    options = example_options(__doc__)
    if options.model:
        pipe = OffloadWanPipeline.from_pretrained(options.model, dtype=torch.bfloat16)
        arguments = {"prompt": "A cat on a surfboard", "num_frames": 33, "num_inference_steps": 20}
    else:
        pipe = small_pipelines.build("wan", cls=OffloadWanPipeline)
        arguments = small_pipelines.call_arguments("wan")

    # Everything on the device, as without this package.
    pipe.to(options.device)
    resident = run(pipe, arguments)

    # One call turns offload on. The blocks go to the host; norms, small projections and the VAE stay.
    pipe.enable_layerwise_offload(components=["dit"], device=options.device)
    offloaded = run(pipe, arguments)
    report = pipe.offload_report()

    # And off again: an ordinary pipeline on the host.
    pipe.disable_offload()
    return options.conclude(resident, offloaded, report)


if __name__ == "__main__":
    sys.exit(main())
