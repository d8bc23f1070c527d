"""Factors from gradients to encoded values, and from sums to averages: weights, loss scale, learning rate."""

from __future__ import annotations

import contextlib
import math

import torch

from commlayer.cluster.servers.bucket_sum import as_float32
from commlayer.engine.buckets.bucket import WorkerBucket
from commlayer.errors import InvalidInput


class Units:
    """Factors between gradients, encoded values and averages, and this worker's assumption of the total weight.

    Residuals are kept as parts of the mean, without the loss scale. So a change of weights or scale does not change the value
    of an old residual. For that, the total weight must be known before encoding. A worker assumes the total of the last step,
    unless the script provides it. If the assumption is wrong, the server requests that the step be encoded again (Flag.AGAIN).
    """

    def __init__(self, members: int, *, shared: bool) -> None:
        """`shared`: True if several ranks of a node add up their gradients before one of them encodes the sum."""
        self.members, self._shared = members, shared
        self.weight = 1.0
        self.scale = 1.0
        self.rate = 1.0
        self.total = float(members)
        """The total weight of all workers: provided by the script, or assumed equal to that of the previous step."""
        self.weight_known = False
        """True: the script has provided the total weight."""
        self.broken = False
        """True: this worker has aborted the step. Its weight is then sent as NaN, which makes the total weight NaN on all
        workers."""

    def take(self, other: Units) -> None:
        self.weight, self.scale, self.rate = other.weight, other.scale, other.rate
        self.total, self.weight_known = other.total, other.weight_known

    def rate_of(self, bucket: WorkerBucket) -> float:
        """Returns the factor by which a bucket's gradients are multiplied before encoding, apart from weight and loss scale:
        the learning rate if the codec encodes weight updates, else 1."""
        return self.rate if bucket.in_updates else 1.0

    def scale_of(self, bucket: WorkerBucket) -> float:
        """Returns the number by which gradients are divided before encoding: the loss scale, divided by the learning rate if
        the bucket encodes weight updates.

        Without this division, a change of the loss scale would falsify every residual. The same holds for the learning rate in
        codecs of weight updates.
        """
        return 1.0 if bucket.buffer else self.scale / (self.rate if bucket.in_updates else 1.0)

    def gather(self, bucket: WorkerBucket) -> None:
        """Copies a bucket's gradients into its send buffer, in the unit in which they are encoded.

        An inherited residual is scaled by total weight / `members`, unless it is already a part of the mean. With equal
        weights, the send buffer then has the scale of gradients.
        """
        bucket.exchange.total = total = as_float32(self.total)
        if self.broken:
            bucket.gather(0.0, 0.0, 0.0)
            bucket.exchange.weight = math.nan
        else:
            worth = 1.0 if bucket.in_means and bucket.served else total / self.members
            bucket.gather(self.factor(bucket), self.weight, worth)

    def factor(self, bucket: WorkerBucket) -> float:
        """Returns the factor by which gradients are multiplied before encoding. Codecs with residuals encode parts of the mean.
        Paths over collectives apply this scale later, when they know the total weight, so they need not assume it."""
        part = self.weight / self.scale_of(bucket)
        in_parts = bucket.in_means and bucket.served
        return part * (self.members / (bucket.exchange.total or self.total)) if in_parts else part

    def average(self, bucket: WorkerBucket, weight: float) -> float | torch.Tensor | None:
        """Returns the factor from the received sum to the average; None if all workers have weight 0."""
        scale = self.scale_of(bucket)
        with contextlib.suppress(ZeroDivisionError):
            average = bucket.over_weight(scale, weight)
            if bucket.means:
                return 1.0
            return scale / self.members if bucket.in_means else average
        return None

    def weigh(self, weight: float, total: float | None) -> None:
        """Sets this worker's weight from now on. `total`: the sum of all workers' weights; None if the script does not provide
        it.

        Several ranks of a node that share buckets ignore `total`, because all of them must assume the same value: the total
        weight of the last step.
        """
        self.weight, self.weight_known = weight, total is not None and not self._shared
        if total is not None and self.weight_known:
            self.total = total

    def regroup(self, total: float) -> None:
        """Sets the total weight of all workers to `total`, after the members have changed during a step."""
        self.total, self.weight_known = total, False

    def receive(self, total: float) -> None:
        """Stores the total weight of this step, which a server has sent. Ranks of a node that share buckets ignore this value,
        because all of them must assume the same one."""
        if not self._shared:
            self.regroup(total)

    def learn(self, total: float) -> None:
        """Stores the total weight of the finished step, as the assumption for the next one. 0: unknown.

        Raises ValueError if the script provided another total.
        """
        if not total:
            return
        if self.weight_known and abs(total - self.total) > 1e-6 * total:
            raise InvalidInput("E-WEIGHT",
                               f"weight(total={self.total:g}) differs from the sum of all workers' weights, {total:g}: pass "
                               "this sum, or leave total out")
        if not self.weight_known:
            self.total = total
