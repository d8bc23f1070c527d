"""Factors from gradients to what is coded, and from what came back to averages: weights, loss scale, learning rate.

What codecs keep back is owed in parts of the mean, without loss scale: then no change of weights or scale changes what an old
debt is worth. For that all workers' weight must be known before coding. It is taken to be what it was in the last step, unless
the script says what it is; a server that finds it was another has the step coded again (Flag.AGAIN).
"""

from __future__ import annotations

import contextlib
import math

import torch

from commlayer.cluster.summation import as_float32
from commlayer.engine.bucket import WorkerBucket
from commlayer.errors import InvalidInput


class Units:
    """One worker's, in the step under way."""

    def __init__(self, members: int, *, shared: bool) -> None:
        """`shared`: several ranks of a node add up their gradients before one of them codes the sum."""
        self.members, self._shared = members, shared
        self.weight = 1.0
        self.scale = 1.0
        self.rate = 1.0
        self.total = float(members)
        """What all workers weigh, as far as this one knows."""
        self.told = False
        """Whether the script said so."""
        self.broken = False
        """Whether this worker has broken the step off: then its part weighs NaN, and so does the sum."""

    def take(self, other: Units) -> None:
        self.weight, self.scale, self.rate = other.weight, other.scale, other.rate
        self.total, self.told = other.total, other.told

    def rate_of(self, bucket: WorkerBucket) -> float:
        """What a gradient is multiplied with before it is coded, besides weight and loss scale."""
        return self.rate if bucket.in_updates else 1.0

    def scale_of(self, bucket: WorkerBucket) -> float:
        """Gradients are coded without the loss scale, or a change of scale would falsify every residual.

        So may a change of the learning rate: codecs that say so have it inside.
        """
        return 1.0 if bucket.buffer else self.scale / self.rate_of(bucket)

    def gather(self, bucket: WorkerBucket) -> None:
        """Gradients to x."""
        bucket.total = as_float32(self.total)
        if self.broken:
            bucket.gather(0.0, 0.0, 0.0)
            bucket.weight = math.nan
        else:
            bucket.gather(self.factor(bucket), self.weight, self.worth(bucket))

    def factor(self, bucket: WorkerBucket) -> float:
        """From a gradient to what is coded of it."""
        part = self.weight / self.scale_of(bucket)
        return part * (self.members / (bucket.total or self.total)) if _by_total(bucket) else part

    def worth(self, bucket: WorkerBucket) -> float:
        """What a debt of 1 is in x. Debts are counted so that all workers' sum up to `members` times what the mean lacks: then
        with equal weights x is the gradient."""
        return 1.0 if _by_total(bucket) else bucket.total / self.members

    def average(self, bucket: WorkerBucket, weight: float) -> float | torch.Tensor | None:
        """What makes an average of what came back; None if all workers' weight is 0."""
        scale = self.scale_of(bucket)
        with contextlib.suppress(ZeroDivisionError):
            average = scale / weight if bucket.served else bucket.over_weight(scale)
            if bucket.means:
                return 1.0
            return scale / self.members if bucket.in_means else average
        return None

    def weigh(self, weight: float, total: float | None) -> None:
        """From now on; `total` is what all weigh then, None if the script does not say.

        Ranks of one node add up parts of what they all know, the weight of the last step, whatever each of them was told.
        """
        self.weight, self.told = weight, total is not None and not self._shared
        if total is not None and self.told:
            self.total = total

    def regroup(self, total: float) -> None:
        """Other workers take part from now on: so much all weigh in the step under way."""
        self.total, self.told = total, False

    def hear(self, total: float) -> None:
        """A server knows already what all weigh in this step. Ranks of one node must all take the same for granted."""
        if not self._shared:
            self.total, self.told = total, False

    def learn(self, total: float) -> None:
        """What all weighed in the step that is over, and for all that is known will in the next; 0 where nobody knows.

        ValueError if the script has said otherwise.
        """
        if not total:
            return
        if self.told and abs(total - self.total) > 1e-6 * total:
            raise InvalidInput("E-WEIGHT",
                               f"weight(total=...) said that all workers weigh {self.total:g}, they weigh {total:g}: give the "
                               "sum over all of them, or leave it out")
        if not self.told:
            self.total = total


def _by_total(bucket: WorkerBucket) -> bool:
    """Whether x has to be a part of the mean from the start. Staged paths hear what all weigh before they code."""
    return bucket.in_means and bucket.served
