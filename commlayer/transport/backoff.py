"""Pauses between the attempts of an operation that is repeated until it succeeds."""

from __future__ import annotations

import math
import random
import threading
import time

MIN_PAUSE_S, MAX_PAUSE_S = 0.02, 0.5
"""Shortest and longest pause between two attempts, in seconds."""


class Backoff:
    """Pauses between attempts of an operation that is repeated until it succeeds. The pauses double. Each pause is random by a
    factor of two, so that processes that lost the same peer do not all reconnect at once."""

    def __init__(self, deadline: float = math.inf, stop: threading.Event | None = None) -> None:
        """`deadline`: time.monotonic() after which there are no more attempts. `stop`: setting this event ends a pause."""
        self.deadline, self._stop = deadline, stop or threading.Event()
        self._pause_s = MIN_PAUSE_S

    def wait(self) -> bool:
        """Pauses before the next attempt and returns True. Returns False if the deadline would pass during the pause (then at
        once), or if `stop` is set."""
        pause_s, self._pause_s = self._pause_s * random.uniform(0.5, 1.0), min(2 * self._pause_s, MAX_PAUSE_S)
        return time.monotonic() + pause_s < self.deadline and not self._stop.wait(pause_s)
