"""Which unit is expected next.

Owns the guess; knows units only as things that can be told apart.
"""

from __future__ import annotations

from collections.abc import Sequence

from .unit import Unit


class Order:
    """Starts as the declared order, each sequence wrapping to its beginning; then expects what followed last time.

    Blocks that are skipped, repeated or run backwards cost a wrong guess once.
    """

    def __init__(self, sequences: Sequence[Sequence[Unit]]) -> None:
        self._next: dict[Unit, Unit] = {}
        self._last: Unit | None = None
        for sequence in sequences:
            for unit, following in zip(sequence, [*sequence[1:], *sequence[:1]], strict=True):
                self._next[unit] = following

    def observe(self, unit: Unit) -> None:
        """`unit` is about to compute. Again, perhaps: what follows it is another one all the same."""
        if self._last is not None and self._last is not unit:
            self._next[self._last] = unit
        self._last = unit

    def forget(self, units: Sequence[Unit]) -> None:
        """`units` will not run any more."""
        gone = set(units)
        self._next = {u: following for u, following in self._next.items() if not {u, following} & gone}
        if self._last in gone:
            self._last = None

    def upcoming(self, unit: Unit, count: int) -> list[Unit]:
        """At most `count` different units that are expected behind `unit`, nearest first, `unit` itself left out."""
        found: list[Unit] = []
        following = self._next.get(unit)
        while following is not None and following is not unit and following not in found and len(found) < count:
            found.append(following)
            following = self._next.get(following)
        return found
