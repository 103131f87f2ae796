"""The mechanics that all entries share: a cached subclass with the original's names, plain copies, undoing.

See [Note: entries].
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

ENTRY = "_offload_entry"
set_class = object.__dict__["__class__"].__set__

HOOK = "_offload_hook"  # on a hook of ours, so that it is found also where an interrupt came before its handle
_HOOK_DICTS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


class PlainCopies:
    """deepcopy and pickle of a module with an entry give the plain class, without entry, with weights of its own."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep our subclasses from the original's `__init_subclass__`: a registry of models is not to learn of them."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        twin = _new(self.__class__)
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(_plain_state(self), memo))
        return twin

    def __copy__(self) -> Any:
        twin = _new(self.__class__)
        twin.__dict__.update(_plain_state(self))
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _new, (self.__class__,), _plain_state(self)


def _new(plain: Any) -> Any:
    return plain.__new__(plain)


def _plain_state(module: Any) -> dict[str, Any]:
    state = {key: value for key, value in module.__dict__.items() if key != ENTRY}
    state |= {name: state[name].copy() for name in _HOOK_DICTS if name in state}
    _remove_our_hooks(state)
    return state


def _remove_our_hooks(state: dict[str, Any]) -> None:
    hooks = [pair for name in _HOOK_DICTS[:2] for pair in state.get(name, {}).items()]
    for key in [key for key, hook in hooks if hasattr(hook, HOOK)]:
        for name in reversed(_HOOK_DICTS):  # the hook itself last: by it the rest is found after an interrupt
            state[name].pop(key, None)


def original_of(cls: type) -> type:
    """The class a subclass of ours was made from; any other class itself."""
    return cls.__dict__.get("_offload_original", cls)


def subclass(
    original: type, methods: type, derive: Callable[[type], type], meta: type | None = None, **body: Any
) -> type:
    """A subclass of `original` with the same names whose instances answer `original` when asked for their class.

    `derive` makes the subclass of another class, when somebody assigns one to `__class__`.
    """

    def assign(self: Any, new: type) -> None:
        set_class(self, derive(original_of(new)))

    body |= {key: getattr(original, key) for key in ("__module__", "__qualname__", "__doc__")}
    body |= {"_offload_original": original, "__class__": property(lambda self: original, assign)}
    return (meta or type(original))(original.__name__, (methods, original), body)


def give_class(module: nn.Module, derive: Callable[[Any], type]) -> None:
    """Make `module` an instance of what `derive` makes of its original class."""
    set_class(module, derive(module.__class__))


def detach(module: nn.Module) -> None:
    """Give `module` back its class and take out whatever an `attach_...` put in.

    The entry goes last: for as long as it is there, an interrupted undoing is found and finished.
    """
    original = module.__class__
    if type(module) is not original:
        set_class(module, original)
    _remove_our_hooks(module.__dict__)
    module.__dict__.pop(ENTRY, None)


def entry_of(module: nn.Module) -> Any:
    """The entry of `module`, None without one."""
    return module.__dict__.get(ENTRY)
