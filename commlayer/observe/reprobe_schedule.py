"""When to probe a link again that may have become faster. Knows times and what came of the last probe; measures nothing.

Under a plan for a slow link next to nothing is sent, so a link that has recovered shows at best in faster steps: such a hint is
followed soon. Without one a link that was faster once is probed all the same, at growing distances.
"""

from __future__ import annotations

import math

FIRST_S, LAST_S = 15.0, 600.0
"""From one probe that nothing hinted at to the next: twice as long after each that finds nothing."""
HINTED_S = 1.0
"""The same where something hints."""
COST_MOST = 0.02
"""Part of the time that probes without a hint may take."""


class ReprobeSchedule:
    def __init__(self) -> None:
        self._from = math.inf  # nobody knows a link yet
        self._gap_s, self._hinted_s = FIRST_S, HINTED_S
        self._cost_s = 0.0

    def changed(self, now: float) -> None:
        """Links are known anew."""
        self._from = now
        self._gap_s, self._hinted_s = FIRST_S, HINTED_S

    def probed(self, now: float, cost_s: float, *, found: bool) -> None:
        """A probe is over; it has found a faster link, or not."""
        self._from, self._cost_s = now, cost_s
        self._gap_s = FIRST_S if found else min(2 * self._gap_s, LAST_S)
        self._hinted_s = HINTED_S if found else min(4 * self._hinted_s, LAST_S)

    def due(self, now: float, *, hinted: bool, lost: bool) -> bool:
        """`lost`: links were once faster than they are known to be now."""
        gap_s = max(self._gap_s, self._cost_s / COST_MOST) if lost else math.inf
        return now - self._from >= (min(gap_s, self._hinted_s) if hinted else gap_s)
