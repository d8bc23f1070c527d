"""Shares rank 0's plan with every rank, and checks that a plan fits the job, before the first step or a change of plan."""

from __future__ import annotations

from collections.abc import Callable

import torch

from commlayer import planner, records
from commlayer.cluster.calls.messages import MAX_PLAN_NBYTES
from commlayer.cluster.calls.sanitize import REASON_CHARS
from commlayer.cluster.processes.collectives import Groups
from commlayer.engine.job.plan_checks import node_problems
from commlayer.engine.sync.sync_modes import Forbids, used_sync_modes
from commlayer.errors import CommError, InvalidInput, short_line
from commlayer.records import Job, Plan

REFUSED = b"!"
"""Prefix of an error text that rank 0 sends instead of a plan. (The bytes of a plan start with a brace.)"""


def encode_lowered_plan(plan: Plan) -> bytes:
    return records.encode(planner.lower(plan))


def plan_in(data: bytes) -> Plan:
    return records.decode(data, Plan, "plan of rank 0")


class OfferedPlan:
    """Result of the function make() on rank 0, before it is sent to the other ranks. If make() fails, its error text is sent
    instead. Ranks can exchange the size of the result together with other data."""

    def __init__(self, make: Callable[[], bytes], rank: int) -> None:
        self.data = b""
        """Bytes to send; empty on ranks other than 0."""
        self._error: Exception | None = None
        if rank == 0:
            try:
                self.data = make()
            except (ValueError, CommError) as error:
                self.data, self._error = REFUSED + str(error).encode(), error

    def taken(self, data: bytes) -> bytes:
        """Returns the data that rank 0 has sent, or raises rank 0's error. Called on every rank."""
        if self._error is not None:
            raise self._error
        if data.startswith(REFUSED):
            why = data.removeprefix(REFUSED)[: 4 * REASON_CHARS].decode(errors="replace")
            raise InvalidInput("E-PLAN-REFUSED", f"rank 0: {short_line(why, REASON_CHARS)}")
        return data


def from_rank_0(make: Callable[[], bytes], groups: Groups, wait_s: float = 0.0) -> bytes:
    """Returns on every rank the bytes that make() returns on rank 0, or raises rank 0's error on every rank.

    `wait_s`: seconds to wait for small results that can take longer than a collective of a step; 0: use a collective.
    """
    offer = OfferedPlan(make, groups.rank)
    return offer.taken(groups.members.exchange_bytes(offer.data, wait_s, "start")[0] if wait_s else
                       groups.share_bytes(offer.data, MAX_PLAN_NBYTES, "a plan"))


def check_plan(
    plan: Plan, job: Job, nodes: int, per_node: int, device: torch.device, forbids: Forbids, *, reachable: bool = True,
) -> None:
    """Raises ValueError with the first reason why this plan cannot run in this job. `forbids` returns why the job cannot use a
    sync mode, or ""."""
    problems = planner.verify(plan, job) or node_problems(
        plan, nodes, per_node, cuda=device.type == "cuda", reachable=reachable) or \
        [f"{what}: {why}" for mode, what in used_sync_modes(plan) if (why := forbids(mode))]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise InvalidInput("E-PLAN-REFUSED", f"plan: {problems[0]}{more}")
