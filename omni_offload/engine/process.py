"""Whether this process is still the one in which something was made.

A forked child has neither the copy thread nor the device state of its parent, and would wait for copies in vain.
"""

from __future__ import annotations

import os

from ..errors import OffloadStateError

_forks = 0


def _count_fork() -> None:
    global _forks
    _forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


class Process:
    """The process that this object was made in."""

    def __init__(self) -> None:
        self._forks = _forks

    def is_this_one(self) -> bool:
        """Whether no fork lies between."""
        return self._forks == _forks

    def require(self) -> None:
        """Raise `OffloadStateError` in a forked child."""
        if self._forks != _forks:
            raise OffloadStateError(
                "offload was enabled before this process was forked, which has neither the copy thread nor the device "
                "of its parent. Enable offload in the child, or start it with the 'spawn' method."
            )
