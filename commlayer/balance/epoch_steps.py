"""How an epoch is cut into steps: one way on every worker, from ledger and schedule alone. Knows no samples and no loader."""

from __future__ import annotations

from commlayer.balance.ledger import Ledger, Range
from commlayer.balance.schedule import Shares, SharesSchedule, scaled

KEEP_STEPS = 64
"""How far back a loss may be announced, of steps that all have. Longer than a dead worker goes unnoticed, since
nobody completes a step without it."""


class Course:
    """A ledger that is led through the steps. `left` positions are to come, next in step `step`."""

    def __init__(self, ledger: Ledger, schedule: SharesSchedule, step: int, batch: int, *, drop: bool) -> None:
        """`drop`: a last step that is not full is left out."""
        self.ledger, self.step = ledger, step
        self._schedule, self._batch, self._drop = schedule, batch, drop

    def copy(self) -> Course:
        """To look ahead: it shares the schedule only."""
        return Course(self.ledger.copy(), self._schedule, self.step, self._batch, drop=self._drop)

    def over(self) -> bool:
        """Whether nothing is left to give out."""
        return self.ledger.left < (self._batch if self._drop else 1)

    def ends(self) -> bool:
        """Whether nothing is left behind the step to come."""
        full, rest = self.steps_left()
        return full + bool(rest) <= 1

    def finished(self) -> bool:
        """Whether the epoch is over. A loss that is announced for later, but began in it, still belongs to it: it is pulled in.

        Only for the course that is trained: it stands at the same step on all workers.
        """
        if not self.over():
            return False
        for worker, first in self._schedule.pull(self.step).items():
            self.ledger.take_back(worker, first)
        return self.over()

    def advance(self, keep_from: int) -> dict[int, list[Range]]:
        """Gives out the next step. Steps before `keep_from` can no longer be taken back."""
        for worker, first in self._schedule.losses(self.step).items():
            self.ledger.take_back(worker, first)
        for step in [s for s in self.ledger.open if s < keep_from]:
            self.ledger.commit(step)
        given = self.ledger.give(self.step, self._counts())
        self.step += 1
        return given

    def steps_left(self) -> tuple[int, int]:
        """Full steps to come, and positions for a short one."""
        full, rest = divmod(self.ledger.left, self._batch)
        return full, 0 if self._drop else rest

    def _counts(self) -> Shares:
        shares = self._schedule.shares(self.step)
        whole = sum(shares.values())
        return shares if self.ledger.left >= whole else scaled(shares, self.ledger.left)
