"""How many steps share one exchange of rows, so that telling each other stays cheap. Arithmetic on seconds; loads no torch."""

from __future__ import annotations

import math

COST_MOST = 0.01
"""Part of the training time that telling each other may take; where an exchange costs more of a step, several share one."""
EVERY_MOST = 64


def spacing(cost_s: float, step_s: float) -> int:
    """Steps from one exchange to the next, so that it costs 1 % of the time.

    >>> spacing(0.0002, 0.1), spacing(0.0002, 0.01)
    (1, 2)
    """
    if not (cost_s > 0 and step_s > 0):
        return 1
    return min(EVERY_MOST, max(1, math.ceil(cost_s / (COST_MOST * step_s))))
