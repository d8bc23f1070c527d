"""Residuals as tensors: what an account of applied updates and input gradients adds up with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from commlayer.compressors.residual_slices import ResidualSlice
from commlayer.engine.worker.worker import Worker


def slices_of(worker: Worker) -> list[ResidualSlice]:
    """All residuals of a worker."""
    return [part for bucket in worker.buckets for part in bucket.ledger.residuals()]


def by_tensor(parts: Iterable[ResidualSlice], shapes: Iterable[int | Sequence[int]]) -> list[torch.Tensor]:
    """The sum of these residuals, one float64 tensor per shape."""
    total = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
    for part in parts:
        total[part.tensor].view(-1)[part.start : part.stop] += torch.as_tensor(part.values).double()
    return total
