"""Whether a plan that somebody asked for still does what was predicted of it: says so where it does not. Changes no plan.

Where the plan was left to commlayer, job/autoplan/driver.py watches, and answers. What a person has chosen stays until a
person changes it.
"""

from __future__ import annotations

import logging
import time
from statistics import median

from commlayer.job.start import Connection
from commlayer.observe import PredictionCheck
from commlayer.records import Plan

log = logging.getLogger("commlayer")

REMEDY = 'it is kept, since it was asked for: make it again from what `commlayer profile` measures here, or take plan="auto"'


def watch(connection: Connection) -> None:
    """From now on, on rank 0, if there is a prediction to watch and nobody does."""
    predicted = connection.plan is not None and connection.plan.step_s > 0
    mine = connection.rank == 0 and connection.worker is not None
    if predicted and mine and not any(isinstance(each, StalePlanWatch) for each in connection.watchers):
        connection.watchers.append(StalePlanWatch(connection))


class StalePlanWatch:
    """Called after each step."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._plan: Plan | None = None
        self._drift: PredictionCheck | None = None
        self._steps, self._ended = 0, 0.0
        self._recent: list[float] = []

    def __call__(self) -> None:
        made = self._connection
        self._steps += 1
        if made.auto:
            self._plan = None
        elif made.plan is not self._plan:
            self._begin(made.plan)
        else:
            self._look(time.perf_counter() - self._ended)
        self._ended = time.perf_counter()

    def _begin(self, plan: Plan | None) -> None:
        self._plan = plan
        self._drift = PredictionCheck(plan.step_s) if plan is not None and plan.step_s > 0 else None
        self._recent.clear()

    def _look(self, step_s: float) -> None:
        self._recent = [*self._recent[-2:], step_s]
        if self._drift is None or (stale := self._drift.observe(median(self._recent), self._steps)) is None:
            return
        self._connection.events.append(stale)
        said = f"step {self._steps}: {stale.reason}; {REMEDY}"
        self._connection.decisions.append(said)
        log.log(logging.WARNING if stale.measured_s > stale.predicted_s else logging.INFO, said)
        self._drift = PredictionCheck(stale.measured_s, usual=True)  # the same is not said twice
