"""The sampler's view of membership: which workers get samples, and from which step on.

A sampler numbers its workers from 0; the session has its own member numbers. A worker that joins gets a new number and an
even part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from commlayer.balance.epoch_steps import KEEP_STEPS
from commlayer.balance.schedule import Announcement, Shares, scaled

SOON_STEPS = KEEP_STEPS - 1
"""Number of steps after a departure or a join at which all workers change their assignments. No loader may draw more
batches in advance than this: one that does is refused."""


class Roster:
    """The same on all workers after the same step."""

    def __init__(self, numbers: Sequence[int] = (), gone: Sequence[int] = (), amiss: int = 0) -> None:
        self.numbers = tuple(numbers)
        """Session member numbers, by the sampler's worker number. Empty: the members are not known yet."""
        self.gone = frozenset(gone)
        """Sampler numbers of workers that left."""
        self.amiss = amiss
        """Before this step, samples may be assigned to workers that have left."""
        self._there = self.numbers
        self.changed = bool(self.gone)
        """Whether the membership differs from the first one."""

    @property
    def left(self) -> list[int]:
        """The sampler's present workers, in the order of their ranks."""
        return [worker for worker in range(len(self.numbers)) if worker not in self.gone]

    def meet(self, members: Sequence[int]) -> None:
        self.numbers = self._there = tuple(members)

    def heed(self, step: int, members: Sequence[int], shares: Shares, batch: int, least: int,
             lost_from: Callable[[int], int]) -> Announcement | None:
        """The announcement for a membership change after `step`; None without one. `shares`: those planned for the step at
        which it takes effect. `lost_from`: the first step without a lost member, by the session's member number."""
        if members == self._there:
            return None
        self._there = tuple(members)
        come = range(len(self.numbers), len(self.numbers) + len(set(members) - set(self.numbers)))
        self.numbers += tuple(member for member in members if member not in self.numbers)
        gone = frozenset(worker for worker, member in enumerate(self.numbers) if member not in members)
        lost, self.gone, self.changed = gone - self.gone, gone, True
        begin = step + 1 + SOON_STEPS
        if lost:
            self.amiss = begin
        left = {worker: share for worker, share in shares.items() if worker not in gone}
        first = {worker: lost_from(self.numbers[worker]) for worker in lost}
        return Announcement(begin, widened(left, come, batch, least), first)


def widened(shares: Mapping[int, int], come: Sequence[int], batch: int, least: int) -> Shares:
    """These shares scaled to the batch, with an even part for each worker that joined. If a share would fall below `least`,
    all parts are even; if even parts are too small as well, the new workers get none.

    >>> widened({0: 6, 2: 6}, [3], 12, 1)
    {0: 4, 2: 4, 3: 4}
    """
    some = sum(share > 0 for share in shares.values())
    if not some:
        return scaled(dict.fromkeys([*shares, *come], 1), batch)
    parts = {worker: share * some for worker, share in shares.items()} | dict.fromkeys(come, sum(shares.values()))
    even = {worker: int(part > 0) for worker, part in parts.items()}
    none = dict(shares) | dict.fromkeys(come, 0)
    for weights in (parts, even, none):
        result = scaled(weights, batch)
        if all(not share or share >= least for share in result.values()):
            break
    return result
