"""Whether a requested plan still does what was predicted of it: says so where it does not. Changes no plan.

Where the plan was left to commlayer, autotune/plan/ watches, and answers. What a person has chosen stays until a person
changes it.
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
    """What is known of the plan that is watched."""

    plan: Plan | None = None
    check: PredictionCheck | None = None
    """None where nothing is predicted."""
    recent: tuple[float, ...] = ()
    """Seconds of the latest steps under the plan; the check sees their median."""


def decide(state: State, plan: Plan | None, step: int, step_s: float) -> tuple[State, StalePlan | None]:
    """After a step, by its number. `plan`: the requested plan in force; None where the plan was left to commlayer.

    A plan's first step is not compared: part of it was another plan's. What was said of a plan becomes what is expected of it,
    so that the same is not said twice.
    """
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
    """On rank 0: plans come and go, and it watches each that has a prediction."""
    return StalePlanWatch(connection) if connection.rank == 0 and connection.worker is not None else None


class StalePlanWatch:
    """Called after each step. Nothing is predicted of a warm-up, which sends more than the plan is priced for."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._state, self._ended = connection, State(), 0.0

    def __call__(self) -> None:
        made = self._connection
        step_s = time.perf_counter() - self._ended
        plan = made.plan
        warming = plan is not None and made.worker is not None and made.worker.step < plan.warmup
        self._state, stale = decide(self._state, None if made.terms.auto or warming else plan, made.passes, step_s)
        if stale is not None:
            if stale.slower:
                made.events.append(stale)
                made.say(f"{stale.reason}; {REMEDY}")
            else:
                made.say(stale.reason, logging.INFO)
        self._ended = time.perf_counter()
