"""Checked, immutable values for the declarations and the configuration.

Owns the frozen mapping and the checks on module paths that `config` and `plan` share. Knows no field by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from .errors import OffloadConfigError, describe, wrong_type

V = TypeVar("V")


class FrozenMapping(Mapping[str, V]):
    """A mapping that cannot change, so it can be hashed, shared, copied and pickled.

    `types.MappingProxyType` can be neither hashed (before Python 3.12), nor copied deeply, nor pickled.

    Args:
        items (`Mapping[str, V]`, defaults to `{}`): What it holds. Copied.
    """

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, V] | None = None) -> None:
        self._items = dict(items or {})

    def __getitem__(self, key: str) -> V:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return repr(self._items)

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenMapping, (self._items,)


def checked_path(field: str, value: object) -> str:
    """Return `value` if it is the dotted path of a module, such as `transformer` or `vision.stages.0.blocks`.

    Raises:
        [`OffloadConfigError`]: It is no string, empty, or a part of it is neither a name nor (past the first
            part) an index.
    """
    if not isinstance(value, str):
        raise wrong_type(field, value, "a dotted path of module names")
    if not value:
        raise OffloadConfigError(f"{describe(field, value)} is empty. Give the dotted path of a module.")
    first, *rest = value.split(".")
    if not first.isidentifier() or not all(part.isidentifier() or _is_index(part) for part in rest):
        raise OffloadConfigError(
            f"{describe(field, value)} is not a dotted path of module names, such as 'transformer' or "
            "'text_encoder.encoder'."
        )
    return value


def checked_paths(field: str, value: object) -> tuple[str, ...]:
    """Return a list or tuple of dotted module paths as a tuple.

    Raises:
        [`OffloadConfigError`]: It is neither, it is empty, an entry is no path, or an entry comes twice.
    """
    if isinstance(value, str):
        raise OffloadConfigError(f"{describe(field, value)} is a single string. Put it in a list: [{value[:80]!r}].")
    if not isinstance(value, (list, tuple)):
        raise wrong_type(field, value, "a list of dotted paths of module names")
    if not value:
        raise OffloadConfigError(f"{describe(field, value)} is empty. Name at least one, or leave it out.")
    paths: list[str] = []
    for index, entry in enumerate(value):
        path = checked_path(f"{field}[{index}]", entry)
        if path in paths:
            raise OffloadConfigError(f"{describe(f'{field}[{index}]', path)} comes twice. Name it once.")
        paths.append(path)
    return tuple(paths)


def checked_mapping(field: str, value: object) -> dict[str, Any]:
    """Return a mapping from dotted module paths as a dict of its own; its values are not looked at.

    Raises:
        [`OffloadConfigError`]: It is no mapping, or a key is no dotted module path.
    """
    if not isinstance(value, Mapping):
        raise wrong_type(field, value, "a mapping from dotted paths of module names")
    return {checked_path(f"{field} key", key): entry for key, entry in value.items()}


def _is_index(part: str) -> bool:
    return part.isascii() and part.isdecimal()
