"""Nelder-Mead search (scipy's) over the split of a batch, as a mode of the simulated cluster.

The search runs after the balancer. It sees only shares and measured times and has no time model, so it learns nothing about
single workers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.optimize import minimize

from bench.reference.balance_cluster import PlayedCluster
from bench.reference.balance_default import Ours
from commlayer.balance.balancer import Outcome, SharePolicy
from commlayer.balance.schedule import apportion

FIRST_MOVE = 0.05
"""Size of first moves, as a fraction of the batch. Smaller moves may not change rounded shares; larger ones cost slow steps."""
MOST = 120
"""Maximum number of splits tried."""
HOLD = 2
"""Steps that measure a split."""
MISSED, MISSES = 0.05, 2
"""A prediction with a larger error than MISSED counts as a miss. After MISSES misses the balancer hands over to the search."""

Split = tuple[int, ...]


class _Enough(Exception):
    """Raised in the objective when the search needs a cost that is not measured yet."""


class Simplex:
    """Ask-and-tell interface: `ask` returns the next split, `tell` takes its cost. Each worker keeps at least one sample."""

    def __init__(self, start: Sequence[int]) -> None:
        self._start, self._told = tuple(start), list[float]()
        self._asked: list[Split] = []
        self._advance()

    def ask(self) -> Split:
        """The next split to measure; after the search, the best."""
        return self._asked[-1]

    def tell(self, cost: float) -> None:
        if not self.done:
            self._told.append(cost)
            self._advance()

    @property
    def done(self) -> bool:
        return len(self._told) >= len(self._asked)

    def _advance(self) -> None:
        """Replays scipy's search with the known costs, up to the first split without a cost."""
        known = iter(self._told)
        attempts: list[Split] = []

        def cost(point: np.ndarray) -> float:
            attempts.append(split_at(point, sum(self._start)))
            if (known_cost := next(known, None)) is None:
                raise _Enough
            return known_cost

        begin = np.array(self._start[:-1]) / sum(self._start)
        try:
            minimize(cost, begin, method="Nelder-Mead", options={
                "maxfev": MOST, "xatol": 1 / sum(self._start), "fatol": 0.0,
                "initial_simplex": [begin, *(begin + FIRST_MOVE * one for one in np.eye(len(begin)))],
            })
        except _Enough:
            self._asked = attempts
        else:
            best = int(np.argmin(self._told))
            self._asked = [*attempts[: len(self._told) - 1], attempts[best]]


def split_at(point: np.ndarray, total: int) -> Split:
    """Integer shares of at least 1 that sum to `total`. `point` has the fractions of all workers but the last."""
    parts = np.maximum(np.append(point, 1.0 - point.sum()), 0.0)
    return tuple(1 + share for share in apportion(parts.tolist(), total - len(parts)))


class OursThenSearch:
    """The balancer first, then Nelder-Mead from its shares. Splits are announced as many steps before they apply."""

    def __init__(self, cluster: PlayedCluster, policy: SharePolicy, at_step: int | None = None) -> None:
        """The search starts at `at_step`, or without it after MISSES wrong predictions of the balancer."""
        self._ours, self._at, self._lead = Ours(cluster, policy), at_step, policy.lead
        self.simplex: Simplex | None = None
        self._missed = 0
        self._split: Sequence[int] = ()
        self._coming: list[tuple[int, Split]] = []
        self._took_s: list[float] = []

    def shares(self, step: int) -> Sequence[int]:
        if self.simplex is None:
            return self._ours.shares(step)
        while self._coming and self._coming[0][0] <= step:
            self._split = self._coming.pop(0)[1]
        return self._split

    def observe(self, step: int, times_s: Sequence[float]) -> None:
        if self.simplex is None:
            self._ours.observe(step, times_s)
            self._begin(step)
        elif not self._coming and not self.simplex.done:
            self._took_s.append(max(times_s))
            if len(self._took_s) == HOLD:
                self.simplex.tell(sum(self._took_s) / HOLD)
                self._announce(step)

    def _begin(self, step: int) -> None:
        events = self._ours.balancer.events
        self._missed += sum(isinstance(event, Outcome) and abs(event.error) > MISSED for event in events)
        events.clear()
        if self._missed >= MISSES if self._at is None else step >= self._at:
            self._split = self._ours.shares(step + 1)
            self.simplex = Simplex(self._split)
            self._announce(step)

    def _announce(self, step: int) -> None:
        assert self.simplex is not None
        self._took_s = []
        self._coming = [(step + self._lead, self.simplex.ask())]
