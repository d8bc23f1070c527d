"""attach(..., max_norm=): clips averages at the start of the optimizer's step, when they are final."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from commlayer.engine.optimizer_steps import closure_of
from commlayer.errors import InvalidInput
from commlayer.optim.sparse import LazyOptimizer


def checked(max_norm: Any, optimizer: Any) -> float | None:
    """Raises ValueError if `max_norm` is no norm, or if there is no optimizer step at which to clip."""
    if max_norm is None:
        return None
    try:
        norm = float(max_norm)
    except (TypeError, ValueError):
        norm = -1.0
    if not 0 < norm < float("inf"):
        raise InvalidInput("E-CLIP", f"max_norm: got {max_norm!r}, allowed: a finite number > 0")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidInput("E-CLIP",
                           "max_norm clips as the optimizer's step begins: give it, attach(model, optimizer, max_norm=...)")
    if isinstance(optimizer, LazyOptimizer):
        raise InvalidInput("E-CLIP",
                           f"max_norm with {type(optimizer).__name__}, whose gradients may be sparse, which torch cannot clip: "
                           "leave max_norm out, or take an optimizer of torch.optim")
    return norm


def clipping(named: Sequence[tuple[str, nn.Parameter]], optimizer: Any, max_norm: float | None) -> Clipping | None:
    """None if there is no norm to clip to."""
    return None if max_norm is None else Clipping([p for _, p in named], optimizer, max_norm)


class Clipping:
    """Does what clip_grad_norm_(parameters, max_norm) would do before each step, on gradients without loss scale."""

    def __init__(self, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer, max_norm: float) -> None:
        self._parameters, self._max_norm = parameters, max_norm
        self._handle = optimizer.register_step_pre_hook(self._clip)

    def _clip(self, optimizer: torch.optim.Optimizer, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        if closure_of(args, kwargs) is not None:
            raise InvalidInput("E-CLIP",
                               "max_norm clips as the optimizer's step begins, and this step's gradients are its closure's: "
                               "clip with clip_grad_norm_ inside the closure, behind backward(), and leave max_norm out")
        scale = getattr(optimizer, "grad_scale", None)  # set by a fused optimizer, which unscales inside its step
        nn.utils.clip_grad_norm_(self._parameters, self._max_norm * (1.0 if scale is None else float(scale)))

    def remove(self) -> None:
        self._handle.remove()
