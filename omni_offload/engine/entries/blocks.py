"""Entries of blocks, and of what is inside them. See [Note: entries]."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn

from ..streamer import Streamer, Token
from ..unit import Unit
from .subclass import ENTRY, PlainCopies, give_class, subclass

REASON = "omni_offload moves weights here; use compile_repeated_blocks for fullgraph"


def never_defers(module: nn.Module) -> bool:
    """`__call__` acquires, always."""
    return False


@dataclass(eq=False)
class BlockEntry:
    """What a block's subclass needs to know: its streamer, its unit, and who acquires."""

    streamer: Streamer
    unit: Unit
    defers: Callable[[nn.Module], bool] = never_defers


@torch.compiler.disable(reason=REASON)
def _acquire(entry: BlockEntry, no_grad: bool) -> Token:
    if no_grad:
        entry.streamer.note_no_grad()
    return entry.streamer.acquire(entry.unit, calling_frame())


@torch.compiler.disable(reason=REASON)
def _release(entry: BlockEntry, token: Token) -> None:
    entry.streamer.release(token)


def calling_frame() -> FrameType:
    """The frame of the code that called the function which calls this one, wrappers of the compiler passed over."""
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


class _Block(PlainCopies):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        entry = self.__dict__.get(ENTRY)
        if entry is None or entry.defers(self):
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        return _run(entry, super().__call__, args, kwargs)  # type: ignore[misc]


def _block_class(original: Any) -> type:
    return _block_subclass(original, original.forward)


@functools.cache
def _block_subclass(original: Any, plain_forward: Any) -> type:
    @functools.wraps(plain_forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        entry = self.__dict__.get(ENTRY)
        # Compiled code runs inside an acquired block. Otherwise this is an inner call, or one that skipped `__call__`.
        if torch.compiler.is_compiling():
            return plain_forward(self, *args, **kwargs)
        if entry is None or entry.streamer.held_here(entry.unit):
            return original.forward(self, *args, **kwargs)  # looked up now: somebody may have replaced it
        return _run(entry, functools.partial(original.forward, self), args, kwargs)

    return subclass(original, _Block, _block_class, forward=forward)


def attach_block(module: nn.Module, entry: BlockEntry) -> None:
    """Make calls of `module` acquire `entry.unit`. Undone by `detach`."""
    module.__dict__[ENTRY] = entry
    give_class(module, _block_class)


class _Child(PlainCopies):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        entry = self.__dict__.get(ENTRY)
        if torch.compiler.is_compiling() or entry is None or entry.streamer.held_here(entry.unit):
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        return _run(entry, super().__call__, args, kwargs)  # type: ignore[misc]


@functools.cache
def _child_class(original: Any) -> type:
    return subclass(original, _Child, _child_class)


def attach_child(module: nn.Module, entry: BlockEntry) -> None:
    """Make calls of `module`, a child of a block, acquire `entry.unit` where the block does not. Undone by `detach`."""
    module.__dict__[ENTRY] = entry
    give_class(module, _child_class)
