"""Observers of each training step, and their order. engine/step_loop.py calls them on every rank.

Observers communicate with those of other ranks, so all ranks call theirs in one order. Only places define the order, not the
time at which an observer was added.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from enum import IntEnum
from statistics import median
from typing import Any, NamedTuple

from msgspec import structs

from commlayer.engine.connection import DistributedJob
from commlayer.observe.prediction_check import PredictionCheck, StalePlan
from commlayer.records import Plan, Record


class ObserverOrder(IntEnum):
    """The order: first those that may change the plan, then those that watch what runs under it."""

    CONTROLLER = 0
    """Measures, chooses plans, compares coded with exact gradients, and switches (autotune/)."""
    TRACE = 1
    """Records the steps of a trace (trace.py)."""
    STALE_PLAN = 2
    """Compares times of steps with predictions (observers.py)."""
    PARAMETER_DRIFT = 3
    """Compares the ranks' parameters (parameter_drift.py)."""
    OTHER = 4


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
    """Averages are written, before the optimizer's step. Under sync="forward": after it, before the next step's first
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
# If commlayer chooses the plan, the controller (autotune/) watches it. A user's plan stays until the user changes it.

REMEDY = 'it is kept, since it was asked for: make it again from what `commlayer profile` measures here, or leave plan out'


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


def watch_of(connection: DistributedJob) -> StalePlanWatch | None:
    """On rank 0 only. It watches each plan that has a prediction, one after the other."""
    return StalePlanWatch(connection) if connection.rank == 0 else None


class StalePlanWatch:
    """Called after each step. Warm-up steps are not compared: they send more than the prediction includes."""

    def __init__(self, connection: DistributedJob) -> None:
        self._connection, self._state, self._ended = connection, StaleState(), 0.0

    def __call__(self) -> None:
        connection = self._connection
        step_s = time.perf_counter() - self._ended
        plan = connection.plan
        warming = connection.worker.step < plan.warmup
        self._state, stale = decide(self._state, None if connection.terms.auto or warming else plan, connection.passes, step_s)
        if stale is not None:
            if stale.slower:
                connection.events.append(stale)
                connection.say(f"{stale.reason}; {REMEDY}")
            else:
                connection.say(stale.reason, logging.INFO)
        self._ended = time.perf_counter()
