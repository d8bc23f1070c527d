"""Which shares hold from which step on, and who is lost: announcements, checked. Knows no samples and no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from commlayer.balance.rounding import apportion
from commlayer.errors import InvalidInput
from commlayer.records import Record

Shares = dict[int, int]
"""Worker -> its part of a step's samples."""


class Announcement(Record, frozen=True):
    """From `step` on these shares hold; what a lost worker was given from a step on goes out again."""

    step: int
    shares: Shares
    lost: dict[int, int] = msgspec.field(default_factory=dict)
    """Worker -> the first step that it had no part in."""


def checked_shares(shares: Sequence[int] | Mapping[int, int], batch: int, least: int) -> Shares:
    """Shares by worker; a sequence counts workers from 0."""
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
    """The sizes that do not change; `workers` is 0 where explicit shares say who there is."""
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
    """As equal as can be, the first ones larger.

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
    """The announcements of a job, in the order of their steps."""

    def __init__(self, shares: Shares) -> None:
        self._all = [Announcement(0, shares)]
        self.newest_step = -1
        """Of the announcement that came last: the next one is for a later step."""

    @classmethod
    def of(cls, announcements: Sequence[Announcement]) -> SharesSchedule:
        """What `since` gave."""
        made = cls({})
        made._all, made.newest_step = list(announcements), announcements[-1].step or -1
        return made

    @classmethod
    def anew(cls, announcements: Sequence[Announcement], step: int, shares: Shares) -> SharesSchedule:
        """These shares from `step` on, in place of what `since(step)` gave. What lost workers had goes out again."""
        lost = {worker: first for a in announcements if a.step >= step for worker, first in a.lost.items()}
        made = cls.of([Announcement(step, shares, lost)])
        made.newest_step = step - 1  # others may be announced for that very step
        return made

    def add(self, announcement: Announcement, *, amends: bool = False) -> None:
        """They come in the order of their steps, one for a step, so that workers that hear them late agree all the same.
        `amends`: it may be for the step of the newest, and is made of that."""
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
        """What holds at that step."""
        return next(a.shares for a in reversed(self._all) if a.step <= step)

    def losses(self, step: int) -> dict[int, int]:
        """What is announced for exactly that step."""
        return next((a.lost for a in self._all if a.step == step), {})

    def lost_since(self, step: int) -> list[int]:
        """Where the losses begin that are announced for that step and later ones."""
        return [first for a in self._all if a.step >= step for first in a.lost.values()]

    def pull(self, step: int) -> dict[int, int]:
        """Makes announced losses that began before `step` hold from it on, with their shares and all that was due before."""
        due = [a for a in self._all if a.step >= step and any(first < step for first in a.lost.values())]
        if not due:
            return {}
        self._all = [a for a in self._all if not step <= a.step <= due[-1].step]
        self._all = sorted([*self._all, Announcement(step, due[-1].shares)], key=lambda a: a.step)
        return {worker: first for a in due for worker, first in a.lost.items()}

    def since(self, step: int) -> list[Announcement]:
        """What matters from that step on: the one in force, and all later ones."""
        force = next(i for i, a in reversed(list(enumerate(self._all))) if a.step <= step)
        return self._all[force:]

    def forget(self, step: int) -> None:
        """Drops what is over by that step."""
        self._all = self.since(step)
