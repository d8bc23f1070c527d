"""Whether what was predicted still holds. Knows two series of seconds; not where they come from, nor what is done about it."""

from __future__ import annotations

import math

from commlayer.records import Record

LIMIT = 0.25
"""Relative error from which a prediction counts as wrong."""
PATIENCE = 8
"""Steps in a row that must be wrong: one slow step is no trend."""
QUIET = 50
"""Steps after a word of staleness before the next: the answer to it needs time to show."""


class StalePlan(Record, frozen=True):
    """The event that a plan no longer holds."""

    step: int
    predicted_s: float
    measured_s: float
    lasted: int
    """Steps in a row that the error has been beyond the limit, in one direction."""
    usual: bool = False
    """`predicted_s` is what steps took before: of a plan that was kept it is the better prediction."""

    @property
    def reason(self) -> str:
        said = "usual" if self.usual else "predicted"
        return (f"the plan is stale: steps take {1e3 * self.measured_s:.1f} ms, {1e3 * self.predicted_s:.1f} were {said}, "
                f"{self.lasted} steps in a row")


class PredictionCheck:
    """`observe` once a step; an event where the plan is stale: the error has stayed above the limit."""

    def __init__(
        self, predicted_s: float, limit: float = LIMIT, patience: int = PATIENCE, quiet: int = QUIET, *, usual: bool = False,
    ) -> None:
        if not (math.isfinite(predicted_s) and predicted_s > 0):
            raise ValueError(f"predicted_s is {predicted_s}, allowed: seconds above 0")
        self.predicted_s, self._limit, self._patience, self._quiet = predicted_s, limit, patience, quiet
        self._usual = usual
        self._wrong = 0
        self._sign = 0
        self._silent = 0
        self.error = 0.0
        """Relative, of the latest step: above 0 it took longer than predicted."""

    def observe(self, measured_s: float, step: int = 0) -> StalePlan | None:
        if not (math.isfinite(measured_s) and measured_s > 0):
            return None  # a step without a time says nothing
        self.error = measured_s / self.predicted_s - 1.0
        sign = (self.error > self._limit) - (self.error < -self._limit)
        self._wrong = self._wrong + 1 if sign and sign == self._sign else abs(sign)
        self._sign = sign
        self._silent = max(0, self._silent - 1)
        if self._wrong < self._patience or self._silent:
            return None
        stale = StalePlan(step, self.predicted_s, measured_s, self._wrong, self._usual)
        self._wrong, self._silent = 0, self._quiet
        return stale
