"""From a pipeline, its declarations and a configuration to a resolved plan.

Decides what happens to every tensor, or refuses, before anything is touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ..config import LayerOptions, OffloadConfig, refuse_unbuilt
from ..engine.unit import own_tensors, refuse_unmanageable, walk
from ..errors import OffloadConfigError, describe, not_one_of
from ..plan import OffloadPlan
from .components import (
    CONTROLNET,
    DIT,
    RESIDENT,
    VAE,
    Component,
    components_of,
    declared_plan,
    find_components,
    unwrapped,
)
from .refusals import refuse_foreign_offload, refuse_unknown_paths, refuse_unserved, refuse_without_exclusion
from .units import (
    BY_STRUCTURE,
    UnitPlan,
    block_lists,
    blocks_at,
    called_outside,
    divided,
    is_split,
    large_tables,
    lists_in,
    tensor_bytes,
)

STREAMED = "streamed"  # its blocks stream, its shell stays on the device
SWAPPED = "swapped"  # on the device as a whole, while no other swapped one is
STAYS = "stays"  # on the device for as long as offload is on


_LITTLE_SAVED = 0.5  # of a component's bytes in the window: then most of it is on the device all the same


@dataclass(frozen=True)
class ComponentPlan:
    """What is to become of one component.

    `sequences` holds its units, list by list, in declared order; `parts` their division in a split module;
    `host_tables` the embedding tables that stay on the host; `outside_calls` modules inside blocks that are called from
    outside.
    """

    path: str
    role: str
    module: nn.Module
    placement: str
    sequences: tuple[tuple[UnitPlan, ...], ...] = ()
    parts: Mapping[str, tuple[UnitPlan, ...]] = field(default_factory=dict)
    options: LayerOptions = field(default_factory=LayerOptions)
    host_tables: tuple[UnitPlan, ...] = ()
    outside_calls: tuple[nn.Module, ...] = ()

    def without(self, names: set[str]) -> ComponentPlan:
        """The component without the units of these names."""

        def kept(units: Sequence[UnitPlan]) -> tuple[UnitPlan, ...]:
            return tuple(unit for unit in units if unit.name not in names)

        sequences = tuple(filter(None, map(kept, self.sequences)))
        parts = {part: kept(units) for part, units in self.parts.items()}
        return replace(self, sequences=sequences, parts=parts, host_tables=kept(self.host_tables))

    @property
    def units(self) -> tuple[UnitPlan, ...]:
        """All units that stream, list by list."""
        return tuple(unit for sequence in self.sequences for unit in sequence)

    @property
    def all_units(self) -> tuple[UnitPlan, ...]:
        """All units, those that stay on the host included."""
        return (*self.units, *self.host_tables)


@dataclass(frozen=True)
class ResolvedPlan:
    """What will be done to a pipeline, decided to the last tensor before anything is touched.

    `tops` are the pipeline's outermost modules, `children` what it is made of by name; `shared` the tensors that more
    than one unit, or a unit and something outside it, holds, and `shared_across` those of more than one component.
    """

    pipeline: str
    config: OffloadConfig
    device: torch.device
    components: tuple[ComponentPlan, ...]
    tops: tuple[nn.Module, ...]
    children: tuple[nn.Module, ...]
    shared: tuple[torch.Tensor, ...]
    shared_across: tuple[torch.Tensor, ...]
    notices: tuple[str, ...]
    all_stay: bool = False


def _selected(config: OffloadConfig, found: Sequence[Component]) -> dict[str, LayerOptions]:
    """Path -> options of the components that the configuration selects."""
    offloadable = [one for one in found if one.role not in (VAE, RESIDENT)]
    if config.mode == "module":
        beside = [one for one in offloadable if one.role == CONTROLNET]
        offloadable = [one for one in offloadable if one.role != CONTROLNET]
        for index, name in enumerate(config.components or ()):
            if any(name in (one.role, one.path) for one in beside):
                raise OffloadConfigError(
                    f"{describe(f'components[{index}]', name)}: a ControlNet runs in every step beside the DiT, so "
                    "with mode='module' it stays on the device. Leave it out, or stream it with mode='layer'."
                )
    names = config.components or tuple(dict.fromkeys(one.role for one in offloadable))
    selected: dict[str, LayerOptions] = {}
    for index, name in enumerate(names):
        hits = [one for one in offloadable if name in (one.role, one.path)]
        if not hits:
            if not offloadable:
                raise OffloadConfigError(
                    f"{describe(f'components[{index}]', name)}: nothing here is a DiT or an encoder. Name them in "
                    "_dit_modules and _encoder_modules of the pipeline class."
                )
            choices = [*dict.fromkeys(one.role for one in offloadable), *(one.path for one in offloadable)]
            raise not_one_of(f"components[{index}]", name, dict.fromkeys(choices), advice="This pipeline has these.")
        for one in hits:
            if name == one.path or one.path not in selected:
                selected[one.path] = config.layer_options.get(name, LayerOptions())
    return selected


def resolve(pipeline: Any, config: OffloadConfig, device: torch.device, *, all_stay: str | None = None) -> ResolvedPlan:
    """Decide what happens to every component of `pipeline`, or refuse.

    Args:
        pipeline: what to offload.
        config: what is wanted.
        device: where to compute.
        all_stay: why nothing is to be offloaded after all: everything is put on the device, and this is said.

    Raises:
        OffloadConfigError: something that is asked for or declared cannot be done; nothing has been touched.
    """
    refuse_unbuilt(config)
    plan = declared_plan(pipeline)
    found, notices = find_components(pipeline, plan)
    if not found:
        raise OffloadConfigError(f"{type(pipeline).__name__} has no modules: there is nothing to offload")
    refuse_foreign_offload(pipeline, found)
    refuse_unknown_paths(pipeline, plan, found)
    selected = _selected(config, found)
    if all_stay is not None:
        selected = {}
        notices.append(all_stay)
    elif config.mode == "module":
        refuse_without_exclusion(pipeline, found)
    components = [_plan_component(one, selected, config, plan, notices) for one in found]
    shared, across = _shared_tensors(components)
    for component in components:
        if component.placement != STAYS:
            for path, module in component.module.named_modules():
                for name, tensor in own_tensors([module]):
                    where = f"{component.path} ({component.module.__class__.__name__}): "
                    where += ".".join(filter(None, (path, name)))
                    refuse_unserved(tensor, where)
                    refuse_unmanageable(tensor, where)
    children = tuple(unwrapped(module) for module in components_of(pipeline).values())
    return ResolvedPlan(
        type(pipeline).__name__,
        config,
        device,
        components=tuple(_without_shared_units(component, shared) for component in components),
        tops=(pipeline,) if isinstance(pipeline, nn.Module) else children,
        children=children,
        shared=shared,
        shared_across=across,
        notices=tuple(notices),
        all_stay=all_stay is not None,
    )


def _plan_component(
    one: Component, selected: Mapping[str, LayerOptions], config: OffloadConfig, plan: OffloadPlan, notices: list[str]
) -> ComponentPlan:
    if one.path not in selected:
        return ComponentPlan(one.path, one.role, one.module, STAYS)
    if config.mode == "module" and is_split(one.module):
        return _plan_split(one)
    lists = block_lists(one, plan)
    guessed = [path for path, where in lists if where.endswith(BY_STRUCTURE)]
    found = [(path, blocks_at(one, path, where)) for path, where in lists]
    sequences = _distinct([divided(one, blocks) if path in guessed else blocks for path, blocks in found])
    if guessed:
        notices.append(f"{one.path}: blocks found by structure in {', '.join(guessed)}")
    tables = large_tables(one, sequences, plan)
    host_tables = tuple(table for table in tables if table.stays_on_host)
    outside = called_outside(one, plan)
    if config.mode == "module":
        return ComponentPlan(
            one.path,
            one.role,
            one.module,
            SWAPPED,
            tuple(sequences),
            host_tables=host_tables,
            outside_calls=outside,
        )
    if not sequences:
        attribute = "block_attrs" if one.role == DIT else "encoder_block_attrs"
        seen = lists_in(one)
        raise OffloadConfigError(
            f"{describe('components', one.path)}: no list of blocks that holds most of its weights was found in "
            f"{one.path} ({one.module.__class__.__name__}; {seen or 'it has no lists'}). Declare it: "
            f"_offload_plan = OffloadPlan({attribute}={{{one.path!r}: ['path.to.blocks']}}), or leave {one.path} out "
            "of components."
        )
    whole, largest = tensor_bytes([one.module]), max(tensor_bytes(unit.modules) for s in sequences for unit in s)
    if sum(map(len, sequences)) > 2 and 2 * largest > _LITTLE_SAVED * whole:
        notices.append(
            f"{one.path}: its largest block is {largest / whole:.0%} of it, and two are on the device at a time, so "
            "layerwise offload saves little here; mode='module' moves it as a whole"
        )
    options = selected[one.path]
    sequences += [(table,) for table in tables if not table.stays_on_host]
    count = sum(len(sequence) for sequence in sequences)
    if options.resident_layers >= count:
        raise OffloadConfigError(
            f"{describe(f'layer_options.{one.path}.resident_layers', options.resident_layers)} leaves nothing to "
            f"stream: {one.path} has {count} units. Leave it out of components to keep all of it on the device."
        )
    return ComponentPlan(
        one.path,
        one.role,
        one.module,
        STREAMED,
        tuple(sequences),
        options=options,
        host_tables=host_tables,
        outside_calls=outside,
    )


def _distinct(sequences: Sequence[tuple[UnitPlan, ...]]) -> list[tuple[UnitPlan, ...]]:
    """The sequences without blocks that stand in an earlier one, under another name or inside another block."""
    seen: set[int] = set()
    result = []
    for sequence in sequences:
        kept = []
        for unit in sequence:
            ids = {id(module) for module in walk(unit.modules)}
            if not ids & seen:
                kept.append(unit)
                seen |= ids
        if kept:
            result.append(tuple(kept))
    return result


def _plan_split(one: Component) -> ComponentPlan:
    declared = getattr(type(one.module), "_offload_components", None)
    where = f"{type(one.module).__name__}._offload_components"
    if not isinstance(declared, Mapping) or len(declared) < 2:
        raise OffloadConfigError(
            f"{describe(where, declared)} must map two or more part names to lists of module paths"
        )
    parts: dict[str, tuple[UnitPlan, ...]] = {}
    for part, paths in declared.items():
        if isinstance(paths, str) or not paths:
            raise OffloadConfigError(
                f"{describe(f'{where}[{part!r}]', paths)} must be a list of module paths, not empty"
            )
        units: list[UnitPlan] = []
        for path in paths:
            try:
                module = one.module.get_submodule(path)
            except AttributeError:
                raise OffloadConfigError(
                    f"{describe(f'{where}[{part!r}]', path)}: no such module in {one.path}"
                ) from None
            is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
            units += (
                blocks_at(one, path, f"{where}[{part!r}]") if is_list else [UnitPlan(f"{one.path}.{path}", (module,))]
            )
        parts[part] = tuple(units)
    held = [id(module) for units in parts.values() for unit in units for module in walk(unit.modules)]
    if len(held) != len(set(held)):
        raise OffloadConfigError(
            f"{describe(where, dict(declared))}: a module stands in two parts; parts exclude one another"
        )
    return ComponentPlan(one.path, one.role, one.module, SWAPPED, tuple(parts.values()), parts=parts)


def _without_shared_units(component: ComponentPlan, shared: Sequence[torch.Tensor]) -> ComponentPlan:
    """The component without the units that consist of shared tensors alone: there is nothing in them to move."""
    ids = {id(tensor) for tensor in shared}
    empty = {
        unit.name
        for unit in component.all_units
        if all(id(tensor) in ids for _, tensor in own_tensors(walk(unit.modules)))
    }
    return component.without(empty)


def _shared_tensors(
    components: Sequence[ComponentPlan],
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Tensors that more than one unit, or a unit and something outside it, holds; and those of several components."""
    holders: dict[int, set[tuple[str, int]]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for component in components:
        stop = [module for unit in component.all_units for module in unit.modules]
        groups = [walk(unit.modules) for unit in component.all_units] + [walk([component.module], stop)]
        for number, modules in enumerate(groups):
            for _, tensor in own_tensors(modules):
                tensors[id(tensor)] = tensor
                holders.setdefault(id(tensor), set()).add((component.path, number))
    shared = tuple(tensors[key] for key, by in holders.items() if len(by) > 1)
    across = tuple(tensors[key] for key, by in holders.items() if len({path for path, _ in by}) > 1)
    return shared, across
