"""Chooses which workers take part in a step, given the cost of sets of workers.

Without communication the best set follows from the time models alone. With communication, all sets are priced for up to
EVERY_SET workers. Beyond that the search is a heuristic: it drops the most expensive workers, then tries single changes of
the set.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

EVERY_SET = 10
"""Up to this many optional workers, all sets are priced."""
EFFORT = 10_000
"""The search prices at most EFFORT / workers single changes."""
ANCHORS = 4
"""Number of workers from which the prices of all others are measured."""
SWEEP = 24
"""Number of set sizes that a sweep tries at once. With more workers it narrows the range and repeats."""


class Computed(NamedTuple):
    """A set with its best shares. Their sum may exceed the total by less than a minimum share."""

    makespan_s: float
    active: tuple[int, ...]
    shares: tuple[int, ...]


class Asked(Protocol):
    """Prices sets of workers for the search."""

    def best(self, allowed: Sequence[int], kept: frozenset[int]) -> Computed | None:
        """The best subset of `allowed` that contains `kept`, with free communication; None if it cannot process the total."""

    def exactly(self, places: Sequence[int]) -> Computed | None:
        """Exactly this set; None if its bounds do not admit the total."""

    def cost_s(self, taken_in: tuple[int, ...], makespan_s: float) -> float:
        """Iteration time with this makespan and the communication of these workers; without workers, no communication."""

    def able(self, time_s: float) -> Sequence[int]:
        """Samples that each worker finishes within a time."""


def choose(asked: Asked, workers: int, kept: frozenset[int], *, free: bool) -> Computed:
    """The best set that contains `kept`. The caller has checked that all workers together can process the total."""
    everyone = range(workers)
    root = asked.best(everyone, kept)
    assert root is not None
    best = _Best(asked, root)
    if free or best.cost_s <= root.makespan_s:  # communication is free, or hidden behind computation
        return root
    optional = [worker for worker in everyone if worker not in kept]
    if len(optional) <= EVERY_SET:
        for some in itertools.chain.from_iterable(itertools.combinations(optional, size) for size in range(len(optional) + 1)):
            if kept or some:
                best.offer(asked.exactly(sorted(kept.union(some))))
        return best.found
    orders = _orders(asked, best, workers, kept, optional)
    for order in orders:
        _drop_first(asked, best, everyone, kept, order)
    _change_one(asked, best, orders, EFFORT // workers)
    return best.found


class _Best:
    """The cheapest set offered so far; the first of equal ones."""

    def __init__(self, asked: Asked, found: Computed) -> None:
        self._asked, self.found = asked, found
        self.cost_s = asked.cost_s(found.active, found.makespan_s)

    def offer(self, found: Computed | None) -> float:
        """Keeps the set if it is cheaper; returns its cost."""
        if found is None:
            return math.inf
        cost_s = self._asked.cost_s(found.active, found.makespan_s)
        # Ignore gains within rounding error.
        if cost_s < self.cost_s * (1 - 1e-12):
            self.found, self.cost_s = found, cost_s
        return cost_s


def _orders(asked: Asked, best: _Best, workers: int, kept: frozenset[int], optional: Sequence[int]) -> list[list[int]]:
    """Orders in which to try dropping workers. By communication price, seen from the fastest worker and from others far
    from it and from each other (other sites); by price per sample; by speed."""
    able = asked.able(best.cost_s)
    anchor = max(kept or optional, key=lambda worker: able[worker])
    nearest: list[float] = []
    keys: list[list[float]] = []
    for _ in range(ANCHORS):
        prices = [asked.cost_s(tuple(sorted({anchor, worker})), 0.0) for worker in range(workers)]
        keys.append([-price for price in prices])
        nearest = [min(pair) for pair in zip(nearest or prices, prices, strict=True)]
        anchor = max(optional, key=lambda worker: (nearest[worker], able[worker]))
    keys.append([price / max(samples, 1) for price, samples in zip(keys[0], able, strict=True)])
    keys.append([0.0] * workers)
    orders = (tuple(sorted(optional, key=lambda worker: (key[worker], able[worker]))) for key in keys)
    return [list(order) for order in dict.fromkeys(orders)]


def _drop_first(asked: Asked, best: _Best, everyone: Sequence[int], kept: frozenset[int], order: Sequence[int]) -> None:
    """Drops a prefix of the order; finds the best length by successive refinement."""
    def price(cut: int) -> float:
        out = frozenset(order[:cut])
        allowed = [worker for worker in everyone if worker not in out]
        return best.offer(asked.best(allowed, kept)) if allowed else math.inf

    low, high, costs = 0, len(order), dict[int, float]()
    while True:
        stride = max(1, (high - low) // SWEEP)
        for cut in range(low, high + 1, stride):
            if cut not in costs:
                costs[cut] = price(cut)
        if stride == 1:
            return
        middle = min(costs, key=lambda cut: (costs[cut], cut))
        low, high = max(low, middle - stride), min(high, middle + stride)


def _change_one(asked: Asked, best: _Best, orders: Sequence[Sequence[int]], sets: int) -> None:
    """Drops, adds or swaps one worker while that is cheaper; prices at most `sets` sets."""
    seen: set[frozenset[int]] = set()
    better = True
    while better:
        active, before_s, better = frozenset(best.found.active), best.cost_s, False
        for out, more in _moves(active, orders):
            candidate = active - out | more
            if not candidate or candidate in seen:
                continue
            if len(seen) == sets:
                return
            seen.add(candidate)
            better = best.offer(asked.exactly(sorted(candidate))) < before_s * (1 - 1e-12)
            if better:
                break


def _moves(active: frozenset[int], orders: Sequence[Sequence[int]]) -> Iterator[tuple[frozenset[int], frozenset[int]]]:
    """Workers to drop and to add: single ones first, then swaps; those at the edge of an order come first."""
    dropped = zip(*([w for w in order if w in active] for order in orders), strict=True)
    missing = zip(*([w for w in reversed(order) if w not in active] for order in orders), strict=True)
    none = frozenset[int]()
    drops = [frozenset({w}) for w in dict.fromkeys(itertools.chain.from_iterable(dropped))]
    adds = [frozenset({w}) for w in dict.fromkeys(itertools.chain.from_iterable(missing))]
    yield from ((drop, none) for drop in drops)
    yield from ((none, add) for add in adds)
    yield from ((drop, add) for total in range(len(drops) + len(adds) - 1) for at, drop in enumerate(drops[: total + 1])
                for add in adds[total - at : total - at + 1])
