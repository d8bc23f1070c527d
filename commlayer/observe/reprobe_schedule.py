"""When to probe a link again that may have become faster. Knows times and what came of the last probe; measures nothing.

Under a plan for a slow link next to nothing is sent, so a link that has recovered shows at best in faster steps: such a hint is
followed soon. Without one links are probed all the same, at growing distances: those that were faster once, and later also
others, which may have been measured while somebody else used them, or the machine. A probe keeps all ranks from training, so
none comes before a faster link could have won the time that it takes.
"""

from __future__ import annotations

import math

from commlayer.records import Record

FIRST_S, LAST_S = 15.0, 600.0
"""From one probe that nothing hinted at to the next: twice as long after each that finds nothing."""
HINTED_S = 1.0
"""The same where something hints."""
COST_MOST = 0.02
"""Part of the time that probes without a hint may take."""
EXPECTED_S = 1.5
"""What a probe costs, before there was one."""


class ReprobeSchedule(Record, frozen=True):
    """A value: each event gives the schedule after it."""

    since_s: float = math.inf
    """When links were last known or probed; never yet."""
    gap_s: float = FIRST_S
    hinted_s: float = HINTED_S
    cost_s: float = 0.0
    """Of the last probe; 0 before there was one."""

    def changed(self, now: float) -> ReprobeSchedule:
        """Links are known anew."""
        return ReprobeSchedule(now, cost_s=self.cost_s)

    def probed(self, now: float, cost_s: float, *, found: bool) -> ReprobeSchedule:
        """A probe is over; it has found a faster link, or not."""
        if found:
            return ReprobeSchedule(now, cost_s=cost_s)
        return ReprobeSchedule(now, min(2 * self.gap_s, LAST_S), min(4 * self.hinted_s, LAST_S), cost_s)

    def due(self, now: float, *, hinted: bool, lost: bool, to_win: float) -> bool:
        """`lost`: links were once faster than they are known to be now. `to_win`: the part of the time that links of any speed
        could save."""
        for_s, cost_s = now - self.since_s, self.cost_s or EXPECTED_S
        gap_s = max(self.gap_s, (self.cost_s if lost else cost_s) / COST_MOST)
        return for_s * to_win >= cost_s and for_s >= (min(gap_s, self.hinted_s) if hinted else gap_s)
