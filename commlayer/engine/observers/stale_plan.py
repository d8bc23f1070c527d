"""Checks whether a requested plan still performs as predicted, and reports it if not, but never changes the plan."""

from __future__ import annotations

import logging
import time
from statistics import median

from msgspec import structs

from commlayer.engine.components import Component, ComponentOrder
from commlayer.engine.job.job import DistributedJob
from commlayer.observe.prediction_check import PredictionCheck, StalePlan
from commlayer.records import Plan, Record

REMEDY = 'the requested plan stays in use: create a new one from new measurements of `commlayer profile`, or leave plan out'


class StaleState(Record, frozen=True):
    """What this rank knows about the requested plan and its step times."""

    plan: Plan | None = None
    check: PredictionCheck | None = None
    """Comparison of step times with the plan's prediction. The value is None if the plan has no prediction."""
    recent: tuple[float, ...] = ()
    """Seconds of the latest steps under the plan, at most three. `check` observes their median."""


def decide(state: StaleState, plan: Plan | None, step: int, step_s: float) -> tuple[StaleState, StalePlan | None]:
    """Compares the time of step number `step` with the plan's prediction. Returns the new state, and a report if the plan is
    slower or faster than predicted. `plan`: the requested plan in use; None if commlayer chooses the plan.

    A plan's first step is not compared, because part of it ran under another plan. After a report, the reported time becomes
    the expected one, so that the report is not repeated.
    """
    if plan is not state.plan:
        check = PredictionCheck(plan.step_s) if plan is not None and plan.step_s > 0 else None
        return StaleState(plan, check), None
    if state.check is None:
        return state, None
    recent = (*state.recent[-2:], step_s)
    check, stale = state.check.observe(median(recent), step)
    if stale is not None:
        check = PredictionCheck(stale.measured_s, usual=True)
    return structs.replace(state, recent=recent, check=check), stale


class StalePlanWatch(Component):
    """Compares step times with the plan's prediction, on rank 0. Warm-up steps are not compared: they send more than the
    prediction includes."""

    order = ComponentOrder.STALE_PLAN

    def __init__(self, context: DistributedJob) -> None:
        self._context = context
        self.new_members()

    def new_members(self) -> None:
        self._state, self._ended = StaleState(), 0.0

    def end_step(self) -> None:
        context = self._context
        if context.rank:
            return
        step_s = time.perf_counter() - self._ended
        plan = context.plan
        warming = context.worker.step < plan.warmup
        self._state, stale = decide(self._state, None if context.terms.auto or warming else plan, context.passes, step_s)
        if stale is not None:
            if stale.slower:
                context.events.append(stale)
                context.log_decision(f"{stale.reason}; {REMEDY}")
            else:
                context.log_decision(stale.reason, logging.INFO)
        self._ended = time.perf_counter()
