"""What one rank measures for the accuracy guard between two comparisons. Has no clock: times are handed in."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import SupportsFloat

from commlayer.autotune.quality.loss_trend import LossTrend
from commlayer.autotune.quality.state import GradientError
from commlayer.observe.fidelity import Dots

LOSSES_KEPT = 4096
STEPS_KEPT = 9


class OwnMeasurements:
    """Its looks at what it sends itself, its losses, and what steps and looks cost it."""

    def __init__(self, now_s: float) -> None:
        self._begin_s = now_s
        self._sent, self._trend = Dots(), LossTrend()
        self._losses: deque[SupportsFloat] = deque(maxlen=LOSSES_KEPT)
        self._steps_s: deque[float] = deque(maxlen=STEPS_KEPT)
        self._ended_s: float | None = None
        self._looking_s = 0.0
        self._here_s, self._looks = 0.0, 0
        self._everywhere_s = 0.0

    def report(self, loss: SupportsFloat) -> None:
        """The training loss of a step, read when the next row is made: nobody waits for a device."""
        self._losses.append(loss)

    def looked(self, sent: Dots, seconds: float) -> None:
        """It has compared a piece of what it sends with its gradient; not finite where the step tells nothing."""
        self._sent = self._sent.plus(sent) if all(map(math.isfinite, sent)) else self._sent
        self._here_s += seconds
        self._looks += 1

    def prepared(self, seconds: float) -> None:
        """What a look costs before its step."""
        self._here_s += seconds

    def compared(self, seconds: float) -> None:
        """A comparison over all ranks took so long, its exchange of rows counted in."""
        self._everywhere_s = seconds

    def looking(self, seconds: float) -> None:
        """Of the step under way, so much was not training."""
        self._looking_s = seconds

    def step_over(self, now_s: float) -> None:
        if self._ended_s is not None:
            self._steps_s.append(now_s - self._ended_s - self._looking_s)
        self._ended_s, self._looking_s = now_s, 0.0

    def row(self, summed: Dots, compared_s: float, now_s: float) -> GradientError:
        """What it tells the others. `compared_s`: of the comparison under way, as far as it has come."""
        while self._losses:
            self._trend = self._trend.add(float(self._losses.popleft()))
        return GradientError(
            self._sent, summed, self._trend.seen(), self._here_s / max(self._looks, 1), self._everywhere_s or compared_s,
            median(self._steps_s) if self._steps_s else 0.0, now_s - self._begin_s,
        )

    def fade(self, factor: float) -> None:
        """What it has seen counts less from now on."""
        self._sent = Dots(*(factor * x for x in self._sent))

    def new_plan(self) -> None:
        self._sent = Dots()

    def new_codecs(self) -> None:
        """A loss does not fall back in a few steps: after the guard's own change only what rises from here counts."""
        self._trend = LossTrend()
