"""Ranks that plan automatically, as far as decisions go: facts in, actions out. And a setting for real ones."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec import structs

from commlayer.autotune.plan import policy
from commlayer.autotune.plan.policy import MEASURED_STEPS, WARM_STEPS, begin, decide
from commlayer.autotune.plan.state import (
    Action,
    ActivePlan,
    Candidate,
    Events,
    Fact,
    LogLine,
    Measure,
    MeasuringDone,
    PlanningDone,
    PlanRequest,
    ReportDue,
    ReportsRead,
    ShareReport,
    ShareStepTime,
    StartPlanning,
    StepDone,
    StepReport,
    StepTimes,
    Switch,
    SwitchDone,
    SwitchRefused,
)
from commlayer.planner import builtin, default_plan
from commlayer.planner.model import Basis, Cluster, Link, PlanInputs
from commlayer.records import Plan

JOB = builtin("lstm")
LINKS = (Link(1e8, 1e8, 0.01), Link(1e8, 1e8, 0.02))
FIRST_PLANNING = WARM_STEPS + MEASURED_STEPS + 1
"""The step behind which all have measured."""


def plan_of(step_s: float, codec: str = "fp16()") -> Plan:
    """A plan that promises such a step."""
    made = default_plan(JOB, codec=codec, path="service", servers=1, ranks_per_node=1, fuse_nbytes=1 << 20, cut_nbytes=1 << 21)
    return structs.replace(made, step_s=step_s)


START = plan_of(0.0, "int4()")
"""What a job begins with, of which nothing is predicted."""
LEAVING = "nothing on averaged gradients keeps up"


def basis_of(plan: Plan) -> Basis:
    return Basis(plan, PlanInputs(JOB, Cluster(())))


def candidate(
    plan: Plan, current_s: float = 1.0, *, local: Plan | None = None, plain: Plan | None = None, took_s: float = 0.5,
    steps: float = 1.0, current_steps: float = 1.0, alone_s: float = 0.0, hint: str = "",
) -> Candidate:
    """That plan, where the one in force takes `current_s` by the same prices; so many times as many steps as dense training.

    `local`, `plain`: found beside it, with steps on own gradients and without compression."""
    found = Candidate(basis_of(plan), plan, START, current_s, 0.9 * current_s, (0.3, 0.1), (0.6, 0.1), took_s, steps,
                      current_steps, alone_s=alone_s, hint=hint)
    others = [found._replace(basis=basis_of(each), runnable=each, steps=1.0, leaves="" if each is plain else LEAVING)
              for each in (local, plain) if each is not None]
    return found._replace(beside=tuple(others))


def row(
    step_s: float = 1.0, word: PlanRequest = PlanRequest.NOTHING, plan_s: float = 0.0, bps: float = 0.0, share: float = 0.0,
    waited_s: float | None = None,
) -> StepReport:
    """A rank's, whose link carried the same both ways, and which waited for just that unless something else is said."""
    return StepReport(word, plan_s, 0.0, step_s, 0.0, share * step_s if waited_s is None else waited_s, bps, share, bps, share)


class Rank:
    """One rank's state, and what it did last."""

    def __init__(self, rank: int = 0, in_force: ActivePlan = ActivePlan(START), **setting: Any) -> None:
        self.state = begin(rank, **setting)
        self.in_force, self.now = in_force, 0.0
        self.told_s = 0.0
        """What all tell that their first steps take, whatever its own did."""
        self.told_waited = 1.0
        """The part of that in which all of them wait."""
        self.waited_s = 0.0
        """What its own steps wait."""

    def feed(self, fact: Fact) -> list[Action]:
        self.state, actions = decide(self.state, fact, self.now)
        return actions

    def step(self, seconds: float = 1.0, *news: Any, times: int = 1) -> list[Action]:
        """What is done behind the last of so many steps."""
        for _ in range(times):
            actions = self.feed(StepDone(self.state.step + 1, seconds, Events(self.in_force, news), self.waited_s))
            if pick(actions, ShareStepTime):
                actions = [*actions, *self.feed(StepTimes(self.told_s, self.told_waited * self.told_s))]
            news = ()
        return actions

    def hear(self, *rows: StepReport) -> list[Action]:
        return self.feed(ReportsRead(rows))

    def word(self) -> PlanRequest:
        """What it would tell the others now."""
        (tell,) = self.feed(ReportDue())
        assert isinstance(tell, ShareReport)
        return tell.word

    def switched(self, plan: Plan) -> list[Action]:
        """It has gone over to that plan."""
        actions = self.feed(SwitchDone(plan, self.in_force.plan))
        self.in_force = ActivePlan(plan, basis_of(plan), (0.3, 0.1))
        return actions

    def refused(self, why: str) -> list[Action]:
        return self.feed(SwitchRefused(why))


def planning(step_s: float = 1.0, **setting: Any) -> tuple[Rank, StartPlanning]:
    """Rank 0 behind the first measuring, and what its thread plans."""
    rank = Rank(**setting)
    assert rank.step(step_s, times=FIRST_PLANNING) == [Measure()]
    (order,) = pick(rank.feed(MeasuringDone(LINKS, step_s)), StartPlanning)
    return rank, order


def proposing(found: Candidate, step_s: float = 1.0) -> Rank:
    """Rank 0 that has found a plan worth a change."""
    rank, order = planning(step_s)
    rank.step(step_s, PlanningDone(order, found))
    return rank


def trying(found: Candidate, step_s: float = 1.0) -> Rank:
    """Rank 0 that has gone over to it."""
    rank = proposing(found, step_s)
    over(rank)
    return rank


def over(rank: Rank) -> Candidate:
    """All hear rank 0's word, and go over to its plan: which."""
    assert rank.word() == PlanRequest.SWITCH
    (switch,) = rank.hear(row(word=PlanRequest.SWITCH), row())
    assert isinstance(switch, Switch)
    assert switch.candidate is not None
    rank.switched(switch.candidate.runnable)
    return switch.candidate


def pick(actions: list[Action], kind: Any) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


def said(actions: list[Action]) -> str:
    return " | ".join(action.text for action in pick(actions, LogLine))



@contextlib.contextmanager
def whatever_steps_take() -> Iterator[None]:
    """All go over to what is found, and stay: what a loaded machine makes of prices and of steps changes no plan."""
    with pytest.MonkeyPatch.context() as patch:
        for rule, value in (("WORTH", -math.inf), ("SLOWER", math.inf), ("PLAIN", -math.inf), ("LEAVES", -math.inf),
                            ("STALE", math.inf)):
            patch.setattr(policy, rule, value)
        yield
