"""Decides from rows when a change of members or plans takes effect. Pure functions.

A member that learns of a joining worker, or decides on a plan, proposes the change in its row. The rows of a step are one
exchange: all members receive the same rows, even if some die. So the rows decide, and no other agreement is needed. The change
takes effect LEAD steps later. Until then each member has reported it to all servers and has their acknowledgements.

A removal needs no agreement: servers learn of it from the coordinator, and close sums without the removed member.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

LEAD = 2
"""Steps between the rows that decide on a change and its first step. Results of a step may be taken during the next one."""


class Proposal(NamedTuple):
    """A change that a member proposes in its row. `generation`: that of the epoch that the change begins. `joins`: rank of a
    worker that has the job's state and joins; -1 for a change of plans, which `plan` numbers."""

    generation: int
    joins: int = -1
    plan: int = 0


class Change(NamedTuple):
    """A change that rows have decided. All members have equal records of it. `first`: its first step."""

    generation: int
    joins: int
    plan: int
    first: int


def decide(generation: int, step: int, proposals: Iterable[Proposal | None]) -> Change | None:
    """Returns the change that the rows of `step` decide; None if there is none. `generation`: that of the last decided change.
    Of several proposals one is chosen; the others are proposed again."""
    valid = [p for p in proposals if p is not None and p.generation == generation + 1]
    return Change(*min(valid), first=step + LEAD) if valid else None
