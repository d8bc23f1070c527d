"""Searches for a good choice of one option per bucket: uniform starts, a beam over sizes, then single changes.

A choice's price is its step time multiplied by its convergence factor, 1 + excess. Lower prices are better. Among equal
prices, fewer steps or less loss is better, then less load on the lanes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, groupby, product, repeat
from operator import getitem, mul
from typing import NamedTuple

from commlayer.errors import InvalidInput
from commlayer.planner.simulation import Timed

EQUAL = 1e-9
"""Prices that differ by less than this fraction are equal."""
EXHAUSTIVE = 2000
"""Up to this many choices, all are tried."""
PAIRS = 12000
"""Pairs of buckets are changed together if that gives at most this many trials."""
FEW, FEWEST = 12, 6
"""Up to FEW buckets, the search continues to the last bit. Up to FEWEST, it improves all states of the beam instead of
only the best."""
WORTH = 1e-3
"""With many buckets, the search continues while a round of changes lowers the price by this fraction."""
TAKERS, GIVERS, GIVEN = 4, 12, 6
"""With the loss budget used up: lossy options that are tried, buckets that may pay for one, and payments."""
RELAXED = 3
"""Number of options, the finest first, that are tried to replace a bucket's option."""


class Space(NamedTuple):
    """The search space. Lists are by bucket, then by option."""

    schedule: Timed
    loss: Sequence[Sequence[float]]
    """What each option adds to the whole model's loss."""
    burden: Sequence[Sequence[float]]
    """Breaks ties: seconds on lanes, plus a penalty for coding that exceeds any seconds."""
    critical: Callable[[Sequence[int]], set[int]]
    """Buckets whose change could shorten the step of a choice."""
    classes: Sequence[Sequence[int]]
    """Buckets with the same options, largest first; by readiness within a class."""
    max_loss: float = math.inf
    slack: float = 0.0
    """Fraction of the price that may be given up to avoid coding or loss."""
    least_s: float = 0.0
    """Known lower bound for the step time of any choice."""
    excess: Sequence[Sequence[float]] | None = None
    """By option, the part of dense training's steps that it adds, if the rest were dense. None: all steps count equally."""

    @property
    def least_excess(self) -> float:
        return sum(map(min, self.excess)) if self.excess else 0.0


class ChoiceFound(NamedTuple):
    """A choice and its price."""

    step_s: float
    loss: float
    burden: float
    choice: tuple[int, ...]
    excess: float = 0.0

    @property
    def price(self) -> float:
        """Seconds per step of dense training."""
        return self.step_s * (1 + self.excess)


def better(a: ChoiceFound, b: ChoiceFound) -> bool:
    if abs(a.price - b.price) > EQUAL * max(a.price, b.price):
        return a.price < b.price
    return _finer(a) < _finer(b)


def _finer(found: ChoiceFound) -> tuple[object, ...]:
    return found.excess, found.loss, found.burden, found.choice


def search(
    space: Space, starts: Sequence[Sequence[int]] = (), *, states: Sequence[ChoiceFound] = (), width: int = 3,
    thorough: bool = True,
) -> ChoiceFound:
    """The best choice found within the loss budget, from the best of `starts`; without starts, from uniform choices.

    `states` are starts with known prices. `thorough` tries all choices, and pairs of changes, where those are few.
    """
    return _Search(space, thorough).run(list(states) or priced(space, starts), width)


def priced(space: Space, starts: Sequence[Sequence[int]]) -> list[ChoiceFound]:
    """The starts within the budget and the choice with the least loss, without duplicates."""
    return _Search(space, False).priced(starts)


def repriced(space: Space, found: ChoiceFound) -> ChoiceFound:
    """The same choice with the prices of another space."""
    return _Search(space, False).price(found.choice)


def best(states: Sequence[ChoiceFound]) -> ChoiceFound:
    return min(states, key=_order)


def _order(found: ChoiceFound) -> tuple[object, ...]:
    return found.price, *_finer(found)


def finest(space: Space, found: ChoiceFound) -> ChoiceFound:
    """The choice with every bucket as fine as possible, at a price that rises by at most the space's slack.

    Slack pays for fewer steps and less loss, not for more bytes: among equally fine options the shortest step wins.
    """
    return _Search(space, False).finer(found)


class _Search:
    def __init__(self, space: Space, thorough: bool) -> None:
        self.space, self.thorough = space, thorough
        self.counts = [len(losses) for losses in space.loss]
        self.every = range(len(self.counts))
        self.within = space.max_loss * (1 + EQUAL) + 1e-12
        self.extra = space.excess

    def run(self, starts: Sequence[ChoiceFound], width: int) -> ChoiceFound:
        if self.thorough and math.prod(self.counts) <= EXHAUSTIVE:
            leader = self.price(self.least())
            for choice in product(*map(range, self.counts)):
                leader = self.keep(leader, choice)
            return leader
        states = self.beam(self.best(starts, width), width)
        leader = states[0]
        for state in states if len(self.counts) <= FEWEST else states[:1]:
            improved = self.improve(state)
            leader = improved if better(improved, leader) else leader
        return leader

    # ---- prices

    def price(self, choice: tuple[int, ...]) -> ChoiceFound:
        return self.found(self.space.schedule.run(list(choice)), choice)

    def found(self, step_s: float, choice: tuple[int, ...]) -> ChoiceFound:
        return ChoiceFound(step_s, self.loss(choice), sum(map(getitem, self.space.burden, choice)), choice, self.excess(choice))

    def loss(self, choice: Sequence[int]) -> float:
        return sum(map(getitem, self.space.loss, choice))

    def excess(self, choice: Sequence[int]) -> float:
        return sum(map(getitem, self.extra, choice)) if self.extra else 0.0

    def factors(self, choice: Sequence[int], buckets: Sequence[int]) -> list[float] | None:
        """By option: the convergence factor of the choice with that option for all these buckets."""
        if not self.extra:
            return None
        rest = self.excess(choice) - sum([self.extra[b][choice[b]] for b in buckets])
        return [1 + rest + sum(each) for each in zip(*[self.extra[b] for b in buckets], strict=True)]

    def allowed(self, choice: Sequence[int]) -> bool:
        return self.loss(choice) <= self.within

    def affordable(self, choice: Sequence[int], buckets: Sequence[int]) -> list[int]:
        """Options that keep the choice within the budget when set for all these buckets."""
        rest = self.loss(choice) - sum([self.space.loss[b][choice[b]] for b in buckets])
        each = zip(*[self.space.loss[b] for b in buckets], strict=True)
        return [option for option, losses in enumerate(each) if rest + sum(losses) <= self.within]

    def keep(self, found: ChoiceFound, choice: tuple[int, ...]) -> ChoiceFound:
        """The better of the two choices, if the new one is within the budget."""
        if not self.allowed(choice):
            return found
        other = self.price(choice)
        return other if better(other, found) else found

    # ---- starts and the beam

    def least(self) -> tuple[int, ...]:
        return tuple(min(range(len(losses)), key=lambda o: (losses[o], o)) for losses in self.space.loss)

    def priced(self, starts: Sequence[Sequence[int]]) -> list[ChoiceFound]:
        least = self.least()
        if not self.allowed(least):
            raise InvalidInput("E-PLAN-INPUT",
                               f"max_loss is {self.space.max_loss:g}, but no choice of these codecs keeps within it; the "
                               f"finest loses {self.loss(least):.3g}: allow a little more than that, or finer codecs")
        if not starts:
            starts = [[min(option, n - 1) for n in self.counts] for option in range(max(self.counts, default=0))]
        distinct = dict.fromkeys([least, *map(tuple, starts)])
        return [self.price(choice) for choice in distinct if self.allowed(choice)]

    def best(self, states: Sequence[ChoiceFound], width: int) -> list[ChoiceFound]:
        kept: list[ChoiceFound] = []
        for state in sorted(states, key=_order):
            if len(kept) < width and all(state.choice != other.choice for other in kept):
                kept.append(state)
        return kept

    def beam(self, states: list[ChoiceFound], width: int) -> list[ChoiceFound]:
        """Changes one class after the other, largest buckets first, as a whole or in its earlier or later half."""
        for members in self.space.classes:
            kept = states
            for state, part in product(states, list(_parts(members))):
                limit = kept[-1].price if len(kept) == width else math.inf
                kept = self.best([*kept, *self.swept(state, part, limit, width)], width)
            states = kept
        return states

    def swept(self, found: ChoiceFound, buckets: Sequence[int], limit: float, most: int) -> Iterator[ChoiceFound]:
        """The choice with each option set for all these buckets, within budget and limit: at least the `most` cheapest."""
        only = self.affordable(found.choice, buckets) if self.space.max_loss < math.inf else None
        factors = self.factors(found.choice, buckets)
        steps = self.space.schedule.sweep(list(found.choice), list(buckets), limit * (1 + 2 * EQUAL), found.step_s, most, only,
                                          -math.inf, factors)
        for option, (step_s, factor) in enumerate(zip(steps, factors or repeat(1.0), strict=False)):
            if step_s * factor <= limit * (1 + EQUAL) and (only is None or option in only):
                choice = _with(found.choice, buckets, option)
                if choice != found.choice:
                    yield self.found(step_s, choice)

    # ---- local improvement

    def improve(self, found: ChoiceFound) -> ChoiceFound:
        """Tries changes of single buckets, of pairs where those are few, and exchanges under the budget, until none helps."""
        worth = WORTH if len(self.counts) > FEW else EQUAL
        moves = [self.singles, self.exchanges, *([self.pairs] if self.thorough else [])]
        improving = True
        least = self.space.least_s * (1 + self.space.least_excess)
        while improving and found.price * (1 - worth) > least:
            improving = False
            for move in moves:
                improved = move(found)
                if improved.price < found.price * (1 - worth):
                    found, improving = improved, True
                    break
        return self.relax(found)

    def singles(self, found: ChoiceFound) -> ChoiceFound:
        critical = self.space.critical(found.choice)
        for b in (b for members in self.space.classes for b in members if b in critical):
            for other in self.swept(found, (b,), found.price, 1):
                found = other if better(other, found) else found
        return found

    def pairs(self, found: ChoiceFound) -> ChoiceFound:
        if sum(self.counts[a] * self.counts[b] for a, b in combinations(self.every, 2)) > PAIRS:
            return found
        for a, b in combinations(self.every, 2):
            for option in range(self.counts[a]):
                first = found._replace(step_s=math.nan, choice=_with(found.choice, (a,), option))
                for other in self.swept(first, (b,), found.price, 1):
                    found = other if better(other, found) else found
        return found

    def exchanges(self, found: ChoiceFound) -> ChoiceFound:
        """If the budget keeps a bucket from an option, another bucket may give up some of its loss."""
        if found.loss + max((max(losses) for losses in self.space.loss), default=0.0) <= self.within:
            return found
        many = len(self.counts) > FEW
        wanted: list[tuple[float, int, int]] = []
        for b in sorted(self.space.critical(found.choice)):
            limit = wanted[-1][0] if many and len(wanted) == TAKERS else found.price * (1 - WORTH)
            dear = [o for o in range(self.counts[b]) if not self.allowed(_with(found.choice, (b,), o))]
            prices = self.tried(found.choice, b, limit, found.step_s, TAKERS if many else 0, dear) if dear else []
            wanted = sorted([*wanted, *((s, b, o) for o, s in enumerate(prices) if s < found.price * (1 - WORTH))])
            wanted = wanted[:TAKERS] if many else wanted
        for _, b, option in wanted:
            other = self.paid(found, b, option)
            found = other if other is not None and better(other, found) else found
        return found

    def tried(
        self, choice: tuple[int, ...], b: int, limit: float, now_s: float, most: int, only: list[int],
    ) -> list[float]:
        """Prices with each of these options for the bucket; infinity if above the limit."""
        factors = self.factors(choice, (b,))
        steps = self.space.schedule.sweep(list(choice), [b], limit, now_s, most, only, -math.inf, factors)
        return steps if factors is None else list(map(mul, steps, factors))

    def paid(self, found: ChoiceFound, taker: int, option: int) -> ChoiceFound | None:
        """Sets the option for the taker. One other bucket, or several in sequence, give up loss to stay within the budget."""
        choice = _with(found.choice, (taker,), option)
        step_s = self.space.schedule.run(list(choice))
        price = step_s * (1 + self.excess(choice))
        givers = [b for members in self.space.classes for b in dict.fromkeys((members[0], members[-1])) if b != taker]
        best: ChoiceFound | None = None
        for _ in range(GIVEN):
            offers = []
            for giver in givers[:GIVERS]:
                losses, now = self.space.loss[giver], self.space.loss[giver][choice[giver]]
                milder = [o for o, loss in enumerate(losses) if loss < now]
                for o, other in enumerate(self.tried(choice, giver, found.price, step_s, 0, milder)):
                    if other < found.price:
                        changed = _with(choice, (giver,), o)
                        offers.append(((other - price) / (now - losses[o]), losses[o], other, changed))
                        if self.allowed(changed) and (best is None or other < best.price):
                            best = self.found(other / (1 + self.excess(changed)), changed)
            if not offers:
                break
            # The one that frees most loss relative to its cost.
            _, _, price, choice = min(offers)
            step_s = price / (1 + self.excess(choice))
            if self.allowed(choice):
                break
        return best

    def relax(self, found: ChoiceFound) -> ChoiceFound:
        """Reverts whatever does not lower the price: if a bucket is sent before a gap, faster sending only widens the gap."""
        limit, coarse = found.price * (1 + self.space.slack), self.coarse()
        for b in self.coarsest_first(coarse, found):
            now = coarse[b][found.choice[b]]
            for *_, option in sorted(each for each in coarse[b] if each[:3] < now[:3])[:RELAXED]:
                other = self.within_limit(found, b, option, limit)
                if other is not None:
                    found = other
                    break
        return found

    def finer(self, found: ChoiceFound) -> ChoiceFound:
        """Like `relax`, over all options: replaces options that need more steps or lose more than necessary."""
        limit, coarse = found.price * (1 + self.space.slack), self.coarse()
        for b in self.coarsest_first(coarse, found):
            now = coarse[b][found.choice[b]]
            levels = groupby(sorted(each for each in coarse[b] if each[:2] < now[:2]), key=lambda each: each[:2])
            for _, level in levels:
                others = [self.within_limit(found, b, option, limit) for *_, option in level]
                if within := [other for other in others if other is not None]:
                    found = best(within)
                    break
        return found

    def coarse(self) -> list[list[tuple[float, float, float, int]]]:
        """By bucket and option: its cost in steps, loss and burden."""
        extra = self.extra or [[0.0] * n for n in self.counts]
        return [list(zip(*each, range(n), strict=True))
                for *each, n in zip(extra, self.space.loss, self.space.burden, self.counts, strict=True)]

    def coarsest_first(self, coarse: list[list[tuple[float, float, float, int]]], found: ChoiceFound) -> list[int]:
        return sorted(self.every, key=lambda b: ([-x for x in coarse[b][found.choice[b]][:3]], b))

    def within_limit(self, found: ChoiceFound, b: int, option: int, limit: float) -> ChoiceFound | None:
        """The choice with this option for the bucket; None if it exceeds the limit or the budget."""
        choice = _with(found.choice, (b,), option)
        factor = 1 + self.excess(choice)
        step_s = self.space.schedule.run(list(choice), limit * (1 + 2 * EQUAL) / factor)
        return self.found(step_s, choice) if step_s * factor <= limit * (1 + EQUAL) and self.allowed(choice) else None


def _parts(members: Sequence[int]) -> Iterator[Sequence[int]]:
    """A whole class, then the halves that are ready first and last."""
    yield members
    if len(members) > 1:
        yield members[: len(members) // 2]
        yield members[len(members) // 2 :]


def _with(choice: tuple[int, ...], buckets: Sequence[int], option: int) -> tuple[int, ...]:
    changed = list(choice)
    for b in buckets:
        changed[b] = option
    return tuple(changed)
