"""One rank's measurements for load balancing between two exchanges. The caller passes all times."""

from __future__ import annotations

from collections import deque

from commlayer.autotune.shares.state import WorkerTime, latest

COSTS_KEPT = 5


class OwnTimes:
    """Compute times and samples of its steps, and the cost of exchanges."""

    def __init__(self) -> None:
        self._samples: dict[int, int] = {}
        """Samples by session step, until the step's time is known."""
        self._times: list[tuple[int, float]] = []
        self._costs_s: deque[float] = deque(maxlen=COSTS_KEPT)
        self._told_s, self._told_step = 0.0, 0
        self._step_s = 0.0

    def afresh(self) -> None:
        """Clears measurements when a pass over the data begins."""
        self._times.clear()
        self._samples.clear()
        self._told_s = 0.0

    def begins(self, session_step: int, samples: int) -> None:
        """Records the number of samples in a session step."""
        self._samples[session_step] = samples

    def took(self, session_step: int, seconds: float) -> None:
        """Adds a time measured by the session; ignored if the step's samples are unknown."""
        if session_step in self._samples:
            self._times.append((self._samples.pop(session_step), seconds))

    def given(self, samples: int, seconds: float) -> None:
        """Sets a time measured by the caller for the last step, instead of the session's times."""
        self._times = [(samples, seconds)]

    def costs(self, seconds: float) -> None:
        """Adds the time that an exchange held up the training thread."""
        self._costs_s.append(seconds)

    def row(self, step: int, now_s: float, *, lookahead: int, price: tuple[float, float], shares: float) -> WorkerTime:
        """The row after `step`; starts a new measurement."""
        computed, compute_s, before_s = latest(self._times)
        self._times = []
        if self._told_s:
            self._step_s = (now_s - self._told_s) / (step - self._told_step)
        self._told_s, self._told_step = now_s, step
        cost_s = min(self._costs_s, default=0.0)  # other load on the machine can only increase the cost
        return WorkerTime(computed, compute_s, before_s, lookahead, cost_s, self._step_s, *price, shares)
