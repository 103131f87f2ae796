"""Wan 2.2 with its two experts: they and the text encoder take turns on the device, each there as a whole.

python examples/wan22_model_level.py                                  # small pipeline, no accelerator needed
python examples/wan22_model_level.py --model path/to/Wan2.2-T2V-A14B-Diffusers
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
        pipe = small_pipelines.build("wan22", cls=OffloadWanPipeline)
        # The first steps, with the most noise, are the first expert's; the rest are the second one's.
        arguments = small_pipelines.call_arguments("wan22", steps=3)

    pipe.to(options.device)
    resident = run(pipe, arguments)

    # The name and the arguments of Diffusers. The text encoder leaves before the first expert comes, and that one
    # before the second, so the device has to hold the largest of the three, not their sum.
    pipe.enable_model_cpu_offload(device=options.device)
    offloaded = run(pipe, arguments)

    report = pipe.offload_report()
    swapped = [component for component in report.components if component.placement == "swapped"]
    assert {"transformer", "transformer_2", "text_encoder"} <= {component.path for component in swapped}
    assert all(component.copies for component in swapped), "a component that takes turns was never on the device"
    assert report.peak_window_bytes < report.streamed_bytes, "they were on the device all at once"
    return options.conclude(resident, offloaded, report)


if __name__ == "__main__":
    sys.exit(main())
