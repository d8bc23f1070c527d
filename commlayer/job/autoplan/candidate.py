"""What planning for a running job found: a plan, and the one in force by the same prices. Values only."""

from __future__ import annotations

from typing import NamedTuple

from commlayer.planner.model.cluster import Basis
from commlayer.records import Plan

Price = tuple[float, float]
"""Seconds of communication, and the part of computing that hides it."""


class Candidate(NamedTuple):
    """A plan that a running job could go over to."""

    basis: Basis
    """With the plan as the planner has it: workers know some of its paths by other names, which have no price."""
    runnable: Plan
    """The same with buckets on the servers that run."""
    current: Plan
    """The plan that was in force when this was planned, as the planner has it."""
    current_s: float
    """Seconds of a step under it, by the prices that this plan has its own from."""
    uncontended_s: float
    """The same by prices that know nothing of processes sharing processors; see cpu_contention.py."""
    price: Price
    current_price: Price
    took_s: float
    """Of planning."""
    plain: Candidate | None = None
    """The plan that sends gradients as they are, through collectives; None where that one is in force."""

    @property
    def plan(self) -> Plan:
        return self.basis.plan


class ReplanVerdict(NamedTuple):
    """What planning found: seconds of a step."""

    measured_s: float
    """Under the plan in force, as all ranks measured it."""
    priced_s: float
    """Under the same plan, by prices that this figure did not go into."""
    found_s: float
    """Under the best plan found, by prices fitted to it."""
