"""Prediction check: detects that step times differ from the prediction for several steps."""

from __future__ import annotations

import math

from msgspec import structs

from commlayer.errors import InvalidInput
from commlayer.records import Record

LIMIT = 0.25
"""Relative error above which a predicted step time counts as wrong."""
PATIENCE = 8
"""Number of consecutive wrong steps before a plan counts as stale, so one slow step has no effect."""
QUIET = 50
"""Number of steps without another report after a stale plan was reported, because a new plan takes time to have an effect."""


class StalePlan(Record, frozen=True):
    """Event: steps no longer take the predicted time. `predicted_s` and `measured_s`: seconds per step."""

    step: int
    predicted_s: float
    measured_s: float
    lasted: int
    """Number of consecutive steps whose error exceeds the limit, all in one direction."""
    usual: bool = False
    """True: `predicted_s` is the previous usual step time, which predicts better for a plan that was kept."""

    @property
    def slower(self) -> bool:
        """True: steps take longer than predicted. The plan is stale only if this flag is True."""
        return self.measured_s > self.predicted_s

    @property
    def reason(self) -> str:
        expected = "usual" if self.usual else "predicted"
        return (f"{'the plan is stale: ' if self.slower else ''}the last {self.lasted} steps took "
                f"{1e3 * self.measured_s:.1f} ms each; {1e3 * self.predicted_s:.1f} ms were {expected}")


class PredictionCheck(Record, frozen=True):
    """Compares measured with predicted step times, as an immutable value. `observe`, called once per step, returns the next
    value, and a StalePlan event if the plan is stale."""

    predicted_s: float
    limit: float = LIMIT
    usual: bool = False
    """True: `predicted_s` is the previous usual step time instead of the plan's prediction."""
    wrong: int = 0
    """Number of latest consecutive steps whose error exceeds the limit in the direction of `sign`."""
    sign: int = 0
    silent: int = 0
    """Number of following steps in which no further event is returned."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.predicted_s) and self.predicted_s > 0):
            raise InvalidInput("E-ARGUMENT", f"predicted_s is {self.predicted_s}, allowed: a number of seconds above 0")

    def observe(self, measured_s: float, step: int = 0) -> tuple[PredictionCheck, StalePlan | None]:
        if not (math.isfinite(measured_s) and measured_s > 0):
            return self, None  # a step without a time is ignored
        error = measured_s / self.predicted_s - 1.0
        sign = (error > self.limit) - (error < -self.limit)
        wrong = self.wrong + 1 if sign and sign == self.sign else abs(sign)
        silent = max(0, self.silent - 1)
        if wrong < PATIENCE or silent:
            return structs.replace(self, wrong=wrong, sign=sign, silent=silent), None
        stale = StalePlan(step, self.predicted_s, measured_s, wrong, self.usual)
        return structs.replace(self, wrong=0, sign=sign, silent=QUIET), stale
