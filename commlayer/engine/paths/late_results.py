"""Keeps late results: averages that are applied one step after their gradients (staleness 1).

The plan marks the bucket of a late result `stale`. Its exchange begins when its step ends, and runs during the next step
(paths/path.py). When that step ends, the result moves from the bucket's receive buffer to a LateResult and is written with the
averages of the step; then the next exchange begins. So a bucket has one running exchange at a time, codecs process their steps
in order, and every rank uses the same result in the same step.

A result that was written but not applied (skipped optimizer step, cleared gradients) is kept and added to the next result. The
gradients that such a step itself encoded are rolled back, as for other buckets. A late result that is not finite is rolled
back, too. The step that would have used it must then be skipped, unless the result's own step was skipped already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from commlayer.compressors.codec import ranges
from commlayer.compressors.feedback import ranges_of
from commlayer.compressors.residual_slices import ResidualSlice, split_by_tensor
from commlayer.engine.buckets.bucket import WorkerBucket

NAN = float("nan")

Factor = Callable[[WorkerBucket, float], float | torch.Tensor]
"""Function that returns the factor which turns a bucket's sum into an average. Arguments: the bucket and its total weight."""


class LateResult:
    """The late result of one bucket: its average, which is applied one step after its gradients."""

    def __init__(self, bucket: WorkerBucket) -> None:
        self._bucket = bucket
        self.x = torch.zeros_like(bucket.x)
        self._views = bucket.layout.views(self.x)
        self.weight = 0.0
        self._slices = self._written = 0
        """Two bit masks of slices: those that will be written (`_slices`), and those that were written but can still be kept
        for another step (`_written`)."""
        self._spoilt = self._skipped = False
        self.not_finite = -1
        """Number of the first tensor for which this worker's own gradient in the kept result was not finite; -1 if there is
        none."""
        self._sums = torch.empty(0)
        """The sum of each slice's gradients in the running exchange. The gradients themselves have changed when the result
        arrives."""

    def sent(self) -> None:
        """Records that the bucket's send buffer contains the gradients of its next exchange."""
        self._sums = torch.stack([view.sum() for view in self._bucket.memory.views])  # on a GPU nothing waits for these

    def take(self) -> None:
        """Moves the result from the bucket's receive buffer into this object, one step after the step of its gradients."""
        bucket, ledger = self._bucket, self._bucket.ledger
        dropped, ledger.discarded = ledger.discarded, 0
        self._slices |= dropped & self._written
        self._written &= ~dropped
        if not bucket.exchange.done:
            return
        bucket.exchange.done = False  # the result is read only once
        if not bucket.exchange.finite:
            self._spoilt = self._spoilt or not self._skipped
            bad = [s.tensor for s, finite in zip(bucket.slices, self._sums.isfinite().tolist(), strict=True) if not finite]
            self.not_finite = bad[0] if bad else -1
            dropped = ledger.all_slices
        kept = bucket.exchange.used & ~dropped
        self._add(kept)
        bucket.finalize(kept)
        ledger.roll_back()

    def _add(self, slices: int) -> None:
        """Stores slices of the received sum, or adds them to slices that were kept from the previous step."""
        bucket = self._bucket
        if not slices:
            return
        y = bucket.y
        if self._slices and not bucket.in_means:  # means over different total weights can be added
            self.x.mul_(bucket.exchange.weight / self.weight)
        for start, stop in ranges(ranges_of(bucket.slices, slices & self._slices), bucket.numel):
            self.x[start:stop] += y[start:stop]
        for start, stop in ranges(ranges_of(bucket.slices, slices & ~self._slices), bucket.numel):
            self.x[start:stop] = y[start:stop]
        self.weight = bucket.exchange.weight
        self._slices |= slices

    @property
    def full(self) -> bool:
        return self._slices > 0

    @property
    def used(self) -> int:
        """Bit mask of the slices that will be written. It is 0 before the first result, so that optimizers skip the tensors of
        these slices."""
        return self._bucket.ledger.all_slices if self._spoilt else self._slices

    def commit(self, factor: float | torch.Tensor, targets: Sequence[torch.Tensor | None]) -> bool:
        """Writes the kept result times `factor` into the targets, or zeros if none is kept. Returns False if the targets are
        NaN and the step must be skipped."""
        self._forget_others()
        for view, target in self._bucket.layout.pairs(targets, self._views):
            if self._slices and not self._spoilt:
                torch.mul(view, factor, out=target.detach())
            else:
                target.detach().fill_(NAN if self._spoilt else 0.0)
        return not self._spoilt

    def _forget_others(self) -> None:
        """Clears slices that were written in an earlier step and have no new result."""
        others = self._bucket.ledger.all_slices & ~self._slices
        for start, stop in ranges(ranges_of(self._bucket.slices, others), self._bucket.numel):
            self.x[start:stop] = 0.0

    def finalize(self, *, finite: bool) -> None:
        """Ends a step while its own exchange is still running: records which slices of this exchange `take` will roll back.
        `finite`: True if the optimizer applies the result of the previous step."""
        if not self._bucket.buffer:
            self._bucket.ledger.finite = False
            self._bucket.ledger.discarded = 0 if finite else self._bucket.ledger.all_slices
        self.settle(applied=finite)

    def settle(self, *, applied: bool) -> None:
        """Records, after the result was written, whether the optimizer applied it. If not, the result is kept for the next
        step."""
        self._spoilt, self._skipped, self.not_finite = False, not applied, -1
        self._written = self._slices if applied else 0
        self._slices = 0 if applied else self._slices

    def residuals(self, world: int, unit: int) -> list[ResidualSlice]:
        """Returns the kept result as residuals, of which each of `world` workers has an equal part. Equal parts are used,
        because the workers' weights might have changed since the result's step. `unit`: see Units.members."""
        if not self._slices or not self.weight:
            return []
        self._forget_others()
        whole = 1.0 if self._bucket.in_means else unit / self.weight
        return list(split_by_tensor(self._bucket.slices, 0, self.x * (whole / world)))

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Returns the state for a checkpoint. Call it when no exchange is running and `take` has moved the last result."""
        tensors = {"spoilt": torch.tensor(self._spoilt)}
        if not self._slices:
            return tensors
        flags = [bool(self._slices >> i & 1) for i in range(len(self._bucket.slices))]
        weight = torch.tensor(self.weight, dtype=torch.float64)
        return tensors | {"x": self.x.cpu().clone(), "weight": weight, "used": torch.tensor(flags)}

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restores the state that `snapshot` returned. An empty one restores the state before the first step."""
        self._spoilt = bool(tensors.get("spoilt", False))
        self._slices = self._written = 0
        if "x" in tensors:
            self.x.copy_(tensors["x"])
            self.weight = float(tensors["weight"])
            self._slices = sum(1 << i for i, flag in enumerate(tensors["used"].tolist()) if flag)


class LateResults:
    """The late results of one worker: averages that are applied one step after their gradients."""

    def __init__(self, buckets: Sequence[WorkerBucket]) -> None:
        self._buckets = [bucket for bucket in buckets if bucket.late]
        self.of = {bucket.id: LateResult(bucket) for bucket in self._buckets}

    def __bool__(self) -> bool:
        return bool(self.of)

    @property
    def not_finite(self) -> int:
        """Number of the first tensor for which this worker's own part of a kept result was not finite; -1 if there is none."""
        return next((result.not_finite for result in self.of.values() if result.not_finite >= 0), -1)

    def commit(self, factor: Factor, into: Sequence[torch.Tensor | None]) -> bool:
        """Writes the kept results into the tensors `into`, by tensor number. Returns True if all results are finite."""
        finite = True
        for bucket in self._buckets:
            result = self.of[bucket.id]
            by = factor(bucket, result.weight) if result.full else 0.0
            finite = result.commit(by, [into[s.tensor] for s in bucket.slices]) and finite
        return finite

    def finalize(self, *, finite: bool) -> None:
        """Ends a step while its own exchanges are still running. `finite`: True if the optimizer applies the results of the
        previous step."""
        for result in self.of.values():
            result.finalize(finite=finite)

    def settle(self, *, applied: bool) -> None:
        """Records whether an optimizer has applied results that were written outside a step."""
        for result in self.of.values():
            result.settle(applied=applied)

    def take(self) -> None:
        for result in self.of.values():
            result.take()

    def residuals(self, world: int, unit: int) -> list[tuple[WorkerBucket, ResidualSlice]]:
        """Returns the kept results of all buckets as residuals of one of `world` workers, with their buckets."""
        return [(bucket, each) for bucket in self._buckets for each in self.of[bucket.id].residuals(world, unit)]

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Returns the state for a checkpoint. Call it when no exchange is running."""
        return {f"late.{number}.{name}": tensor
                for number, result in self.of.items() for name, tensor in result.snapshot().items()}

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restores the state that `snapshot` returned. A result that is missing in `tensors` gets its state before the first
        step."""
        for number, result in self.of.items():
            start = f"late.{number}."
            result.restore({name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)})
