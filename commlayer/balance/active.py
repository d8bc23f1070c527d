"""Which workers take part. Knows models, a way to solve for a fixed set and a way to price one; no caps, no steps.

Without communication the best set is one of the prefixes in order of T(minimum): a worker that starts below the makespan of the
others can only take work off them, one that starts above it can only hold them up. With communication a set's price is any
function, so few workers are tried in all sets and many by dropping and re-adding one at a time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import combinations

from commlayer.balance.makespan import makespan_s
from commlayer.balance.models import TimeModel

EVERY_SET = 6
"""Up to this many workers whose part is open, all sets are priced."""
CANDIDATES = 16
"""Beyond it, so many of those that start last may be dropped or added again in a move."""

Fixed = Callable[[Sequence[int]], list[int] | None]
Price = Callable[[Sequence[int], float], float]


def choose(
    models: Sequence[TimeModel],
    minimum: int,
    kept: Sequence[int],
    fixed: Fixed,
    price: Price,
    reached_s: Callable[[], float],
    *,
    free: bool,
) -> list[int]:
    """The best shares over all sets of workers that contain `kept`. Some set is feasible: that of all workers.

    `reached_s()` is about when the best set is done if communication is free: a hint, which costs time where it is wrong.
    """
    must = set(kept)
    order = sorted(range(len(models)), key=lambda p: (p not in must, models[p].time_s(minimum), p))
    first = len(must)
    starts = [models[p].time_s(minimum) for p in order]
    prefix = fixed(order)
    assert prefix is not None, "the caller has checked that all workers together admit the total"
    if starts[-1] >= makespan_s(models, prefix):
        prefix = _best_prefix(starts, first, bisect_right(starts, reached_s(), first), models, order, fixed)
    if free:
        return prefix
    best = _Best(models, fixed, price)
    if len(order) - first <= EVERY_SET:
        for size in range(len(order) - first, -1, -1):
            for some in combinations(order[first:], size):
                best.offer(order[:first] + list(some))
    else:
        best.offer(order)
        best.offer([p for p, share in enumerate(prefix) if share])
        candidates = order[max(first, len(order) - CANDIDATES) :]
        while any(best.offer(sorted(set(best.places) ^ {candidate})) for candidate in candidates):
            pass
    return best.shares


class _Best:
    """The cheapest set offered so far; of equal ones the first."""

    def __init__(self, models: Sequence[TimeModel], fixed: Fixed, price: Price) -> None:
        self.models, self.fixed, self.price = models, fixed, price
        self.places: list[int] = []
        self.shares: list[int] = []
        self.cost = float("inf")

    def offer(self, places: Sequence[int]) -> bool:
        shares = self.fixed(places) if places else None
        if shares is None:
            return False
        cost = self.price(sorted(places), makespan_s(self.models, shares))
        # A gain within rounding is none, or two equal sets would replace each other for ever.
        if self.shares and cost >= self.cost * (1 - 1e-12):
            return False
        self.places, self.shares, self.cost = list(places), shares, cost
        return True


def _best_prefix(
    starts: Sequence[float], first: int, guess: int, models: Sequence[TimeModel], order: Sequence[int], fixed: Fixed
) -> list[int]:
    """Searches for the last prefix whose newest worker starts before the makespan of the rest; the size `guess` is tried first.

    From one prefix to the next the makespan falls as long as the next worker starts below it, and never again after: so whether
    a prefix is infeasible or slower than the next worker's start changes once, and bisection finds where.
    """
    low, high = max(first, 1), len(order)
    best: list[int] | None = None
    near = [guess, guess - 1, guess + 1]
    while low < high or best is None:
        size = next((size for size in near if low <= size <= high), (low + high) // 2)
        near = [other for other in near if other != size]
        here = fixed(order[:size])
        if size < len(order) and (here is None or starts[size] < makespan_s(models, here)):
            low = size + 1
        else:
            high, best = size, here
    assert best is not None
    return best
