"""Residuals as values on elements of tensors, which belong to no bucket, codec, worker or server.

All residuals of a job are parts of the mean over the same number of workers (Units.members). Residuals of any workers and
servers can therefore be added, cut at any element, and given to any worker, under any plan: for each element, the sum stays the
same. Changes of plan (engine/worker/plan_handover.py), servers and checkpoints all move residuals in this form.

Buckets send residuals in the unit of their sums: gradients, or weight changes under local steps. Only an optimizer converts a
gradient into a weight change. So residuals that are gradients stay gradients under local steps, and are pending until they are
added to the worker's next gradients. A weight change becomes a gradient only if the effect of a gradient on a weight is a
constant: the learning rate of SGD without momentum. Otherwise the residual is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from commlayer.compressors import kernels
from commlayer.compressors.kernels import Array
from commlayer.records import Slice

Effect = Callable[[int], float]
"""Function from a tensor's number to the weight change that a gradient of 1 causes; 0 if it is not a constant."""


class ResidualSlice(NamedTuple):
    """Residual values for the elements [start, stop) of the tensor with number `tensor`."""

    tensor: int
    start: int
    values: Array

    @property
    def stop(self) -> int:
        return self.start + len(self.values)

    def times(self, factor: float) -> ResidualSlice:
        """Returns the same memory if the factor is 1, because residuals are as large as the model."""
        return self if factor == 1.0 else self._replace(values=self.values * factor)


class Residuals(NamedTuple):
    """Residuals that were not sent, by unit."""

    gradients: Sequence[ResidualSlice] = ()
    changes: Sequence[ResidualSlice] = ()
    """Weight changes of local steps."""

    def for_plan(self, *, steps_locally: bool, effect: Effect) -> PlanResiduals:
        """Returns what becomes of these residuals under a plan with or without local steps."""
        if steps_locally:
            return PlanResiduals(self.changes, self.gradients, ())
        rates = {part.tensor: effect(part.tensor) for part in self.changes}
        converted = [part.times(1.0 / rates[part.tensor]) for part in self.changes if rates[part.tensor]]
        return PlanResiduals([*self.gradients, *converted], (), sorted(tensor for tensor, rate in rates.items() if not rate))


def merge_residuals(each: Sequence[Residuals]) -> Residuals:
    return Residuals([part for one in each for part in one.gradients], [part for one in each for part in one.changes])


class PlanResiduals(NamedTuple):
    """What becomes of residuals under a plan."""

    sent: Sequence[ResidualSlice]
    """In the unit of the plan's sums: buckets send them."""
    pending: Sequence[ResidualSlice]
    """Gradients under local steps: the worker adds them to its next gradients."""
    dropped: Sequence[int]
    """Numbers of the tensors whose weight changes cannot become gradients."""


def split_by_tensor(slices: Sequence[Slice], start: int, values: Array) -> Iterator[ResidualSlice]:
    """Converts values on a bucket's elements from `start` on to values on elements of the tensors in the bucket's slices."""
    at = 0
    for s in slices:
        low, high = max(start, at), min(start + len(values), at + s.numel)
        if low < high:
            yield ResidualSlice(s.tensor, s.start + low - at, values[low - start : high - start])
        at += s.numel


def overlaps(parts: Iterable[ResidualSlice], slices: Sequence[Slice]) -> Iterator[tuple[int, Array]]:
    """Yields the values that lie on a bucket's elements, each with the bucket's element where they begin."""
    at, parts = 0, [*parts]
    for s in slices:
        for part in parts:
            low, high = max(s.start, part.start), min(s.stop, part.stop)
            if part.tensor == s.tensor and low < high:
                yield at + low - s.start, part.values[low - part.start : high - part.start]
        at += s.numel


def residual_on(parts: Iterable[ResidualSlice], slices: Sequence[Slice]) -> Array | None:
    """Returns the sum of residuals on a bucket's elements as a numpy array. Returns None if the residuals have none of these
    elements."""
    total: Array | None = None
    for at, values in overlaps(parts, slices):
        if total is None:
            total = np.zeros(sum(s.numel for s in slices), np.float32)
        total[at : at + len(values)] += kernels.to_host(values)
    return total
