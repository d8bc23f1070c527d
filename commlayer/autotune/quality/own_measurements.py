"""One rank's measurements for the quality guard between two comparisons. The caller passes all times."""

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
    """This rank's checks of its own payloads, its losses, and the time of steps and checks."""

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
        """Records the training loss of a step. It is read for the next row, so that no step waits for the device."""
        self._losses.append(loss)

    def looked(self, sent: Dots, seconds: float) -> None:
        """Adds a comparison of sent values with the gradient. Ignored if not finite."""
        self._sent = self._sent.plus(sent) if all(map(math.isfinite, sent)) else self._sent
        self._here_s += seconds
        self._looks += 1

    def prepared(self, seconds: float) -> None:
        """Adds the cost of preparing a check before its step."""
        self._here_s += seconds

    def compared(self, seconds: float) -> None:
        """Sets the duration of a comparison over all ranks, including its exchange of rows."""
        self._everywhere_s = seconds

    def looking(self, seconds: float) -> None:
        """Sets the part of the present step that was not training."""
        self._looking_s = seconds

    def step_over(self, now_s: float) -> None:
        if self._ended_s is not None:
            self._steps_s.append(now_s - self._ended_s - self._looking_s)
        self._ended_s, self._looking_s = now_s, 0.0

    def row(self, summed: Dots, compared_s: float, now_s: float) -> GradientError:
        """The row for the other ranks. `compared_s`: duration of the present comparison so far."""
        while self._losses:
            self._trend = self._trend.add(float(self._losses.popleft()))
        return GradientError(
            self._sent, summed, self._trend.seen(), self._here_s / max(self._looks, 1), self._everywhere_s or compared_s,
            median(self._steps_s) if self._steps_s else 0.0, now_s - self._begin_s,
        )

    def fade(self, factor: float) -> None:
        """Reduces the weight of earlier observations."""
        self._sent = Dots(*(factor * x for x in self._sent))

    def new_plan(self) -> None:
        self._sent = Dots()

    def new_codecs(self) -> None:
        """Restarts the loss trend: a loss takes many steps to fall, so after a change only new rises count."""
        self._trend = LossTrend()
