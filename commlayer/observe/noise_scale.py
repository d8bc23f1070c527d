"""The gradient noise scale (McCandlish et al., 1812.06162): for batches below this size, larger batches save steps.

The unit in this module is one worker's batch. With a noise scale of 10, training with the batches of ten workers needs twice as
many steps as with an unlimited batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

LEAST_NOISE = 1e-4
"""Least fraction of a gradient's squared norm that counts as noise; a smaller fraction is rounding error."""
HIDDEN = 0.02
"""Lower limit of the signal as a fraction of the mean's squared norm. The bound keeps the noise scale finite if noise hides the
signal."""
MEMORY = 0.9
"""Weight of earlier steps in the running averages, relative to the newest step."""
ENOUGH = 8
"""Number of steps before the noise scale is reported."""


class NoiseScale(NamedTuple):
    """A running estimate of the noise scale from the gradients of several workers and their mean."""

    noise: float = 0.0
    """Weighted sum over steps of the squared norm of one gradient's noise."""
    signal: float = 0.0
    """Weighted sum over steps of the squared norm of the gradient without noise. This estimate can be negative."""
    mean: float = 0.0
    """Weighted sum over steps of the squared norm of the mean gradient."""
    steps: int = 0

    def plus(self, squares: Sequence[float], mean: float) -> NoiseScale:
        """Adds one step. `squares`: squared norms of the workers' gradients; `mean`: squared norm of their mean."""
        count, one = len(squares), sum(squares) / len(squares)
        noise, signal = (one - mean) * count / (count - 1), (count * mean - one) / (count - 1)
        return NoiseScale(MEMORY * self.noise + noise, MEMORY * self.signal + signal, MEMORY * self.mean + mean, self.steps + 1)

    @property
    def batches(self) -> float:
        """The noise scale in batches of one worker; 0: the gradients have no noise."""
        signal = max(self.signal, HIDDEN * self.mean)
        return self.noise / signal if signal > 0 and self.noise > LEAST_NOISE * (self.noise + signal) else 0.0

    @property
    def known(self) -> float:
        """The noise scale in batches of one worker; 0 until enough steps were seen."""
        return self.batches if self.steps >= ENOUGH else 0.0


class Agreement(NamedTuple):
    """A running estimate of how much the weight changes of several workers have in common."""

    common: float = 0.0
    """Weighted sum over exchanges of the inner products of two workers' changes, over all pairs."""
    most: float = 0.0
    """The same sum if all changes had one direction: products of their norms."""
    exchanges: int = 0

    def plus(self, rows: Sequence[Sequence[float]], mean: float) -> Agreement:
        """Adds one exchange. `rows`: weight and squared norm of each worker's change. `mean`: squared norm of their weighted
        mean. An exchange with fewer than two changes does not count."""
        counted = [(weight, square) for weight, square in rows if weight > 0]
        own = math.fsum(weight**2 * square for weight, square in counted)
        most = math.fsum(weight * math.sqrt(square) for weight, square in counted) ** 2 - own
        common = math.fsum(weight for weight, _ in counted) ** 2 * mean - own
        if len(counted) < 2 or not (most > 0 and math.isfinite(most + common)):
            return self
        return Agreement(MEMORY * self.common + common, MEMORY * self.most + most, self.exchanges + 1)

    @property
    def cosine(self) -> float:
        """Mean cosine between two workers' changes, weighted like their mean. 1: the changes have one direction; 0: they are
        orthogonal."""
        return self.common / self.most if self.most else 0.0
