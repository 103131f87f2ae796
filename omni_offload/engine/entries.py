"""Module entries: how a call of a user's module becomes acquire, compute, release.

Owns the cached subclasses given to blocks and roots and their undoing; knows nothing of slots or pipelines.

[Note: entries]
A block gets a subclass of its class, one per original class, with the same names, that overrides `__call__` and
`forward`; no hook is registered and nothing is put in the instance's `forward`, so user hooks, accelerate, compiled
blocks and Diffusers' hook registry all keep working around or inside it.
  - `__call__` acquires, outside of whatever is compiled. It leaves that to `forward` when `defers` says that something
    inside may decide to skip the block (Diffusers' step caches), so that a skipped block moves nothing.
  - `obj.__class__` answers the original class: registries look classes up by it, and parametrize assigns it.
  - deepcopy and pickle give the plain class.
acquire and release are graph breaks for the compiler; `compile_repeated_blocks(fullgraph=True)` compiles inside them.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from .streamer import Group, Streamer, Token
from .unit import Unit

ENTRY = "_offload_entry"
_set_class = object.__dict__["__class__"].__set__
_REASON = "omni_offload moves weights here; use compile_repeated_blocks for fullgraph"


def never_defers(module: nn.Module) -> bool:
    """`__call__` acquires, always."""
    return False


@dataclass(eq=False)
class BlockEntry:
    """What a block's subclass needs to know: its streamer, its unit, and who acquires."""

    streamer: Streamer
    unit: Unit
    defers: Callable[[nn.Module], bool] = never_defers


@torch.compiler.disable(reason=_REASON)
def _acquire(entry: BlockEntry, no_grad: bool) -> Token:
    if no_grad:
        entry.streamer.note_no_grad()
    return entry.streamer.acquire(entry.unit, _calling_frame())


@torch.compiler.disable(reason=_REASON)
def _release(entry: BlockEntry, token: Token) -> None:
    entry.streamer.release(token)


@torch.compiler.disable(reason=_REASON)
def _held_here(entry: BlockEntry) -> bool:
    return entry.streamer.held_here(entry.unit)


def _calling_frame() -> FrameType:
    """The frame of the code that called a function of this module which the compiler leaves alone."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code in _wrapper_codes:
        frame = frame.f_back
    assert frame is not None
    return frame


def _find_wrapper_codes() -> frozenset[Any]:
    """The code objects that `torch.compiler.disable` puts between a caller and a function."""

    @torch.compiler.disable
    def probe() -> list[Any]:
        codes, frame = [], sys._getframe(1)
        while frame.f_code is not _find_wrapper_codes.__code__ and frame.f_back is not None:
            codes.append(frame.f_code)
            frame = frame.f_back
        return codes

    return frozenset(probe())


_wrapper_codes = _find_wrapper_codes()


def _run(entry: BlockEntry, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    no_grad = torch.is_grad_enabled()
    token = _acquire(entry, no_grad)
    try:
        if no_grad:
            with torch.no_grad():
                return function(*args, **kwargs)
        return function(*args, **kwargs)
    finally:
        _release(entry, token)


class _PlainCopies:
    """deepcopy and pickle of a module with an entry give the plain class, without entry, with weights of its own."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        plain = self.__class__
        twin = _new(plain)
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(_plain_state(self), memo))
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _new, (self.__class__,), _plain_state(self)


def _new(plain: Any) -> Any:
    return plain.__new__(plain)


def _plain_state(module: Any) -> dict[str, Any]:
    state = {key: value for key, value in module.__dict__.items() if key != ENTRY}
    entry = module.__dict__.get(ENTRY)
    if isinstance(entry, RootEntry):
        state |= {name: state[name].copy() for name in _HOOK_DICTS}
        _remove_our_hooks(state)
    return state


def _original(cls: type) -> type:
    """The class a subclass of ours was made from; any other class itself."""
    return cls.__dict__.get("_offload_original", cls)


class _Block(_PlainCopies):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        entry = self.__dict__.get(ENTRY)
        if entry is None or entry.defers(self):
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        return _run(entry, super().__call__, args, kwargs)  # type: ignore[misc]


@functools.cache
def _block_class(original: type) -> type:
    plain_forward = original.forward  # type: ignore[attr-defined]

    @functools.wraps(plain_forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        entry = self.__dict__.get(ENTRY)
        # Compiled code runs inside an acquired block. Otherwise this is an inner call, or one that skipped `__call__`.
        if entry is None or torch.compiler.is_compiling() or _held_here(entry):
            return plain_forward(self, *args, **kwargs)
        return _run(entry, functools.partial(plain_forward, self), args, kwargs)

    return _subclass(original, _Block, _block_class, forward=forward)


def _subclass(
    original: type, methods: type, derive: Callable[[type], type], meta: type | None = None, **body: Any
) -> type:
    """A subclass of `original` with the same names whose instances answer `original` when asked for their class."""

    def assign(self: Any, new: type) -> None:
        _set_class(self, derive(_original(new)))

    body |= {key: getattr(original, key) for key in ("__module__", "__qualname__", "__doc__")}
    body |= {"_offload_original": original, "__class__": property(lambda self: original, assign)}
    return (meta or type(original))(original.__name__, (methods, original), body)


def attach_block(module: nn.Module, entry: BlockEntry) -> None:
    """Make calls of `module` acquire `entry.unit`. Undone by `detach`."""
    module.__dict__[ENTRY] = entry
    original: Any = module.__class__
    _set_class(module, _block_class(original))


class Root(Protocol):
    """What the subclass of a component's root asks for; see `attach_root`."""

    device: torch.device

    def enter(self, frame: FrameType) -> None:
        """The component's forward starts; `frame` is on the stack until it ends."""

    def leave(self) -> None:
        """The component's forward has ended."""

    def check_device(self, device: torch.device) -> None:
        """Raise unless `device` is where the component computes anyway."""

    def before_change(self, what: str) -> None:
        """Weights are about to be changed from outside: park them and drop device copies."""

    def after_change(self) -> None:
        """The change is over: bring what has come to where it belongs."""


@dataclass(eq=False)
class RootEntry:
    """The object that answers for the component."""

    root: Root


_HOOK = "_offload_hook"  # on a hook of ours, so that it is found also where an interrupt came before its handle
_HOOK_DICTS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


def _remove_our_hooks(state: dict[str, Any]) -> None:
    """Take our hooks out of the state of a module."""
    hooks = [pair for name in _HOOK_DICTS[:2] for pair in state[name].items()]
    for key in [key for key, hook in hooks if hasattr(hook, _HOOK)]:
        for name in _HOOK_DICTS:
            state[name].pop(key, None)


def _root_of(module: Any) -> Root:
    root: Root = module.__dict__[ENTRY].root
    return root


class _RootMethods(_PlainCopies):
    """What a managed component answers differently from a plain one."""

    @property
    def device(self) -> torch.device:
        return _root_of(self).device

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
        return cls is other or _original(cls) is other

    return type("_RootMeta", (meta,), {"__eq__": equal, "__hash__": lambda cls: hash(_original(cls))})


@functools.cache
def _root_class(original: type, mutators: tuple[str, ...]) -> type:
    calls = {name: _parked(name, getattr(original, name)) for name in mutators if hasattr(original, name)}
    derive = functools.partial(_root_class, mutators=mutators)
    return _subclass(original, _RootMethods, derive, _root_meta(type(original)), **calls)


def _parked(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        root = _root_of(self)
        root.before_change(f"{name}()")
        try:
            return plain(self, *args, **kwargs)
        finally:
            root.after_change()

    return call


def attach_root(module: nn.Module, root: Root, mutators: tuple[str, ...] = ()) -> None:
    """Make `module` answer for the onload device and tell `root` when it runs or is changed. Undone by `detach`.

    Args:
        module: the root of a component.
        root: what answers for it.
        mutators: names of methods that edit weights in ways that leave no trace on the tensors.
    """
    module.__dict__[ENTRY] = RootEntry(root)
    original: Any = module.__class__
    _set_class(module, _root_class(original, mutators))
    # Hooks and not `__call__`: a wrapper that torch.compile(module) made before holds the old `__call__`.
    module.register_forward_pre_hook(_before(root), prepend=True, with_kwargs=True)
    module.register_forward_hook(_behind(root), always_call=True)


def _before(root: Root) -> Callable[..., Any]:
    @torch.compiler.disable(reason=_REASON)
    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        root.enter(_calling_frame())
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to(root.device), (args, kwargs))

    setattr(enter, _HOOK, True)
    return enter


def _behind(root: Root) -> Callable[..., None]:
    @torch.compiler.disable(reason=_REASON)
    def leave(module: nn.Module, args: Any, output: Any) -> None:
        root.leave()

    setattr(leave, _HOOK, True)
    return leave


@dataclass(eq=False)
class InnerEntry:
    """A module inside a component that may be called by itself: then it enters `group` as the component's root does."""

    streamer: Streamer
    group: Group


class _Inner(_PlainCopies):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        entry = self.__dict__.get(ENTRY)
        # Compiled code runs inside the component's root, and so do most calls.
        if torch.compiler.is_compiling() or entry is None or entry.streamer.runs_here(entry.group):
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        entry.streamer.enter(entry.group.name, entry.group, sys._getframe())
        try:
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        finally:
            entry.streamer.leave(entry.group.name)


@functools.cache
def _inner_class(original: type) -> type:
    return _subclass(original, _Inner, _inner_class)


def attach_inner(module: nn.Module, entry: InnerEntry) -> None:
    """Make calls of `module` by itself enter `entry.group`. Undone by `detach`."""
    module.__dict__[ENTRY] = entry
    original: Any = module.__class__
    _set_class(module, _inner_class(original))


def detach(module: nn.Module) -> None:
    """Give `module` back its class and take out what `attach_block` or `attach_root` put in.

    The entry goes last: for as long as it is there, an interrupted undoing is found and finished.
    """
    original = module.__class__
    if type(module) is not original:
        _set_class(module, original)
    _remove_our_hooks(module.__dict__)
    module.__dict__.pop(ENTRY, None)


def entry_of(module: nn.Module) -> BlockEntry | InnerEntry | RootEntry | None:
    """The entry of `module`, if it has one."""
    entry: BlockEntry | InnerEntry | RootEntry | None = module.__dict__.get(ENTRY)
    return entry
