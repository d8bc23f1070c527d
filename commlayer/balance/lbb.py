"""LBB (load balanced batching) as published, defects included: the baseline of Controller(mode="lbb").

The paper's objective, thresholds, window and rounding are kept. It minimizes max - min instead of the maximum. The launch
cost a0 stays that of the profile, so an added offset is read as slope. A fine-tuning step of 1 takes floor(1/2) = 0 from the
slowest and gives ceil(1/2) = 1 to the fastest, so the sum grows. After a rapid tuning, only fine tuning is allowed for a
window. Where the paper is silent (rounding, solver, window length), this follows the released code.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections import deque
from collections.abc import Sequence

import numpy as np
from scipy.optimize import minimize

from commlayer.balance.balancer import (
    EVENTS_KEPT,
    OUTCOME_AFTER,
    Decision,
    Event,
    Measurement,
    Note,
    Outcome,
    Policy,
    straggler_effect,
)
from commlayer.balance.time_models import Cubic, checked_time
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


class LbbBalancer:
    """Has the default balancer's decide()."""

    def __init__(
        self, curves: Sequence[Cubic], total: int, caps: Sequence[int | None], first: Decision, policy: Policy,
        settings: LbbSettings | None = None,
    ) -> None:
        """`curves` are the cubic profile models. `first`: the current or announced shares."""
        self._lbb = Lbb(curves, total, caps, settings)
        self._total, self._caps = total, [cap or total for cap in caps]
        self.policy = policy
        self.events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self.latest = first
        self._under: list[float] = []
        self._lbb.take(first.shares)

    def copy(self) -> LbbBalancer:
        """Independent: decisions of one copy do not affect the other."""
        clone = copy.copy(self)
        clone._lbb, clone._under = self._lbb.copy(), list(self._under)
        clone.events = deque(self.events, maxlen=EVENTS_KEPT)
        return clone

    @staticmethod
    def begin(curves: Sequence[Cubic], total: int, caps: Sequence[int | None], minimum: int) -> list[int]:
        """The shares that LBB computes from profiles, adjusted so that they can be assigned."""
        wanted = list(Lbb(curves, total, caps).shares(0))
        return adjusted_to_total(wanted, total, minimum, order=sorted(range(len(wanted)), key=lambda i: -wanted[i]))

    def decide(self, step: int, inputs: Sequence[Measurement]) -> Decision | None:
        """Algorithm 2 of the paper with the measurements of `step`; the new shares are for step + lead."""
        if step < self.latest.from_step:
            return None
        shares = self.latest.shares
        times = [0.0] * len(shares)
        for one in inputs:
            try:
                checked_time(one.worker, one.compute_s)
            except ValueError as error:
                self.events.append(Note(step, str(error)))
                return None
            if one.batch == shares[one.worker]:
                times[one.worker] = one.compute_s
        if any(share and not time_s for share, time_s in zip(shares, times, strict=True)):
            return None
        at = [time_s for time_s in times if time_s]
        effect, rapid = straggler_effect(at), len(self._lbb.rapid_steps)
        self._compare(step, max(at), effect)
        self._lbb.observe(step, times)
        order = sorted(range(len(times)), key=lambda worker: -times[worker])
        adjusted = adjusted_to_total(self._lbb.shares(step + 1), self._total, self.policy.minimum, order)
        self._lbb.take(adjusted)
        if tuple(adjusted) == shares:
            return None
        reason = "LBB, rapid tuning" if len(self._lbb.rapid_steps) > rapid else "LBB, fine tuning"
        expected = [self._expected_s(worker, share, times[worker]) for worker, share in enumerate(adjusted)]
        pieces = tuple(-(-share // cap) for share, cap in zip(adjusted, self._caps, strict=True))
        self.latest = Decision(
            step, step + self.policy.lead, self.latest.workers, tuple(adjusted), pieces, reason, max(at), max(expected), effect)
        self._under = []
        self.events.append(self.latest)
        return self.latest

    def _expected_s(self, worker: int, share: int, time_s: float) -> float:
        """Prediction by the worker's own model: the line through the profile's launch cost and the measured point."""
        launch_s, before = self._lbb.curves[worker].a0_s, self.latest.shares[worker]
        if not share:
            return 0.0
        return launch_s + (time_s - launch_s) / before * share if before else self._lbb.curves[worker].time_s(share)

    def _compare(self, step: int, slowest_s: float, effect: float) -> None:
        self._under.append(slowest_s)
        if len(self._under) == OUTCOME_AFTER and self.latest.after_s < math.inf:
            promised, measured_s = self.latest, statistics.median(self._under)
            self.events.append(Outcome(step, promised.step, promised.after_s, measured_s, promised.reason, effect))


def adjusted_to_total(wanted: Sequence[int], total: int, minimum: int, order: Sequence[int]) -> list[int]:
    """Shares near `wanted` with the sum `total`, each 0 or at least `minimum`. `order`: the first gives first, the last takes
    first.

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
