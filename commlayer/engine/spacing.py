"""Computes how rarely to do something beside training, so that it stays within its share of the time."""

from __future__ import annotations

import math

from commlayer.errors import InvalidInput

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
