"""Shares rank 0's plan with every rank, and checks that a plan fits the job, before the first step or a change of plan."""

from __future__ import annotations

from collections.abc import Callable

import torch

from commlayer import planner, records
from commlayer.cluster.collectives import Groups
from commlayer.engine.plan_check import unsuited
from commlayer.engine.ways import Forbids, ways_of
from commlayer.errors import CommError, InvalidInput
from commlayer.records import Job, Plan

REFUSED = b"!"
"""Prefix of the error text that rank 0 sends instead of a plan; a plan's bytes begin with a brace."""


def agreed_plan(settle: Callable[[], Plan], groups: Groups | None) -> Plan:
    """Returns the result of settle() on rank 0, on every rank, or raises its error on every rank."""
    return plan_in(from_rank_0(lambda: bytes_of(settle()), groups))


def bytes_of(plan: Plan) -> bytes:
    return records.encode(planner.lower(plan))


def plan_in(data: bytes) -> Plan:
    return records.decode(data, Plan, "plan of rank 0")


class Offer:
    """The result of make() on rank 0, made before it is shared, so that ranks can exchange its size together with other data.
    If make() fails, its error is shared."""

    def __init__(self, make: Callable[[], bytes], rank: int) -> None:
        self.data = b""
        """Empty on other ranks."""
        self._error: Exception | None = None
        if rank == 0:
            try:
                self.data = make()
            except (ValueError, CommError) as error:
                self.data, self._error = REFUSED + str(error).encode(), error

    def taken(self, data: bytes) -> bytes:
        """Called on every rank with rank 0's data. Returns the data, or raises rank 0's error."""
        if self._error is not None:
            raise self._error
        if data.startswith(REFUSED):
            raise InvalidInput("E-PLAN-REFUSED", f"rank 0: {data.removeprefix(REFUSED).decode()}")
        return data


def from_rank_0(make: Callable[[], bytes], groups: Groups | None, wait_s: float = 0.0) -> bytes:
    """Returns the result of make() on rank 0, on every rank; or raises its error on every rank.

    `wait_s`: for small results that may take longer than a collective of a step.
    """
    if groups is None:
        return make()
    offer = Offer(make, groups.rank)
    return offer.taken(groups.members.tell(offer.data, wait_s, "start")[0] if wait_s else groups.share_bytes(offer.data))


def check_plan(
    plan: Plan, job: Job, nodes: int, per_node: int, device: torch.device, forbids: Forbids, *, reachable: bool = True,
) -> None:
    """Raises ValueError with the first reason why the plan cannot run."""
    problems = planner.verify(plan, job) or unsuited(
        plan, nodes, per_node, cuda=device.type == "cuda", reachable=reachable) or \
        [f"{what}: {why}" for way, what in ways_of(plan) if (why := forbids(way))]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise InvalidInput("E-PLAN-REFUSED", f"plan: {problems[0]}{more}")
