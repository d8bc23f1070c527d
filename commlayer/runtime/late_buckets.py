"""The stale buckets of one worker together: what a step and the caller do with their late results. Knows flows; no peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from commlayer.compressors.debts import Debt
from commlayer.runtime.flow import Flow

Factor = Callable[[Flow, float], float | torch.Tensor]
"""From a flow's sum and its weight to what makes the sum an average."""


class LateBuckets:
    """Of none it does nothing."""

    def __init__(self, flows: Sequence[Flow]) -> None:
        self._held = [(f, f.held) for f in flows if f.held is not None]

    def __bool__(self) -> bool:
        return bool(self._held)

    def commit(self, factor: Factor, into: Sequence[torch.Tensor | None]) -> bool:
        """Writes what is held into the tensors' gradients. Whether all of it is finite."""
        finite = True
        for flow, held in self._held:
            by = factor(flow, held.weight) if held.full else 0.0
            finite = held.commit(by, [into[s.tensor] for s in flow.bucket.slices]) and finite
        return finite

    def settle(self, *, applied: bool) -> None:
        """After a commit: whether the step was one for the optimizer."""
        for _, held in self._held:
            held.settle(applied=applied)

    def wait(self, deadline: float, failed: Callable[[], BaseException | None]) -> Flow | None:
        """Until no exchange is under way; the first flow whose result did not come."""
        return next((flow for flow, held in self._held if not held.wait(deadline, failed)), None)

    def take(self) -> None:
        """What has come is held."""
        for _, held in self._held:
            held.take()

    def debts(self, weight: float, members: int) -> list[tuple[Flow, Debt]]:
        """What is held, as debts of a worker of that weight."""
        return [(flow, debt) for flow, held in self._held for debt in held.debts(weight, members)]
