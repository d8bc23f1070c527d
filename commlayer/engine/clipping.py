"""attach(..., max_norm=): clips averages as the optimizer's step begins, when they are final in every way. No networks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from commlayer.engine.optimizer_steps import closure_of
from commlayer.errors import InvalidInput
from commlayer.optim.lazy import Lazy


def checked(max_norm: Any, optimizer: Any) -> float | None:
    """ValueError for what is no norm, or where no step tells when to clip."""
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
    if isinstance(optimizer, Lazy):
        raise InvalidInput("E-CLIP",
                           f"max_norm with {type(optimizer).__name__}, whose gradients may be sparse, which torch cannot clip: "
                           "leave max_norm out, or take an optimizer of torch.optim")
    return norm


def clipping(named: Sequence[tuple[str, nn.Parameter]], optimizer: Any, max_norm: float | None) -> Clipping | None:
    """If there is a norm to clip to."""
    return None if max_norm is None else Clipping([p for _, p in named], optimizer, max_norm)


class Clipping:
    """What clip_grad_norm_(parameters, max_norm) would do ahead of each step, of gradients without loss scale."""

    def __init__(self, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer, max_norm: float) -> None:
        self._parameters, self._max_norm = parameters, max_norm
        self._handle = optimizer.register_step_pre_hook(self._clip)

    def _clip(self, optimizer: torch.optim.Optimizer, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        if closure_of(args, kwargs) is not None:
            raise InvalidInput("E-CLIP",
                               "max_norm clips as the optimizer's step begins, and this step's gradients are its closure's: "
                               "clip "
                               "with clip_grad_norm_ inside the closure, behind backward(), and leave max_norm out")
        scale = getattr(optimizer, "grad_scale", None)  # of a fused optimizer, which takes the scale out by itself
        nn.utils.clip_grad_norm_(self._parameters, self._max_norm * (1.0 if scale is None else float(scale)))

    def remove(self) -> None:
        self._handle.remove()
