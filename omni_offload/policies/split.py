"""Split models: one module whose parts run in phases and take turns on the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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

    @contextmanager
    def _offload_context(self, name: str) -> Iterator[None]:
        """The body runs part `name`.

        Raises:
            OffloadConfigError: `_offload_components` has no part of this name.
        """
        if name not in self._offload_components:
            raise not_one_of("_offload_context(name)", name, self._offload_components)
        entry = entry_of(self)  # type: ignore[arg-type]
        root: Any = entry.root if isinstance(entry, RootEntry) else None
        if root is not None:
            root.activate_part(name)
        yield
