"""What decides under Controller(mode="lbb"): LBB (lbb.py), its shares made such that a sampler can hand them out. Pure.

What a job asks for and the paper does not keep: the sum is the batch (a surplus goes to and comes from the slowest, as its fine
tuning intends), no share lies between 0 and the minimum, and an iteration counts only if the newest shares were in force in it,
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
    """decide() as the default balancer has it."""

    def __init__(
        self, curves: Sequence[Cubic], total: int, caps: Sequence[int | None], first: Decision, policy: Policy,
        settings: LbbSettings | None = None,
    ) -> None:
        """`curves` are the cubic profile models; `first`: the shares in force, or announced."""
        self._lbb = Lbb(curves, total, caps, settings)
        self._total, self._caps = total, [cap or total for cap in caps]
        self.policy = policy
        self.events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        self.latest = first
        self._under: list[float] = []
        self._lbb.take(first.shares)

    def copy(self) -> Published:
        """Independent of this one: what either decides leaves the other as it is."""
        made = copy.copy(self)
        made._lbb, made._under = self._lbb.copy(), list(self._under)
        made.events = deque(self.events, maxlen=EVENTS_KEPT)
        return made

    @staticmethod
    def begin(curves: Sequence[Cubic], total: int, caps: Sequence[int | None], minimum: int) -> list[int]:
        """The shares that LBB takes from profiles, as far as they can be handed out."""
        wanted = list(Lbb(curves, total, caps).shares(0))
        return fitting(wanted, total, minimum, order=sorted(range(len(wanted)), key=lambda i: -wanted[i]))

    def decide(self, step: int, inputs: Sequence[Measurement]) -> Decision | None:
        """Algorithm 2 of the paper, with what was measured in `step`; its shares are for step + lead."""
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
        found = fitting(self._lbb.shares(step + 1), self._total, self.policy.minimum, order)
        self._lbb.take(found)
        if tuple(found) == shares:
            return None
        reason = "LBB, rapid tuning" if len(self._lbb.rapid_steps) > rapid else "LBB, fine tuning"
        expected = [self._expected_s(worker, share, times[worker]) for worker, share in enumerate(found)]
        pieces = tuple(-(-share // cap) for share, cap in zip(found, self._caps, strict=True))
        self.latest = Decision(
            step, step + self.policy.lead, self.latest.workers, tuple(found), pieces, reason, max(at), max(expected), effect)
        self._under = []
        self.events.append(self.latest)
        return self.latest

    def _expected_s(self, worker: int, share: int, time_s: float) -> float:
        """By its own model: the line through the launch cost of the profile and what was measured."""
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
    """Shares near `wanted` with the sum `total`, each 0 or at least `minimum`. `order`: who gives first; the last takes first.

    >>> fitting([166, 168, 159, 20], 512, 1, order=[3, 0, 1, 2])
    [166, 168, 159, 19]
    """
    found = [share if share >= minimum else minimum if 2 * share >= minimum else 0 for share in wanted]
    while (over := sum(found) - total) > 0:
        giver = next((i for i in order if found[i] > minimum), None)
        if giver is None:
            giver = max(order, key=lambda i: found[i])
            found[giver] = 0  # all at the minimum: one leaves
        else:
            found[giver] -= min(over, found[giver] - minimum, max(1, over // len(found)))
    while (short := total - sum(found)) > 0:
        taker = next(i for i in reversed(order) if found[i] or short >= minimum)
        found[taker] += short
    return found
