"""Cuts an epoch into steps, deterministically on every worker, from ledger and schedule alone."""

from __future__ import annotations

from commlayer.balance.ledger import Ledger, Range
from commlayer.balance.schedule import Shares, SharesSchedule, scaled

KEEP_STEPS = 64
"""How many steps back a loss may be announced. More steps than can complete before a dead worker is noticed, since no step
completes without it."""


class Course:
    """Advances an epoch's ledger step by step; `step` is the next one to assign."""

    def __init__(self, ledger: Ledger, schedule: SharesSchedule, step: int, batch: int, *, drop: bool) -> None:
        """`drop`: leave out a last step that is not full."""
        self.ledger, self.step = ledger, step
        self._schedule, self._batch, self._drop = schedule, batch, drop

    def copy(self) -> Course:
        """A copy to look ahead with; it shares only the schedule."""
        return Course(self.ledger.copy(), self._schedule, self.step, self._batch, drop=self._drop)

    def over(self) -> bool:
        """Whether no positions are left to assign."""
        return self.ledger.left < (self._batch if self._drop else 1)

    def ends(self) -> bool:
        """Whether the next step is the last one."""
        full, rest = self.steps_left()
        return full + bool(rest) <= 1

    def finished(self) -> bool:
        """Whether the epoch is over. A loss that is announced for a later step but began in this epoch is applied now.

        Call it only on the trained course, which is at the same step on all workers.
        """
        if not self.over():
            return False
        for worker, first in self._schedule.pull(self.step).items():
            self.ledger.take_back(worker, first)
        return self.over()

    def advance(self, keep_from: int) -> dict[int, list[Range]]:
        """Assigns the next step. Steps before `keep_from` can no longer be taken back."""
        for worker, first in self._schedule.losses(self.step).items():
            self.ledger.take_back(worker, first)
        for step in [s for s in self.ledger.open if s < keep_from]:
            self.ledger.commit(step)
        given = self.ledger.give(self.step, self._counts())
        self.step += 1
        return given

    def steps_left(self) -> tuple[int, int]:
        """Full steps left, and the positions of a short last one."""
        full, rest = divmod(self.ledger.left, self._batch)
        return full, 0 if self._drop else rest

    def _counts(self) -> Shares:
        shares = self._schedule.shares(self.step)
        whole = sum(shares.values())
        return shares if self.ledger.left >= whole else scaled(shares, self.ledger.left)
