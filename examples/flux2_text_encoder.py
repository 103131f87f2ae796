"""FLUX.2 text to image, where the text encoder is nearly as large as the transformer: the blocks of both stream.

python examples/flux2_text_encoder.py                                 # small pipeline, no accelerator needed
python examples/flux2_text_encoder.py --model path/to/FLUX.2-dev
"""

import os

# Equal numbers at other addresses may give another last bit on the CPU otherwise; read before MKL's first call.
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")

import sys

import torch

from omni_offload import OffloadFlux2Pipeline
from omni_offload.demo import small_pipelines
from omni_offload.demo.comparison import example_options, run


def main() -> int:
    """Run resident, then offloaded, and compare."""
    options = example_options(__doc__)
    if options.model:
        pipe = OffloadFlux2Pipeline.from_pretrained(options.model, dtype=torch.bfloat16)
        arguments = {"prompt": "A cat on a surfboard", "num_inference_steps": 20}
    else:
        pipe = small_pipelines.build("flux2", cls=OffloadFlux2Pipeline)
        arguments = small_pipelines.call_arguments("flux2")

    pipe.to(options.device)
    resident = run(pipe, arguments)

    # By role. Options go to one of them: here two blocks of the transformer, evenly spaced, stay on the device,
    # which saves their copies.
    pipe.enable_layerwise_offload(
        components=["dit", "text_encoder"],
        device=options.device,
        layer_options={"dit": {"resident_layers": 2}},
    )
    offloaded = run(pipe, arguments)

    report = pipe.offload_report()
    streamed = {component.path for component in report.components if component.placement == "streamed"}
    assert streamed == {"transformer", "text_encoder"}, streamed
    return options.conclude(resident, offloaded, report)


if __name__ == "__main__":
    sys.exit(main())
