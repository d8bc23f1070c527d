"""How rarely gradients may be compared so that comparing stays within its part of the time. Arithmetic on seconds only."""

from __future__ import annotations

import math

TIME_PART = 0.01
"""Most part of a job's time that comparing with exact gradients may take."""


def steps_until_paid(spent_s: float, cost_s: float, elapsed_s: float, step_s: float, part: float = TIME_PART) -> int:
    """Steps until another comparison, too, keeps all of them within that part of the time since the start.

    >>> steps_until_paid(spent_s=0.05, cost_s=0.05, elapsed_s=1.0, step_s=0.2), steps_until_paid(0.0, 0.05, 10.0, 0.2)
    (45, 1)
    """
    if min(spent_s, cost_s, elapsed_s) < 0 or step_s <= 0:
        raise ValueError(f"spent {spent_s:g} s, comparing takes {cost_s:g} s, {elapsed_s:g} s have passed, a step takes "
                         f"{step_s:g} s: allowed are 0 or more, and more than 0")
    return max(1, math.ceil(((spent_s + cost_s) / part - elapsed_s) / step_s - 1e-9))


def steps_between(compare_s: float, step_s: float, part: float = TIME_PART) -> int:
    """Steps from one comparison to the next, so that comparisons take at most that part of the time.

    >>> steps_between(0.05, 0.2)
    25
    """
    if compare_s < 0 or step_s <= 0:
        raise ValueError(f"comparing takes {compare_s:g} s, a step {step_s:g} s: allowed are 0 or more, and more than 0")
    return max(1, math.ceil(compare_s / (part * step_s) - 1e-9))
