"""Searches other sync modes: local steps, compressed updates, overlapped exchanges, stale results.

Each is searched with the buckets and servers of the plain plan, and must be clearly better than it. An overlapped round may
be split into fragments, balanced by cutting tensors: that lowers the convergence factor, but each turn has its own latencies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from msgspec import structs

from commlayer.planner.buckets import ELEMENT_NBYTES
from commlayer.planner.choices import ChoiceFound
from commlayer.planner.convergence import Recipe, late_measured, measured_local_steps
from commlayer.planner.costs import plan_excess
from commlayer.planner.layout_candidate import FINEST, LayoutCandidate
from commlayer.planner.model import Policy, Profile
from commlayer.planner.option_prices import Layout
from commlayer.planner.simulation import exact_s, locally
from commlayer.planner.tensors import full
from commlayer.records import Plan

WORTH = 0.02
"""Fraction by which another mode must beat the plain plan, and a mode closer to it."""
TURNS = 0.1
"""Fraction by which a placed plan may be faster than the searched choice. It was 4 % in short turns, where each bucket
waits for all servers."""
LEAST_TURN_NBYTES = 64 << 10
"""Least part of the model in a turn: smaller turns are mostly latency."""
MOST_LOCAL_STEPS = 512
"""Limit of the search over local steps, if measured rows show how their cost grows. Beyond measured numbers the cost is
extrapolated."""
MOST_FRAGMENTS = 64
SEARCHED = 3
"""Number of modes searched in full, by their best uniform choice."""


class Found(NamedTuple):
    """A plan's origin, its price in seconds per step of dense training, and its excess steps and loss."""

    entry: LayoutCandidate
    choice: ChoiceFound
    price: float
    excess: float
    loss: float
    shortest: float
    """Its price before the choice was made finer."""
    late: Plan | None = None
    """The plan with stale results, if it is one."""

    @property
    def plan(self) -> Plan:
        return self.late or self.entry.emit(self.choice)


class OtherWays:
    """Alternatives to a plain plan. Each mode is searched once, even if `best` is called with several policies."""

    def __init__(self, entry: LayoutCandidate, found: ChoiceFound) -> None:
        self._plain = entry, found
        self._anew = LayoutCandidate(entry.inputs, entry.ways, entry.layout)
        self._cut: dict[Layout, LayoutCandidate] = {self._anew.layout: self._anew}
        self._tried: dict[Recipe, LayoutCandidate] = {}
        self._made: dict[tuple[LayoutCandidate, ChoiceFound], Found] = {}

    def best(self, *, exact: bool) -> Found:
        """The best of the plain plan and the alternatives that the policy allows; the finest of nearly equal ones.

        `exact` overrides the policy's setting: True excludes local steps and stale results. False, under an exact policy,
        allows at most as many local steps as were measured.
        """
        plain, _ = self._plain
        policy = plain.inputs.policy
        if exact and not policy.exact:
            policy = structs.replace(policy, exact=True, max_local_steps=1, staleness=False)
        elif policy.exact and not exact:
            policy = structs.replace(policy, exact=False, max_local_steps=measured_local_steps(plain.inputs.profile.learning))
        kept = [self._found(*self._plain)]
        # Modes without measurements are used only if the policy names them.
        freely = not policy.exact and plain.ways.steps_count
        measured = freely and late_measured(plain.inputs.profile.learning, policy.optimizer)
        if measured if policy.staleness is None else policy.staleness:
            kept += [late for late in _late(kept[0]) if late.loss <= policy.max_loss]
        most = searched_local_steps(plain.inputs.profile)
        parts = max(1, plain.inputs.job.numel * ELEMENT_NBYTES // LEAST_TURN_NBYTES) if policy.fragments else 1
        tried = [self._entry(recipe) for recipe in _recipes(plain.recipe, policy, freely, most, parts)]
        # Local steps cannot overlap their exchange with backward, so two may be slower than an exchange in every step. Four
        # may still be faster: each number of local steps is judged by itself.
        able = [each for each in tried if _least(each) < kept[0].price * (1 - WORTH) and each.kept_budget]
        worth = FINEST if plain.ways.steps_count else WORTH

        def near() -> float:  # so that slack is not given twice to plans that were made finer
            return min(each.shortest for each in kept) * (1 + worth)

        candidates = _near(able, min(each.shortest for each in kept), worth)
        searched = _shortest(candidates, SEARCHED)
        for each in searched:
            if _least(each) <= near():
                kept += [self._found(each, choice) for choice in dict.fromkeys((each.quick, each.searched))]
        most_price = near()
        rest = [each for each in candidates if each not in searched and _about(each) <= most_price]
        kept += [self._found(each, each.quick) for each in sorted(rest, key=lambda each: each.exact(each.quick))]
        # The first of equal ones. Time is traded for finer options, not for rarer exchanges.
        most_price, soonest = near(), min(kept, key=lambda each: each.shortest).entry.local_steps
        return min((each for each in kept if each.price <= most_price and each.entry.local_steps <= soonest),
                   key=lambda each: each.excess)

    def _entry(self, recipe: Recipe) -> LayoutCandidate:
        """The candidate for a recipe, with large tensors cut for its turns."""
        if recipe not in self._tried:
            inputs, layout = self._anew.inputs, self._anew.layout
            if locally(recipe):
                inputs, layout = inputs._replace(job=full(inputs.job)), layout.full
            layout = layout.in_turns(recipe.fragments)
            if layout not in self._cut:
                self._cut[layout] = LayoutCandidate(inputs, self._anew.ways, layout)
            cut = self._cut[layout]
            self._tried[recipe] = (cut.hidden if recipe.overlap == "round" else cut).otherwise(recipe)
        return self._tried[recipe]

    def _found(self, entry: LayoutCandidate, found: ChoiceFound) -> Found:
        if (entry, found) not in self._made:
            finer = entry.finest(found)
            self._made[entry, found] = Found(entry, finer, entry.exact(finer), finer.excess, finer.loss, entry.exact(found))
        return self._made[entry, found]


def _about(entry: LayoutCandidate) -> float:
    """Lower bound for the price of its quick choice after placement."""
    return entry.quick.price / entry.local_steps * (1 - TURNS)


def _least(entry: LayoutCandidate) -> float:
    return entry.least_price / entry.local_steps


def _near(able: Iterable[LayoutCandidate], least: float, worth: float) -> list[LayoutCandidate]:
    """Candidates that may be among the nearly equal ones. `least`: the lowest price so far."""
    near_entries = []
    for each in sorted(able, key=_least):
        if _least(each) > least * (1 + worth):
            break
        if _about(each) < least:
            least = min(least, each.exact(each.quick))
        near_entries.append(each)
    return near_entries


def _shortest(looked: Sequence[LayoutCandidate], most: int) -> list[LayoutCandidate]:
    """The candidates with the cheapest quick choice after placement, which is computed only where it may matter."""
    ranked: list[tuple[float, int, LayoutCandidate]] = []
    for place, each in enumerate(sorted(looked, key=_about)):
        if len(ranked) == most and _about(each) >= ranked[-1][0]:
            break
        ranked = sorted([*ranked, (each.exact(each.quick), place, each)])[:most]
    return [each for *_, each in ranked]


def searched_local_steps(profile: Profile) -> int:
    """Limit if the policy sets none. A single measured number of local steps does not show how the cost grows."""
    measured = {row.every for row in profile.learning if row.every > 1}
    return MOST_LOCAL_STEPS if len(measured) > 1 else max(measured, default=1)


def _recipes(plain: Recipe, policy: Policy, freely: bool, most: int, parts: int) -> list[Recipe]:
    """Recipes that the policy allows, the plainest first. `most`: local steps, if the policy sets no limit. `parts`: most
    fragments."""
    recipes = [plain._replace(overlap="forward")] if policy.forward else []
    if freely:
        recipes += [plain._replace(codes="updates"), plain._replace(codes="updates", overlap="round")]
    for every in local_steps(policy.max_local_steps or (most if freely else 1)):
        recipes += [plain._replace(codes="updates", every=every)]
        overlap_recipe = plain._replace(codes="updates", every=every, overlap="round")
        recipes += [overlap_recipe._replace(fragments=count) for count in fragments(every, parts)] if freely else []
    return recipes


def local_steps(most: int) -> list[int]:
    """Powers of two up to `most`.

    >>> local_steps(1), local_steps(4), local_steps(6), local_steps(9999)[-1]
    ([], [2, 4], [2, 4], 512)
    """
    return [2**i for i in range(1, MOST_LOCAL_STEPS.bit_length()) if 2**i <= most]


def fragments(every: int, most: int) -> list[int]:
    """
    >>> fragments(8, 64), fragments(64, 5)
    ([1, 2, 4, 8], [1, 2, 4])
    """
    return [2**i for i in range(every.bit_length()) if 2**i <= min(most, MOST_FRAGMENTS)]


def _late(plain: Found) -> Iterator[Found]:
    """Plans in which a part of the buckets, those that are ready last, is one step stale."""
    plan, inputs = plain.plan, plain.entry.inputs
    job, _, cluster, profile, policy = inputs
    gradients = [b.id for b in plan.buckets if b.served and not job.tensors[b.slices[0].tensor].buffer]
    least = plain.price
    for share in (8, 4, 2, 1):
        late = set(gradients[len(gradients) - -(-len(gradients) // share) :])
        delayed = structs.replace(plan, buckets=tuple(structs.replace(b, stale=b.id in late) for b in plan.buckets))
        more = plan_excess(delayed, job, cluster, profile, policy)
        excess = more.high if plain.entry.ways.steps_count else 0.0
        price = exact_s(delayed, job, cluster, profile, policy) * (1 + excess)
        if price < least * (1 - WORTH):
            least = price
            yield plain._replace(price=price, excess=excess, loss=more.loss_high, shortest=price, late=delayed)
