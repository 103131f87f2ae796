"""Giving the mixin to a pipeline that exists already."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

from .discovery import components_of
from .mixin import OffloadMixin

P = TypeVar("P")


@functools.cache
def _adopting_class(cls: Any) -> type:
    body = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls)(cls.__name__, (OffloadMixin, cls), body)


def with_offload(pipeline: P) -> P:
    """Give `pipeline` the methods of [`OffloadMixin`], in place, and return it.

    For a pipeline of any class that was made elsewhere; `type(pipeline).__name__` stays what it was. A pipeline that
    has the mixin already is returned as it is. Components are taken by name and class, which is said in a notice; a
    class with declarations of its own is better: see [`OffloadMixin`].

    Raises:
        [`OffloadConfigError`]: not a pipeline.
    """
    components_of(pipeline)  # refuses what is no pipeline
    if not isinstance(pipeline, OffloadMixin):
        target: Any = pipeline
        target.__class__ = _adopting_class(target.__class__)
    return pipeline
