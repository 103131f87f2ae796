"""Module entries: how a call of a user's module becomes acquire, compute, release.

Owns the subclasses given to blocks, what is inside them, roots and what is inside those, and their undoing; knows
nothing of slots or pipelines.

[Note: entries]
A block gets a subclass of its class, made once per class, with the same names, that overrides `__call__` and
`forward`; no hook is registered and nothing is put in the instance's `forward`, so user hooks, accelerate, compiled
blocks and Diffusers' hook registry all keep working around or inside it.
  - `__call__` acquires, outside of whatever is compiled. It leaves that to `forward` when `defers` says that something
    inside may decide to skip the block (Diffusers' step caches), so that a skipped block moves nothing.
  - A child of a block acquires when it is called from outside of its block (`blocks[0].norm1(x)`, as step caches do).
  - A large embedding table stays on the host: its `forward` gathers the rows asked for, there, and sends those.
  - `obj.__class__` answers the original class: registries look classes up by it, and parametrize assigns it.
  - deepcopy and pickle give the plain class.
acquire and release are graph breaks for the compiler; `compile_repeated_blocks(fullgraph=True)` compiles inside them.
"""

from .blocks import BlockEntry, attach_block, attach_child, never_defers
from .roots import InnerEntry, Root, RootEntry, attach_inner, attach_root
from .subclass import ENTRY, detach, entry_of
from .tables import TableEntry, attach_table, gathers_rows

__all__ = [
    "ENTRY",
    "BlockEntry",
    "InnerEntry",
    "Root",
    "RootEntry",
    "TableEntry",
    "attach_block",
    "attach_child",
    "attach_inner",
    "attach_root",
    "attach_table",
    "detach",
    "entry_of",
    "gathers_rows",
    "never_defers",
]
