"""A model in two parts, a reasoner and a generator, of which exactly one is on the device at any time.

The model says so itself: it inherits `SplitOffloadMixin`, names its parts in `_offload_components`, and wraps the
code of each in `with self._offload_context(name)`; see `SmallSplitTransformer` in omni_offload/demo/split_model.py.

    python examples/split_model.py                                        # no accelerator needed
    python examples/split_model.py --model path/to/a/saved/SmallSplitPipeline
"""

import os

# Equal numbers at other addresses may give another last bit on the CPU otherwise; read before MKL's first call.
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")

import sys
from typing import Any

from omni_offload import OffloadMixin
from omni_offload.demo import small_pipelines
from omni_offload.demo.comparison import example_options, run
from omni_offload.demo.split_model import SmallSplitPipeline
from omni_offload.policies.memory import offloads_on


class OffloadSplitPipeline(OffloadMixin, SmallSplitPipeline):
    """The pipeline with the mixin."""

    _dit_modules = ("transformer",)
    _vae_modules = ("vae",)


def watch(pipe: Any, seen: list[tuple[str, str]]) -> None:
    """At every block of both parts, add (the part that runs, the part on the device) to `seen`."""
    (offload,) = offloads_on(pipe)  # a look inside, only to show what happens there

    def look(part: str) -> None:
        present = [group.part for group in offload.streamer.active if group.part is not None]
        assert len(present) == 1, f"{present} are on the device while {part} runs"
        seen.append((part, present[0]))

    for part, paths in type(pipe.transformer)._offload_components.items():
        for path in paths:
            for block in pipe.transformer.get_submodule(path):
                block.register_forward_pre_hook(lambda *_, part=part: look(part))


def main() -> int:
    """Run resident, then offloaded under watch, and compare."""
    options = example_options(__doc__)
    if options.model:
        pipe = OffloadSplitPipeline.from_pretrained(options.model)
    else:
        pipe = small_pipelines.build("split", cls=OffloadSplitPipeline)
    arguments = small_pipelines.call_arguments("split")

    pipe.to(options.device)
    resident = run(pipe, arguments)

    pipe.enable_model_cpu_offload(device=options.device)
    seen: list[tuple[str, str]] = []
    watch(pipe, seen)
    offloaded = run(pipe, arguments)

    phases = [pair for index, pair in enumerate(seen) if index == 0 or pair != seen[index - 1]]
    for part, present in phases:
        print(f"while {part} ran, on the device: {present}")
    assert phases == [("reasoner", "reasoner"), ("generator", "generator")], phases
    return options.conclude(resident, offloaded, pipe.offload_report())


if __name__ == "__main__":
    sys.exit(main())
