"""Decides from rows which workers join a job next, or begin to follow it, and in which step. Pure functions.

A member that learns of joining workers proposes them in its row. The rows of a step are one exchange: all members receive the
same rows, even if some die. So the rows decide, and no other agreement is needed. The workers become members LEAD steps later.
Until then each member has reported them to all servers and has their acknowledgements.

A removal needs no agreement: servers learn of it from the coordinator, and close sums without the removed member.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

LEAD = 2
"""Steps between the rows that decide on a joining worker and its first step. Results of a step may be taken during the next
one."""
MOST_AT_ONCE = 4
"""Number of proposals in a row: the largest number of workers that join in the same step."""


class Proposal(NamedTuple):
    """A worker that a member proposes in its row. `number`: number of workers that have joined, with this one. `generation`:
    that of the coordinator's epoch in which the worker is a member."""

    number: int
    member: int
    generation: int


class Joining(NamedTuple):
    """A worker that rows have admitted. All members have equal records of it. `first`: its first step."""

    number: int
    member: int
    generation: int
    first: int


def propose(joined: int, new: Iterable[int], generation: int) -> list[Proposal]:
    """Returns the proposals of a row. `new`: workers that are to join, in this order. `joined`: number of workers that have
    been admitted so far."""
    proposals = [Proposal(joined + place, member, generation) for place, member in enumerate(islice(new, MOST_AT_ONCE), 1)]
    return proposals + [Proposal(0, 0, 0)] * (MOST_AT_ONCE - len(proposals))


def decide(joined: int, step: int, proposals: Iterable[Proposal]) -> list[Joining]:
    """Returns the workers that the rows of `step` admit. `joined`: number of workers that have been admitted so far. Of several
    proposals with the same number one is chosen; a worker that is not chosen is proposed again."""
    chosen, left = list[Joining](), [*proposals]
    while valid := [p for p in left if p.number == joined + len(chosen) + 1]:
        chosen.append(Joining(*min(valid), first=step + LEAD))
        left = [p for p in left if p.member != chosen[-1].member]
    return chosen
