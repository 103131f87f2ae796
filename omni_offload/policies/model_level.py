"""Model-level offload: DiTs and encoders take turns on the device; VAEs and residents stay.

Built on streaming with room for the whole component: on first use its units flow in, in order, each awaited only by
its own forward, so that the move hides behind the first pass. They stay until another component starts or the pipeline
call ends, and are never copied back.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from ..engine.entries import InnerEntry, attach_inner
from ..engine.streamer import Group, WholeStreamer
from ..engine.unit import Shell, Unit, own_tensors, walk
from .component import ManagedComponent
from .offload import Offload


class ModelLevelOffload(Offload):
    """See the module."""

    def _build_component(self, component: ManagedComponent) -> None:
        plan = component.plan
        modules = [module for unit in plan.units for module in unit.modules] + self._build_tables(component)
        common = {id(tensor) for tensor in self.plan.shared_across}
        inside = {id(tensor) for tensor in self.plan.shared} - common
        for unit_plan in plan.units:
            component.units.append(self._unit(unit_plan))
        extra = [tensor for _, tensor in own_tensors(walk(modules)) if id(tensor) in inside]
        shell = Unit(
            f"{plan.path} (shell)",
            [plan.module],
            self._allocator,
            stop=modules,
            extra=extra,
            excluded=self.plan.shared_across,
        )
        component.shell = shell
        by_name = {unit.name: unit for unit in component.units}
        if plan.parts:
            component.group = Group(plan.path, [], shell)
            component.parts = {
                part: Group(plan.path, [by_name[unit.name] for unit in units], shell, part=part)
                for part, units in plan.parts.items()
            }
        else:
            component.group = Group(plan.path, component.units, shell)

    def _start(self) -> None:
        groups = [group for c in self.components for group in (c.group, *c.parts.values()) if group is not None]
        if self.plan.shared_across:
            common = Shell("shared between components", [], self.plan.device, extra=self.plan.shared_across)
            common.place()
            self._shells.append(common)
        self.streamer = WholeStreamer(self._transfer, groups, self._shells)
        for component in self.components:
            for plan, unit in zip(component.plan.units, component.units, strict=True):
                component.attach(plan, unit)
            self._attach_tables(component)
            blocks = [module for unit in component.plan.all_units for module in unit.modules]
            # A module that another component has too is resident, and would bring the wrong one.
            others = [other.plan.module for other in self.components if other is not component]
            left_alone = {id(module) for module in (*blocks, *walk(others))}
            for module in _callable_inside(component.plan.module, left_alone):
                component.attached.append(module)
                assert component.group is not None
                attach_inner(module, InnerEntry(self.streamer, component.group))

    def _idle_window_bytes(self) -> int:
        return 0


def _callable_inside(module: nn.Module, left_alone: set[int]) -> Iterator[nn.Module]:
    """Modules of a component's shell with weights at or below them: each may be called without the component itself."""
    for child in module.children():
        if id(child) in left_alone:
            continue
        if not isinstance(child, (nn.ModuleList, nn.ModuleDict)) and any(True for _ in own_tensors(walk([child]))):
            yield child
        yield from _callable_inside(child, left_alone)
