"""Detects aliases: whether a script holds a tensor by a name other than its parameter's, so that its uses go unnoticed.

A tensor in flight must be read and written only through its parameter. A kept list of gradients, a flat buffer of which they
are views, or an old copy of `weight.data` would bypass every guard.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import nn


def gradient_held(p: torch.Tensor) -> bool:
    """Whether `p.grad` has another name, between two backward passes."""
    return p.grad is not None and _names_of_gradient(p) > _alone()[0]


def weight_held(p: torch.Tensor) -> bool:
    """Whether another tensor shares its memory."""
    return _in_memory(p) > _alone()[1]


def hooked_behind_adding(p: torch.Tensor) -> bool:
    """Whether a hook other than commlayer's runs after a gradient is accumulated; it may keep the gradient."""
    hooks: Any = p._post_accumulate_grad_hooks
    return bool(hooks) and not all(ours(hook) for hook in hooks.values())


def ours(hook: Any) -> bool:
    """Whether the hook is commlayer's own, which keeps nothing."""
    function = getattr(hook, "func", hook)  # of a partial
    return str(getattr(function, "__module__", "")).startswith("commlayer.")


def _names_of_gradient(p: torch.Tensor) -> int:
    grad = p.grad
    assert grad is not None
    if grad.is_sparse:
        return 0  # refused elsewhere
    return sys.getrefcount(grad) + _in_memory(grad)


def _in_memory(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


@functools.cache
def _alone() -> tuple[int, int]:
    """The counts without another name; they differ between versions of torch."""
    p = nn.Parameter(torch.zeros(2))
    p.grad = torch.zeros(2)
    return _names_of_gradient(p), _in_memory(p)
