"""Windows: the slots on the device, and which unit is in which.

Owns device memory for streamed units and who gives way to whom; knows nothing of modules, hooks or host edits.
A unit is in a slot exactly if `_where` says so: one dictionary, so that no interrupt can leave two truths.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from .order import Order
from .process import Process
from .transfer import Slot, Transfer
from .unit import Unit

logger = logging.getLogger(__name__)


class Window(Protocol):
    """What the streamer asks of the device memory that units share."""

    def bring(self, unit: Unit) -> Slot:
        """The slot that holds `unit`, its copy issued. Others give way, never one that is held."""

    def entered(self, unit: Unit) -> None:
        """`unit` is about to compute: a good moment to fetch what comes next."""

    def left(self, unit: Unit) -> None:
        """What `unit` computes has been issued."""

    def parked(self, unit: Unit) -> None:
        """`unit` does not show its slot any more."""

    def drop(self, unit: Unit) -> None:
        """Forget the device copy of `unit`: it is no longer what the host has."""

    def rest(self) -> None:
        """Go to the idle level: what is on the device between pipeline calls."""

    def forget(self, units: Sequence[Unit]) -> None:
        """`units` will not come any more."""

    def close(self) -> None:
        """Give all device memory back."""

    @property
    def nbytes(self) -> int:
        """Device bytes of all slots."""


class _Slots:
    """The part both windows share: slots, where each unit is, and copies that know what they copied."""

    def __init__(self, transfer: Transfer, held: Callable[[Unit], bool]) -> None:
        self._transfer = transfer
        self._held = held
        self._where: dict[Unit, Slot] = {}
        self._slots: list[Slot] = []
        self.hits = 0
        self.misses = 0
        self.peak_nbytes = 0
        # A window that is dropped with copies under way gives its memory up as properly as a closed one.
        weakref.finalize(self, _retire, Process(), transfer, self._slots)

    @property
    def nbytes(self) -> int:
        return sum(slot.nbytes for slot in self._slots)

    def holds(self, unit: Unit) -> bool:
        """Whether a copy of `unit` is on the device or on its way."""
        return unit in self._where

    def drop(self, unit: Unit) -> None:
        self._where.pop(unit, None)

    def _new_slot(self, nbytes: int) -> Slot:
        slot = self._transfer.new_slot(nbytes)
        self._slots.append(slot)
        self.peak_nbytes = max(self.peak_nbytes, self.nbytes)
        return slot

    def _fill(self, slot: Slot, unit: Unit) -> Slot:
        unit.stamp()  # first: an edit during the copy makes the copy stale, never unnoticed
        self._transfer.fill(slot, unit.store)
        unit.copies += 1
        self._where[unit] = slot
        return slot

    def _give_up(self, slot: Slot) -> None:
        for unit in [u for u, s in self._where.items() if s is slot]:
            del self._where[unit]
        self._transfer.retire(slot)
        if slot in self._slots:
            self._slots.remove(slot)

    def close(self) -> None:
        for slot in list(self._slots):
            self._give_up(slot)


def _retire(process: Process, transfer: Transfer, slots: list[Slot]) -> None:
    if process.is_this_one():
        for slot in slots:
            transfer.retire(slot)
    slots.clear()


class StreamingWindow(_Slots):
    """`depth` + 1 slots for all units, as large as the largest; the next units are fetched while one computes.

    Args:
        transfer: moves the bytes.
        units: everything that streams through this window.
        order: what is expected next; also told what happened.
        depth: how many units are fetched ahead.
        held: whether a unit is in use just now.
    """

    def __init__(
        self, transfer: Transfer, units: Sequence[Unit], order: Order, *, depth: int, held: Callable[[Unit], bool]
    ) -> None:
        super().__init__(transfer, held)
        self._order = order
        self._units = list(units)
        self._depth = depth
        self._measure()
        for _ in range(self._count):
            self._new_slot(self._regular)

    def _measure(self) -> None:
        regular = [u for u in self._units if not u.oversize]
        self._regular = max((u.nbytes for u in regular), default=0)
        self._count = min(self._depth + 1, len(regular))

    def bring(self, unit: Unit) -> Slot:
        slot = self._where.get(unit)
        if slot is not None:
            self.hits += 1
            return slot
        self.misses += 1
        return self._fill(self._vacant(unit), unit)

    def _vacant(self, unit: Unit) -> Slot:
        """A slot for `unit`, which is wanted now."""
        if not unit.oversize:
            self._regular = max(self._regular, unit.nbytes)
            slot = self._spare(keep=())
            if slot is not None:
                return self._large_enough(slot)
        # A large embedding, or more units nested in one another than there are slots: memory for this use only.
        return self._new_slot(unit.nbytes)

    def _spare(self, keep: Iterable[Unit]) -> Slot | None:
        """A slot that nobody needs: an empty one, or the one whose unit left longest ago. It is emptied."""
        occupied = {id(slot): unit for unit, slot in self._where.items()}
        for slot in self._slots:
            if id(slot) not in occupied:
                return slot
        if len(self._slots) < self._count:
            return self._new_slot(self._regular)
        for unit, slot in self._where.items():  # in the order of their copies: the oldest first
            if not self._held(unit) and unit not in keep:
                del self._where[unit]
                return slot
        return None

    def _large_enough(self, slot: Slot) -> Slot:
        if slot.nbytes >= self._regular:
            return slot
        self._give_up(slot)  # units have grown, an adapter say: the old memory goes before the new comes
        return self._new_slot(self._regular)

    def entered(self, unit: Unit) -> None:
        self._order.observe(unit)
        try:
            self._fetch_behind(unit)
        except torch.OutOfMemoryError as shortage:
            logger.debug("nothing was fetched ahead of its use: %s", shortage)  # it will be when it is needed

    def _fetch_behind(self, unit: Unit) -> None:
        upcoming = self._order.upcoming(unit, self._count - 1)
        for position, following in enumerate(upcoming):
            if following in self._where or following.oversize or following.nbytes > self._regular:
                continue
            slot = self._spare(keep=upcoming[:position])
            if slot is None:
                return
            self._fill(self._large_enough(slot), following)

    def left(self, unit: Unit) -> None:
        slot = self._where.get(unit)
        if slot is not None:
            self._transfer.mark_free(slot)

    def parked(self, unit: Unit) -> None:
        slot = self._where.get(unit)
        if slot is None:
            return
        if slot.kept_by_others():
            # An output or a cache of the block is a view of its weights: that memory is not to be written again.
            logger.warning(
                "%s keeps or returns a view of its weights; the %.3f MiB of device memory that they lay in stay taken "
                "until it is let go",
                unit.name,
                slot.nbytes / 2**20,
            )
            self._give_up(slot)
        elif len(self._slots) > self._count:
            extra = slot if unit.oversize else self._slots[-1]
            if extra is slot or extra not in self._where.values():
                self._give_up(extra)

    def rest(self) -> None:
        self._where.clear()
        self._measure()  # units may have shrunk: an adapter that was taken off, a dtype
        for slot in [s for i, s in enumerate(self._slots) if i >= self._count or s.nbytes > self._regular]:
            self._give_up(slot)

    def forget(self, units: Sequence[Unit]) -> None:
        self._units = [u for u in self._units if u not in units]
        self._order.forget(units)
        self.rest()


class WholeWindow(_Slots):
    """Room for whole groups: the units of the group in use flow in, in order, and stay until another group starts.

    Each unit has a slot of its own, as large as itself, so that no allocation is larger than a unit.
    """

    def __init__(self, transfer: Transfer, held: Callable[[Unit], bool]) -> None:
        super().__init__(transfer, held)

    def load(self, units: Iterable[Unit]) -> None:
        """Bring all of `units`: all memory first, then the copies in order, which the first pass runs behind."""
        missing = [u for u in units if u not in self._where]
        slots: list[Slot] = []
        try:
            for unit in missing:
                slots.append(self._new_slot(unit.nbytes))
            for unit, slot in zip(missing, slots, strict=True):
                self._fill(slot, unit)
                self.misses += 1
        except BaseException:
            for slot in slots:
                self._give_up(slot)
            raise

    def bring(self, unit: Unit) -> Slot:
        slot = self._where.get(unit)
        if slot is not None:
            self.hits += 1
            return slot
        self.load([unit])
        return self._where[unit]

    def drop(self, unit: Unit) -> None:
        slot = self._where.get(unit)
        if slot is not None:
            self._give_up(slot)

    def entered(self, unit: Unit) -> None:
        pass

    def left(self, unit: Unit) -> None:
        slot = self._where.get(unit)
        if slot is not None:
            self._transfer.mark_free(slot)

    def parked(self, unit: Unit) -> None:
        pass  # nothing else is ever written to its slot

    def forget(self, units: Sequence[Unit]) -> None:
        self.unload(units)

    def unload(self, units: Iterable[Unit]) -> None:
        """Give the memory of `units` back. Nothing is copied."""
        for unit in units:
            self.drop(unit)

    def rest(self) -> None:
        self.close()
