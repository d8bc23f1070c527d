"""Computes after how many steps to repeat measurements, so that they take at most a given fraction of the training time."""

from __future__ import annotations

import math

TIME_PART = 0.01
"""Largest fraction of a job's time for comparisons with exact gradients, and for exchanges of measurements between ranks."""
MOST_STEPS = 64
"""Largest number of steps between two exchanges of measurements, so that measurements are recent."""


def steps_until_paid(spent_s: float, cost_s: float, elapsed_s: float, step_s: float, part: float = TIME_PART) -> int:
    """Returns how many steps to wait before one more comparison. All comparisons together then take at most the fraction `part`
    of the time since the start.

    >>> steps_until_paid(spent_s=0.05, cost_s=0.05, elapsed_s=1.0, step_s=0.2), steps_until_paid(0.0, 0.05, 10.0, 0.2)
    (45, 1)
    """
    return max(1, math.ceil(((spent_s + cost_s) / part - elapsed_s) / step_s - 1e-9))


def steps_between(cost_s: float, step_s: float, part: float = TIME_PART) -> int:
    """Returns the number of steps between two repetitions of work that costs `cost_s` seconds, so that this work takes at most
    the fraction `part` of the time.

    >>> steps_between(0.05, 0.2)
    25
    """
    return max(1, math.ceil(cost_s / (part * step_s) - 1e-9))


def row_spacing(cost_s: float, step_s: float) -> int:
    """Returns the number of steps between two exchanges of measurements that each cost `cost_s` seconds; 1 while the cost is
    unknown (0).

    >>> row_spacing(0.0002, 0.1), row_spacing(0.0002, 0.01), row_spacing(0.0, 0.01)
    (1, 2, 1)
    """
    return min(MOST_STEPS, steps_between(cost_s, step_s)) if cost_s > 0 and step_s > 0 else 1
