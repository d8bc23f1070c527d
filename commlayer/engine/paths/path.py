"""Interface of a path: how one kind of bucket gets from final gradients to the sum over all workers.

In each step, and for each path, the worker calls `open` at the first gradient, and `begin` for each of the path's buckets. It
calls `finish` after the backward pass, and before that `take` for single buckets if results are applied one by one. Then it
commits the results in the buckets, and calls `reset`. Between steps, or after the first error, it can call `undo`. `drain` and
`close` end the path. These calls come from one thread at a time. A path can have threads of its own. It reports their errors,
counts and arrivals to the Step object that it received.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from commlayer.engine.buckets import WorkerBucket
from commlayer.engine.lanes import Staging
from commlayer.engine.step import Step


class BucketPath(ABC):
    """Base class of paths. A path exchanges some of the buckets of one worker."""

    ordered = False
    """Whether `begin` calls a collective. All ranks must then call `begin` for the path's buckets in the order of the plan."""

    def open(self) -> None:  # noqa: B027  not every route needs it
        """Called at the start of a step, when its first gradient is final."""

    @abstractmethod
    def begin(self, bucket: WorkerBucket) -> None:
        """Starts the exchange of a bucket whose gradients are final, without waiting for it."""

    @abstractmethod
    def finish(self, deadline: float) -> None:
        """Waits until commit can read `y`, `used` and `weight` of every bucket, and the step can continue. Called after `begin`
        for all.

        Raises an error that names the missing peers when the deadline passes. Returns early when the step has failed.
        """

    def take(self, bucket: WorkerBucket, deadline: float | None) -> bool | None:
        """Whether commit can read this bucket before the others. Waits for it until `deadline`; None: does not wait.

        Returns None if results of this path arrive only together, in `finish`. The worker calls `finish` after the last bucket
        in any case.
        """
        del bucket, deadline
        return None

    def undo(self, bucket: WorkerBucket) -> bool:
        """Rolls back the slices of the bucket's last exchange that were not applied. Returns whether there were any."""
        return bucket.take_back() != 0

    @abstractmethod
    def reset(self) -> None:
        """Prepares the path for the next step. Called after the commit of the last one."""

    def drain(self, timeout_s: float) -> bool:
        """Waits until the path's threads have finished their work. Returns whether they did within `timeout_s` seconds."""
        return True

    def close(self, timeout_s: float) -> None:  # noqa: B027  not every route has threads
        """Ends the path's threads, and waits up to `timeout_s` seconds for each."""


def take_back(route: BucketPath, bucket: WorkerBucket, staging: Staging) -> None:
    """Rolls back the averages of a bucket's last exchange that were not applied, before its next exchange. Later readers of the
    bucket wait for the rollback."""
    if route.undo(bucket):
        bucket.marks.append(staging.mark())


def fill(bucket: WorkerBucket, step: Step, staging: Staging) -> None:
    """Copies gradients into the send buffer, and writes weight and used flags after it. A collective sums both."""
    staging.catch_up(bucket)
    step.units.gather(bucket)
    bucket.write_tail(bucket.tail)
