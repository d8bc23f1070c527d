"""DeMo (Peng, Quesnelle, Kingma: Decoupled Momentum Optimization, 2024), implemented from the paper for comparison.

Each tensor is cut into chunks of 64 (matrices into squares of 64 x 64) and transformed by the DCT. Of each chunk, a rank sends
the `entries` largest coefficients and subtracts them from its momentum. So the momentum is its own error feedback. All ranks
step by the sign of the mean of all sent coefficients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import nn

CHUNK = 64
Gather = Callable[[torch.Tensor], list[torch.Tensor]]
"""All-gather: takes one rank's tensor and returns those of all ranks, in order of ranks."""


@cache
def dct(n: int) -> torch.Tensor:
    """The matrix of the orthonormal DCT-II; its rows are the cosines."""
    k, i = torch.arange(n, dtype=torch.float32)[:, None], torch.arange(n, dtype=torch.float32)[None]
    matrix = torch.cos(math.pi * (i + 0.5) * k / n) * math.sqrt(2 / n)
    matrix[0] /= math.sqrt(2)
    return matrix


def _side(length: int) -> int:
    """The largest divisor of `length` that is at most CHUNK."""
    return next(side for side in range(min(CHUNK, length), 0, -1) if length % side == 0)


class Chunks:
    """Converts a tensor to rows of DCT coefficients, one row per chunk, and back."""

    def __init__(self, shape: torch.Size) -> None:
        self._shape = shape
        flat = (math.prod(shape[:1]), math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
        self._rows, self._columns = (_side(length) for length in flat)
        self._grid = (flat[0] // self._rows, self._rows, flat[1] // self._columns, self._columns)
        self.size = self._rows * self._columns

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        cut = x.reshape(self._grid).permute(0, 2, 1, 3)
        return (dct(self._rows) @ cut @ dct(self._columns).T).reshape(-1, self.size)

    def decode(self, coefficients: torch.Tensor) -> torch.Tensor:
        cut = coefficients.view(self._grid[0], self._grid[2], self._rows, self._columns)
        return (dct(self._rows).T @ cut @ dct(self._columns)).permute(0, 2, 1, 3).reshape(self._shape)


class DeMo(torch.optim.Optimizer):
    """The optimizer. `sent` is the bytes that this rank sent in the last step."""

    def __init__(self, params: Iterable[nn.Parameter], gather: Gather, lr: float, decay: float = 0.999,
                 entries: int = 32) -> None:
        super().__init__(params, {"lr": lr, "decay": decay, "entries": entries})
        self._gather, self.sent = gather, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        payloads, parts = [], []
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"], state["chunks"] = torch.zeros_like(p), Chunks(p.shape)
                momentum, chunks = state["momentum"], state["chunks"]
                momentum.mul_(group["decay"]).add_(p.grad, alpha=group["lr"])
                coefficients = chunks.encode(momentum)
                places = coefficients.abs().topk(min(group["entries"], chunks.size), dim=1).indices
                values = coefficients.gather(1, places).half()
                momentum.sub_(chunks.decode(torch.zeros_like(coefficients).scatter_(1, places, values.float())))
                payloads += [places.short().flatten(), values.flatten().view(torch.int16)]
                parts.append((p, group["lr"], chunks, coefficients.shape, places.shape))
        own = torch.cat(payloads)
        self.sent = own.numel() * 2
        payloads_of_all, at = self._gather(own), 0
        for p, lr, chunks, shape, shape_sent in parts:
            count, mean = math.prod(shape_sent), torch.zeros(shape)
            for payload in payloads_of_all:
                places = payload[at : at + count].view(shape_sent).long()
                values = payload[at + count : at + 2 * count].view(torch.float16).view(shape_sent).float()
                mean.scatter_add_(1, places, values)
            at += 2 * count
            p.sub_(chunks.decode(mean).sign(), alpha=lr)
