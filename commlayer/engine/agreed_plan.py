"""Rank 0's plan, on every rank, and whether a plan fits a job here. Runs ahead of the first step and of a change of plans."""

from __future__ import annotations

from collections.abc import Callable

import torch

from commlayer import planner, records
from commlayer.cluster.groups import Groups
from commlayer.engine.plan_check import unsuited
from commlayer.engine.ways import Forbids, ways_of
from commlayer.errors import CommError, InvalidInput
from commlayer.records import Job, Plan

REFUSED = b"!"
"""In front of the reason that rank 0 sends in place of a plan; a plan's bytes begin with a brace."""


def agreed_plan(settle: Callable[[], Plan], groups: Groups | None) -> Plan:
    """What settle() gives on rank 0, on every rank, or its reason for failing."""
    return plan_in(from_rank_0(lambda: bytes_of(settle()), groups))


def bytes_of(plan: Plan) -> bytes:
    return records.encode(planner.lower(plan))


def plan_in(data: bytes) -> Plan:
    return records.decode(data, Plan, "plan of rank 0")


class Offer:
    """What make() gives on rank 0, made ahead of being shared, so that ranks can tell each other its size along with something
    else. Where it fails, the reason is shared."""

    def __init__(self, make: Callable[[], bytes], rank: int) -> None:
        self.data = b""
        """Nothing on other ranks."""
        self._error: Exception | None = None
        if rank == 0:
            try:
                self.data = make()
            except (ValueError, CommError) as error:
                self.data, self._error = REFUSED + str(error).encode(), error

    def taken(self, data: bytes) -> bytes:
        """On every rank, of rank 0's data as it came: what was made, or raises rank 0's reason for failing."""
        if self._error is not None:
            raise self._error
        if data.startswith(REFUSED):
            raise InvalidInput("E-PLAN-REFUSED", f"rank 0: {data.removeprefix(REFUSED).decode()}")
        return data


def from_rank_0(make: Callable[[], bytes], groups: Groups | None, wait_s: float = 0.0) -> bytes:
    """What make() gives on rank 0, on every rank; or its reason for failing, raised on every rank.

    `wait_s`: of what is small and may take longer than a collective of a step.
    """
    if groups is None:
        return make()
    offer = Offer(make, groups.rank)
    return offer.taken(groups.members.tell(offer.data, wait_s, "start")[0] if wait_s else groups.share_bytes(offer.data))


def check_plan(
    plan: Plan, job: Job, nodes: int, per_node: int, device: torch.device, forbids: Forbids, *, reachable: bool = True,
) -> None:
    """ValueError with the first reason why it cannot run."""
    problems = planner.verify(plan, job) or unsuited(
        plan, nodes, per_node, cuda=device.type == "cuda", reachable=reachable) or \
        [f"{what}: {why}" for way, what in ways_of(plan) if (why := forbids(way))]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise InvalidInput("E-PLAN-REFUSED", f"plan: {problems[0]}{more}")
