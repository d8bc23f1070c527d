"""Defines the path for uncompressed buckets: one all-reduce over all workers, called by the training thread.

On a GPU the host does not wait for sums. So the hosts exchange the total weight separately; it is NaN if a worker has aborted
the step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from commlayer.cluster.processes.bounded_calls import PendingCollective
from commlayer.cluster.processes.collectives import Groups
from commlayer.engine.buckets.bucket import BucketExchange, CollectiveBucket, WorkerBucket
from commlayer.engine.buckets.current_step import Step
from commlayer.engine.paths.path import Path
from commlayer.engine.paths.staging import Staging


class AllReducePath(Path[CollectiveBucket]):
    """Sums each bucket with one all-reduce over all workers."""

    ordered = True

    def __init__(
        self, buckets: Sequence[CollectiveBucket], step: Step, staging: Staging, groups: Groups,
    ) -> None:
        super().__init__(buckets, step, staging)
        self._groups = groups
        self._hosts = groups.hosts if not all(bucket.read_here for bucket in buckets) else None
        self._issued: dict[int, tuple[CollectiveBucket, PendingCollective, float]] = {}
        """Maps bucket id to each bucket whose all-reduce is running, the running collective and its start time."""
        self._weight: tuple[torch.Tensor, PendingCollective] | None = None
        self._left = 0

    def begin(self, bucket: CollectiveBucket) -> None:
        self._fill(bucket)
        every = bucket.memory.all
        self._step.counters.all_reduced(every.nbytes, self._groups.world)
        self._issued[bucket.id] = bucket, self._groups.allreduce(every), time.perf_counter()
        self._left -= 1
        if self._hosts is not None and not self._left:  # the last bucket begins only after the backward pass
            weight = torch.tensor([bucket.exchange.weight], dtype=torch.float64)
            self._weight = weight, self._hosts.allreduce(weight)

    def finish(self, deadline: float) -> None:
        for bucket, _, _ in [*self._issued.values()]:
            self.take(bucket, deadline)

    def take(self, bucket: WorkerBucket, deadline: float | None) -> bool:
        if bucket.id not in self._issued:
            return True
        own, pending, begin = self._issued[bucket.id]
        if deadline is None and not (pending.is_over() and (self._weight is None or self._weight[1].is_over())):
            return False
        weight = None
        if self._weight is not None:
            total, hosts = self._weight
            hosts.wait(deadline or 0.0, self._step.failed)
            weight = float(total)
        pending.wait(deadline or 0.0, self._step.failed)
        self._arrivals.last_at = time.monotonic()  # torch does not report when it arrived
        self._step.recorder.add("all.allreduce", bucket.id, begin)
        own.read_tail(weight)
        del self._issued[bucket.id]
        return True

    def reset(self) -> None:
        for bucket in self.buckets:
            bucket.exchange = BucketExchange()
        self._issued.clear()
        self._weight, self._left = None, len(self.buckets)
