"""Detects aliases: references by which a script could use a tensor's memory, past every check, while it is exchanged."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer


def gradient_held(p: torch.Tensor) -> bool:
    """Returns True if the script has another reference to `p.grad`, or to its memory. Call it between two backward passes."""
    return p.grad is not None and _names_of_gradient(p.grad) > _counts_without_alias()[0]


def weight_held(p: torch.Tensor) -> bool:
    """Returns True if another tensor shares the parameter's memory."""
    return _in_memory(p) > _counts_without_alias()[1]


def shares_memory(grad: torch.Tensor) -> bool:
    """Returns True if a gradient is part of a larger buffer. All gradients in the buffer then have the same version."""
    return not grad.is_sparse and grad.untyped_storage().nbytes() > grad.nbytes


def has_later_hook(p: torch.Tensor) -> bool:
    """Returns True if a hook other than commlayer's runs after the parameter's gradient is accumulated. Such a hook might keep
    the gradient."""
    hooks: Any = p._post_accumulate_grad_hooks
    return bool(hooks) and not all(is_own_hook(hook) for hook in hooks.values())


def hooked_by_script(optimizer: Any) -> bool:
    """Returns True if hooks other than commlayer's run around the optimizer's steps. Such hooks might read gradients or
    weights."""
    called = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks,
              torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)
    return not all(is_own_hook(hook) for hooks in called for hook in hooks.values())


def is_own_hook(hook: Any) -> bool:
    """Returns True if the hook is commlayer's own. Such hooks keep no reference to a gradient."""
    function = getattr(hook, "func", hook)  # the function in a functools.partial
    return str(getattr(function, "__module__", "")).startswith("commlayer.")


def _names_of_gradient(grad: torch.Tensor) -> int:
    if grad.is_sparse:
        return 0  # check_dense refuses sparse gradients
    return sys.getrefcount(grad) + _in_memory(grad)


def _in_memory(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


@functools.cache
def _counts_without_alias() -> tuple[int, int]:
    """Returns the numbers of references to a gradient and to a parameter's memory when there is no alias. The numbers differ
    between versions of torch."""
    p = nn.Parameter(torch.zeros(2))
    p.grad = torch.zeros(2)
    return _names_of_gradient(p.grad), _in_memory(p)
