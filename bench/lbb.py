"""LBB (load balanced batching) as published, defects included: the baseline of `python -m bench balance`.

The paper's objective, thresholds, window and rounding are kept. LBB minimizes max - min of the workers' times instead of the
maximum. The launch cost a0 stays that of the profile, so an added offset is read as slope. A fine-tuning step of 1 takes
floor(1/2) = 0 from the slowest and gives ceil(1/2) = 1 to the fastest, so the sum grows. After a rapid tuning, only fine tuning
is allowed for a window. Where the paper is silent (rounding, solver, window length), this follows the released code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.optimize import minimize

from commlayer.balance.balancer import straggler_effect
from commlayer.balance.time_models import Points, checked_points
from commlayer.records import Record

FINE, RAPID = 0.05, 0.3
"""Straggler effects, (longest - shortest) / mean compute time, above which LBB tunes finely or rapidly."""
STEP = 1
"""Number of samples that a fine tuning moves."""
WINDOW = 30
"""Number of steps after a rapid tuning in which only fine tuning is allowed."""


class Cubic(Record, frozen=True):
    """LBB's time model: a batch of B samples takes a3 B^3 + a2 B^2 + a1 B + a0 seconds."""

    a3_s: float
    a2_s: float
    a1_s: float
    a0_s: float

    def time_s(self, batch: float) -> float:
        return ((self.a3_s * batch + self.a2_s) * batch + self.a1_s) * batch + self.a0_s


def fit_cubic(points: Points) -> Cubic:
    """Fits LBB's cubic time model by plain least squares, as published. With fewer than four distinct batches the degree is
    lower."""
    batches, times = checked_points(points)
    degree = min(3, len(set(batches)) - 1)
    return Cubic(*[0.0] * (3 - degree), *(float(c) for c in np.polyfit(batches, times, degree)))


def spread_s(curves: Sequence[Cubic], batches: Sequence[float]) -> float:
    """Returns max T - min T over all workers. A worker without a share counts with its launch cost T(0)."""
    times = [curve.time_s(batch) for curve, batch in zip(curves, batches, strict=True)]
    return max(times) - min(times)


def spread_shares(curves: Sequence[Cubic], total: int, caps: Sequence[int | None]) -> list[float]:
    """Returns fractional shares that minimize the spread (the paper's equation 3), by SLSQP from (2, ..., 2) as in the
    released code."""
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
    """Rounds fractional shares as LBB does after profiling: the larger half up, the smaller half down. The sum may miss the
    total."""
    order = sorted(range(len(real)), key=lambda i: real[i])
    low = set(order[: len(real) // 2])
    return [math.floor(batch) if i in low else math.ceil(batch) for i, batch in enumerate(real)]


class Lbb:
    """LBB's coordinator in the training loop. `curves`: the cubic time models from profiling."""

    def __init__(self, curves: Sequence[Cubic], total: int, caps: Sequence[int | None] | None = None) -> None:
        self.curves, self.total = list(curves), total
        self.caps = list(caps or [None] * len(curves))
        self.current: Sequence[int] = round_halves(spread_shares(self.curves, total, self.caps))
        self._since_rapid = WINDOW
        self.rapid_steps: list[int] = []

    def shares(self, step: int) -> Sequence[int]:
        return self.current

    def observe(self, step: int, times_s: Sequence[float]) -> None:
        """Applies the paper's algorithm 2: no change, fine tuning or rapid tuning of the shares of the next step."""
        self._since_rapid += 1
        effect = straggler_effect(times_s)
        if effect < FINE:
            return
        if effect < RAPID or self._since_rapid < WINDOW:
            self.current = self._fine(times_s)
        else:
            self.current = self._rapid(times_s)
            self._since_rapid = 0
            self.rapid_steps.append(step)

    def _fine(self, times_s: Sequence[float]) -> list[int]:
        shares = list(self.current)
        slowest, fastest = int(np.argmax(times_s)), int(np.argmin(times_s))
        shares[slowest] = max(0, shares[slowest] - STEP // 2)
        shares[fastest] += -(-STEP // 2)
        return shares

    def _rapid(self, times_s: Sequence[float]) -> list[int]:
        """Returns shares that minimize the spread of new time models: lines through (0, a0 of the profile) and each worker's
        last measurement."""
        rough = [
            Cubic(0.0, 0.0, (time_s - curve.a0_s) / share if share else curve.a1_s, curve.a0_s)
            for curve, share, time_s in zip(self.curves, self.current, times_s, strict=True)
        ]
        return [round(batch) for batch in spread_shares(rough, self.total, self.caps)]
