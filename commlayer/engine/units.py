"""Factors from gradients to coded values, and from sums to averages: weights, loss scale, learning rate.

Residuals are kept in parts of the mean, without the loss scale. So a change of weights or scale does not change the value of an
old residual. For that, the weight of all workers must be known before coding. A worker assumes the total of the last step,
unless the script gives it. If the assumption was wrong, the server requests that the step be coded again (Flag.AGAIN).
"""

from __future__ import annotations

import contextlib
import math

import torch

from commlayer.cluster.summation import as_float32
from commlayer.engine.bucket import WorkerBucket
from commlayer.errors import InvalidInput


class Units:
    def __init__(self, members: int, *, shared: bool) -> None:
        """`shared`: several ranks of a node add up their gradients before one of them codes the sum."""
        self.members, self._shared = members, shared
        self.weight = 1.0
        self.scale = 1.0
        self.rate = 1.0
        self.total = float(members)
        """The weight of all workers together: given, or that of the last step."""
        self.told = False
        """Whether the script gave the total."""
        self.broken = False
        """Whether this worker has broken the step off. Then its part weighs NaN, and so does the sum."""

    def take(self, other: Units) -> None:
        self.weight, self.scale, self.rate = other.weight, other.scale, other.rate
        self.total, self.told = other.total, other.told

    def rate_of(self, bucket: WorkerBucket) -> float:
        """The factor on a gradient before coding, in addition to weight and loss scale."""
        return self.rate if bucket.in_updates else 1.0

    def scale_of(self, bucket: WorkerBucket) -> float:
        """Coded values are gradients divided by this: the loss scale, over the learning rate if the bucket codes updates.

        With the loss scale inside, a change of scale would falsify every residual. So would a change of the learning rate in
        codecs of updates."""
        return 1.0 if bucket.buffer else self.scale / self.rate_of(bucket)

    def gather(self, bucket: WorkerBucket) -> None:
        bucket.total = as_float32(self.total)
        if self.broken:
            bucket.gather(0.0, 0.0, 0.0)
            bucket.weight = math.nan
        else:
            bucket.gather(self.factor(bucket), self.weight, self.worth(bucket))

    def factor(self, bucket: WorkerBucket) -> float:
        """From a gradient to the value that is coded."""
        part = self.weight / self.scale_of(bucket)
        return part * (self.members / (bucket.total or self.total)) if _by_total(bucket) else part

    def worth(self, bucket: WorkerBucket) -> float:
        """The value in x of a residual of 1.

        Residuals are counted so that the sum over all workers is `members` times what the mean lacks. With equal weights, x is
        then the gradient."""
        return 1.0 if _by_total(bucket) else bucket.total / self.members

    def average(self, bucket: WorkerBucket, weight: float) -> float | torch.Tensor | None:
        """The factor from the sum to the average; None if all workers have weight 0."""
        scale = self.scale_of(bucket)
        with contextlib.suppress(ZeroDivisionError):
            average = scale / weight if bucket.served else bucket.over_weight(scale)
            if bucket.means:
                return 1.0
            return scale / self.members if bucket.in_means else average
        return None

    def weigh(self, weight: float, total: float | None) -> None:
        """Sets the weight from now on. `total`: the weight of all workers together, None if the script does not give it.

        Ranks of one node ignore a given `total`. They must all use the same value, the weight of the last step."""
        self.weight, self.told = weight, total is not None and not self._shared
        if total is not None and self.told:
            self.total = total

    def regroup(self, total: float) -> None:
        """The members have changed; all workers of the current step together have weight `total`."""
        self.total, self.told = total, False

    def hear(self, total: float) -> None:
        """A server has sent the weight of all workers in this step. Ranks of one node must all use the same value, so they
        ignore it."""
        if not self._shared:
            self.total, self.told = total, False

    def learn(self, total: float) -> None:
        """Takes over the total weight of the finished step, as the assumption for the next one. 0 if unknown.

        Raises ValueError if the script gave another total."""
        if not total:
            return
        if self.told and abs(total - self.total) > 1e-6 * total:
            raise InvalidInput("E-WEIGHT",
                               f"weight(total=...) said that all workers weigh {self.total:g}, they weigh {total:g}: give the "
                               "sum over all of them, or leave it out")
        if not self.told:
            self.total = total


def _by_total(bucket: WorkerBucket) -> bool:
    """Whether x must be a part of the mean from the start. Staged paths learn the total weight before they code."""
    return bucket.in_means and bucket.served
