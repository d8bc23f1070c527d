"""LBB (load balanced batching) as published, defects included: the baseline of Controller(mode="lbb").

The paper's objective, thresholds, window and rounding are kept. It minimizes max - min instead of the maximum. The launch
cost a0 stays that of the profile, so an added offset is read as slope. A fine-tuning step of 1 takes floor(1/2) = 0 from the
slowest and gives ceil(1/2) = 1 to the fastest, so the sum grows. After a rapid tuning, only fine tuning is allowed for a
window. Where the paper is silent (rounding, solver, window length), this follows the released code.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import numpy as np
from scipy.optimize import minimize

from commlayer.balance.events import straggler_effect
from commlayer.balance.models import Cubic
from commlayer.records import Record


class LbbSettings(Record, frozen=True):
    """Thresholds of the straggler effect, and the window in iterations since the last rapid tuning."""

    fine: float = 0.05
    rapid: float = 0.3
    step: int = 1
    window: int = 30


def spread_s(curves: Sequence[Cubic], batches: Sequence[float]) -> float:
    """max T - min T over all workers. A worker without a share counts with its launch cost T(0)."""
    times = [curve.time_s(batch) for curve, batch in zip(curves, batches, strict=True)]
    return max(times) - min(times)


def spread_shares(curves: Sequence[Cubic], total: int, caps: Sequence[int | None]) -> list[float]:
    """Real shares that minimize the spread (the paper's equation 3), by SLSQP from (2, ..., 2) as in the released code."""
    optimum = minimize(
        # In milliseconds, because the solver's tolerance is absolute.
        lambda batches: 1e3 * spread_s(curves, batches),
        np.full(len(curves), 2.0),
        method="SLSQP",
        bounds=[(0, total if cap is None else cap) for cap in caps],
        constraints={"type": "eq", "fun": lambda batches: float(batches.sum()) - total},
        options={"maxiter": 1000},
    )
    return [float(batch) for batch in optimum.x]


def round_halves(real: Sequence[float]) -> list[int]:
    """Rounding after profiling: the larger half of the shares up, the smaller half down. The sum may miss the total."""
    order = sorted(range(len(real)), key=lambda i: real[i])
    low = set(order[: len(real) // 2])
    return [math.floor(batch) if i in low else math.ceil(batch) for i, batch in enumerate(real)]


class Lbb:
    """LBB's coordinator in the training loop. `curves` are the cubic profile models."""

    def __init__(
        self,
        curves: Sequence[Cubic],
        total: int,
        caps: Sequence[int | None] | None = None,
        settings: LbbSettings | None = None,
    ) -> None:
        self.curves, self.total, self.settings = list(curves), total, settings or LbbSettings()
        self.caps = list(caps or [None] * len(curves))
        self._shares = round_halves(spread_shares(self.curves, total, self.caps))
        self._since_rapid = self.settings.window
        self.rapid_steps: list[int] = []

    def copy(self) -> Lbb:
        clone = copy.copy(self)
        clone.rapid_steps = list(self.rapid_steps)
        return clone

    def shares(self, step: int) -> Sequence[int]:
        return self._shares

    def observe(self, step: int, times_s: Sequence[float]) -> None:
        """Algorithm 2: no change, fine tuning or rapid tuning for the next iteration."""
        self._since_rapid += 1
        effect = straggler_effect(times_s)
        if effect < self.settings.fine:
            return
        if effect < self.settings.rapid or self._since_rapid < self.settings.window:
            self._shares = self._fine(times_s)
        else:
            self._shares = self._rapid(times_s)
            self._since_rapid = 0
            self.rapid_steps.append(step)

    def _fine(self, times_s: Sequence[float]) -> list[int]:
        shares = list(self._shares)
        slowest, fastest = int(np.argmax(times_s)), int(np.argmin(times_s))
        shares[slowest] = max(0, shares[slowest] - self.settings.step // 2)
        shares[fastest] += -(-self.settings.step // 2)
        return shares

    def _rapid(self, times_s: Sequence[float]) -> list[int]:
        """New lines through (0, a0 of the profile) and each worker's last point."""
        rough = [
            Cubic(0.0, 0.0, (time_s - curve.a0_s) / share if share else curve.a1_s, curve.a0_s)
            for curve, share, time_s in zip(self.curves, self._shares, times_s, strict=True)
        ]
        return [round(batch) for batch in spread_shares(rough, self.total, self.caps)]

    def take(self, shares: Sequence[int]) -> None:
        """Replaces the shares by those that the caller applied."""
        self._shares = list(shares)
