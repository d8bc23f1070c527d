"""Averages into parameters' gradients. Knows parameters and a worker; nothing of hooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from commlayer.engine.worker import Worker


def targets_of(worker: Worker, parameters: Iterable[nn.Parameter]) -> list[torch.Tensor | None]:
    """What averages are written into: `.grad`, made where only others had one, None where nothing comes back."""
    pairs = zip(parameters, worker.used(), strict=False)
    return [None if not anyone else torch.empty_like(p) if p.grad is None else p.grad for p, anyone in pairs]


def hand_out(worker: Worker, parameters: Sequence[nn.Parameter]) -> bool:
    """Waits for late results and writes them into gradients; the others become None. Whether there are any."""
    worker.drain()
    grads = targets_of(worker, parameters)
    found = any(grad is not None for grad in grads)
    if found:
        for grad in grads:
            if grad is not None:
                grad.detach().zero_()
        worker.hand_out([*grads, *[None] * (len(worker.job.tensors) - len(grads))])
        for p, grad in zip(parameters, grads, strict=True):
            p.grad = grad
    return found


def write_gradient(p: torch.Tensor, average: torch.Tensor, *, keep: bool) -> None:
    """Into `.grad`, if it is not there already. `keep`: it may lie where `average` does."""
    if p.grad is None:
        p.grad = average if keep else average.clone()
    elif p.grad.data_ptr() != average.data_ptr():
        p.grad.detach().copy_(average)
