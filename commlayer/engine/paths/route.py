"""The contract of a route: how one kind of bucket gets from final gradients to the sum over all workers. Knows no route.

In a step the worker calls, for each route: `open` at the first gradient; `begin` for each of its buckets; `finish` when
backward is over, with `take` of single buckets before that where somebody wants them one by one; then it commits what lies in
the buckets, and calls `reset`. Between steps, or behind the first error of all, it may call `undo`. `drain` and `close` end it.
These calls come from one thread at a time; what a route does on threads of its own it reports to the step that it was given:
errors, counts and arrivals.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from commlayer.engine.bucket import WorkerBucket
from commlayer.engine.staging import Staging
from commlayer.engine.step import Step


class Route(ABC):
    """Of some buckets of one worker."""

    ordered = False
    """Whether `begin` calls a collective: then all ranks must call it for their buckets in plan order."""

    def open(self) -> None:  # noqa: B027  not every route needs it
        """A step begins: its first gradient is there."""

    @abstractmethod
    def begin(self, bucket: WorkerBucket) -> None:
        """The bucket's gradients are final. Starts its exchange, and does not wait."""

    @abstractmethod
    def finish(self, deadline: float) -> None:
        """All buckets have begun. Waits until commit can read `y`, `used` and `weight` of each, and the step can go on.

        Raises who is missing when the deadline passes, and returns early when the step has failed."""

    def take(self, bucket: WorkerBucket, deadline: float | None) -> bool | None:
        """Whether commit can read this bucket, ahead of the others; waits for it until `deadline`, if one is given.

        None: this route has all its results together, see `finish`. Behind the last bucket `finish` is called all the same."""
        del bucket, deadline
        return None

    def undo(self, bucket: WorkerBucket) -> bool:
        """Takes back what of the bucket's last exchange was not applied. Whether there was anything."""
        return bucket.take_back() != 0

    @abstractmethod
    def reset(self) -> None:
        """Before a step, behind the commit of the last."""

    def drain(self, timeout_s: float) -> bool:
        """Whether its threads came to an end of what they were given, within that time. Without threads: at once."""
        return True

    def close(self, timeout_s: float) -> None:  # noqa: B027  not every route has threads
        """Ends its threads."""


def take_back(route: Route, bucket: WorkerBucket, staging: Staging) -> None:
    """Ahead of an exchange: what of the last one was not applied. What reads the bucket next goes on behind that."""
    if route.undo(bucket):
        bucket.marks.append(staging.mark())


def fill(bucket: WorkerBucket, step: Step, staging: Staging) -> None:
    """Gradients to x, and their facts to the tail behind it: what a collective sums."""
    staging.catch_up(bucket)
    step.units.gather(bucket)
    bucket.write_tail(bucket.tail)
