"""Entries of components' roots, and of modules inside them that may be called by themselves. See [Note: entries]."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, FunctionType
from typing import Any, Protocol

import torch
from torch import nn

from ..streamer import Group, Streamer
from .blocks import REASON, calling_frame
from .subclass import ENTRY, HOOK, PlainCopies, give_class, original_of, subclass


class Root(Protocol):
    """What the subclass of a component's root asks for; see `attach_root`."""

    device: torch.device

    @property
    def comes_as_a_whole(self) -> bool:
        """Whether entering brings all of it to the device."""

    def enter(self, frame: FrameType) -> None:
        """The component's forward starts; `frame` is on the stack until it ends."""

    def leave(self) -> None:
        """The component's forward has ended."""

    def runs_here(self) -> bool:
        """Whether the component's forward is running in this thread."""

    def check_device(self, device: torch.device) -> None:
        """Raise unless `device` is where the component computes anyway."""

    def refuse(self, what: str) -> None:
        """Raise: `what` cannot be done to a managed component."""

    def before_change(self, what: str) -> None:
        """Weights are about to be changed from outside: park them and drop device copies."""

    def after_change(self) -> None:
        """The change is over: bring what has come to where it belongs."""


@dataclass(eq=False)
class RootEntry:
    """The object that answers for the component."""

    root: Root


def _root_of(module: Any) -> Root:
    root: Root = module.__dict__[ENTRY].root
    return root


class _RootMethods(PlainCopies):
    """What a managed component answers differently from a plain one."""

    @property
    def device(self) -> torch.device:
        return _root_of(self).device

    @device.setter
    def device(self, value: Any) -> None:
        plain = getattr(self.__class__, "device", None)
        if plain is not None:
            plain.__set__(self, value)  # refuses, or knows what to do
        else:
            self.__dict__["device"] = value  # a model that notes where its inputs are: seen again when offload is off

    def to(self, *args: Any, **kwargs: Any) -> Any:
        root = _root_of(self)
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
        if device is not None:
            root.check_device(device)
            root.after_change()  # whatever has come in since belongs there too
        change = {k: v for k, v in (("dtype", dtype), ("memory_format", memory_format)) if v is not None}
        if change:
            super().to(**change)  # type: ignore[misc]
        return self

    def cuda(self, device: int | torch.device | None = None) -> Any:
        return self.to(torch.device("cuda", device) if isinstance(device, int) else device or torch.device("cuda"))

    def cpu(self) -> Any:
        return self.to(torch.device("cpu"))

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        root = _root_of(self)
        root.before_change("changing all weights of a component")
        try:
            return super()._apply(*args, **kwargs)  # type: ignore[misc]
        finally:
            root.after_change()

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        root = _root_of(self)
        root.before_change("loading a state dict")
        try:
            return super().load_state_dict(*args, **kwargs)  # type: ignore[misc]
        finally:
            root.after_change()


@functools.cache
def _root_meta(meta: type) -> type:
    # `from_pipe` asks `type(component) in types`: the subclass has to be equal to what it was made from.
    def equal(cls: type, other: object) -> bool:
        return cls is other or original_of(cls) is other

    return type("_RootMeta", (meta,), {"__eq__": equal, "__hash__": lambda cls: hash(original_of(cls))})


def _root_class(original: Any, mutators: tuple[str, ...], refused: tuple[str, ...]) -> type:
    return _root_subclass(original, original.forward, mutators, refused)


@functools.cache
def _root_subclass(original: Any, plain_forward: Any, mutators: tuple[str, ...], refused: tuple[str, ...]) -> type:
    @functools.wraps(plain_forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        entry = self.__dict__.get(ENTRY)
        if torch.compiler.is_compiling():
            return plain_forward(self, *args, **kwargs)
        # Otherwise an inner call, or one that skipped `__call__` and with it the hooks.
        if entry is None or entry.root.runs_here():
            return original.forward(self, *args, **kwargs)
        entry.root.enter(sys._getframe())
        try:
            return original.forward(self, *args, **kwargs)
        finally:
            entry.root.leave()

    calls = {name: _entered(original, name) for name in _own_methods(original)}
    calls |= {name: _parked(original, name) for name in mutators if hasattr(original, name)}
    calls |= {name: _refused(original, name) for name in refused if hasattr(original, name)}
    derive = functools.partial(_root_class, mutators=mutators, refused=refused)
    meta: Any = type(original)
    return subclass(original, _RootMethods, derive, _root_meta(meta), forward=forward, **calls)


_FRAMEWORK = ("Module", "ModelMixin", "PreTrainedModel")
_ABOUT_THE_MODEL = re.compile(
    r"_|(set|enable|disable|fuse|unfuse|add|load|save|reset|init|register|from|tie|compile|freeze)(_|$)"
)


def _own_methods(original: Any) -> list[str]:
    """Public methods, besides `forward`, that a model's own classes define and that may compute with its weights.

    Not what a framework's base class has too (`get_input_embeddings`), nor what changes the model or its settings.
    """
    bases = [cls for cls in original.__mro__ if issubclass(cls, nn.Module)]
    framework = [cls for cls in bases if cls.__name__ in _FRAMEWORK]
    own = [cls for cls in bases if cls not in framework and cls is not PlainCopies]
    names = {name for cls in own for name, value in cls.__dict__.items() if isinstance(value, FunctionType)}
    inherited = {name for cls in framework for name in dir(cls)}
    chosen = [name for name in names - inherited - {"forward"} if not _ABOUT_THE_MODEL.match(name)]
    found = {name: inspect.getattr_static(original, name) for name in chosen}  # the one that counts, of several
    return sorted(n for n, f in found.items() if isinstance(f, FunctionType) and not inspect.isgeneratorfunction(f))


def _entered(original: Any, name: str) -> Callable[..., Any]:
    """Method `name`, which may be called before any forward and finds the component's weights where it computes."""

    @functools.wraps(getattr(original, name))
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        entry = self.__dict__.get(ENTRY)
        if torch.compiler.is_compiling() or entry is None or not entry.root.comes_as_a_whole or entry.root.runs_here():
            return getattr(original, name)(self, *args, **kwargs)
        entry.root.enter(sys._getframe())
        try:
            return getattr(original, name)(self, *args, **kwargs)
        finally:
            entry.root.leave()

    return call


def _parked(original: Any, name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(original, name))
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        root = _root_of(self)
        root.before_change(f"{name}()")
        try:
            return getattr(original, name)(self, *args, **kwargs)
        finally:
            root.after_change()

    return call


def _refused(original: Any, name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(original, name))
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        _root_of(self).refuse(f"{name}()")

    return call


def attach_root(module: nn.Module, root: Root, mutators: tuple[str, ...] = (), refused: tuple[str, ...] = ()) -> None:
    """Make `module` answer for the onload device and tell `root` when it runs or is changed. Undone by `detach`.

    Args:
        module: the root of a component.
        root: what answers for it.
        mutators: names of methods that edit weights in ways that leave no trace on the tensors.
        refused: names of methods that cannot be called meanwhile.
    """
    module.__dict__[ENTRY] = RootEntry(root)
    give_class(module, functools.partial(_root_class, mutators=mutators, refused=refused))
    # Hooks and not `__call__`: a wrapper that torch.compile(module) made before holds the old `__call__`.
    module.register_forward_pre_hook(_before(root), prepend=True, with_kwargs=True)
    module.register_forward_hook(_behind(root), always_call=True)


def _before(root: Root) -> Callable[..., Any]:
    @torch.compiler.disable(reason=REASON)
    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        root.enter(calling_frame())
        device = root.device
        return tuple(_brought(arg, device) for arg in args), {k: _brought(v, device) for k, v in kwargs.items()}

    setattr(enter, HOOK, True)
    return enter


def _brought(value: Any, device: torch.device) -> Any:
    """An argument on `device`: tensors, and those in tuples.

    Lists and dictionaries are the caller's, who may look into them afterwards, and the model's, which may fill them:
    what lies in them stays as it is, as it does where nothing is offloaded.
    """
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if type(value) is tuple:
        return tuple(_brought(item, device) for item in value)
    return value


def _behind(root: Root) -> Callable[..., None]:
    @torch.compiler.disable(reason=REASON)
    def leave(module: nn.Module, args: Any, output: Any) -> None:
        root.leave()

    setattr(leave, HOOK, True)
    return leave


@dataclass(eq=False)
class InnerEntry:
    """A module inside a component that may be called by itself: then it enters `group` as the component's root does."""

    streamer: Streamer
    group: Group


class _Inner(PlainCopies):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        entry = self.__dict__.get(ENTRY)
        # Compiled code runs inside the component's root, and so do most calls.
        if torch.compiler.is_compiling() or entry is None or entry.streamer.runs_here(entry.group.component):
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        entry.streamer.enter(entry.group.name, entry.group, sys._getframe())
        try:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        finally:
            entry.streamer.leave(entry.group.name)


@functools.cache
def _inner_class(original: Any) -> type:
    return subclass(original, _Inner, _inner_class)


def attach_inner(module: nn.Module, entry: InnerEntry) -> None:
    """Make calls of `module` by itself enter `entry.group`. Undone by `detach`."""
    module.__dict__[ENTRY] = entry
    give_class(module, _inner_class)
