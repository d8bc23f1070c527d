"""Interface of a route: how one kind of bucket gets from final gradients to the sum over all workers.

In a step the worker calls, for each route: `open` at the first gradient; `begin` for each of its buckets; `finish` after the
backward pass, with `take` of single buckets before that if results are taken one by one. Then it commits the results in the
buckets, and calls `reset`. Between steps, or after the first error, it may call `undo`. `drain` and `close` end the route.
These calls come from one thread at a time. A route may use threads of its own. It reports their errors, counts and arrivals to
the step that it was given.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from commlayer.engine.buckets import WorkerBucket
from commlayer.engine.lanes import Staging
from commlayer.engine.step import Step


class BucketPath(ABC):
    """Carries some buckets of one worker."""

    ordered = False
    """Whether `begin` calls a collective: then all ranks must call it for their buckets in plan order."""

    def open(self) -> None:  # noqa: B027  not every route needs it
        """A step begins: its first gradient is final."""

    @abstractmethod
    def begin(self, bucket: WorkerBucket) -> None:
        """The bucket's gradients are final. Starts its exchange without waiting."""

    @abstractmethod
    def finish(self, deadline: float) -> None:
        """Every bucket has begun. Waits until commit can read `y`, `used` and `weight` of each, and the step can continue.

        Raises an error that names the missing peers when the deadline passes. Returns early when the step has failed."""

    def take(self, bucket: WorkerBucket, deadline: float | None) -> bool | None:
        """Whether commit can read this bucket before the others; waits for it until `deadline`, if one is given.

        None: this route has all its results together, see `finish`. `finish` is called after the last bucket in any case."""
        del bucket, deadline
        return None

    def undo(self, bucket: WorkerBucket) -> bool:
        """Takes back the slices of the bucket's last exchange that were not applied. Returns whether there were any."""
        return bucket.take_back() != 0

    @abstractmethod
    def reset(self) -> None:
        """Runs before a step, after the commit of the last one."""

    def drain(self, timeout_s: float) -> bool:
        """Whether its threads finished their work within that time. A route without threads returns at once."""
        return True

    def close(self, timeout_s: float) -> None:  # noqa: B027  not every route has threads
        """Ends its threads."""


def take_back(route: BucketPath, bucket: WorkerBucket, staging: Staging) -> None:
    """Before an exchange: takes back what was not applied of the last one. Later readers of the bucket wait for that."""
    if route.undo(bucket):
        bucket.marks.append(staging.mark())


def fill(bucket: WorkerBucket, step: Step, staging: Staging) -> None:
    """Gathers gradients into x, and writes weight and flags to the tail after x. A collective sums both."""
    staging.catch_up(bucket)
    step.units.gather(bucket)
    bucket.write_tail(bucket.tail)
