"""Factors from gradients to encoded values, and from sums to averages: weights, loss scale, learning rate."""

from __future__ import annotations

import math

import torch

from commlayer.cluster.servers.bucket_sum import as_float32
from commlayer.engine.buckets.bucket import WorkerBucket


class Units:
    """Factors between gradients, encoded values and averages.

    Residuals are kept as parts of the mean, without the loss scale. A change of weights or scale therefore does not change the
    value of an old residual. For that, gradients are divided by the total weight before they are encoded. Workers do not know
    it yet and divide by the total of the bucket's last result; when the result shows the true total, the residual is corrected
    (`EncodedBucket.finish`).
    """

    def __init__(self, members: int) -> None:
        self.members = members
        """Number of workers with which the job began. Residuals are parts of a mean over these, also when workers have left or
        joined: a constant factor of all ranks."""
        self.weight = 1.0
        self.scale = 1.0
        self.rate = 1.0
        self.total = float(members)
        """The total weight of all workers in the last step."""
        self.broken = False
        """True: this worker has aborted the step. Its weight is then sent as NaN, which makes the total weight NaN on all
        workers."""

    def copy_from(self, other: Units) -> None:
        self.weight, self.scale, self.rate = other.weight, other.scale, other.rate
        self.total = other.total

    def encoding_rate(self, bucket: WorkerBucket) -> float:
        """Returns the factor by which a bucket's gradients are multiplied before encoding, apart from weight and loss scale:
        the learning rate if the codec encodes weight updates, else 1."""
        return self.rate if bucket.encodes_updates else 1.0

    def encoding_divisor(self, bucket: WorkerBucket) -> float:
        """Returns the number by which gradients are divided before encoding: the loss scale, divided by the learning rate if
        the bucket encodes weight updates.

        Without this division, a change of the loss scale would falsify every residual. The same holds for the learning rate in
        codecs of weight updates.
        """
        return 1.0 if bucket.buffer else self.scale / (self.rate if bucket.encodes_updates else 1.0)

    def divisor(self, bucket: WorkerBucket) -> float:
        """Returns the total weight by which a bucket's contributions are divided; 0 if the bucket's result is a weighted sum,
        which workers divide. Only codecs with residuals on workers can correct for another total than the number of workers."""
        if not (bucket.served and bucket.in_means):
            return 0.0
        return as_float32(bucket.assumed or self.members) if bucket.assumes_total else float(self.members)

    def gather(self, bucket: WorkerBucket) -> None:
        """Copies a bucket's gradients into its send buffer, in the unit in which they are encoded.

        An inherited residual is a part of the mean. It is scaled as gradients of mean weight are, unless these are divided
        before they are encoded. With equal weights, the send buffer then has the scale of gradients.
        """
        bucket.exchange.total = self.divisor(bucket) if bucket.assumes_total else as_float32(self.total)
        if self.broken:
            bucket.gather(0.0, 0.0, 0.0)
            bucket.exchange.weight = math.nan
        else:
            worth = 1.0 if bucket.assumes_total else bucket.exchange.total / self.members
            bucket.gather(self.factor(bucket, bucket.exchange.total), self.weight * bucket.ranks, worth)

    def factor(self, bucket: WorkerBucket, total: float) -> float:
        """Returns the factor by which gradients are multiplied before encoding, if the total weight is assumed to be `total`.
        Codecs with residuals encode parts of the mean. Paths over collectives apply this scale later, when they know the total
        weight, so they need not assume it."""
        part = self.weight * bucket.ranks / self.encoding_divisor(bucket)
        return part * (self.members / total) if bucket.assumes_total else part

    def average(self, bucket: WorkerBucket, weight: float) -> float | torch.Tensor | None:
        """Returns the factor from the received sum to the average; None if all workers have weight 0."""
        scale = self.encoding_divisor(bucket)
        try:
            average = bucket.over_weight(scale, weight)
        except ZeroDivisionError:
            return None
        if bucket.means:
            return 1.0
        return scale / self.members if bucket.in_means else average

    def learn(self, total: float) -> None:
        """Stores the total weight of the finished step. 0: unknown."""
        self.total = total or self.total
