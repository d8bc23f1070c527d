"""When the links of a running job are probed again."""

from __future__ import annotations

import math

from commlayer.records import Record

FIRST_S, LAST_S = 15.0, 600.0
"""Seconds between probes without a hint: first and largest interval. The interval doubles after each probe that finds no faster
link."""
HINTED_S = 1.0
"""First interval in seconds between probes after a hint that links are faster."""
COST_MOST = 0.02
"""Largest fraction of the time that probes without a hint may take."""
EXPECTED_S, EXPECTED_TRIPS = 1.5, 45
"""Assumed duration of a probe before the first probe is measured: the maximum of this many seconds and this many round
trips."""


class ReprobeSchedule(Record, frozen=True):
    """Schedule of link probes, as an immutable value: each event returns the next schedule.

    A plan for a slow link sends little, so a recovered link is visible only in faster steps. A probe follows soon after such a
    hint. Without a hint, links are probed at growing intervals, unless traffic confirms their rates. The first probes need a
    link that was faster before. Later probes need none, since an earlier measurement may have been disturbed. A probe stops
    training on all ranks, so it waits until a faster link could have saved as much time as the probe takes.
    """

    since_s: float = math.inf
    """Time of the last measurement or probe; infinite before the first."""
    gap_s: float = FIRST_S
    hinted_s: float = HINTED_S
    cost_s: float = 0.0
    """Duration of the last probe in seconds; 0 before the first."""

    def changed(self, now: float) -> ReprobeSchedule:
        """Returns the schedule after links were measured."""
        return ReprobeSchedule(now, cost_s=self.cost_s)

    def after_probe(self, now: float, cost_s: float, *, found: bool) -> ReprobeSchedule:
        """Returns the schedule after a probe of `cost_s` seconds. `found`: True if the link has become faster."""
        if found:
            return ReprobeSchedule(now, cost_s=cost_s)
        return ReprobeSchedule(now, min(2 * self.gap_s, LAST_S), min(4 * self.hinted_s, LAST_S), cost_s)

    def due(self, now: float, *, hinted: bool, lost: bool, largest_gain: float, round_trip_s: float = 0.0) -> bool:
        """True: a probe is due. `hinted`: steps have become faster. `lost`: links were once faster than the presently known
        rates. `largest_gain`: fraction of the time that infinitely fast links could save."""
        for_s, cost_s = now - self.since_s, self.cost_s or max(EXPECTED_S, EXPECTED_TRIPS * round_trip_s)
        gap_s = max(self.gap_s, (self.cost_s if lost else cost_s) / COST_MOST)
        return for_s * largest_gain >= cost_s and for_s >= (min(gap_s, self.hinted_s) if hinted else gap_s)
