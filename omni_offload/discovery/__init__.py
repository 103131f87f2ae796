"""From a pipeline and a configuration to a resolved plan.

Pure: moves nothing, hooks nothing. Everything that can be refused is refused here, before anything is touched. Knows
Diffusers pipelines and plain `nn.Module` pipelines; knows nothing of streams, slots or stores.
"""

from .components import components_of, declared_modules, declared_plan, find_components, unwrapped
from .resolve import STAYS, STREAMED, SWAPPED, ComponentPlan, ResolvedPlan, resolve
from .units import UnitPlan, is_split, tensor_bytes

__all__ = [
    "STAYS",
    "STREAMED",
    "SWAPPED",
    "ComponentPlan",
    "ResolvedPlan",
    "UnitPlan",
    "components_of",
    "declared_modules",
    "declared_plan",
    "find_components",
    "is_split",
    "resolve",
    "tensor_bytes",
    "unwrapped",
]
