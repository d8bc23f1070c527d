"""Clips averages at the start of the optimizer's step, when they are final: attach(..., clip_grad_norm=)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from commlayer.engine.model.optimizers import find_closure
from commlayer.errors import InvalidInput
from commlayer.optim.lazy import LazyOptimizer


def check_clip_grad_norm(clip_grad_norm: Any, optimizer: Any) -> float | None:
    """Returns the argument clip_grad_norm as a number, or None. Raises ValueError if it is not a finite positive number, or if
    there is no supported optimizer at whose step to clip."""
    if clip_grad_norm is None:
        return None
    try:
        norm = float(clip_grad_norm)
    except (TypeError, ValueError):
        norm = -1.0
    if not 0 < norm < float("inf"):
        raise InvalidInput("E-CLIP", f"clip_grad_norm: got {clip_grad_norm!r}, but it must be a finite number above 0")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidInput("E-CLIP",
                           "clip_grad_norm clips at the start of the optimizer's step, but attach() has no optimizer: call "
                           "attach(model, optimizer, clip_grad_norm=...)")
    if isinstance(optimizer, LazyOptimizer):
        raise InvalidInput("E-CLIP",
                           f"clip_grad_norm is not supported with {type(optimizer).__name__}, because torch cannot clip its "
                           "sparse gradients: leave clip_grad_norm out, or use an optimizer of torch.optim")
    return norm


def clipping(named: Sequence[tuple[str, nn.Parameter]], optimizer: Any, clip_grad_norm: float | None) -> Clipping | None:
    """Creates the object that clips gradients before each optimizer step; returns None if `clip_grad_norm` is None."""
    return None if clip_grad_norm is None else Clipping([p for _, p in named], optimizer, clip_grad_norm)


class Clipping:
    """Clips gradients before each optimizer step as clip_grad_norm_(parameters, max_norm) does. Gradients with a loss scale are
    clipped as if they had none."""

    def __init__(self, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer, clip_grad_norm: float) -> None:
        self._parameters, self._clip_grad_norm = parameters, clip_grad_norm
        self._handle = optimizer.register_step_pre_hook(self._clip)

    def _clip(self, optimizer: torch.optim.Optimizer, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        if find_closure(args, kwargs) is not None:
            raise InvalidInput("E-CLIP",
                               "clip_grad_norm clips at the start of the optimizer's step, but a closure computes the "
                               "gradients of this step later: call clip_grad_norm_ inside the closure, after backward(), and "
                               "leave clip_grad_norm out")
        scale = getattr(optimizer, "grad_scale", None)  # set by a fused optimizer, which unscales inside its step
        nn.utils.clip_grad_norm_(self._parameters, self._clip_grad_norm * (1.0 if scale is None else float(scale)))

    def remove(self) -> None:
        self._handle.remove()
