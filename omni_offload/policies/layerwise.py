"""Layerwise offload: the blocks of the selected components stream through one window; shells stay on the device."""

from __future__ import annotations

from ..discovery import ResolvedPlan, UnitPlan
from ..engine.streamer import LayerStreamer
from ..engine.unit import Shell, Unit, own_tensors, walk
from .component import ManagedComponent
from .offload import Offload

DEPTH = 1  # units fetched ahead; more buys next to nothing in time and costs a unit of memory each


def spaced(count: int, chosen: int) -> set[int]:
    """`chosen` of `count` indices, evenly spaced: between two that stay, a streamed one has time to arrive."""
    return {(2 * i + 1) * count // (2 * chosen) for i in range(chosen)}


class LayerwiseOffload(Offload):
    """See the module."""

    def __init__(self, plan: ResolvedPlan) -> None:
        super().__init__(plan)
        self._sequences: list[tuple[list[UnitPlan], list[Unit]]] = []

    def _build_component(self, component: ManagedComponent) -> None:
        plan = component.plan
        stay = spaced(len(plan.units), plan.options.resident_layers) if plan.options.resident_layers else set()
        staying = {id(unit) for index, unit in enumerate(plan.units) if index in stay}
        streamed: list[UnitPlan] = []
        for sequence in plan.sequences:
            kept = [unit for unit in sequence if id(unit) not in staying]
            units = []
            for unit_plan in kept:
                unit = self._unit(unit_plan)
                component.units.append(unit)
                units.append(unit)
            self._sequences.append((kept, units))
            streamed += kept
        tables = self._build_tables(component)
        modules = [module for unit in streamed for module in unit.modules] + tables
        shared = {id(tensor) for tensor in self.plan.shared}
        extra = [tensor for _, tensor in own_tensors(walk(modules)) if id(tensor) in shared]
        component.shell = Shell(plan.path, [plan.module], self.plan.device, stop=modules, extra=extra)
        self._shells.append(component.shell)

    def _start(self) -> None:
        self._mark_oversize()
        sequences = [units for _, units in self._sequences if units]
        self.streamer = LayerStreamer(self._transfer, sequences, self._shells, depth=DEPTH, home=self._home)
        by_unit = {unit: component for component in self.components for unit in component.units}
        for plans, units in self._sequences:
            for plan, unit in zip(plans, units, strict=True):
                by_unit[unit].attach(plan, unit)
        self._sequences.clear()
        for component in self.components:
            self._attach_tables(component)

    def _home(self, unit: Unit) -> Shell:
        shell = next(component.shell for component in self.components if unit in component.units)
        assert isinstance(shell, Shell)
        return shell

    def _mark_oversize(self) -> None:
        """A table larger than any block gets device memory for as long as it is used, instead of growing all slots."""
        pairs = [pair for plans, units in self._sequences for pair in zip(plans, units, strict=True)]
        largest = max((unit.nbytes for plan, unit in pairs if not plan.large), default=0)
        for plan, unit in pairs:
            unit.oversize = plan.large and unit.nbytes > largest

    def _idle_window_bytes(self) -> int:
        return self.streamer.window.nbytes
