"""Decides from rows which worker joins a job next, and in which step it begins. Pure functions.

A member that learns of a joining worker proposes it in its row. The rows of a step are one exchange: all members receive the
same rows, even if some die. So the rows decide, and no other agreement is needed. The worker becomes a member LEAD steps later.
Until then each member has reported it to all servers and has their acknowledgements.

A removal needs no agreement: servers learn of it from the coordinator, and close sums without the removed member.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

LEAD = 2
"""Steps between the rows that decide on a joining worker and its first step. Results of a step may be taken during the next
one."""


class Proposal(NamedTuple):
    """A worker that a member proposes in its row. `number`: number of workers that have joined, with this one. `generation`:
    that of the coordinator's epoch in which the worker is a member."""

    number: int
    member: int
    generation: int


class Joining(NamedTuple):
    """A worker that rows have let in. All members have equal records of it. `first`: its first step."""

    number: int
    member: int
    generation: int
    first: int


def decide(joined: int, step: int, proposals: Iterable[Proposal]) -> Joining | None:
    """Returns the worker that the rows of `step` let in; None if there is none. `joined`: number of workers that have been let
    in so far. Of several proposals one is chosen; the others are proposed again."""
    valid = [p for p in proposals if p.number == joined + 1]
    return Joining(*min(valid), first=step + LEAD) if valid else None
