"""Defines the interface of a path: how one kind of bucket gets from final gradients to the sum over all workers.

The worker calls `begin` for each of the path's buckets when their gradients are final. Then it calls `finish`, and before that
`take` for single buckets if averages are applied one by one. When the results are written or held, it calls `reset`. Between
two exchanges, a bucket's ledger rolls back what was not applied. These calls come from one thread at a time. A path can have
threads of its own. The path reports its errors, counts and arrivals to the Step object.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

from commlayer.cluster.processes.bounded_calls import ANY_PEER
from commlayer.engine.buckets.bucket import BucketExchange, WorkerBucket
from commlayer.engine.buckets.current_step import Step
from commlayer.engine.paths.staging import Staging
from commlayer.errors import CommError, DeadlineExceeded

B = TypeVar("B", bound=WorkerBucket)


class Path(ABC, Generic[B]):
    """Base class of paths. A path exchanges some of the buckets of one worker."""

    ordered = False
    """True: `begin` calls a collective, so all ranks must call `begin` for the path's buckets in the order of the plan."""

    def __init__(self, buckets: Sequence[B], step: Step, staging: Staging) -> None:
        self.buckets, self._step, self._staging = buckets, step, staging
        self._arrivals = step.arrivals()

    @abstractmethod
    def begin(self, bucket: B) -> None:
        """Starts the exchange of a bucket whose gradients are final, without waiting for it."""

    def deadline_error(self, bucket: WorkerBucket) -> CommError:
        """Creates the deadline error for a bucket without a result. The error names the peer that caused the delay; after a
        collective no peer is known."""
        return DeadlineExceeded("the bucket was not exchanged before the deadline", peer=ANY_PEER, step=self._step.number,
                                bucket=bucket.id)

    def _arrived(self, bucket: WorkerBucket) -> None:
        """Records that a bucket's result can be written. Lanes and receive threads call it."""
        bucket.exchange.done = True
        self._arrivals.arrived()

    @property
    def arrived_at(self) -> float:
        """Value of time.monotonic() when the last result of the path's last complete exchange arrived."""
        return self._arrivals.last_at

    def finish(self, deadline: float) -> None:
        """Waits until the results of all buckets can be written, and the step can continue. Called after `begin` for all.

        Raises an error that names the missing peers when the deadline passes. Returns early when the step has failed.
        """
        if not self._arrivals.wait(deadline):
            raise self.deadline_error(next((b for b in self.buckets if not b.exchange.done), self.buckets[0]))
        self._staging.join()

    def take(self, bucket: WorkerBucket, deadline: float | None) -> bool:
        """Returns True if this bucket's result can be written before those of the others. Waits for the result until
        `deadline`. None: the call does not wait. The worker calls `finish` after the last bucket in any case."""
        if deadline is not None and not self._arrivals.wait_for(lambda: bucket.exchange.done, deadline):
            raise self.deadline_error(bucket)
        if bucket.exchange.done:
            self._staging.join()
        return bucket.exchange.done

    def reset(self) -> None:
        """Prepares the path for its next exchanges. Called after the results of the last ones were written or held."""
        self._arrivals.expect(len(self.buckets))
        for bucket in self.buckets:
            bucket.exchange = BucketExchange()

    def drain(self, timeout_s: float) -> bool:
        """Waits until the path's threads have finished their work. Returns True if that took less than `timeout_s` seconds."""
        return True

    def close(self, timeout_s: float) -> None:
        """Ends the path's threads, and waits up to `timeout_s` seconds for each."""

    def _roll_back(self, bucket: WorkerBucket) -> None:
        """Rolls back the averages of a bucket's last exchange that were not applied, before its next exchange. Threads that
        read the bucket later wait for the rollback."""
        if bucket.ledger.roll_back():
            bucket.marks.append(self._staging.mark())

    def _fill(self, bucket: WorkerBucket) -> None:
        """Copies gradients into the send buffer, and writes weight and used flags after it. A collective sums both."""
        self._roll_back(bucket)
        self._staging.catch_up(bucket)
        self._step.units.gather(bucket)
        bucket.write_tail(bucket.memory.tail)
