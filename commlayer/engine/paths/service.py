"""Route for buckets that a worker, alone in its node, exchanges with servers; each result belongs to its own step."""

from __future__ import annotations

import time
from collections.abc import Sequence

from commlayer.engine.bucket import WorkerBucket
from commlayer.engine.paths.route import Route, take_back
from commlayer.engine.paths.server_exchange import ServerExchange
from commlayer.engine.staging import Staging
from commlayer.engine.step import Step


class Service(Route):
    def __init__(self, buckets: Sequence[WorkerBucket], step: Step, staging: Staging, exchange: ServerExchange) -> None:
        self._buckets, self._step, self._staging, self._exchange = buckets, step, staging, exchange
        self._arrivals = step.arrivals()

    def begin(self, bucket: WorkerBucket) -> None:
        take_back(self, bucket, self._staging)
        bucket.step = self._step.number
        self._exchange.put(bucket, self._gather, self._arrived)

    def _gather(self, bucket: WorkerBucket) -> float:
        """Runs on the encode lane."""
        begin = time.perf_counter()
        self._step.units.gather(bucket)
        return begin

    def _arrived(self, _bucket: WorkerBucket) -> None:
        """Runs on the decode lane."""
        self._arrivals.arrived()

    def finish(self, deadline: float) -> None:
        if not self._arrivals.wait(deadline):
            raise self._exchange.overdue(next((b for b in self._buckets if not b.done), self._buckets[0]))
        self._staging.join()

    def take(self, bucket: WorkerBucket, deadline: float | None) -> bool:
        if deadline is not None and not self._arrivals.wait_for(lambda: bucket.done, deadline):
            raise self._exchange.overdue(bucket)
        if bucket.done:
            self._staging.join()
        return bucket.done

    def reset(self) -> None:
        self._arrivals.expect(len(self._buckets))
        for bucket in self._buckets:
            bucket.rewind()
