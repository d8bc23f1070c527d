"""Rate limit of calls per caller: a token bucket."""

from __future__ import annotations

from collections import OrderedDict

RATE, BURST = 1000.0, 8000.0
"""A worker makes a few calls per second, and some hundreds at once for a large plan. A certificate may serve many machines."""
EACH_RATE, EACH_BURST = 16.0, 128.0
"""Per worker of a job, if that is more, since a cluster may share one certificate. A waiting process calls 4 times per second,
and each process that sends heartbeats sends one per second."""
MOST_KNOWN = 4096
"""Callers that are remembered. The ones idle for longest are forgotten."""


class TooMany(Exception):
    """The caller exceeds its call rate."""


class CallQuota:
    """Of one coordinator. Not thread-safe."""

    def __init__(self, rate: float = RATE, burst: float = BURST) -> None:
        self.rate, self._burst = rate, burst
        self._left: OrderedDict[str, tuple[float, float, int]] = OrderedDict()  # tokens, at what time, refusals in a row

    def expect(self, workers: int) -> None:
        """Raises the limits for a caller that may run all of these workers."""
        self.rate, self._burst = max(self.rate, EACH_RATE * workers), max(self._burst, EACH_BURST * workers)

    def over(self, who: str, now: float) -> int:
        """Counts a call. 0 if it is allowed, else how many in a row are not."""
        left, since, refused = self._left.pop(who, (self._burst, now, 0))
        left = min(self._burst, left + self.rate * (now - since))
        refused = 0 if left >= 1.0 else refused + 1
        self._left[who] = left if refused else left - 1.0, now, refused
        while len(self._left) > MOST_KNOWN:
            self._left.popitem(last=False)
        return refused
