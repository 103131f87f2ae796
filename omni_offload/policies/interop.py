"""What the package knows of Diffusers' hook registry: the one place that touches its fields.

A registry puts its own `forward` on the instance and remembers the one that was there. A step cache may skip a block
altogether, so where a block carries such hooks, the weights are fetched by the remembered forward and not before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_REGISTRY = "_diffusers_hook"


def acquires_in_forward(module: nn.Module) -> bool:
    """Whether a block's hooks decide if it runs: then acquiring is left to its forward."""
    registry = module.__dict__.get(_REGISTRY)
    if registry is None or not registry.hooks:
        return False
    # A compiled block acquires outside of what is compiled, hooks included.
    return module._compiled_call_impl is None and not torch.compiler.is_compiling()


def point_hooks_at(module: nn.Module, forward: Any, instead_of: tuple[Any, ...]) -> None:
    """Make hooks that remember one of the functions `instead_of` as the module's forward call `forward` instead."""
    bound = module.__dict__.get("forward")
    if getattr(bound, "__func__", None) in instead_of:
        del module.__dict__["forward"]  # left by a hook that was removed; the class has the same one
    registry = module.__dict__.get(_REGISTRY)
    if registry is None or not registry._fn_refs:
        return
    innermost = registry._fn_refs[0]
    for name in ("original_forward", "forward"):
        if getattr(getattr(innermost, name), "__func__", None) in instead_of:
            setattr(innermost, name, forward.__get__(module))
