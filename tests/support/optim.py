"""Sparse gradients, and the dense optimizers that lazy ones are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from commlayer.optim.sparse_gradients import sparse_gradient


class Case(NamedTuple):
    """A lazy optimizer and torch's equivalent."""

    lazy: Callable[..., Any]
    dense: Callable[..., torch.optim.Optimizer]
    settings: dict[str, Any]


def draw(shape: tuple[int, ...], most: int, scale: float = 1.0) -> torch.Tensor:
    """A sparse gradient with up to `most` entries, from none on."""
    n = torch.Size(shape).numel()
    idx = torch.randperm(n)[: int(torch.randint(0, most + 1, ()))].sort().values
    return sparse_gradient(idx.to(torch.int32), torch.randn(len(idx)) * scale, shape)


class Race:
    """The same gradients for a lazy optimizer, and for torch's in double precision and in single."""

    def __init__(self, case: Case, shape: tuple[int, ...] = (23, 13), **settings: Any) -> None:
        torch.manual_seed(7)
        start = torch.randn(shape)
        self.shape = shape
        self.lazy, self.single = nn.Parameter(start.clone()), nn.Parameter(start.clone())
        self.exact = nn.Parameter(start.double())
        self.optimizer = case.lazy([self.lazy], **case.settings, **settings)
        self.rivals = [case.dense([self.exact], **case.settings), case.dense([self.single], **case.settings)]

    def step(self, gradient: torch.Tensor | None, rate: float | None = None) -> None:
        dense = None if gradient is None else gradient.to_dense()
        self.lazy.grad = gradient
        self.exact.grad, self.single.grad = None if dense is None else dense.double(), dense
        for optimizer in (self.optimizer, *self.rivals):
            for group in optimizer.param_groups:
                group["lr"] = rate if rate is not None else group["lr"]
            optimizer.step()

    def errors(self) -> tuple[float, float]:
        """Of the lazy optimizer, and of torch's in single precision; both against double precision."""
        ours, torchs = (float((p.detach().double() - self.exact.detach()).abs().max()) for p in (self.lazy, self.single))
        return ours, torchs


def rates(steps: int, top: float) -> Iterable[float]:
    """A warmup, a decay, and a restart."""
    return [top * (0.1 + (t % 23) / 23) * 0.98**t for t in range(steps)]
