"""How many calls a second one asker may make: a bucket that fills at a rate. Knows names and times; no gRPC, no clock."""

from __future__ import annotations

from collections import OrderedDict

RATE, BURST = 1000.0, 8000.0
"""Workers make a few a second, and for a large plan some hundreds at once; a machine with one certificate may have many."""
EACH_RATE, EACH_BURST = 16.0, 128.0
"""Of each worker of a job, where that is more: a cluster may have one certificate for all. Who waits for others asks 4 times a
second, and each of its processes that beats has a heartbeat a second."""
MOST_KNOWN = 4096
"""Askers that are kept in mind: the longest silent are forgotten."""


class TooMany(Exception):
    """A call beyond what one asker may make."""


class CallQuota:
    """Of one coordinator, in one thread."""

    def __init__(self, rate: float = RATE, burst: float = BURST) -> None:
        self.rate, self._burst = rate, burst
        self._left: OrderedDict[str, tuple[float, float, int]] = OrderedDict()  # calls, when that was so, how many since none

    def expect(self, workers: int) -> None:
        """So many may be one asker's."""
        self.rate, self._burst = max(self.rate, EACH_RATE * workers), max(self._burst, EACH_BURST * workers)

    def over(self, who: str, now: float) -> int:
        """Counts a call: 0 if it may be made, else which one it is of those in a row that may not."""
        left, since, refused = self._left.pop(who, (self._burst, now, 0))
        left = min(self._burst, left + self.rate * (now - since))
        refused = 0 if left >= 1.0 else refused + 1
        self._left[who] = left if refused else left - 1.0, now, refused
        while len(self._left) > MOST_KNOWN:
            self._left.popitem(last=False)
        return refused
