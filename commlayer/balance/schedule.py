"""The schedule of shares: which shares of the batch apply from which step on, and which workers are lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from operator import attrgetter

import msgspec

from commlayer.errors import InvalidInput
from commlayer.records import Record

KEEP_STEPS = 64
"""Maximum number of steps between the death of a worker and the announcement that the worker is lost. Fewer steps can complete
before a dead worker is detected, since no step completes without that worker."""

Shares = dict[int, int]
"""Maps a worker to its number of samples in a step."""


class Announcement(Record, frozen=True):
    """Announces shares from `step` on. The samples that a lost worker was assigned are assigned again."""

    step: int
    shares: Shares
    lost: dict[int, int] = msgspec.field(default_factory=dict)
    """Maps each lost worker to the first step that was averaged without that worker."""


def checked_shares(shares: Sequence[int] | Mapping[int, int], batch: int, least: int) -> Shares:
    """Validates shares and returns them by worker number. If `shares` is a sequence, its first entry is for worker 0."""
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
    """Raises InvalidInput if the sizes do not fit together. `workers`: 0 if explicit shares define the workers."""
    if least < 1:
        raise InvalidInput("E-SHARES-ARGUMENT", f"least {least}: allowed is 1 or more")
    if batch < max(1, workers * least):
        each = f", {least} per worker" if workers else ""
        raise InvalidInput("E-SHARES-ARGUMENT", f"batch {batch}: allowed are {max(1, workers * least)} samples or more{each}")
    if cap and cap < 2 * least - 1:
        raise InvalidInput("E-SHARES-ARGUMENT",
                           f"cap {cap}: allowed is 0 (none) or at least {2 * least - 1}, so that parts of a share reach "
                           f"{least}")


def even_shares(batch: int, workers: int) -> list[int]:
    """Returns shares that are as equal as possible; the first ones are larger.

    >>> even_shares(8, 3)
    [3, 3, 2]
    """
    return apportion([1] * workers, batch)


def scaled(shares: Mapping[int, int], total: int) -> Shares:
    """Splits `total` in proportion to the shares; on a tie the worker with the smaller number gets the sample.

    >>> scaled({0: 6, 1: 2, 2: 0}, 5)
    {0: 4, 1: 1, 2: 0}
    """
    workers = sorted(shares)
    return dict(zip(workers, apportion([shares[worker] for worker in workers], total), strict=True))


class SharesSchedule:
    """All announcements of shares in a job, in the order of their steps."""

    def __init__(self, shares: Shares) -> None:
        self._all = [Announcement(0, shares)]
        self.newest_step = -1
        """Step of the newest announcement; the next one must be for a later step."""

    @classmethod
    def of(cls, announcements: Sequence[Announcement]) -> SharesSchedule:
        """Creates a schedule from the announcements that `announcements_since` returned."""
        schedule = cls({})
        schedule._all, schedule.newest_step = list(announcements), announcements[-1].step or -1
        return schedule

    @classmethod
    def restarted(cls, announcements: Sequence[Announcement], step: int, shares: Shares) -> SharesSchedule:
        """Returns a schedule with these shares from `step` on. The schedule replaces the shares in `announcements`, the result
        of `announcements_since(step)`, but keeps the announced lost workers."""
        lost = {worker: first for a in announcements if a.step >= step for worker, first in a.lost.items()}
        schedule = cls.of([Announcement(step, shares, lost)])
        schedule.newest_step = step - 1  # allows another announcement for this step
        return schedule

    def add(self, announcement: Announcement, *, amends: bool = False) -> None:
        """Adds an announcement. The steps of announcements must increase, and a step has at most one announcement, so that
        workers that receive announcements late still agree.

        `amends`: True: if the newest announcement is for the same step, it is extended.
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
        """Returns the shares in a step."""
        return next(a.shares for a in reversed(self._all) if a.step <= step)

    def losses(self, step: int) -> dict[int, int]:
        """Returns the lost workers that are announced for exactly this step, each with the first step averaged without that
        worker."""
        return next((a.lost for a in self._all if a.step == step), {})

    def lost_since(self, step: int) -> list[int]:
        """Returns, for each lost worker that is announced for this step or a later one, the first step averaged without that
        worker."""
        return [first for a in self._all if a.step >= step for first in a.lost.values()]

    def move_losses_forward(self, step: int) -> dict[int, int]:
        """Moves announcements of workers that were lost before `step` forward to `step`, together with the shares that they
        announce. Returns the first step averaged without each lost worker."""
        due = [a for a in self._all if a.step >= step and any(first < step for first in a.lost.values())]
        if not due:
            return {}
        self._all = [a for a in self._all if not step <= a.step <= due[-1].step]
        self._all = sorted([*self._all, Announcement(step, due[-1].shares)], key=attrgetter("step"))
        return {worker: first for a in due for worker, first in a.lost.items()}

    def announcements_since(self, step: int) -> list[Announcement]:
        """Returns the announcement that applies in a step, and all later ones."""
        force = next(i for i, a in reversed(list(enumerate(self._all))) if a.step <= step)
        return self._all[force:]

    def forget(self, step: int) -> None:
        """Drops announcements that no longer apply at `step`."""
        self._all = self.announcements_since(step)


CHANGE_DELAY_STEPS = KEEP_STEPS - 1
"""Number of steps after a departure or a join at which all workers change their assignments. No loader may draw more
batches in advance than this: a loader that does is rejected."""


class SamplerMembership:
    """Which workers take part in the sampler's job. Equal on all workers after the same step."""

    def __init__(self, numbers: Sequence[int] = (), departed: Sequence[int] = ()) -> None:
        self.numbers = tuple(numbers)
        """Maps the sampler's worker numbers, as indices, to the session's member numbers. Empty while the members are not
        known."""
        self.departed = frozenset(departed)
        """The sampler's numbers of the workers that left."""
        self.session_steps: dict[int, int] = {}
        """If workers may leave: maps the sampler's step to the session's step, for steps that were not exchanged at the last
        check."""
        self._current = self.numbers
        self.changed = bool(self.departed)
        """True: workers have left or joined since the start."""

    @property
    def left(self) -> list[int]:
        """Numbers of the sampler's present workers, in the order of their ranks."""
        return [worker for worker in range(len(self.numbers)) if worker not in self.departed]

    def set_members(self, members: Sequence[int]) -> None:
        self.numbers = self._current = tuple(members)

    def update(self, step: int, members: Sequence[int], shares: Shares, batch: int, least: int,
               lost_from: Callable[[int], int]) -> Announcement | None:
        """Returns the announcement of shares for a membership change after `step`. Returns None if there is no change.
        `shares`: the shares planned for the step in which the change takes effect. `lost_from` maps a lost member's session
        number to the first step without that member."""
        if members == self._current:
            return None
        self._current = tuple(members)
        joined = range(len(self.numbers), len(self.numbers) + len(set(members) - set(self.numbers)))
        self.numbers += tuple(member for member in members if member not in self.numbers)
        departed = frozenset(worker for worker, member in enumerate(self.numbers) if member not in members)
        lost, self.departed, self.changed = departed - self.departed, departed, True
        begin = step + 1 + CHANGE_DELAY_STEPS
        left = {worker: share for worker, share in shares.items() if worker not in departed}
        first = {worker: lost_from(self.numbers[worker]) for worker in lost}
        return Announcement(begin, with_joined(left, joined, batch, least), first)


def with_joined(shares: Mapping[int, int], joined: Sequence[int], batch: int, least: int) -> Shares:
    """Scales these shares to the batch, and adds an even part for each worker that joined. If a share falls below `least`, all
    parts are even; if even parts are too small as well, the new workers get none.

    >>> with_joined({0: 6, 2: 6}, [3], 12, 1)
    {0: 4, 2: 4, 3: 4}
    """
    some = sum(share > 0 for share in shares.values())
    if not some:
        return scaled(dict.fromkeys([*shares, *joined], 1), batch)
    parts = {worker: share * some for worker, share in shares.items()} | dict.fromkeys(joined, sum(shares.values()))
    even = {worker: int(part > 0) for worker, part in parts.items()}
    none = dict(shares) | dict.fromkeys(joined, 0)
    for weights in (parts, even, none):
        result = scaled(weights, batch)
        if all(not share or share >= least for share in result.values()):
            break
    return result


def apportion(weights: Sequence[float], total: int) -> list[int]:
    """Returns shares proportional to the weights, with the sum `total`; on a tie the earlier one is larger. If all weights are
    0, all count equally. The arithmetic is exact, so all machines get the same shares.

    >>> apportion([6, 2, 0], 5), apportion([0, 0], 3)
    ([4, 1, 0], [2, 1])
    """
    exact = [Fraction(weight) for weight in weights]
    weight_sum = sum(exact)
    parts = [total * weight / weight_sum if weight_sum else Fraction(total, len(exact)) for weight in exact]
    shares = [int(part) for part in parts]
    for i in sorted(range(len(parts)), key=lambda i: (shares[i] - parts[i], i))[: total - sum(shares)]:
        shares[i] += 1
    return shares
