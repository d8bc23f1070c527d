"""Defines the path for buckets that a worker, the only one on its node, exchanges with servers."""

from __future__ import annotations

import time
from collections.abc import Sequence

from commlayer.engine.buckets.bucket import EncodedBucket, WorkerBucket
from commlayer.engine.buckets.current_step import Step
from commlayer.engine.paths.path import Path
from commlayer.engine.paths.server_exchange import ServerExchange
from commlayer.engine.paths.staging import Staging
from commlayer.errors import CommError


class ServerPath(Path[EncodedBucket]):
    def __init__(self, buckets: Sequence[EncodedBucket], step: Step, staging: Staging, exchange: ServerExchange) -> None:
        super().__init__(buckets, step, staging)
        self._exchange = exchange

    def begin(self, bucket: EncodedBucket) -> None:
        if bucket.late:  # averages of another step will be written into these gradients before the lane could read them
            self._fill(bucket)
            bucket.marks.append(self._staging.mark())
        else:
            self._roll_back(bucket)
        bucket.exchange.step = self._step.number
        self._exchange.put(bucket, self._gather, self._arrived)

    def _gather(self, bucket: EncodedBucket) -> float:
        """Copies a bucket's gradients into its send buffer. Runs on the encode lane; returns the start time."""
        begin = time.perf_counter()
        if not bucket.late:
            self._step.units.gather(bucket)
        return begin

    def deadline_error(self, bucket: WorkerBucket) -> CommError:
        return self._exchange.deadline_error(bucket)
