"""Buckets that go uncompressed through one all-reduce over all workers. On the training thread; knows groups, no codecs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from commlayer.runtime.bucket import WorkerBucket
from commlayer.runtime.routes.route import Route, fill, take_back
from commlayer.runtime.staging import Staging
from commlayer.runtime.step import Step
from commlayer.transport.groups import Groups
from commlayer.transport.pending import Pending


class _Issued(NamedTuple):
    bucket: WorkerBucket
    pending: Pending
    at: float


class AllReduce(Route):
    """Route. Without groups a worker is alone, and its gradients are the sum."""

    ordered = True

    def __init__(self, buckets: Sequence[WorkerBucket], step: Step, staging: Staging, groups: Groups | None) -> None:
        self._buckets, self._step, self._staging, self._groups = buckets, step, staging, groups
        self._issued: list[_Issued] = []

    def begin(self, bucket: WorkerBucket) -> None:
        take_back(self, bucket, self._staging)
        fill(bucket, self._step, self._staging)
        if self._groups is not None:
            self._issued.append(_Issued(bucket, self._groups.allreduce(bucket.all), time.perf_counter()))

    def finish(self, deadline: float) -> None:
        for bucket, pending, at in self._issued:
            pending.wait(deadline, self._step.failed)
            self._step.recorder.add("all.allreduce", bucket.id, at)
            bucket.read_used()

    def take(self, bucket: WorkerBucket, deadline: float | None) -> bool:
        for issued in self._issued:
            if issued.bucket is bucket:
                if deadline is None and not issued.pending.is_over():
                    return False
                issued.pending.wait(deadline or 0.0, self._step.failed)
                bucket.read_used()
                self._issued.remove(issued)
                break
        return True

    def reset(self) -> None:
        self._issued.clear()
        for bucket in self._buckets:
            bucket.rewind()
