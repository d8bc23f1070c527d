"""The schedule of shares: which shares apply from which step on, and which workers are lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from commlayer.balance.rounding import apportion
from commlayer.errors import InvalidInput
from commlayer.records import Record

Shares = dict[int, int]
"""Worker -> its part of a step's samples."""


class Announcement(Record, frozen=True):
    """Shares from `step` on. What a lost worker was assigned is assigned again."""

    step: int
    shares: Shares
    lost: dict[int, int] = msgspec.field(default_factory=dict)
    """Worker -> the first step that it had no part in."""


def checked_shares(shares: Sequence[int] | Mapping[int, int], batch: int, least: int) -> Shares:
    """Validated shares by worker; a sequence numbers workers from 0."""
    named = dict(shares) if isinstance(shares, Mapping) else dict(enumerate(shares))
    for worker, share in named.items():
        if not isinstance(share, int) or isinstance(share, bool) or share < 0:
            raise InvalidInput("E-SHARES-ARGUMENT", f"shares: worker {worker} got {share!r}, allowed: whole numbers, 0 or more")
        if 0 < share < least:
            raise InvalidInput("E-SHARES-ARGUMENT",
                               f"shares: worker {worker} got {share}, allowed: 0, or at least {least} (the setting `least`)")
    if sum(named.values()) != batch:
        raise InvalidInput("E-SHARES-ARGUMENT",
                           f"shares: {list(named.values())} sum to {sum(named.values())}, allowed: the batch, which is {batch}")
    return named


def check_sizes(batch: int, workers: int, *, least: int, cap: int) -> None:
    """Validates the fixed sizes. `workers` is 0 if explicit shares define the workers."""
    if least < 1:
        raise InvalidInput("E-SHARES-ARGUMENT", f"least {least}: allowed is 1 or more")
    if batch < max(1, workers * least):
        each = f", {'one' if least == 1 else least} for each worker" if workers else ""
        raise InvalidInput("E-SHARES-ARGUMENT", f"batch {batch}: allowed is {max(1, workers * least)} or more{each}")
    if cap and cap < 2 * least - 1:
        raise InvalidInput("E-SHARES-ARGUMENT",
                           f"cap {cap}: allowed is 0 (none) or at least {2 * least - 1}, so that parts of a share reach "
                           f"{least}")


def even_shares(batch: int, workers: int) -> list[int]:
    """As equal as possible, the first ones larger.

    >>> even_shares(8, 3)
    [3, 3, 2]
    """
    return apportion([1] * workers, batch)


def scaled(shares: Mapping[int, int], total: int) -> Shares:
    """`total` split in proportion to the shares; ties go to the smaller number.

    >>> scaled({0: 6, 1: 2, 2: 0}, 5)
    {0: 4, 1: 1, 2: 0}
    """
    workers = sorted(shares)
    return dict(zip(workers, apportion([shares[worker] for worker in workers], total), strict=True))


class SharesSchedule:
    """A job's announcements, in the order of their steps."""

    def __init__(self, shares: Shares) -> None:
        self._all = [Announcement(0, shares)]
        self.newest_step = -1
        """Step of the newest announcement; the next one must be for a later step."""

    @classmethod
    def of(cls, announcements: Sequence[Announcement]) -> SharesSchedule:
        """The inverse of `since`."""
        schedule = cls({})
        schedule._all, schedule.newest_step = list(announcements), announcements[-1].step or -1
        return schedule

    @classmethod
    def anew(cls, announcements: Sequence[Announcement], step: int, shares: Shares) -> SharesSchedule:
        """A schedule with these shares from `step` on. It replaces the result of `since(step)` but keeps its losses."""
        lost = {worker: first for a in announcements if a.step >= step for worker, first in a.lost.items()}
        schedule = cls.of([Announcement(step, shares, lost)])
        schedule.newest_step = step - 1  # allows another announcement for this step
        return schedule

    def add(self, announcement: Announcement, *, amends: bool = False) -> None:
        """Adds an announcement. Steps must increase, one announcement per step, so that workers that receive them late still
        agree.

        `amends`: the step may be that of the newest announcement, which is then extended.
        """
        step = announcement.step
        if step < self.newest_step or (step == self.newest_step and not amends):
            raise InvalidInput("E-SHARES-ARGUMENT",
                               f"announce: step {step} is not after step {self.newest_step}, announced before")
        self.newest_step = step
        same = self._all.pop() if self._all[-1].step == step else announcement
        self._all.append(Announcement(step, announcement.shares, same.lost | announcement.lost))

    @property
    def newest(self) -> Shares:
        return self._all[-1].shares

    def shares(self, step: int) -> Shares:
        """The shares at a step."""
        return next(a.shares for a in reversed(self._all) if a.step <= step)

    def losses(self, step: int) -> dict[int, int]:
        """Losses announced for exactly this step."""
        return next((a.lost for a in self._all if a.step == step), {})

    def lost_since(self, step: int) -> list[int]:
        """First steps of the losses announced for this step and later ones."""
        return [first for a in self._all if a.step >= step for first in a.lost.values()]

    def pull(self, step: int) -> dict[int, int]:
        """Applies announced losses that began before `step` from `step` on, with their shares and all announcements up to
        them."""
        due = [a for a in self._all if a.step >= step and any(first < step for first in a.lost.values())]
        if not due:
            return {}
        self._all = [a for a in self._all if not step <= a.step <= due[-1].step]
        self._all = sorted([*self._all, Announcement(step, due[-1].shares)], key=lambda a: a.step)
        return {worker: first for a in due for worker, first in a.lost.items()}

    def since(self, step: int) -> list[Announcement]:
        """The announcement that applies at a step, and all later ones."""
        force = next(i for i, a in reversed(list(enumerate(self._all))) if a.step <= step)
        return self._all[force:]

    def forget(self, step: int) -> None:
        """Drops announcements that no longer apply at `step`."""
        self._all = self.since(step)
