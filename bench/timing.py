"""Times calls on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable


def seconds(call: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one call."""
    begin = clock()
    call()
    return clock() - begin


def least_s(call: Callable[[], object], times: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Minimum over several calls, because other load on the machine only adds time."""
    return min(seconds(call, clock) for _ in range(times))
