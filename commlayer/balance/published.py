"""Adapts LBB (lbb.py) to a running job; used by Controller(mode="lbb"). Pure.

It keeps what a job needs and the paper does not guarantee. The sum is the batch: a surplus is taken from the slowest, as
LBB's fine tuning intends. No share is between 0 and the minimum. An iteration counts only if it ran under the newest shares,
because a decision takes effect steps later.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections import deque
from collections.abc import Sequence

from commlayer.balance.balancer import EVENTS_KEPT, OUTCOME_AFTER, Policy
from commlayer.balance.events import Decision, Event, Measurement, Note, Outcome, straggler_effect
from commlayer.balance.lbb import Lbb, LbbSettings
from commlayer.balance.models import Cubic
from commlayer.balance.recursive_fit import checked_time


class Published:
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

    def copy(self) -> Published:
        """Independent: decisions of one copy do not affect the other."""
        clone = copy.copy(self)
        clone._lbb, clone._under = self._lbb.copy(), list(self._under)
        clone.events = deque(self.events, maxlen=EVENTS_KEPT)
        return clone

    @staticmethod
    def begin(curves: Sequence[Cubic], total: int, caps: Sequence[int | None], minimum: int) -> list[int]:
        """The shares that LBB computes from profiles, adjusted so that they can be assigned."""
        wanted = list(Lbb(curves, total, caps).shares(0))
        return fitting(wanted, total, minimum, order=sorted(range(len(wanted)), key=lambda i: -wanted[i]))

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
        adjusted = fitting(self._lbb.shares(step + 1), self._total, self.policy.minimum, order)
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


def fitting(wanted: Sequence[int], total: int, minimum: int, order: Sequence[int]) -> list[int]:
    """Shares near `wanted` with the sum `total`, each 0 or at least `minimum`. `order`: the first gives first, the last takes
    first.

    >>> fitting([166, 168, 159, 20], 512, 1, order=[3, 0, 1, 2])
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
