"""Observers of each training step, and their order. engine/step_loop.py calls them on every rank.

Observers communicate with those of other ranks, so all ranks call theirs in one order. Only places define the order, not the
time at which an observer was added.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from enum import IntEnum
from statistics import median
from typing import Any, NamedTuple

from msgspec import structs

from commlayer.engine.connection import JobContext
from commlayer.errors import InvalidInput
from commlayer.observe import PredictionCheck, StalePlan
from commlayer.records import Plan, Record


class ObserverOrder(IntEnum):
    """The order: first those that may change the plan, then those that watch what runs under it."""

    AUTO_PLAN = 0
    """Measures, plans, and switches to a better plan (autotune/plan)."""
    ACCURACY = 1
    """Compares coded with exact gradients, and makes codecs finer or coarser (autotune/quality)."""
    TRACE = 2
    """Records the steps of a trace (trace.py)."""
    STALE_PLAN = 3
    """Compares times of steps with predictions (stale_plan.py)."""
    PARAMETER_DRIFT = 4
    """Compares the ranks' parameters (parameter_drift.py)."""
    OTHER = 5


def _nothing() -> None:
    """Default: the observer does nothing at that point."""


def _never() -> bool:
    """Default: the observer does not read sums."""
    return False


class Observer(NamedTuple):
    """One observer and its callbacks. A CommError that it raises is latched in the worker."""

    place: ObserverOrder
    who: Any
    after_step: Callable[[], None] = _nothing
    """Averages are written, before the optimizer's step. With overlap="forward": after it, before the next step's first
    gradient."""
    before_commit: Callable[[], None] = _nothing
    """Sums have arrived, and averages are not yet written."""
    looks: Callable[[], bool] = _never
    """Whether `before_commit` reads the sums of the current step."""
    after_exchange: Callable[[], None] = _nothing
    """Local steps have been exchanged on schedule. An observer may change the plan in this call."""
    after_drain: Callable[[], None] = _nothing
    """Local steps have been exchanged early: for a save, an evaluation, the end, or a change of plans. Training continues under
    the same plan."""


class Observers:
    """Those of one session, in the order of their places; at one place, in the order in which they were added."""

    def __init__(self) -> None:
        self._all: list[Observer] = []

    def add(self, observer: Observer) -> None:
        self._all = sorted([*self._all, observer], key=lambda each: each.place)

    def remove(self, who: Any) -> None:
        self._all = [each for each in self._all if each.who is not who]

    def at(self, place: ObserverOrder) -> list[Any]:
        return [each.who for each in self._all if each.place is place]

    def __iter__(self) -> Iterator[Observer]:
        """Additions and removals during an iteration take effect in the next one."""
        return iter(tuple(self._all))


# ---- checks whether a requested plan still performs as predicted, and reports it if not
#
# Never changes the plan.
#
# If commlayer chooses the plan, autotune/plan/ watches it and replans. A user's plan stays until the user changes it.

REMEDY = 'it is kept, since it was asked for: make it again from what `commlayer profile` measures here, or take plan="auto"'


class StaleState(Record, frozen=True):
    """Knowledge about the watched plan."""

    plan: Plan | None = None
    check: PredictionCheck | None = None
    """None without a prediction."""
    recent: tuple[float, ...] = ()
    """Seconds of the latest steps under the plan; the check uses their median."""


def decide(state: StaleState, plan: Plan | None, step: int, step_s: float) -> tuple[StaleState, StalePlan | None]:
    """Runs after step number `step`. `plan`: the requested plan in use; None if commlayer chooses the plan.

    A plan's first step is not compared, because part of it ran under another plan. After a report, the reported time becomes
    the expected one, so that the report is not repeated."""
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


def watch_of(connection: JobContext) -> StalePlanWatch | None:
    """On rank 0 only. It watches each plan that has a prediction, one after the other."""
    return StalePlanWatch(connection) if connection.rank == 0 and connection.worker is not None else None


class StalePlanWatch:
    """Called after each step. Warm-up steps are not compared: they send more than the prediction includes."""

    def __init__(self, connection: JobContext) -> None:
        self._connection, self._state, self._ended = connection, StaleState(), 0.0

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


# ---- computes how rarely to do something beside training, so that it stays within its share of the time

TIME_PART = 0.01
"""Largest share of a job's time for comparisons with exact gradients, and for exchanges of rows between ranks."""
MOST_STEPS = 64
"""Most steps that share an exchange of rows: the values should be recent."""


def steps_until_paid(spent_s: float, cost_s: float, elapsed_s: float, step_s: float, part: float = TIME_PART) -> int:
    """Steps until one more comparison keeps all of them within that part of the time since the start.

    >>> steps_until_paid(spent_s=0.05, cost_s=0.05, elapsed_s=1.0, step_s=0.2), steps_until_paid(0.0, 0.05, 10.0, 0.2)
    (45, 1)"""
    if min(spent_s, cost_s, elapsed_s) < 0 or step_s <= 0:
        raise InvalidInput("E-ARGUMENT",
                           f"spent {spent_s:g} s, it takes {cost_s:g} s, {elapsed_s:g} s have passed, a step takes "
                           f"{step_s:g} s: allowed are 0 or more, and more than 0")
    return max(1, math.ceil(((spent_s + cost_s) / part - elapsed_s) / step_s - 1e-9))


def steps_between(cost_s: float, step_s: float, part: float = TIME_PART) -> int:
    """Steps from one time to the next, so that all of them together take at most that part of the time.

    >>> steps_between(0.05, 0.2)
    25"""
    if cost_s < 0 or step_s <= 0:
        raise InvalidInput("E-ARGUMENT", f"it takes {cost_s:g} s, a step {step_s:g} s: allowed are 0 or more, and more than 0")
    return max(1, math.ceil(cost_s / (part * step_s) - 1e-9))


def row_spacing(cost_s: float, step_s: float) -> int:
    """Steps that share one exchange of rows; 1 while its cost is unknown.

    >>> row_spacing(0.0002, 0.1), row_spacing(0.0002, 0.01), row_spacing(0.0, 0.01)
    (1, 2, 1)"""
    return min(MOST_STEPS, steps_between(cost_s, step_s)) if cost_s > 0 and step_s > 0 else 1
