"""Optimizers that step inside backward, which are refused. Knows parameters and torch's optimizers; no sessions, no networks.

Averages are there when backward() returns. An optimizer that steps as soon as a gradient is ready (a hook on each parameter,
apply_optimizer_in_backward) takes this rank's own, and the ranks part without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

REMEDY = "averages are there when backward() returns, so step then, with one optimizer over model.parameters()"
OUTSIDE = -1
"""torch's number of the backward pass that runs in this thread, where none does."""

_averaged: Any = WeakIdKeyDictionary()
"""Of each parameter that some session averages its name."""
_hook: Any = None


class Averaged:
    """These parameters are averaged, as long as this is not removed."""

    def __init__(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        global _hook
        self._parameters = [p for _, p in named]
        _averaged.update((p, name) for name, p in named)
        if _hook is None:
            _hook = register_optimizer_step_pre_hook(torch.compiler.disable(_before_step))

    def remove(self) -> None:
        global _hook
        for p in self._parameters:
            _averaged.pop(p, None)
        self._parameters.clear()
        if _hook is not None and not len(_averaged):
            _hook.remove()
            _hook = None


def is_averaged(parameter: torch.Tensor) -> bool:
    """Whether a session of this process averages its gradients."""
    return parameter in _averaged


def refuse(named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Before anything is attached: what apply_optimizer_in_backward has marked."""
    for name, p in named:
        for optimizer in getattr(p, "_in_backward_optimizers", ()):
            raise ValueError(f"{name} is stepped inside backward by {type(optimizer).__name__} (apply_optimizer_in_backward), "
                             f"with what its own rank has: {REMEDY}")


def _before_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    if torch._C._current_graph_task_id() == OUTSIDE:
        return
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p in _averaged:
                raise RuntimeError(f"{type(optimizer).__name__} steps {_averaged[p]} inside backward, with what its own rank "
                                   f"has: {REMEDY}")
