"""Checks whether a requested plan still performs as predicted, and reports it if not. Never changes the plan.

If commlayer chooses the plan, autotune/plan/ watches it and replans. A user's plan stays until the user changes it.
"""

from __future__ import annotations

import logging
import time
from statistics import median

from msgspec import structs

from commlayer.engine.connection import Connection
from commlayer.observe import PredictionCheck, StalePlan
from commlayer.records import Plan, Record

REMEDY = 'it is kept, since it was asked for: make it again from what `commlayer profile` measures here, or take plan="auto"'


class State(Record, frozen=True):
    """Knowledge about the watched plan."""

    plan: Plan | None = None
    check: PredictionCheck | None = None
    """None without a prediction."""
    recent: tuple[float, ...] = ()
    """Seconds of the latest steps under the plan; the check uses their median."""


def decide(state: State, plan: Plan | None, step: int, step_s: float) -> tuple[State, StalePlan | None]:
    """Runs after step number `step`. `plan`: the requested plan in use; None if commlayer chooses the plan.

    A plan's first step is not compared, because part of it ran under another plan. After a report, the reported time becomes
    the expected one, so that the report is not repeated."""
    if plan is not state.plan:
        check = PredictionCheck(plan.step_s) if plan is not None and plan.step_s > 0 else None
        return State(plan, check), None
    if state.check is None:
        return state, None
    recent = (*state.recent[-2:], step_s)
    check, stale = state.check.observe(median(recent), step)
    if stale is not None:
        check = PredictionCheck(stale.measured_s, usual=True)
    return structs.replace(state, recent=recent, check=check), stale


def watch_of(connection: Connection) -> StalePlanWatch | None:
    """On rank 0 only. It watches each plan that has a prediction, one after the other."""
    return StalePlanWatch(connection) if connection.rank == 0 and connection.worker is not None else None


class StalePlanWatch:
    """Called after each step. Warm-up steps are not compared: they send more than the prediction includes."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._state, self._ended = connection, State(), 0.0

    def __call__(self) -> None:
        connection = self._connection
        step_s = time.perf_counter() - self._ended
        plan = connection.plan
        warming = plan is not None and connection.worker is not None and connection.worker.step < plan.warmup
        self._state, stale = decide(self._state, None if connection.terms.auto or warming else plan, connection.passes, step_s)
        if stale is not None:
            if stale.slower:
                connection.events.append(stale)
                connection.say(f"{stale.reason}; {REMEDY}")
            else:
                connection.say(stale.reason, logging.INFO)
        self._ended = time.perf_counter()
