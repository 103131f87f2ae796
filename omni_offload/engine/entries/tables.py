"""Entries of embedding tables that stay on the host, where the few rows that a call asks for are gathered."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..streamer import Streamer
from ..unit import Unit
from .blocks import REASON
from .subclass import ENTRY, PlainCopies, give_class, subclass


@dataclass(eq=False)
class TableEntry:
    """What a table's subclass needs to know: its streamer, and the unit that its weight belongs to."""

    streamer: Streamer
    unit: Unit


def gathers_rows(module: nn.Module) -> bool:
    """Whether a call of `module` is known to read nothing but the rows that it is asked for."""
    return (
        module.__class__ is nn.Embedding
        and "forward" not in module.__dict__
        and module.max_norm is None
        and not module.sparse
    )


@torch.compiler.disable(reason=REASON)
def _rows(table: nn.Embedding, entry: TableEntry, indices: torch.Tensor) -> torch.Tensor:
    if torch.is_grad_enabled():
        entry.streamer.note_no_grad()
    with torch.no_grad(), entry.streamer.undisturbed():
        rows = nn.functional.embedding(indices.to(table.weight.device), table.weight, table.padding_idx)
        return rows.to(entry.streamer.device)


@functools.cache
def _table_class(original: Any) -> type:
    @functools.wraps(original.forward)
    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        entry = self.__dict__.get(ENTRY)
        if entry is None or entry.streamer.held_here(entry.unit):
            plain: torch.Tensor = original.forward(self, input)
            return plain
        return _rows(self, entry, input)

    return subclass(original, PlainCopies, _table_class, forward=forward)


def attach_table(module: nn.Module, entry: TableEntry) -> None:
    """Make calls of `module`, an `nn.Embedding`, gather rows on the host. Undone by `detach`."""
    module.__dict__[ENTRY] = entry
    give_class(module, _table_class)
