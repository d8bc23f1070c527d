"""Schedule of link probes: when to probe again a link that may have become faster.

A plan for a slow link sends little, so a link that has recovered shows at best in faster steps; after such a hint a probe
follows soon. Without a hint links are probed at growing intervals: first those that were faster once, later also others, whose
measurement may have been disturbed. A probe stops training on all ranks. It therefore waits until a faster link could have
saved the time that the probe takes.
"""

from __future__ import annotations

import math

from commlayer.records import Record

FIRST_S, LAST_S = 15.0, 600.0
"""Interval between probes without a hint: first and largest; it doubles after each probe that finds nothing."""
HINTED_S = 1.0
"""First interval after a hint."""
COST_MOST = 0.02
"""Fraction of the time that probes without a hint may take."""
EXPECTED_S = 1.5
"""Assumed duration of a probe before the first one."""


class ReprobeSchedule(Record, frozen=True):
    """An immutable value: each event returns the next schedule."""

    since_s: float = math.inf
    """Time of the last measurement or probe; infinite before the first."""
    gap_s: float = FIRST_S
    hinted_s: float = HINTED_S
    cost_s: float = 0.0
    """Duration of the last probe; 0 before the first."""

    def changed(self, now: float) -> ReprobeSchedule:
        """Links were measured."""
        return ReprobeSchedule(now, cost_s=self.cost_s)

    def probed(self, now: float, cost_s: float, *, found: bool) -> ReprobeSchedule:
        """A probe has ended; `found`: the link is faster."""
        if found:
            return ReprobeSchedule(now, cost_s=cost_s)
        return ReprobeSchedule(now, min(2 * self.gap_s, LAST_S), min(4 * self.hinted_s, LAST_S), cost_s)

    def due(self, now: float, *, hinted: bool, lost: bool, to_win: float) -> bool:
        """`lost`: links were once faster than now known. `to_win`: fraction of the time that infinitely fast links could save.
        """
        for_s, cost_s = now - self.since_s, self.cost_s or EXPECTED_S
        gap_s = max(self.gap_s, (self.cost_s if lost else cost_s) / COST_MOST)
        return for_s * to_win >= cost_s and for_s >= (min(gap_s, self.hinted_s) if hinted else gap_s)
