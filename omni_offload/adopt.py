"""Giving the mixin to a pipeline that exists already."""

from __future__ import annotations

import functools
from typing import Any, TypeVar

from .discovery import components_of
from .errors import OffloadConfigError
from .mixin import OffloadMixin

P = TypeVar("P")
_MODELS = ("ModelMixin", "PreTrainedModel")  # what Diffusers and transformers derive their models from


@functools.cache
def _adopting_class(cls: Any) -> type:
    body: dict[str, Any] = {key: getattr(cls, key) for key in ("__module__", "__qualname__", "__doc__")}
    # The class stands in no module: pickle takes the original and adopts it again.
    body["__reduce_ex__"] = lambda self, protocol: (_adopted, (cls,), self.__dict__)
    return type(cls)(cls.__name__, (OffloadMixin, cls), body)


def _adopted(cls: Any) -> Any:
    return _adopt(cls.__new__(cls))


def _adopt(pipeline: Any) -> Any:
    pipeline.__class__ = _adopting_class(pipeline.__class__)
    return pipeline


def with_offload(pipeline: P) -> P:
    """Give `pipeline` the methods of [`OffloadMixin`], in place, and return it.

    For a pipeline of any class that was made elsewhere; `type(pipeline).__name__` stays what it was. A pipeline that
    has the mixin already is returned as it is. Components are taken by name and class, which is said in a notice; a
    class with declarations of its own is better: see [`OffloadMixin`].

    Raises:
        [`OffloadConfigError`]: not a pipeline.
    """
    if any(base.__name__ in _MODELS for base in type(pipeline).__mro__):
        raise OffloadConfigError(
            f"{type(pipeline).__name__} is a model and not a pipeline. Give its pipeline to with_offload(), and name "
            "the model in components."
        )
    components_of(pipeline)  # refuses what is no pipeline
    return pipeline if isinstance(pipeline, OffloadMixin) else _adopt(pipeline)
