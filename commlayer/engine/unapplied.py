"""Takes back what a step coded but no optimizer applied, after its averages are written.

Each bucket has one bit per slice for an average that was not applied. The rollback happens before the bucket's next exchange,
and that exchange reports it to the server. `undone` does it between two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from commlayer.engine.bucket import WorkerBucket
from commlayer.engine.paths.table import Routes

DRAIN_S = 5.0
"""Seconds for which a failed step waits for a lane to end its current call, before residuals are corrected."""


def _nothing() -> None:
    """Default of `settle`: averages are not watched."""


class Unapplied:
    """Part of Worker: rollback of its last step."""

    buckets: list[WorkerBucket]
    turns: list[list[WorkerBucket]]
    _by_tensor: list[list[tuple[WorkerBucket, int]]]
    _in_time: list[WorkerBucket]
    _routes: Routes
    settle: Callable[[], None] = staticmethod(_nothing)
    """Makes the watcher of averages report those that the script has cleared: see `cleared`."""
    intact = True
    """Whether residuals are as they were before the failed step."""
    tentative = False
    """Whether the last step was not finite somewhere. Such a step is skipped, unless an optimizer steps anyway."""

    def cleared(self, tensor: int) -> None:
        """The script discarded the average that the last step wrote for this tensor."""
        for bucket, i in self._by_tensor[tensor]:
            bucket.unapplied |= 1 << i

    def applied(self, tensors: Collection[int], turn: int | None = None) -> None:
        """An optimizer has applied these averages, though the step was not finite elsewhere. `turn`: only those of that turn.
        """
        if not self.tentative:
            return
        for bucket in self.buckets if turn is None else self.turns[turn]:
            for i, s in enumerate(bucket.slices if bucket.sound else ()):
                if s.tensor in tensors:
                    bucket.unapplied &= ~(1 << i)

    def anything(self, tensor: int) -> bool:
        """Whether the last step's average for this tensor has nonzero values. Late results count as nonzero, unread."""
        return any(bucket.late or bool(bucket.slice_of_result(i).any()) for bucket, i in self._by_tensor[tensor])

    def spent(self, tensors: Collection[int]) -> None:
        """An optimizer has already applied these averages of an unfinished step, so a failure must not take them back."""
        for tensor in tensors:
            for bucket, i in self._by_tensor[tensor]:
                bucket.spent |= 1 << i

    def undone(self) -> dict[int, int]:
        """By bucket, the slices of the last step that were not applied, and not yet reported to servers. The same on all ranks.
        """
        self.settle()
        for bucket in self._in_time:
            self._routes.of[bucket.id].undo(bucket)
        return {bucket.id: bucket.undone for bucket in self.buckets if bucket.undone and bucket.served}

    def unapplied(self) -> tuple[int, int]:
        """The slices of the last averages that are not applied, as bits bucket after bucket, and the number of slices."""
        self.settle()
        bits = slices = 0
        for bucket in self.buckets:
            bits, slices = bits | bucket.unapplied << slices, slices + bucket.nslices
        return bits, slices

    def take_over(self, bits: int) -> None:
        """Sets `unapplied` of the last step as another rank has seen it."""
        for bucket in self.buckets:
            bucket.unapplied, bits = bits & bucket.all_slices, bits >> bucket.nslices

    def _undo_step(self) -> None:
        """The current step has failed: residuals get back what it sent. If a lane is stuck, possibly inside a codec, its
        residual cannot be corrected."""
        self.intact = self._routes.drain(DRAIN_S)
        if self.intact:
            for bucket in self.buckets:
                bucket.unapplied |= bucket.all_slices & ~bucket.spent if bucket.started else 0
                self._routes.of[bucket.id].undo(bucket)

    def unheard(self) -> dict[int, int]:
        """After a failed step: by bucket, the rollbacks of the step before that servers may not have received."""
        slices = {b.id: b.said if b.started else b.undone for b in self.buckets if b.served}
        return {number: bits for number, bits in slices.items() if bits}

    def heard(self) -> None:
        """The servers have received the rollbacks."""
        for bucket in self.buckets:
            bucket.undone = 0
