"""Writes averages into parameters' gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from commlayer.engine.worker import Worker


def targets_of(worker: Worker, parameters: Iterable[nn.Parameter]) -> list[torch.Tensor | None]:
    """The tensors to write averages into: `.grad`; a new one if only other ranks had a gradient; None if no rank had one."""
    pairs = zip(parameters, worker.used(), strict=False)
    return [None if not anyone else torch.empty_like(p) if p.grad is None else p.grad for p, anyone in pairs]


def hand_out(worker: Worker, parameters: Sequence[nn.Parameter]) -> bool:
    """Waits for late results and writes them into gradients; the others become None. Returns whether there are any."""
    worker.drain()
    grads = targets_of(worker, parameters)
    has_late = any(grad is not None for grad in grads)
    if has_late:
        for grad in grads:
            if grad is not None:
                grad.detach().zero_()
        worker.hand_out([*grads, *[None] * (len(worker.job.tensors) - len(grads))])
        for p, grad in zip(parameters, grads, strict=True):
            p.grad = grad
    return has_late


def write_gradient(p: torch.Tensor, average: torch.Tensor, *, keep: bool) -> None:
    """Writes into `.grad`, unless the average is already there. `keep`: `.grad` may share the memory of `average`."""
    if p.grad is None:
        p.grad = average if keep else average.clone()
    elif p.grad.data_ptr() != average.data_ptr():
        p.grad.detach().copy_(average)
