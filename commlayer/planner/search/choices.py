"""Chooses one option (path and codec) for each bucket: first the best option common to all buckets, then Espresso's two passes
and one refinement.

A choice's price is its step time multiplied by its convergence factor, 1 + excess; lower is better. Among equal prices, a
smaller convergence factor is better, then a smaller loss, then less busy time of links, codecs and servers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import permutations, product
from operator import attrgetter, getitem
from typing import NamedTuple

from commlayer.errors import InvalidInput
from commlayer.planner.simulation import Simulation

BY_ORDER = attrgetter("order")
EQUAL = 1e-9
"""Relative tolerance: prices that differ by less than this fraction count as equal."""
STARTS = 2
"""Number of starting points of the first pass: choices in which all buckets use the same option."""
FEW = 2000
"""If there are at most this many combinations of options, the search tries all of them."""
SMALL = 6
"""With at most this many buckets, the search also changes pairs: under a loss budget, one bucket's loss can allow another's
gain."""
MOST_SINGLE = 16
"""Number of buckets, the largest first, that a pass also changes individually."""


class ChoiceSpace(NamedTuple):
    """The search space. Tables are indexed by bucket, then by option."""

    steps: Simulation
    loss: Sequence[Sequence[float]]
    """Relative increase of the whole model's loss from each option."""
    excess: Sequence[Sequence[float]]
    """Increase of the whole model's convergence factor from each option."""
    burden: Sequence[Sequence[float]]
    """Breaks ties: busy seconds of links, codecs and servers, plus a penalty for compression that exceeds any of these
    seconds."""
    groups: Sequence[Sequence[int]]
    """Groups of buckets that have the same options, largest buckets first; ordered by readiness within a group."""
    max_loss: float = math.inf
    least_s: float = 0.0
    """A lower bound of any choice's step time, such as the compute time."""


class Choice(NamedTuple):
    """A choice of one option (path and codec) per bucket, with the resulting step time and loss."""

    step_s: float
    loss: float
    burden: float
    options: tuple[int, ...]
    """For each bucket, the index of its option."""
    excess: float = 0.0

    @property
    def price(self) -> float:
        """Step time in seconds times the convergence factor, which is proportional to the time to a given loss."""
        return self.step_s * (1 + self.excess)

    @property
    def order(self) -> tuple[object, ...]:
        return self.price, self.excess, self.loss, self.burden, self.options


def cheapest(choices: Iterable[Choice]) -> Choice:
    return min(choices, key=BY_ORDER)


def uniform(space: ChoiceSpace, starts: Sequence[Sequence[int]] = ()) -> list[Choice]:
    """Evaluates the choices in `starts` that are within the loss budget, and the choice with the least loss. Without `starts`,
    evaluates each option for all buckets."""
    least = [min(range(len(losses)), key=lambda o: (losses[o], o)) for losses in space.loss]
    if _total(space.loss, least) > _loss_limit(space):
        raise InvalidInput("E-PLAN-INPUT",
                           f"max_loss is {space.max_loss:g}, but no choice of these codecs keeps within it; the finest loses "
                           f"{_total(space.loss, least):.3g}: allow a little more than that, or finer codecs")
    most = max(map(len, space.loss), default=0)
    starts = starts or [[min(option, len(losses) - 1) for losses in space.loss] for option in range(most)]
    distinct = dict.fromkeys([tuple(least), *map(tuple, starts)])
    return [_evaluate(space, options) for options in distinct if _total(space.loss, options) <= _loss_limit(space)]


def search(space: ChoiceSpace, starts: Sequence[Choice]) -> Choice:
    """Improves the best starting choices in two passes: the first changes groups of buckets, the second also single buckets. If
    there are few combinations, tries all."""
    if math.prod(map(len, space.loss)) <= FEW:
        return _drop_useless_compression(space, _best_of_all(space))
    best = cheapest(_improve(space, start, _groups(space)) for start in sorted(starts, key=BY_ORDER)[:STARTS])
    single = [(b,) for members in space.groups if len(members) > 1 for b in members][:MOST_SINGLE]
    best = _improve(space, best, [*single, *_groups(space)])
    while len(best.options) <= SMALL and (paired := _best_pair(space, best)) != best:
        best = paired
    return _drop_useless_compression(space, best)


def _best_pair(space: ChoiceSpace, best: Choice) -> Choice:
    """The best choice that differs from `best` in two buckets."""
    for a, b in permutations(range(len(best.options)), 2):
        for option in range(len(space.loss[a])):
            first = _evaluate(space, _with_option(best.options, (a,), option))
            other = _best_change(space, first, (b,), best.price)
            if other.price < best.price * (1 - EQUAL) and other.loss <= _loss_limit(space):
                best = other
    return best


def _best_of_all(space: ChoiceSpace) -> Choice:
    """The best of all combinations of options within the loss budget."""
    every = (_evaluate(space, options) for options in product(*(range(len(losses)) for losses in space.loss)))
    return cheapest(choice for choice in every if choice.loss <= _loss_limit(space))


def _groups(space: ChoiceSpace) -> list[Sequence[int]]:
    """Each group of buckets, and its two halves by readiness."""
    halves = [(members, members[: len(members) // 2], members[len(members) // 2 :]) for members in space.groups]
    return [part for parts in halves for part in (parts if len(parts[0]) > 1 else parts[:1])]


def _improve(space: ChoiceSpace, best: Choice, moves: Sequence[Sequence[int]]) -> Choice:
    for buckets in moves:
        best = _best_change(space, best, buckets)
    return best


def _best_change(space: ChoiceSpace, best: Choice, buckets: Sequence[int], price: float = math.inf) -> Choice:
    """Gives all of these buckets the option with the lowest price. Returns `best` unchanged if no price is lower than both
    `best.price` and `price`."""
    price = min(price, best.price) if best.loss <= _loss_limit(space) else price
    now = best.options
    rest_excess = 1 + best.excess - sum(space.excess[b][now[b]] for b in buckets)
    rest_loss = best.loss - sum(space.loss[b][now[b]] for b in buckets)
    factors = [rest_excess + sum(each) for each in zip(*[space.excess[b] for b in buckets], strict=True)]
    only = [o for o, losses in enumerate(zip(*[space.loss[b] for b in buckets], strict=True))
            if rest_loss + sum(losses) <= _loss_limit(space) and space.least_s * factors[o] < price * (1 - EQUAL)]
    if not only:
        return best
    seconds = space.steps.sweep(list(now), list(buckets), price * (1 + 2 * EQUAL), best.step_s, 1, only, factors)
    option = min(only, key=lambda o: seconds[o] * factors[o])
    if seconds[option] * factors[option] >= price * (1 - EQUAL):
        return best
    return _choice(space, seconds[option], _with_option(now, buckets, option))


def _drop_useless_compression(space: ChoiceSpace, best: Choice) -> Choice:
    """Gives each bucket, the coarsest first, the finest option that does not raise the price, so compression that saves no time
    is reverted."""
    limit = best.price * (1 + EQUAL)
    coarseness = [list(zip(*tables, strict=True)) for tables in zip(space.excess, space.loss, space.burden, strict=True)]
    chosen = list(map(getitem, coarseness, best.options))
    for b in sorted(range(len(chosen)), key=lambda b: ([-x for x in chosen[b]], b)):
        finer = sorted((coarse, o) for o, coarse in enumerate(coarseness[b]) if coarse < chosen[b])
        for _, option in finer[:3]:
            options = _with_option(best.options, (b,), option)
            factor = 1 + _total(space.excess, options)
            step_s = space.steps.run(list(options), limit * (1 + EQUAL) / factor)
            if step_s * factor <= limit and _total(space.loss, options) <= _loss_limit(space):
                best = _choice(space, step_s, options)
                break
    return best


def _evaluate(space: ChoiceSpace, options: tuple[int, ...]) -> Choice:
    return _choice(space, space.steps.run(list(options)), options)


def _choice(space: ChoiceSpace, step_s: float, options: tuple[int, ...]) -> Choice:
    return Choice(step_s, _total(space.loss, options), _total(space.burden, options), options, _total(space.excess, options))


def _total(of: Sequence[Sequence[float]], options: Sequence[int]) -> float:
    return sum(map(getitem, of, options))


def _loss_limit(space: ChoiceSpace) -> float:
    return space.max_loss * (1 + EQUAL) + 1e-12


def _with_option(options: tuple[int, ...], buckets: Sequence[int], option: int) -> tuple[int, ...]:
    changed = list(options)
    for b in buckets:
        changed[b] = option
    return tuple(changed)
