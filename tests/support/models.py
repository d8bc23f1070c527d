"""Models that use some of their parameters in a step, or compute parts of it twice; and their training alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from support.attached import Run, loss_of, mlp, weights

STEPS = 5


def train(run: Run, model: nn.Module, wrapped: Any, steps: int = STEPS) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(run, wrapped, step).backward()
        optimizer.step()
    return weights(model)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(12, 16), nn.Linear(16, 3), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor, branches: str) -> torch.Tensor:
        x = self.body(x).tanh()
        return torch.stack([{"l": self.left, "r": self.right}[b](x) for b in branches]).sum(0)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.body, self.head, self.reentrant = mlp()[:4], mlp(1)[4], reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.body, x.requires_grad_(), use_reentrant=self.reentrant))
