"""Whether what was predicted still holds. Knows two series of seconds; not where they come from, nor what is done about it."""

from __future__ import annotations

import math

from msgspec import structs

from commlayer.errors import InvalidInput
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
    def slower(self) -> bool:
        """Whether steps take longer than predicted. Only then is the plan stale."""
        return self.measured_s > self.predicted_s

    @property
    def reason(self) -> str:
        said = "usual" if self.usual else "predicted"
        return (f"{'the plan is stale: ' if self.slower else ''}steps take {1e3 * self.measured_s:.1f} ms, "
                f"{1e3 * self.predicted_s:.1f} were {said}, {self.lasted} steps in a row")


class PredictionCheck(Record, frozen=True):
    """A value: `observe` once a step gives the check after it, and an event where the plan is stale."""

    predicted_s: float
    limit: float = LIMIT
    patience: int = PATIENCE
    quiet: int = QUIET
    usual: bool = False
    """`predicted_s` is what steps took before."""
    wrong: int = 0
    """Steps in a row, up to now, that the error has been beyond the limit in the direction of `sign`."""
    sign: int = 0
    silent: int = 0
    """Steps for which nothing more is said."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.predicted_s) and self.predicted_s > 0):
            raise InvalidInput("E-ARGUMENT", f"predicted_s is {self.predicted_s}, allowed: seconds above 0")

    def observe(self, measured_s: float, step: int = 0) -> tuple[PredictionCheck, StalePlan | None]:
        if not (math.isfinite(measured_s) and measured_s > 0):
            return self, None  # a step without a time says nothing
        error = measured_s / self.predicted_s - 1.0
        sign = (error > self.limit) - (error < -self.limit)
        wrong = self.wrong + 1 if sign and sign == self.sign else abs(sign)
        silent = max(0, self.silent - 1)
        if wrong < self.patience or silent:
            return structs.replace(self, wrong=wrong, sign=sign, silent=silent), None
        stale = StalePlan(step, self.predicted_s, measured_s, wrong, self.usual)
        return structs.replace(self, wrong=0, sign=sign, silent=self.quiet), stale
