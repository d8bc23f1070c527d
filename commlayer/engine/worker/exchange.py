"""Defines an exchange: buckets of one worker that are launched together, and the delay after which their averages are applied.

An exchange has at most one result on its way. The result is taken before the next launch, so codecs process their steps in
order, and every rank uses the same result in the same step. There are four settings:

    in its own step           launched bucket by bucket in the backward pass, applied after it
    in the next forward pass  applied bucket by bucket (partial_step.py, step/forward_overlap.py)
    one step late             LateExchange: launched when its step ends, held when the next step ends, and applied then
    local steps               launched after an outer step or a part of it, applied at once or before the next launch
                              (sync/local_steps.py)

Averages that no optimizer applies are discarded: the ledger of their bucket rolls them back before the next launch. When the
plan changes, results that are held and gradients that are not sent become residuals (plan_handover.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from commlayer.compressors.codec import ranges
from commlayer.compressors.feedback import flagged_ranges
from commlayer.compressors.residual_slices import ResidualSlice, split_by_tensor
from commlayer.engine.buckets.bucket import WorkerBucket
from commlayer.engine.buckets.current_step import Step
from commlayer.engine.paths.path import Path

NAN = float("nan")

Factor = Callable[[WorkerBucket, float], float | torch.Tensor]
"""Function that returns the factor which turns a bucket's sum into an average. Arguments: the bucket and its total weight."""


class Exchange:
    """Buckets whose averages can be applied as soon as they arrive. The worker launches each when its gradients are final."""

    def __init__(self, buckets: Sequence[WorkerBucket], paths: Sequence[Path[Any]], step: Step) -> None:
        self.buckets, self._paths, self._step = buckets, paths, step

    def wait(self, deadline: float) -> None:
        """Waits until the sums of all buckets have arrived. All of them must have been launched."""
        for path in self._paths:
            if self._step.error is None:
                path.finish(deadline)

    @property
    def arrived_at(self) -> float:
        """Value of time.monotonic() when the last result arrived; 0 without buckets."""
        return max((path.arrived_at for path in self._paths), default=0.0)

    @property
    def has_weight(self) -> bool:
        """True, unless all workers have contributed to the sums with weight 0."""
        return any(bucket.exchange.weight for bucket in self.buckets)

    def finalize(self, *, applied: bool) -> None:
        """Marks averages as applied, or as discarded: the next launch first rolls them back and reports it to the servers."""
        for bucket in self.buckets:
            if not bucket.buffer:
                bucket.ledger.finite = bucket.exchange.finite
                if not applied:  # what this step has encoded is dropped with it
                    bucket.exchange.kept = None
                bucket.finalize(bucket.exchange.used if applied else 0)

    def reset(self) -> None:
        """Prepares the next launch, after the results were written."""
        for path in self._paths:
            path.reset()


class LateExchange(Exchange):
    """Buckets whose averages are applied one step after their gradients (staleness 1).

    A result that was written but not applied (skipped optimizer step, cleared gradients) is held and added to the next result.
    The gradients that such a step itself encoded are rolled back, as for other buckets. A late result that is not finite is
    rolled back, too. The step that would have used it must then be skipped, unless the result's own step was skipped already.
    """

    def __init__(self, buckets: Sequence[WorkerBucket], paths: Sequence[Path[Any]], step: Step) -> None:
        super().__init__(buckets, paths, step)
        self._held = [HeldResult(bucket) for bucket in buckets]

    def __bool__(self) -> bool:
        return bool(self.buckets)

    def launch(self, deadline: float) -> None:
        """Waits for the last step's result and holds it, then launches the exchange of this step's gradients."""
        self.wait(deadline)
        if self._step.error is None and self.buckets:
            self.hold()
            self.reset()
            (path,) = self._paths
            for held in self._held:
                path.begin(held.bucket)
                held.launched()

    def hold(self) -> None:
        """Moves results from the receive buffers, one step after the step of their gradients. None may be on its way."""
        for held in self._held:
            held.take()

    @property
    def used(self) -> dict[int, int]:
        """Maps a bucket's id to the bit mask of its slices that will be written."""
        return {held.bucket.id: held.used for held in self._held}

    @property
    def not_finite(self) -> int:
        """Number of the first tensor for which this worker's own part of a held result was not finite; -1 if there is none."""
        return next((held.not_finite for held in self._held if held.not_finite >= 0), -1)

    def write(self, factor: Factor, into: Sequence[torch.Tensor | None]) -> bool:
        """Writes the held results into the tensors `into`, by tensor number. Returns True if all results are finite."""
        finite = [held.write(factor, [into[s.tensor] for s in held.bucket.slices]) for held in self._held]
        return all(finite)

    def finalize(self, *, applied: bool) -> None:
        """Ends a step while its own exchange is on its way: `hold` will roll it back if the step is skipped. `applied`: True if
        the optimizer applies the results of the previous step."""
        for held in self._held:
            held.bucket.ledger.finite = False
            held.bucket.ledger.discarded = 0 if applied else held.bucket.ledger.all_slices
        self.settle(applied=applied)

    def settle(self, *, applied: bool) -> None:
        """Records whether an optimizer applies the written results. If not, they are held for the next step."""
        for held in self._held:
            held.settle(applied=applied)

    def residuals(self, world: int, unit: int) -> list[tuple[WorkerBucket, ResidualSlice]]:
        """Returns the held results as residuals, of which each of `world` workers has an equal part, with their buckets. Equal
        parts are used, because the workers' weights might have changed since the step of the results. `unit`: see
        Units.members."""
        return [(held.bucket, each) for held in self._held for each in held.residuals(world, unit)]

    def snapshot(self) -> dict[str, torch.Tensor]:
        """Returns the state for a checkpoint. Call it when no result is on its way and `hold` has moved the last one."""
        return {f"late.{held.bucket.id}.{name}": tensor for held in self._held for name, tensor in held.snapshot().items()}

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restores the state that `snapshot` returned. A result that is missing in `tensors` gets its state before the first
        step."""
        for held in self._held:
            start = f"late.{held.bucket.id}."
            held.restore({name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)})


class HeldResult:
    """The result of one bucket that is applied one step after its gradients."""

    def __init__(self, bucket: WorkerBucket) -> None:
        self.bucket = bucket
        self._x = torch.zeros_like(bucket.x)
        """The sum, and 0 in slices that are not held."""
        self._views = bucket.layout.views(self._x)
        self._weight = 0.0
        self._slices = self._written = 0
        """Two bit masks of slices: those that will be written (`_slices`), and those that were written but can still be held
        for another step (`_written`)."""
        self._spoilt = self._skipped = False
        self.not_finite = -1
        """Number of the first tensor for which this worker's own gradient in the held result was not finite; -1 if there is
        none."""
        self._sums = torch.empty(0)
        """The sum of each slice's gradients in the running exchange. The gradients themselves have changed when the result
        arrives."""

    def launched(self) -> None:
        """Records that the bucket's send buffer contains the gradients of its next exchange."""
        self._sums = torch.stack([view.sum() for view in self.bucket.memory.views])  # on a GPU nothing waits for these

    def take(self) -> None:
        bucket, ledger, exchange = self.bucket, self.bucket.ledger, self.bucket.exchange
        dropped, ledger.discarded = ledger.discarded, 0
        self._slices |= dropped & self._written
        self._written = 0  # the next result takes their place
        if not exchange.done:
            self._keep(0)
            return
        exchange.done = False  # the result is read only once
        if not exchange.finite:
            self._spoilt = self._spoilt or not self._skipped
            bad = [s.tensor for s, finite in zip(bucket.slices, self._sums.isfinite().tolist(), strict=True) if not finite]
            self.not_finite = bad[0] if bad else -1
            dropped = ledger.all_slices
        self._keep(exchange.used & ~dropped)
        bucket.finalize(exchange.used & ~dropped)
        ledger.roll_back()

    def _keep(self, slices: int) -> None:
        """Adds slices of the received sum to those that are still held from the previous step, and clears all others."""
        bucket, held = self.bucket, self._slices
        if slices and held and not bucket.in_means:  # means over different total weights can be added
            self._x.mul_(bucket.exchange.weight / self._weight)
        for start, stop in self._ranges(slices & held):
            self._x[start:stop] += bucket.y[start:stop]
        for start, stop in self._ranges(slices & ~held):
            self._x[start:stop] = bucket.y[start:stop]
        for start, stop in self._ranges(bucket.ledger.all_slices & ~slices & ~held):
            self._x[start:stop] = 0.0
        if slices:
            self._weight = bucket.exchange.weight
        self._slices |= slices

    def _ranges(self, slices: int) -> list[tuple[int, int]]:
        return [*ranges(flagged_ranges(self.bucket.slices, slices), self.bucket.numel)]

    @property
    def used(self) -> int:
        """Bit mask of the slices that will be written. The mask is 0 before the first result, so that optimizers skip the
        tensors of these slices."""
        return self.bucket.ledger.all_slices if self._spoilt else self._slices

    def write(self, factor: Factor, targets: Sequence[torch.Tensor | None]) -> bool:
        """Writes the average into the targets, or zeros if no result is held. Returns False if the targets are NaN and the step
        must be skipped."""
        average = factor(self.bucket, self._weight) if self._slices and not self._spoilt else None
        for view, target in self.bucket.layout.pairs(targets, self._views):
            if average is None:
                target.detach().fill_(NAN if self._spoilt else 0.0)
            else:
                torch.mul(view, average, out=target.detach())
        return not self._spoilt

    def settle(self, *, applied: bool) -> None:
        self._spoilt, self._skipped, self.not_finite = False, not applied, -1
        self._written = self._slices if applied else 0
        self._slices = 0 if applied else self._slices

    def residuals(self, world: int, unit: int) -> list[ResidualSlice]:
        if not self._slices or not self._weight:
            return []
        whole = 1.0 if self.bucket.in_means else unit / self._weight
        return list(split_by_tensor(self.bucket.slices, 0, self._x * (whole / world)))

    def snapshot(self) -> dict[str, torch.Tensor]:
        tensors = {"spoilt": torch.tensor(self._spoilt)}
        if not self._slices:
            return tensors
        flags = [bool(self._slices >> i & 1) for i in range(len(self.bucket.slices))]
        weight = torch.tensor(self._weight, dtype=torch.float64)
        return tensors | {"x": self._x.cpu().clone(), "weight": weight, "used": torch.tensor(flags)}

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._spoilt = bool(tensors.get("spoilt", False))
        self._slices = self._written = 0
        if "x" in tensors:
            self._x.copy_(tensors["x"])
            self._weight = float(tensors["weight"])
            self._slices = sum(1 << i for i, flag in enumerate(tensors["used"].tolist()) if flag)
