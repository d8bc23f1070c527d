"""What one rank measures for balancing between two exchanges. Has no clock: times are handed in."""

from __future__ import annotations

from collections import deque

from commlayer.autotune.shares.state import WorkerTime, latest

COSTS_KEPT = 5


class OwnTimes:
    """Its steps' compute times and samples, and what telling them costs it."""

    def __init__(self) -> None:
        self._samples: dict[int, int] = {}
        """By the session's step: what was computed in it, until its time is known."""
        self._times: list[tuple[int, float]] = []
        self._costs_s: deque[float] = deque(maxlen=COSTS_KEPT)
        self._told_s, self._told_step = 0.0, 0
        self._step_s = 0.0

    def afresh(self) -> None:
        """A pass over the data begins: what came before it says nothing of its steps."""
        self._times.clear()
        self._samples.clear()
        self._told_s = 0.0

    def begins(self, session_step: int, samples: int) -> None:
        """The session's step computes so many samples."""
        self._samples[session_step] = samples

    def took(self, session_step: int, seconds: float) -> None:
        """What the session measured of a step; one of which nobody knows the samples is left out."""
        if session_step in self._samples:
            self._times.append((self._samples.pop(session_step), seconds))

    def given(self, samples: int, seconds: float) -> None:
        """What somebody else measured of the step that is over, in place of all that the session did."""
        self._times = [(samples, seconds)]

    def costs(self, seconds: float) -> None:
        """An exchange held up the training thread for so long."""
        self._costs_s.append(seconds)

    def row(self, step: int, now_s: float, *, lookahead: int, price: tuple[float, float], shares: float) -> WorkerTime:
        """What it tells the others after `step`; measuring begins anew."""
        computed, compute_s, before_s = latest(self._times)
        self._times = []
        if self._told_s:
            self._step_s = (now_s - self._told_s) / (step - self._told_step)
        self._told_s, self._told_step = now_s, step
        cost_s = min(self._costs_s, default=0.0)  # what else the machine does only adds
        return WorkerTime(computed, compute_s, before_s, lookahead, cost_s, self._step_s, *price, shares)
