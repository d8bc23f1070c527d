"""Route for late buckets: their exchange with a server continues after its step, and the next step uses the result.

A step waits only until its gradients are copied. The copy waits for the bucket's result of the previous step.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from commlayer.engine.bucket import WorkerBucket
from commlayer.engine.late_results import LateResult
from commlayer.engine.paths.route import Route
from commlayer.engine.paths.server_exchange import ServerExchange
from commlayer.engine.staging import Staging
from commlayer.engine.step import Step


class Late(Route):
    def __init__(
        self, results: Mapping[int, LateResult], buckets: Sequence[WorkerBucket], step: Step, staging: Staging,
        exchange: ServerExchange,
    ) -> None:
        """`results` by the number of their bucket."""
        self._results, self._buckets, self._step, self._staging, self._exchange = results, buckets, step, staging, exchange
        self._arrivals = step.arrivals()

    def begin(self, bucket: WorkerBucket) -> None:
        self._results[bucket.id].push(lambda: self._exchange.put(bucket, self._copy, self._arrived))

    def _copy(self, bucket: WorkerBucket) -> float:
        """Runs on the encode lane, after the last result has arrived."""
        self._results[bucket.id].take()
        bucket.rewind()
        bucket.step = self._step.number
        begin = time.perf_counter()
        self._step.units.gather(bucket)
        self._staging.settle()
        self._arrivals.arrived()
        return begin

    def _arrived(self, bucket: WorkerBucket) -> None:
        """Runs on the decode lane."""
        self._results[bucket.id].arrived()

    def finish(self, deadline: float) -> None:
        if not self._arrivals.wait(deadline):
            missing = [bucket for bucket in self._buckets if not bucket.done] or self._buckets
            blocked = (bucket for bucket in missing if self._results[bucket.id].blocked)
            raise self._exchange.overdue(next(blocked, missing[0]))
        self._staging.join()

    def quiet(self, deadline: float) -> None:
        """Waits until no exchange is in flight; then all results can be taken."""
        for bucket in self._buckets:
            if not self._results[bucket.id].wait(deadline, self._step.failed):
                raise self._exchange.overdue(bucket)
        self._staging.join()

    def reset(self) -> None:
        """Exchanges continue."""
        self._arrivals.expect(len(self._buckets))
