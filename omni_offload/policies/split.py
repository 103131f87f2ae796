"""Split models: one module whose parts run in phases and take turns on the device."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from ..engine.entries import RootEntry, entry_of
from ..errors import not_one_of


class SplitOffloadMixin:
    """For a module that runs its parts one after another, each wrapped in `self._offload_context(name)`.

    With model-level offload exactly one part is on the device at a time; otherwise the context does nothing.

    Class attributes:
        _offload_components: part name -> dotted paths, from the module, of its lists of blocks or of single modules.
    """

    _offload_components: ClassVar[Mapping[str, Sequence[str]]] = {}

    def _offload_context(self, name: str) -> AbstractContextManager[None]:
        """`with self._offload_context(name):` runs part `name` in its body.

        Raises:
            OffloadConfigError: `_offload_components` has no part of this name.
        """
        if name not in self._offload_components:
            raise not_one_of("_offload_context(name)", name, self._offload_components)
        entry = entry_of(self)  # type: ignore[arg-type]
        return _Part(entry.root if isinstance(entry, RootEntry) else None, name)


class _Part:
    """While the body runs, a token says so; it has to know the frame of the body, so this is no generator."""

    def __init__(self, root: Any, name: str) -> None:
        self._root = root
        self._name = name

    def __enter__(self) -> None:
        if self._root is not None:
            self._root.enter_part(self._name, sys._getframe(1))

    def __exit__(self, *_: object) -> None:
        if self._root is not None:
            self._root.leave_part(self._name)
