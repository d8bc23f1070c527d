"""The gradient noise scale (McCandlish et al., 1812.06162): up to that batch, more data per step saves steps.

Its unit here is one worker's batch. With a noise scale of 10, training with the batches of ten workers needs twice as many
steps as with an unlimited batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

LEAST_NOISE = 1e-4
"""Least part of a gradient's squared norm that counts as noise: less is rounding."""
HIDDEN = 0.02
"""A signal that the noise hides counts as this part of the mean's squared norm, so that the noise scale stays finite."""
MEMORY = 0.9
"""Weight of earlier steps against a new one."""
ENOUGH = 8
"""Steps before the noise scale is reported."""


class NoiseScale(NamedTuple):
    """A running estimate from the gradients of several workers and their mean."""

    noise: float = 0.0
    """Squared norm of one gradient's noise."""
    signal: float = 0.0
    """Squared norm of the gradient without noise. An estimate, which can be below 0."""
    mean: float = 0.0
    """Squared norm of the mean gradient."""
    steps: int = 0

    def plus(self, squares: Sequence[float], mean: float) -> NoiseScale:
        """Adds one step: the squared norms of the workers' gradients, and that of their mean."""
        count, one = len(squares), sum(squares) / len(squares)
        noise, signal = (one - mean) * count / (count - 1), (count * mean - one) / (count - 1)
        return NoiseScale(MEMORY * self.noise + noise, MEMORY * self.signal + signal, MEMORY * self.mean + mean, self.steps + 1)

    @property
    def batches(self) -> float:
        """The noise scale in batches of one worker; 0: there is no noise."""
        signal = max(self.signal, HIDDEN * self.mean)
        return self.noise / signal if signal > 0 and self.noise > LEAST_NOISE * (self.noise + signal) else 0.0

    @property
    def known(self) -> float:
        """`batches` once enough steps were seen; until then 0."""
        return self.batches if self.steps >= ENOUGH else 0.0
