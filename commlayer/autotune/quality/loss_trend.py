"""Measures the rise of a noisy training loss, from a fast mean and the lowest value of a slow one."""

from __future__ import annotations

import math
from typing import NamedTuple

from commlayer.records import Record

FAST, SLOW = 0.1, 0.02
"""Weight of the newest loss in the fast and in the slow running mean."""


class LossRise(NamedTuple):
    """How much a training loss has risen, as numbers that ranks exchange."""

    rise: float = 0.0
    """Rise of the loss, relative to the lowest value; 0 before enough losses are known."""
    noise: float = 0.0
    """Standard error of the rise, relative like the rise."""


class LossTrend(Record, frozen=True):
    """Running means of the losses that the script has reported."""

    near: float = 0.0
    """The fast running mean of the loss."""
    far: float = 0.0
    """The slow running mean of the loss."""
    wobble: float = 0.0
    lowest: float = math.inf
    count: int = 0

    def add(self, loss: float) -> LossTrend:
        """Adds the loss of one step; values that are not finite are ignored."""
        if not math.isfinite(loss):
            return self
        count = self.count + 1
        fast, slow = max(FAST, 1 / count), max(SLOW, 1 / count)
        wobble = self.wobble + fast * (abs(loss - self.near) - self.wobble) if count > 1 else 0.0
        near, far = self.near + fast * (loss - self.near), self.far + slow * (loss - self.far)
        return LossTrend(near, far, wobble, min(self.lowest, far), count)

    def measure_rise(self) -> LossRise:
        if self.count < 1 / SLOW:
            return LossRise()
        lowest = max(abs(self.lowest), 1e-9)
        return LossRise((self.near - self.lowest) / lowest, 3.0 * self.wobble * math.sqrt(FAST / 2) / lowest)
