"""Local steps: every H-th step the workers' changes since the last exchange are averaged. Knows a worker; no hooks.

An exchange takes the way of a step's gradients, codec and residual and all, with start minus end in their place. What comes
back is the outer optimizer's gradient at the start, and all workers go on from where that leads, on the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from commlayer.optim import Outer
from commlayer.runtime.worker import Worker

log = logging.getLogger("commlayer")


class StepWeights:
    """What a worker's changes count for in an exchange: the mean of what the batches of its steps weighed since the last."""

    def __init__(self, weight: float, total: float | None) -> None:
        self._now = weight, total
        self._sum = [0.0, 0.0, 0.0, 0.0]
        """Steps, their weights, those that say what all weigh, and that."""

    def weigh(self, weight: float, total: float | None) -> None:
        """From now on, for a batch of that weight; see Worker.weigh."""
        self._now = weight, total

    def count(self) -> None:
        """A step has been taken."""
        weight, total = self._now
        for i, term in enumerate((1.0, weight, float(total is not None), total or 0.0)):
            self._sum[i] += term

    def take(self) -> tuple[float, float | None]:
        """Weight and total of an exchange of the steps so far."""
        (steps, weights, told, totals), self._sum = self._sum, [0.0, 0.0, 0.0, 0.0]
        if not steps:
            return self._now
        return weights / steps, totals / steps if told == steps else None

    def snapshot(self) -> torch.Tensor:
        return torch.tensor(self._sum, dtype=torch.float64)

    def restore(self, kept: torch.Tensor | None) -> None:
        self._sum = [0.0, 0.0, 0.0, 0.0] if kept is None else kept.tolist()


class LocalSteps:
    """Of one model. `every` may change between two exchanges."""

    def __init__(self, parameters: Sequence[nn.Parameter], every: int, outer: Outer, weights: StepWeights) -> None:
        self._parameters, self.every, self.weights = parameters, every, weights
        self.taken = 0
        """Steps since the last exchange."""
        self._starts = [_wide(p) for p in parameters]
        self._outer = outer.over(self._starts)

    def count(self) -> None:
        """A backward pass is over, its optimizer step still to come."""
        if self.taken == 0:
            for start, p in zip(self._starts, self._parameters, strict=True):
                if not torch.equal(start.to(p.dtype), p):  # the script has put other weights in place
                    start.copy_(p.detach())
        self.taken += 1
        self.weights.count()

    @property
    def due(self) -> bool:
        return self.taken >= self.every

    def exchange(self, worker: Worker, buffers: Sequence[torch.Tensor], deadline_s: float) -> None:
        """All ranks call it, each behind an optimizer step: afterwards they have the same weights and buffers."""
        worker.scale = worker.rate = 1.0  # the unit is that of the weights
        worker.weigh(*self.weights.take())
        with torch.no_grad():
            changes = [start - p for start, p in zip(self._starts, self._parameters, strict=True)]
        for number in reversed(range(len(changes))):
            worker.ready(number, changes[number])
        worker.finish([*changes, *buffers], deadline_s)
        worker.commit([*changes, *buffers])
        # A rank whose optimizer step is still to come (the scaler skipped the last) is ahead by the steps that it took since.
        self.taken = max(0, self.taken - self.every)
        if all(bool(change.isfinite().all()) for change in changes):
            for start, change in zip(self._starts, changes, strict=True):
                start.grad = change
            self._outer.step()
            self._outer.zero_grad()
        else:
            log.warning("some worker's weights are not finite: all go back to those of the last exchange")
        with torch.no_grad():
            for start, p in zip(self._starts, self._parameters, strict=True):
                p.copy_(start)

    def snapshot(self) -> dict[str, torch.Tensor]:
        """For a checkpoint. Starts are in it: between two exchanges no model's file holds them."""
        kept = {"local.taken": torch.tensor(self.taken), "local.weights": self.weights.snapshot()}
        for number, start in enumerate(self._starts):
            kept[f"local.start.{number}"] = start.detach().cpu().clone()
            velocity = self._outer.state[start].get("momentum_buffer")
            if velocity is not None:
                kept[f"local.velocity.{number}"] = velocity.detach().cpu().clone()
        return kept

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The reverse."""
        self.taken = int(tensors["local.taken"])
        self.weights.restore(tensors.get("local.weights"))
        for number, start in enumerate(self._starts):
            start.copy_(tensors[f"local.start.{number}"])
            velocity = tensors.get(f"local.velocity.{number}")
            self._outer.state[start] = {} if velocity is None else {"momentum_buffer": velocity.clone().to(start.device)}


def _wide(p: nn.Parameter) -> torch.Tensor:
    """A copy, in float32 where the parameter is narrower, so that small changes of many exchanges add up."""
    return p.detach().to(torch.float32 if p.element_size() < 4 else p.dtype, copy=True)
