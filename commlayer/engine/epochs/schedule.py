"""Decides from rows which workers join a job next, or begin to follow it, and in which step. Pure functions.

A member that learns of joining workers proposes them in its row. The rows of a step are one exchange: all members receive the
same rows, even if some die. What more than half of them propose is decided, so no further agreement is needed. The workers
become members LEAD steps later, under local steps in the next outer step; all workers of a site in the same one. Until then
each member has reported them to all servers and has their acknowledgements.

A removal needs no agreement: servers learn of it from the coordinator, and close sums without the removed member.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import NamedTuple

LEAD = 2
"""Steps between the rows that decide on a joining worker and its first step. Results of a step may be taken during the next
one."""
MOST_AT_ONCE = 4
"""Number of proposals in a row: the largest number of sites that join in the same step."""


class EpochProposal(NamedTuple):
    """A site that a member proposes in its row. `number`: number of workers that have joined, with the first one of this site.
    `member`: number of this first worker; the site's other workers have the numbers after it. `generation`: that of the
    coordinator's epoch in which they are members. `workers`: their number."""

    number: int
    member: int
    generation: int
    workers: int = 1


class Joining(NamedTuple):
    """A worker that rows have admitted, with all workers of its site. All members have equal records of it. `first`: its first
    step. `site`: number of the first worker of its site, which has `workers`."""

    number: int
    member: int
    generation: int
    first: int
    site: int
    workers: int = 1


def propose(joined: int, new: Iterable[Sequence[int]], generation: int) -> list[EpochProposal]:
    """Returns the proposals of a row. `new`: the workers of each site that is to join, in this order. `joined`: number of
    workers that have been admitted so far."""
    proposals = list[EpochProposal]()
    for site in islice(new, MOST_AT_ONCE):
        proposals.append(EpochProposal(joined + 1, site[0], generation, len(site)))
        joined += len(site)
    return proposals + [EpochProposal(0, 0, 0)] * (MOST_AT_ONCE - len(proposals))


def keep_majority(rows: Sequence[Iterable[EpochProposal]]) -> list[EpochProposal]:
    """Returns the proposals that more than half of the rows make. So no member alone admits workers, and a worker waits until
    most members know of it."""
    counts = Counter(chain.from_iterable(map(set, rows)))
    return [p for p, count in counts.items() if 2 * count > len(rows)]


def decide(joined: int, first: int, proposals: Iterable[EpochProposal]) -> list[Joining]:
    """Returns the workers that rows admit from step `first` on. `joined`: number of workers that have been admitted so far. Of
    several proposals with the same number one is chosen; a site that is not chosen is proposed again."""
    chosen, left = list[Joining](), [*proposals]
    while valid := [p for p in left if p.number == joined + len(chosen) + 1]:
        number, member, generation, workers = min(valid)
        chosen += [Joining(number + place, member + place, generation, first, member, workers) for place in range(workers)]
        left = [p for p in left if p.member != member]
    return chosen
