"""Which modules of a component stream together: its blocks, and tables larger than any block.

Reads structure and declarations; moves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from ..declarations import BLOCK_LISTS, OUTSIDE_CALLS
from ..engine.entries import gathers_rows
from ..engine.unit import own_tensors, walk
from ..errors import OffloadConfigError, describe, quoted
from ..plan import OffloadPlan
from .components import DIT, Component

# A list of blocks found by structure has to hold this share of the component's bytes to be worth a copy per block; all
# lists together have to hold most of the component, tables of embeddings aside.
_SMALLEST_LIST = 0.02
_SMALLEST_COVERAGE = 0.5

# A stage of a U-Net is a block that holds lists of blocks and next to nothing else, and a large part of the component.
_LARGEST_BLOCK = 1 / 16
_STAGE_COVERAGE = 0.9

BY_STRUCTURE = "by structure"


@dataclass(frozen=True)
class UnitPlan:
    """Modules whose tensors will stream together: a block, or a large table (`large`).

    `tables` are those of the modules whose rows are gathered on the host. Where all are, nothing of the unit streams.
    """

    name: str
    modules: tuple[nn.Module, ...]
    large: bool = False
    tables: tuple[nn.Module, ...] = ()

    @property
    def stays_on_host(self) -> bool:
        """Whether it never goes to the device as a whole."""
        return len(self.tables) == len(self.modules)


def tensor_bytes(modules: Iterable[nn.Module]) -> int:
    """Bytes of all parameters and buffers at and below `modules`, shared ones once."""
    return sum(tensor.numel() * tensor.element_size() for _, tensor in own_tensors(walk(modules)))


def _children(container: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The blocks of a list: its children, and those of containers without a forward among them."""
    for name, child in container.named_children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            for inner_name, inner in _children(child):
                yield f"{name}.{inner_name}", inner
        else:
            yield name, child


def blocks_at(component: Component, path: str, where: str) -> tuple[UnitPlan, ...]:
    try:
        container = component.module.get_submodule(path)
    except AttributeError:
        raise OffloadConfigError(
            f"{describe(where, path)}: {component.path} ({component.module.__class__.__name__}) has no module "
            f"{path!r}; it has {quoted(name for name, _ in component.module.named_children())}"
        ) from None
    if not isinstance(container, (nn.ModuleList, nn.Sequential, nn.ModuleDict)):
        raise OffloadConfigError(
            f"{describe(where, path)} is a {container.__class__.__name__}; a list of blocks is a ModuleList, a "
            "Sequential or a ModuleDict"
        )
    blocks = tuple(
        UnitPlan(f"{component.path}.{path}.{name}", (block,))
        for name, block in _children(container)
        if next(own_tensors(walk([block])), None) is not None
    )
    if not blocks:
        raise OffloadConfigError(f"{describe(where, path)} holds no block with weights in {component.path}")
    return blocks


def _outermost_lists(module: nn.Module, prefix: str = "") -> Iterator[str]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, nn.ModuleList):
            yield path
        else:
            yield from _outermost_lists(child, f"{path}.")


def _shares(component: Component) -> dict[str, float]:
    """Path -> share of the component's bytes without embedding tables, for its outermost lists."""
    lists = {path: component.module.get_submodule(path) for path in _outermost_lists(component.module)}
    outside = walk([component.module], list(lists.values()))
    tables = tensor_bytes(module for module in outside if isinstance(module, nn.Embedding))
    total = tensor_bytes([component.module]) - tables
    return {path: tensor_bytes([module]) / max(total, 1) for path, module in lists.items()}


def lists_in(component: Component) -> str:
    """The lists of a component with their shares, for a message."""
    return ", ".join(
        f"{path} holds {share:.0%}" for path, share in _shares(component).items() if share >= _SMALLEST_LIST
    )


def _lists_by_structure(component: Component) -> list[str]:
    shares = _shares(component)
    kept = [path for path, share in shares.items() if share >= _SMALLEST_LIST]
    return kept if sum(shares[path] for path in kept) >= _SMALLEST_COVERAGE else []


def divided(component: Component, units: Sequence[UnitPlan]) -> tuple[UnitPlan, ...]:
    """`units` with every stage of a U-Net replaced by the blocks in its lists, at any depth.

    What the stage has beside them stays on the device. A block that `compile_repeated_blocks` compiles stays whole.
    """
    smallest_stage = _LARGEST_BLOCK * tensor_bytes([component.module])
    repeated = getattr(component.module, "_repeated_blocks", None) or ()

    def parts(unit: UnitPlan) -> Iterator[UnitPlan]:
        (block,) = unit.modules
        size = tensor_bytes([block])
        if size <= smallest_stage or block.__class__.__name__ in repeated:
            yield unit
            return
        inner = [
            replace(unit, name=f"{unit.name}.{path}.{name}", modules=(child,))
            for path in _outermost_lists(block)
            for name, child in _children(block.get_submodule(path))
            if next(own_tensors(walk([child])), None) is not None
        ]
        if len(inner) < 2 or tensor_bytes(part.modules[0] for part in inner) < _STAGE_COVERAGE * size:
            yield unit
            return
        for part in inner:
            yield from parts(part)

    return tuple(part for unit in units for part in parts(unit))


def block_lists(component: Component, plan: OffloadPlan) -> list[tuple[str, str]]:
    """`(path, where it was said)` of a component's lists of blocks: plan, class attribute, by class name, structure."""
    attribute = "block_attrs" if component.role == DIT else "encoder_block_attrs"
    declared = getattr(plan, attribute).get(component.path)
    if declared:
        return [(path, f"_offload_plan.{attribute}[{component.path!r}]") for path in declared]
    kind = component.module.__class__
    own = getattr(kind, "_layerwise_offload_blocks_attrs", None)
    if own is not None:
        where = f"{kind.__name__}._layerwise_offload_blocks_attrs"
        if isinstance(own, str) or not own or len(set(own)) != len(own):
            raise OffloadConfigError(f"{describe(where, own)} must be a list of different module paths, not empty")
        return [(path, where) for path in own]
    if is_split(component.module):
        parts = [path for paths in kind._offload_components.values() for path in paths]  # type: ignore[attr-defined]
        return [(path, f"{kind.__name__}._offload_components") for path in parts if _has(component.module, path)]
    known = BLOCK_LISTS.get(kind.__name__, ())
    present = [path for path in known if _has(component.module, path)]
    if present:
        return [(path, f"{kind.__name__} by name") for path in present]
    return [(path, f"{kind.__name__} {BY_STRUCTURE}") for path in _lists_by_structure(component)]


def _has(module: nn.Module, path: str) -> bool:
    try:
        return len(list(module.get_submodule(path).children())) > 0
    except AttributeError:
        return False


def large_tables(
    component: Component, sequences: Sequence[Sequence[UnitPlan]], plan: OffloadPlan
) -> tuple[UnitPlan, ...]:
    """Embedding tables and output layers outside the blocks that are larger than any block, and what is declared.

    Modules tied to one another by a shared weight are one unit.
    """
    declared = plan.offload_submodules.get(component.path, ())
    where = f"_offload_plan.offload_submodules[{component.path!r}]"
    blocks = [module for sequence in sequences for unit in sequence for module in unit.modules]
    largest = max((tensor_bytes(unit.modules) for sequence in sequences for unit in sequence), default=0)
    candidates: dict[str, nn.Module] = {}
    for path in declared:
        try:
            candidates[path] = component.module.get_submodule(path)
        except AttributeError:
            raise OffloadConfigError(f"{describe(where, path)}: {component.path} has no such module") from None
    inside_blocks = {id(module) for module in walk(blocks)}
    for path, module in component.module.named_modules():
        is_table = isinstance(module, (nn.Embedding, nn.Linear)) and id(module) not in inside_blocks
        if is_table and 0 < largest < tensor_bytes([module]):
            candidates.setdefault(path, module)
    groups: list[tuple[list[str], list[nn.Module], set[int]]] = []
    for path, module in candidates.items():
        weights = {id(tensor) for _, tensor in own_tensors(walk([module]))}
        for paths, modules, held in groups:
            if held & weights:
                paths.append(path)
                modules.append(module)
                held |= weights
                break
        else:
            groups.append(([path], [module], weights))
    return tuple(
        UnitPlan(
            f"{component.path}.{'+'.join(paths)}",
            tuple(modules),
            large=True,
            tables=tuple(module for module in modules if gathers_rows(module)),
        )
        for paths, modules, _ in groups
    )


def called_outside(component: Component, plan: OffloadPlan) -> tuple[nn.Module, ...]:
    """Modules deep inside blocks that are called from outside of their block: declared, or known by class name."""
    declared = plan.outside_calls.get(component.path, ())
    known = OUTSIDE_CALLS.get(component.module.__class__.__name__, ())
    found = []
    for path in (*declared, *known):
        try:
            found.append(component.module.get_submodule(path))
        except AttributeError:
            if path in declared:
                where = f"_offload_plan.outside_calls[{component.path!r}]"
                raise OffloadConfigError(f"{describe(where, path)}: {component.path} has no such module") from None
    return tuple(found)


def is_split(module: nn.Module) -> bool:
    """Whether a module declares parts that run in phases (`SplitOffloadMixin`)."""
    return bool(getattr(type(module), "_offload_components", None)) and hasattr(module, "_offload_context")
