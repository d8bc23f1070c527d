"""Rank 0's plan, on every rank, and whether a plan fits a job here. Runs ahead of the first step and of a change of plans."""

from __future__ import annotations

from collections.abc import Callable

import torch

from commlayer import planner, records
from commlayer.errors import CommError
from commlayer.job.ways import Forbids, ways_of
from commlayer.records import Job, Plan
from commlayer.runtime.plan_check import unsuited
from commlayer.transport.groups import Groups

REFUSED = b"!"
"""In front of the reason that rank 0 sends in place of a plan; a plan's bytes begin with a brace."""


def agreed_plan(settle: Callable[[], Plan], groups: Groups | None) -> Plan:
    """What settle() gives on rank 0, on every rank, or its reason for failing."""
    data = from_rank_0(lambda: records.encode(planner.lower(settle())), groups)
    return records.decode(data, Plan, "plan of rank 0")


class Offer:
    """Rank 0's plan, made ahead of being shared, so that ranks can tell each other its size along with something else."""

    def __init__(self, settle: Callable[[], Plan], rank: int) -> None:
        self._data = b""
        self._error: Exception | None = None
        if rank == 0:
            try:
                self._data = records.encode(planner.lower(settle()))
            except (ValueError, CommError) as error:
                self._data, self._error = REFUSED + str(error).encode(), error

    @property
    def nbytes(self) -> int:
        """0 on other ranks."""
        return len(self._data)

    def shared(self, groups: Groups, nbytes: int) -> Plan:
        """On every rank; or rank 0's reason for failing. `nbytes`: of rank 0's."""
        data = groups.share_bytes(self._data, nbytes)
        if self._error is not None:
            raise self._error
        return records.decode(_unless_refused(data), Plan, "plan of rank 0")


def from_rank_0(make: Callable[[], bytes], groups: Groups | None, wait_s: float = 0.0) -> bytes:
    """What make() gives on rank 0, on every rank; or its reason for failing, raised on every rank.

    `wait_s`: of what is small and may take longer than a collective of a step.
    """
    if groups is None:
        return make()

    def share(data: bytes) -> bytes:
        return groups.members.tell(data, wait_s, "start")[0] if wait_s else groups.share_bytes(data)

    data = b""
    if groups.rank == 0:
        try:
            data = make()
        except (ValueError, CommError) as error:
            share(REFUSED + str(error).encode())
            raise
    return _unless_refused(share(data))


def _unless_refused(data: bytes) -> bytes:
    if data.startswith(REFUSED):
        raise ValueError(f"rank 0: {data.removeprefix(REFUSED).decode()}")
    return data


def check_plan(
    plan: Plan, job: Job, nodes: int, per_node: int, device: torch.device, forbids: Forbids, *, reachable: bool = True,
) -> None:
    """ValueError with the first reason why it cannot run."""
    problems = planner.verify(plan, job) or unsuited(
        plan, nodes, per_node, cuda=device.type == "cuda", reachable=reachable) or \
        [f"{what}: {why}" for way, what in ways_of(plan) if (why := forbids(way))]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ValueError(f"plan: {problems[0]}{more}")
