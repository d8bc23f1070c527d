"""The automatic plan in tests: plans and candidates, rank 0's decisions step by step, and a setting for real jobs."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import structs

from commlayer.autotune import plan_policy
from commlayer.autotune.planning.candidate import Candidate
from commlayer.autotune.state import (
    MEASURED_STEPS,
    WARM_STEPS,
    LinkState,
    LogLine,
    Phase,
    Reason,
    TuningRequest,
    TuningState,
)
from commlayer.observe.interface_counters import Direction, Throughput
from commlayer.observe.link_monitor import SeenStep
from commlayer.observe.prediction_check import StalePlan
from commlayer.planner import builtin, default_plan
from commlayer.planner.data.tables import profile_from_tables
from commlayer.planner.model import Basis, Cluster, Link, Policy, Question
from commlayer.records import Plan

JOB = builtin("lstm")
LINKS = (Link(1e8, 1e8, 0.01), Link(1e8, 1e8, 0.02))
FIRST_PLANNING = WARM_STEPS + MEASURED_STEPS + 1
"""The step after which all have measured."""


def plan_of(step_s: float, codec: str = "fp16()") -> Plan:
    """A plan with this predicted step time."""
    plan = default_plan(JOB, codec=codec, path="service", servers=1, ranks_per_node=1, fuse_nbytes=1 << 20, cut_nbytes=1 << 21)
    return structs.replace(plan, step_s=step_s)


def local(step_s: float) -> Plan:
    return structs.replace(plan_of(step_s, "identity()"), codes="updates", local_steps=8)


START = plan_of(0.0, "int4()")
"""The first plan of a job, which has no prediction."""
LEAVING = "nothing on averaged gradients keeps up"


def basis_of(plan: Plan) -> Basis:
    return Basis(plan, Question(JOB, Cluster(()), profile_from_tables(Cluster(())), Policy()))


def candidate(
    plan: Plan, current_s: float = 1.0, *, local: Plan | None = None, plain: Plan | None = None, steps: float = 1.0,
    current_steps: float = 1.0, alone_s: float = 0.0, hint: str = "",
) -> Candidate:
    """That plan, at prices by which the active plan takes `current_s`. `local`, `plain`: its alternatives, with local steps and
    without compression."""
    result = Candidate(basis_of(plan), plan, START, current_s, 0.9 * current_s, (0.3, 0.1), (0.6, 0.1), steps, current_steps,
                       alone_s=alone_s, hint=hint)
    others = [result._replace(basis=basis_of(each), runnable=each, steps=1.0, leaves="" if each is plain else LEAVING)
              for each in (local, plain) if each is not None]
    return result._replace(alternatives=tuple(others))


def seen(step_s: float = 1.0, waited_s: float = 0.0, bps: float = 0.0, share: float = 0.0) -> SeenStep:
    """The rows of all ranks, whose links carried the same in both directions."""
    way = Direction(bps, share)
    return SeenStep(step_s, waited_s, (Throughput(way, way),) * len(LINKS))


class Rank0:
    """Rank 0's state after the first measurement of links, the inputs from the controller, and the decisions."""

    def __init__(self) -> None:
        self.state = TuningState(START, leads=True, phase=Phase.WATCHING, links=LinkState.of(LINKS, 0.0, 0.0))
        self.step_number, self.now = 0, 0.0
        self.lines: list[Reason] = []

    def set(self, state: TuningState, lines: list[Reason]) -> list[Reason]:
        self.state = state
        self.lines += lines
        return lines

    @property
    def links(self) -> LinkState:
        assert self.state.links is not None
        return self.state.links

    @links.setter
    def links(self, links: LinkState) -> None:
        self.state = structs.replace(self.state, links=links)

    def step(self, seconds: float = 1.0, times: int = 1) -> list[Reason]:
        """The lines of the last of these steps."""
        for _ in range(times):
            self.step_number += 1
            lines = self.set(*plan_policy.record_step_time(self.state, seconds, self.step_number))
        return lines

    def search(self, step_s: float = 1.0, pace_s: float = 0.0, *, checks: bool = True) -> None:
        self.state = plan_policy.begin_search(self.state, step_s, pace_s, checks=checks)

    def found(self, result: Candidate | None, why: str = "") -> list[Reason]:
        assert self.state.order is not None
        return self.set(*plan_policy.end_search(self.state, self.state.order, result, why))

    def observe(self, row: SeenStep, times: int = 1) -> None:
        for _ in range(times):
            self.links = structs.replace(self.links, watch=self.links.watch.observe(row)[0])

    def request(self) -> TuningRequest:
        self.state, request = plan_policy.next_request(self.state, self.now)
        return request

    def enter(self, plan: Plan) -> None:
        """The script or the quality guard has set this plan."""
        self.state = plan_policy.adapt_to_plan(self.state, plan)

    def switch(self, plan: Plan | None = None) -> Candidate:
        """All ranks switch to the proposal, or to `plan` instead. Returns the proposal."""
        assert self.request() == TuningRequest.SWITCH
        assert self.state.proposal is not None
        proposed = self.state.proposal.candidate
        self.set(*plan_policy.finish_switch(self.state, plan or proposed.runnable))
        self.state = plan_policy.adapt_to_plan(self.state, plan or proposed.runnable, own=True)
        return proposed


def searching(step_s: float = 1.0, pace_s: float = 0.0) -> Rank0:
    """Rank 0 after the first measurement."""
    rank = Rank0()
    rank.search(step_s, pace_s)
    return rank


def proposing(result: Candidate, step_s: float = 1.0) -> Rank0:
    """Rank 0 with a search result."""
    rank = searching(step_s)
    rank.found(result)
    return rank


def trying(result: Candidate, step_s: float = 1.0) -> Rank0:
    """Rank 0 after the switch to it."""
    rank = proposing(result, step_s)
    rank.switch()
    return rank


def texts(lines: list[Reason]) -> str:
    return " | ".join(line.reason if isinstance(line, StalePlan) else line.text for line in lines)


def warnings(lines: list[Reason]) -> list[str]:
    return [line.text for line in lines if isinstance(line, LogLine) and line.level == logging.WARNING]


@contextlib.contextmanager
def any_step_time() -> Iterator[None]:
    """All switch to the plan found and stay: prices and step times of a loaded machine change no plan."""
    settings: dict[str, Any] = {"WORTH": -math.inf, "SLOWER": math.inf, "PLAIN": -math.inf, "LEAVES": -math.inf,
                                "STALE": math.inf}
    with pytest.MonkeyPatch.context() as patch:
        for rule, value in settings.items():
            patch.setattr(plan_policy, rule, value)
        yield
