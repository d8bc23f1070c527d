"""Who of a job's workers a sampler deals to, as they go and come: which shares hold then, and from when. Knows no samples.

A sampler counts workers from 0, a session by who they are. Whoever comes gets a number that nobody had, and an even part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from commlayer.balance.epoch_steps import KEEP_STEPS
from commlayer.balance.schedule import Announcement, Shares, scaled

SOON_STEPS = KEEP_STEPS - 1
"""So many steps behind a loss or a gain all workers hand out anew. No loader may draw more batches ahead: one that does is
refused."""


class Roster:
    """The same on all workers behind the same step."""

    def __init__(self, numbers: Sequence[int] = (), gone: Sequence[int] = (), amiss: int = 0) -> None:
        self.numbers = tuple(numbers)
        """How the session counts the workers that the sampler counts from 0. Empty: they have not met."""
        self.gone = frozenset(gone)
        """Of the sampler's."""
        self.amiss = amiss
        """Up to this step others have been given samples that are gone."""
        self._there = self.numbers
        self.changed = bool(self.gone)
        """Whether workers are others than those who met."""

    @property
    def left(self) -> list[int]:
        """Those of the sampler's who are there, in the order of their ranks."""
        return [worker for worker in range(len(self.numbers)) if worker not in self.gone]

    def meet(self, members: Sequence[int]) -> None:
        self.numbers = self._there = tuple(members)

    def heed(self, step: int, members: Sequence[int], shares: Shares, batch: int, least: int,
             lost_from: Callable[[int], int]) -> Announcement | None:
        """What is to be announced where members are others behind `step`. `shares`: those that would hold then. `lost_from`:
        of a member that has gone, the first step that it had no part in, as the session counts members."""
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
    """These shares scaled to the batch, and beside them an even part for each that has come. Where that leaves somebody less
    than the `least`, the parts of all are even; where that is too little, too, those who have come get none.

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
        found = scaled(weights, batch)
        if all(not share or share >= least for share in found.values()):
            break
    return found
