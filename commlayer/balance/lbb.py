"""LBB (load balanced batching) as published, defects included: the baseline of LoadBalancer(mode="lbb").

The paper's objective, thresholds, window and rounding are kept. LBB minimizes max - min of the workers' times instead of the
maximum. The launch cost a0 stays that of the profile, so an added offset is read as slope. A fine-tuning step of 1 takes
floor(1/2) = 0 from the slowest and gives ceil(1/2) = 1 to the fastest, so the sum grows. After a rapid tuning, only fine tuning
is allowed for a window. Where the paper is silent (rounding, solver, window length), this follows the released code.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy.optimize import minimize

from commlayer.balance.balancer import Balancer, Decision, Joined, SharePolicy, straggler_effect
from commlayer.balance.time_models import Cubic

FINE, RAPID = 0.05, 0.3
"""Straggler effects, (longest - shortest) / mean compute time, above which LBB tunes finely or rapidly."""
STEP = 1
"""Number of samples that a fine tuning moves."""
WINDOW = 30
"""Number of steps after a rapid tuning in which only fine tuning is allowed."""


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
        self._shares = round_halves(spread_shares(self.curves, total, self.caps))
        self._since_rapid = WINDOW
        self.rapid_steps: list[int] = []

    def copy(self) -> Lbb:
        clone = copy.copy(self)
        clone.rapid_steps = list(self.rapid_steps)
        return clone

    def shares(self, step: int) -> Sequence[int]:
        return self._shares

    def observe(self, step: int, times_s: Sequence[float]) -> None:
        """Applies the paper's algorithm 2: no change, fine tuning or rapid tuning of the shares of the next step."""
        self._since_rapid += 1
        effect = straggler_effect(times_s)
        if effect < FINE:
            return
        if effect < RAPID or self._since_rapid < WINDOW:
            self._shares = self._fine(times_s)
        else:
            self._shares = self._rapid(times_s)
            self._since_rapid = 0
            self.rapid_steps.append(step)

    def _fine(self, times_s: Sequence[float]) -> list[int]:
        shares = list(self._shares)
        slowest, fastest = int(np.argmax(times_s)), int(np.argmin(times_s))
        shares[slowest] = max(0, shares[slowest] - STEP // 2)
        shares[fastest] += -(-STEP // 2)
        return shares

    def _rapid(self, times_s: Sequence[float]) -> list[int]:
        """Returns shares that minimize the spread of new time models: lines through (0, a0 of the profile) and each worker's
        last measurement."""
        rough = [
            Cubic(0.0, 0.0, (time_s - curve.a0_s) / share if share else curve.a1_s, curve.a0_s)
            for curve, share, time_s in zip(self.curves, self._shares, times_s, strict=True)
        ]
        return [round(batch) for batch in spread_shares(rough, self.total, self.caps)]

    def take(self, shares: Sequence[int]) -> None:
        """Sets the shares to those that the caller applied."""
        self._shares = list(shares)


class LbbBalancer(Balancer):
    """A Balancer that decides as LBB does, with shares adjusted so that they can be assigned. Communication does not count."""

    def __init__(
        self, curves: Sequence[Cubic], total: int, caps: Sequence[int | None], first: Decision, policy: SharePolicy,
    ) -> None:
        """`curves`: the cubic time models from profiling. `first`: the current or announced shares."""
        super().__init__([Joined(worker, cap) for worker, cap in enumerate(caps)], total, policy, shares=first)
        self._lbb = Lbb(curves, total, caps)
        self._lbb.take(first.shares)

    def copy(self) -> LbbBalancer:
        clone = super().copy()
        assert isinstance(clone, LbbBalancer)
        clone._lbb = self._lbb.copy()
        return clone

    @staticmethod
    def begin(curves: Sequence[Cubic], total: int, caps: Sequence[int | None], minimum: int) -> list[int]:
        """Returns the shares that LBB computes from profiles, adjusted so that they can be assigned."""
        wanted = list(Lbb(curves, total, caps).shares(0))
        return adjusted_to_total(wanted, total, minimum, order=sorted(range(len(wanted)), key=lambda i: -wanted[i]))

    def _follow(self, step: int, worker: int, batch: int, compute_s: float) -> None:
        pass  # LBB reads the latest times only

    def _iteration_s(self, makespan_s: float) -> float:
        return makespan_s

    def _proposed(self, step: int, times_s: Mapping[int, float]) -> Decision | None:
        """Applies the paper's algorithm 2, once all workers with a share have measured it."""
        shares = self.latest.shares
        if any(share and worker not in times_s for worker, share in enumerate(shares)):
            return None
        times = [times_s.get(worker, 0.0) for worker in range(len(shares))]
        rapid = len(self._lbb.rapid_steps)
        self._lbb.observe(step, times)
        order = sorted(range(len(times)), key=lambda worker: -times[worker])
        adjusted = adjusted_to_total(self._lbb.shares(step + 1), self.total, self.policy.minimum, order)
        self._lbb.take(adjusted)
        if tuple(adjusted) == shares:
            return None
        reason = "LBB, rapid tuning" if len(self._lbb.rapid_steps) > rapid else "LBB, fine tuning"
        after_s = max(self._predicted_s(worker, share, times[worker]) for worker, share in enumerate(adjusted))
        return self._decision(step, step + self.policy.lead, adjusted, reason, max(times), after_s)

    def _predicted_s(self, worker: int, share: int, time_s: float) -> float:
        """Returns the time of `share` by the worker's own model: the line through the profile's launch cost and the measured
        point."""
        curve, before = self._lbb.curves[worker], self.latest.shares[worker]
        if not share:
            return 0.0
        return curve.a0_s + (time_s - curve.a0_s) / before * share if before else curve.time_s(share)


def adjusted_to_total(wanted: Sequence[int], total: int, minimum: int, order: Sequence[int]) -> list[int]:
    """Returns shares near `wanted` with the sum `total`, each 0 or at least `minimum`. Workers give up samples in `order`, and
    receive missing samples in reverse order.

    >>> adjusted_to_total([166, 168, 159, 20], 512, 1, order=[3, 0, 1, 2])
    [166, 168, 159, 19]
    """
    shares = [share if share >= minimum else minimum if 2 * share >= minimum else 0 for share in wanted]
    while (over := sum(shares) - total) > 0:
        giver = next((i for i in order if shares[i] > minimum), None)
        if giver is None:
            giver = max(order, key=lambda i: shares[i])
            shares[giver] = 0  # all at the minimum: drop one
        else:
            shares[giver] -= min(over, shares[giver] - minimum, max(1, over // len(shares)))
    while (short := total - sum(shares)) > 0:
        taker = next(i for i in reversed(order) if shares[i] or short >= minimum)
        shares[taker] += short
    return shares
