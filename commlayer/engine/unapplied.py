"""Takes back what a step coded and no optimizer applied, once its averages are written. Knows buckets and routes; no optimizer.

Buckets keep in bits, slice by slice, where their last average was not applied. It is taken back ahead of their next exchange,
and servers hear it with that, or between steps when somebody asks (`undone`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from commlayer.engine.bucket import WorkerBucket
from commlayer.engine.paths.table import Routes

DRAIN_S = 5.0
"""How long a failed step waits for a lane to end the call it is in, before residuals are put right."""


def _nothing() -> None:
    """Nobody watches."""


class Unapplied:
    """A worker's, of its last step."""

    buckets: list[WorkerBucket]
    turns: list[list[WorkerBucket]]
    _by_tensor: list[list[tuple[WorkerBucket, int]]]
    _in_time: list[WorkerBucket]
    _routes: Routes
    settle: Callable[[], None] = staticmethod(_nothing)
    """Who watches what becomes of averages tells it here of those that were cleared: see `cleared`."""
    intact = True
    """Whether residuals are what they were before the step that failed."""
    tentative = False
    """Whether the last step was not finite somewhere, and so is one to skip, unless an optimizer steps all the same."""

    def cleared(self, tensor: int) -> None:
        """The average that the last step wrote for this tensor was thrown away."""
        for bucket, i in self._by_tensor[tensor]:
            bucket.unapplied |= 1 << i

    def applied(self, tensors: Collection[int], turn: int | None = None) -> None:
        """An optimizer has stepped with these averages: also in a step of which others were not finite. `turn`: with those that
        came in it."""
        if not self.tentative:
            return
        for bucket in self.buckets if turn is None else self.turns[turn]:
            for i, s in enumerate(bucket.slices if bucket.sound else ()):
                if s.tensor in tensors:
                    bucket.unapplied &= ~(1 << i)

    def anything(self, tensor: int) -> bool:
        """Whether the average that the last step wrote for this tensor was other than zeros; of a late result nobody asks."""
        return any(bucket.late or bool(bucket.slice_of_result(i).any()) for bucket, i in self._by_tensor[tensor])

    def spent(self, tensors: Collection[int]) -> None:
        """An optimizer has stepped with these averages already, of a step that is not over: they are owed no longer."""
        for tensor in tensors:
            for bucket, i in self._by_tensor[tensor]:
                bucket.spent |= 1 << i

    def undone(self) -> dict[int, int]:
        """By bucket, what of the last step was not applied and servers have not heard, between steps. The same on all ranks."""
        self.settle()
        for bucket in self._in_time:
            self._routes.of[bucket.id].undo(bucket)
        return {bucket.id: bucket.undone for bucket in self.buckets if bucket.undone and bucket.served}

    def _undo_step(self) -> None:
        """The step under way has failed: residuals get back what it sent. A lane that is stuck may be inside a codec: then its
        residual cannot be put right."""
        self.intact = self._routes.drain(DRAIN_S)
        if self.intact:
            for bucket in self.buckets:
                bucket.unapplied |= bucket.all_slices & ~bucket.spent if bucket.started else 0
                self._routes.of[bucket.id].undo(bucket)

    def unheard(self) -> dict[int, int]:
        """By bucket, behind a step that failed, what of the one before was not applied: for servers that may not have heard."""
        words = {b.id: b.said if b.started else b.undone for b in self.buckets if b.served}
        return {number: word for number, word in words.items() if word}

    def heard(self) -> None:
        """The servers have heard it."""
        for bucket in self.buckets:
            bucket.undone = 0
