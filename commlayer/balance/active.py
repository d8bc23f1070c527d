"""Chooses which workers take part in a step. Knows what sets of workers cost, by asking; no time models, caps or steps.

Without communication the best set is the workers that do the total first if each may stay away: in the smallest time in which
those that can do the minimum do the total together, one that cannot yet would only hold the others up. With communication it is
searched for by branch and bound: a worker is taken in or left out, and a branch ends where the best makespan that it allows,
with the communication of those taken in, costs no less than the best set known. So it is exact, as long as no set communicates
in less time than a part of it. It begins with good sets: those of which the dearest were dropped, one after another.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

EVERY_SET = 6
"""Up to this many workers whose part is open, all sets are priced, so that communication may be any function of the set."""
EFFORT = 20_000
"""Workers in all sets that the search looks at: past it the best set known stands. Ten workers never come near it."""
ANCHORS = 4
"""From so many workers the prices of all others are looked at."""
ROUNDS = 4
"""How often each order's cut is looked at again, for the cuts of the others have moved."""
SWEEP = 24
"""With more workers, so many sizes of a sweep are tried at a time, closer and closer."""


class Computed(NamedTuple):
    """A set with its best shares, which may add up to more than the total by less than a minimum."""

    makespan_s: float
    active: tuple[int, ...]
    shares: tuple[int, ...]


class Asked(Protocol):
    """What is asked about sets."""

    def best(self, allowed: Sequence[int], kept: frozenset[int]) -> Computed | None:
        """The best set among these with all that are kept, if communication is free; None where they cannot do the total."""

    def exactly(self, places: Sequence[int]) -> Computed | None:
        """This set; None where its bounds do not admit the total."""

    def cost_s(self, taken_in: tuple[int, ...], makespan_s: float) -> float:
        """An iteration of that makespan with the communication of these; without any, with none."""

    def able(self, time_s: float) -> Sequence[int]:
        """How many samples each worker does in a time."""


def choose(asked: Asked, workers: int, kept: frozenset[int], *, free: bool) -> tuple[Computed, float]:
    """The best set that contains `kept`, and what none falls below if adding a worker never saves communication.

    Some set is feasible: that of all workers.
    """
    everyone = range(workers)
    root = asked.best(everyone, kept)
    assert root is not None, "the caller has checked that all workers together admit the total"
    if free:
        return root, root.makespan_s
    best = _Best(asked, root)
    open_yet = [worker for worker in everyone if worker not in kept]
    if best.cost_s <= root.makespan_s:  # hidden
        return root, root.makespan_s
    if len(open_yet) <= EVERY_SET:
        for some in itertools.chain.from_iterable(itertools.combinations(open_yet, size) for size in range(len(open_yet) + 1)):
            if kept or some:
                best.offer(asked.exactly(sorted(kept.union(some))))
        return best.found, best.cost_s
    floor_s = _floor_s(asked, kept, everyone, root)
    if best.cost_s <= floor_s:  # the same for all sets
        return root, floor_s
    orders = _orders(asked, best, workers, kept, open_yet)
    _descend(asked, best, everyone, kept, orders)
    _polish(asked, best, orders, EFFORT // workers // 2)
    bound_s = _branch(asked, best, workers, kept, root, orders[0])
    return best.found, bound_s


class _Best:
    """The cheapest set offered so far; of equal ones the first."""

    def __init__(self, asked: Asked, found: Computed) -> None:
        self._asked, self.found = asked, found
        self.cost_s = asked.cost_s(found.active, found.makespan_s)

    def offer(self, found: Computed | None) -> float:
        """What it costs."""
        if found is None:
            return math.inf
        cost_s = self._asked.cost_s(found.active, found.makespan_s)
        # A gain within rounding is none.
        if cost_s < self.cost_s * (1 - 1e-12):
            self.found, self.cost_s = found, cost_s
        return cost_s


def _orders(asked: Asked, best: _Best, workers: int, kept: frozenset[int], open_yet: Sequence[int]) -> list[list[int]]:
    """In what order workers might be dropped: dear ones first, seen from the fastest and from those far from it and from each
    other, as in other sites; dear for what they compute; slow ones."""
    able = asked.able(best.cost_s)
    anchor = max(kept or open_yet, key=lambda worker: able[worker])
    nearest: list[float] = []
    keys: list[list[float]] = []
    for _ in range(ANCHORS):
        prices = [asked.cost_s(tuple(sorted({anchor, worker})), 0.0) for worker in range(workers)]
        keys.append([-price for price in prices])
        nearest = [min(pair) for pair in zip(nearest or prices, prices, strict=True)]
        anchor = max(open_yet, key=lambda worker: (nearest[worker], able[worker]))
    keys.append([price / max(samples, 1) for price, samples in zip(keys[0], able, strict=True)])
    keys.append([0.0] * workers)
    orders = (tuple(sorted(open_yet, key=lambda worker: (key[worker], able[worker]))) for key in keys)
    return [list(order) for order in dict.fromkeys(orders)]


def _descend(asked: Asked, best: _Best, everyone: Sequence[int], kept: frozenset[int], orders: Sequence[Sequence[int]]) -> None:
    """Drops the first of each order, so many that no other number of one order alone is better."""
    cuts = [0] * len(orders)
    costs: dict[frozenset[int], float] = {}

    def price(cuts: Sequence[int]) -> float:
        out = frozenset(itertools.chain.from_iterable(order[:cut] for order, cut in zip(orders, cuts, strict=True)))
        if out not in costs:
            allowed = [worker for worker in everyone if worker not in out]
            costs[out] = best.offer(asked.best(allowed, kept)) if allowed else math.inf
        return costs[out]

    def swept(at: int) -> tuple[float, list[int]]:
        before, after = cuts[:at], cuts[at + 1 :]
        cut, cost_s = _sweep(lambda cut: price([*before, cut, *after]), len(orders[at]))
        return cost_s, [*before, cut, *after]

    now_s, cuts = min(swept(at) for at in range(len(orders)))
    for _ in range(ROUNDS):
        before_s = now_s
        for at in range(len(orders)):
            now_s, cuts = swept(at)
        if now_s >= before_s:
            return


def _polish(asked: Asked, best: _Best, orders: Sequence[Sequence[int]], sets: int) -> None:
    """Drops a worker, takes one in, or one for another, while that is cheaper; at most so many sets."""
    seen: set[frozenset[int]] = set()
    better = True
    while better:
        active, before_s, better = frozenset(best.found.active), best.cost_s, False
        for out, more in _moves(active, orders):
            there = active - out | more
            if not there or there in seen:
                continue
            if len(seen) == sets:
                return
            seen.add(there)
            better = best.offer(asked.exactly(sorted(there))) < before_s * (1 - 1e-12)
            if better:
                break


def _moves(active: frozenset[int], orders: Sequence[Sequence[int]]) -> Iterator[tuple[frozenset[int], frozenset[int]]]:
    """Whom to drop and whom to take in: single ones first, those at the edge of an order before others."""
    dropped = zip(*([w for w in order if w in active] for order in orders), strict=True)
    missing = zip(*([w for w in reversed(order) if w not in active] for order in orders), strict=True)
    none = frozenset[int]()
    drops = [frozenset({w}) for w in dict.fromkeys(itertools.chain.from_iterable(dropped))]
    adds = [frozenset({w}) for w in dict.fromkeys(itertools.chain.from_iterable(missing))]
    yield from ((drop, none) for drop in drops)
    yield from ((none, add) for add in adds)
    yield from ((drop, add) for total in range(len(drops) + len(adds) - 1) for at, drop in enumerate(drops[: total + 1])
                for add in adds[total - at : total - at + 1])


def _sweep(price: Callable[[int], float], high: int) -> tuple[int, float]:
    """The cheapest number and its price: all are tried where they are few, else closer and closer around the cheapest."""
    low, costs = 0, dict[int, float]()
    while True:
        stride = max(1, (high - low) // SWEEP)
        for cut in range(low, high + 1, stride):
            if cut not in costs:
                costs[cut] = price(cut)
        middle = min(costs, key=lambda cut: (costs[cut], cut))
        if stride == 1:
            return middle, costs[middle]
        low, high = max(low, middle - stride), min(high, middle + stride)


class _Branch(NamedTuple):
    """All sets that hold `inside` and lie within `allowed`; `relaxed` is the best of them if communication is free."""

    bound_s: float
    number: int
    inside: frozenset[int]
    allowed: frozenset[int]
    relaxed: Computed


def _branch(
    asked: Asked, best: _Best, workers: int, kept: frozenset[int], root: Computed, order: Sequence[int]
) -> float:
    """Searches all sets, the most promising branch first; gives what none falls below."""
    anchor = order[-1]
    rank = {worker: place for place, worker in enumerate([anchor, *order[:-1]])}
    numbers = itertools.count()
    everyone = frozenset(range(workers))
    branches = [_Branch(_floor_s(asked, kept, everyone, root), next(numbers), kept, everyone, root)]
    for _ in range(max(1, EFFORT // workers)):
        if not branches or branches[0].bound_s >= best.cost_s * (1 - 1e-12):
            return best.cost_s
        _, _, inside, allowed, relaxed = heapq.heappop(branches)
        worker = min((worker for worker in relaxed.active if worker not in inside), key=rank.__getitem__)
        taken_in, left = inside | {worker}, allowed - {worker}
        without = asked.best(sorted(left), inside) if left else None
        best.offer(without)
        for now, within, found in ((taken_in, allowed, relaxed), (inside, left, without)):
            if found is None:
                continue
            bound_s = _floor_s(asked, now, within, found)
            if bound_s < best.cost_s * (1 - 1e-12):
                heapq.heappush(branches, _Branch(bound_s, next(numbers), now, within, found))
    return min(best.cost_s, branches[0].bound_s) if branches else best.cost_s


def _floor_s(asked: Asked, inside: frozenset[int], allowed: Iterable[int], relaxed: Computed) -> float:
    """What no set costs less than that holds `inside`, or else anyone."""
    if inside:
        return asked.cost_s(tuple(sorted(inside)), relaxed.makespan_s)
    return min(asked.cost_s((worker,), relaxed.makespan_s) for worker in allowed)
