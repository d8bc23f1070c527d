"""The late results of one worker together: what a step and the caller do with them. Knows buckets; no routes, no peers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from commlayer.compressors.debts import Debt
from commlayer.runtime.bucket import WorkerBucket
from commlayer.runtime.late_result import LateResult

Factor = Callable[[WorkerBucket, float], float | torch.Tensor]
"""From a bucket's sum and its weight to what makes the sum an average."""


class LateBuckets:
    """Of none it does nothing."""

    def __init__(self, buckets: Sequence[WorkerBucket]) -> None:
        self._buckets = [bucket for bucket in buckets if bucket.late]
        self.results = {bucket.id: LateResult(bucket) for bucket in self._buckets}

    def __bool__(self) -> bool:
        return bool(self.results)

    def commit(self, factor: Factor, into: Sequence[torch.Tensor | None]) -> bool:
        """Writes what is kept into the tensors' gradients. Whether all of it is finite."""
        finite = True
        for bucket in self._buckets:
            result = self.results[bucket.id]
            by = factor(bucket, result.weight) if result.full else 0.0
            finite = result.commit(by, [into[s.tensor] for s in bucket.slices]) and finite
        return finite

    def judge(self, *, finite: bool) -> None:
        """A step is over: whether it was one for the optimizer."""
        for result in self.results.values():
            result.judge(finite=finite)
            result.settle(applied=finite)

    def settle(self, *, applied: bool) -> None:
        """What was kept has been written without a step: whether it counts as applied."""
        for result in self.results.values():
            result.settle(applied=applied)

    def take(self) -> None:
        """What has come is kept."""
        for result in self.results.values():
            result.take()

    def debts(self, weight: float, members: int) -> list[tuple[WorkerBucket, Debt]]:
        """What is kept, as debts of a worker of that weight."""
        return [(bucket, debt) for bucket in self._buckets for debt in self.results[bucket.id].debts(weight, members)]

    def snapshot(self) -> dict[str, torch.Tensor]:
        """For a checkpoint, with nothing under way."""
        return {f"late.{number}.{name}": tensor
                for number, result in self.results.items() for name, tensor in result.snapshot().items()}

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The reverse. A result that is not there is as before the first step."""
        for number, result in self.results.items():
            start = f"late.{number}."
            result.restore({name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)})
