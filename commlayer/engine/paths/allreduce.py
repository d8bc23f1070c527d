"""Path for uncompressed buckets: one all-reduce over all workers, called by the training thread.

On a GPU the host does not wait for sums. So the hosts exchange the total weight separately; it is NaN if a worker has aborted
the step.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from commlayer.cluster.collectives import Groups
from commlayer.cluster.process_groups import PendingCollective
from commlayer.engine.buckets import WorkerBucket
from commlayer.engine.lanes import Staging
from commlayer.engine.paths.path import BucketPath, fill, take_back
from commlayer.engine.step import Step


class _Issued(NamedTuple):
    bucket: WorkerBucket
    pending: PendingCollective
    at: float


class AllReducePath(BucketPath):
    """Sums each bucket with one all-reduce over all workers. With `groups` None this worker is the only one, and its gradients
    are the sum."""

    ordered = True

    def __init__(self, buckets: Sequence[WorkerBucket], step: Step, staging: Staging, groups: Groups | None) -> None:
        self._buckets, self._step, self._staging, self._groups = buckets, step, staging, groups
        self._issued: list[_Issued] = []
        self._hosts = groups.hosts if groups is not None and not all(bucket.read_here for bucket in buckets) else None
        self._weight: tuple[torch.Tensor, PendingCollective] | None = None
        self._left = 0

    def begin(self, bucket: WorkerBucket) -> None:
        take_back(self, bucket, self._staging)
        fill(bucket, self._step, self._staging)
        if self._groups is not None:
            self._step.counters.all_reduced(bucket.all.nbytes, self._groups.world)
            self._issued.append(_Issued(bucket, self._groups.allreduce(bucket.all), time.perf_counter()))
        self._left -= 1
        if self._hosts is not None and not self._left:  # the last bucket begins only after the backward pass
            weight = torch.tensor([bucket.weight], dtype=torch.float64)
            self._weight = weight, self._hosts.allreduce(weight)

    def _hear(self, deadline: float) -> None:
        """Waits for the total weight that the hosts exchange, and stores it in the buckets."""
        if self._weight is not None:
            weight, pending = self._weight
            pending.wait(deadline, self._step.failed)
            for bucket in self._buckets:
                bucket.received_weight = float(weight)

    def finish(self, deadline: float) -> None:
        self._hear(deadline)
        for bucket, pending, at in self._issued:
            pending.wait(deadline, self._step.failed)
            self._step.recorder.add("all.allreduce", bucket.id, at)
            bucket.read_used()

    def take(self, bucket: WorkerBucket, deadline: float | None) -> bool:
        for issued in self._issued:
            if issued.bucket is bucket:
                has_weight = self._weight is None or self._weight[1].is_over()
                if deadline is None and not (issued.pending.is_over() and has_weight):
                    return False
                self._hear(deadline or 0.0)
                issued.pending.wait(deadline or 0.0, self._step.failed)
                bucket.read_used()
                self._issued.remove(issued)
                break
        return True

    def reset(self) -> None:
        self._issued.clear()
        self._weight, self._left = None, len(self._buckets)
        for bucket in self._buckets:
            bucket.rewind()
