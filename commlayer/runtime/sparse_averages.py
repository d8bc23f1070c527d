"""Averages with few entries as sparse gradients, for optimizers that step only those. Knows parameters, nothing of codecs.

What came back is looked through once, whatever codec and way it took. It is the same on all ranks to the last bit, so all
choose alike, as replicas of a lazy optimizer must.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from commlayer.compressors import kernels
from commlayer.optim.entries import sparse_gradient
from commlayer.optim.lazy import Lazy

LEAST = 4096
"""Elements below which a dense step is as fast."""
MOST = 8
"""One element in so many may be an entry: beyond, a dense step is as fast."""
SMALLEST = 2.0**-126
"""What is below all normal numbers counts as nothing."""


def stepped_lazily(optimizer: Any, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Those of the parameters whose averages are worth handing over as entries."""
    if not isinstance(optimizer, Lazy):
        return []
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [p for p in parameters if id(p) in held and p.numel() >= LEAST and p.device.type == "cpu" and p.is_contiguous()]


def make_sparse(parameters: Sequence[nn.Parameter]) -> None:
    """`.grad` becomes sparse COO where it has few entries and is finite."""
    for p in parameters:
        if p.grad is None or p.grad.is_sparse or not p.grad.is_contiguous():
            continue
        room = p.numel() // MOST
        idx, values = torch.empty(room, dtype=torch.int32), torch.empty(room)
        count, beyond, finite = kernels.select(p.grad.view(-1), None, SMALLEST, 0, idx, values)
        if finite and not beyond:
            p.grad = sparse_gradient(idx[:count], values[:count], p.shape)


def make_dense(parameters: Sequence[nn.Parameter]) -> None:
    """Ahead of an exchange: what is left of the last one's, to which this backward pass has added nothing."""
    for p in parameters:
        if p.grad is not None and p.grad.is_sparse:
            p.grad = p.grad.to_dense()
