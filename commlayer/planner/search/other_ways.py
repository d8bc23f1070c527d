"""How else steps could be taken: local steps, coded updates, overlapped exchanges, late results. Knows no codecs.

Each is searched with the buckets and servers of the plain plan that was found, and must be worth leaving it. A round that
overlaps may go in fragments, as many as its buckets make: that costs fewer steps, but each turn has latencies of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from msgspec import structs

from commlayer.planner.model.cluster import Policy, Profile
from commlayer.planner.model.fragments import most_fragments
from commlayer.planner.model.learning import Recipe
from commlayer.planner.pricing.steps_needed import plan_excess
from commlayer.planner.search.choices import ChoiceFound
from commlayer.planner.search.layout_candidate import FINEST, LayoutCandidate
from commlayer.planner.simulation.timeline import exact_s
from commlayer.records import Plan

WORTH = 0.02
"""By what part such a way must win over the plain one; and over one that is nearer to it."""
SEARCHED = 3
"""Of those that look best with one option for every bucket, so many are searched in full."""


class Found(NamedTuple):
    """A plan, seconds for each step that dense training needs, what it needs and loses besides, and where it is from."""

    price: float
    excess: float
    loss: float
    plan: Plan
    entry: LayoutCandidate
    shortest: float
    """Its price before anything became finer at the cost of some of it."""


def best(entry: LayoutCandidate, found: ChoiceFound, *, exact: bool) -> tuple[LayoutCandidate, Plan]:
    """Of the plain plan that was found and of what the policy allows besides; of nearly equal ones the finest. `exact`: in
    place of the policy's."""
    policy, plain = structs.replace(entry.inputs.policy, exact=exact), _made(entry, found)
    kept = [plain]
    # What nobody has measured is done only where it is asked for by name.
    freely = not policy.exact and entry.ways.steps_count
    if freely if policy.staleness is None else policy.staleness:
        kept += [late for late in _late(plain) if late.loss <= policy.max_loss]
    anew, most = LayoutCandidate(entry.inputs, entry.ways, entry.layout), measured_local_steps(entry.inputs.profile)
    parts = most_fragments(entry.layout.pieces) if policy.fragments else 1
    tried = [(anew.hidden if recipe.overlap == "round" else anew).otherwise(recipe)
             for recipe in _recipes(entry.recipe, policy, freely, most, parts)]
    # Two local steps may not pay, for they cannot hide behind backward as an exchange in every step does, and four still may.
    able = [each for each in tried if each.least_price / each.local_steps < plain.price * (1 - WORTH) and each.kept_budget]
    worth = FINEST if entry.ways.steps_count else WORTH
    quick = sorted(_near(able, min(each.shortest for each in kept), worth), key=lambda each: each.exact(each.quick))
    kept += [_made(each, min((each.quick, each.searched), key=each.exact)) for each in quick[:SEARCHED]]
    kept += [_made(each, each.quick) for each in quick[SEARCHED:]]
    near = min(each.shortest for each in kept) * (1 + worth)  # of what was made finer already, the slack is not given twice
    chosen = min((each for each in kept if each.price <= near), key=lambda each: each.excess)  # of equal ones the first
    return chosen.entry, chosen.plan


def _near(able: Iterable[LayoutCandidate], least: float, worth: float) -> Iterator[LayoutCandidate]:
    """Those that can be among the nearly equal ones; `least`: the lowest price so far."""
    for each in sorted(able, key=lambda each: each.least_price / each.local_steps):
        if each.least_price / each.local_steps <= least * (1 + worth):
            least = min(least, each.exact(each.quick))
            yield each


def _made(entry: LayoutCandidate, found: ChoiceFound) -> Found:
    entry.found = entry.finest(found)
    return Found(entry.exact(entry.found), entry.found.excess, entry.found.loss, entry.emit(), entry, entry.exact(found))


def measured_local_steps(profile: Profile) -> int:
    """Where the policy does not say how many: as many as somebody has measured."""
    return max((row.every for row in profile.learning), default=1)


def _recipes(plain: Recipe, policy: Policy, freely: bool, most: int, parts: int) -> list[Recipe]:
    """Those that the policy allows, the plainest first; `most`: local steps, where it does not say; `parts`: fragments."""
    found = [plain._replace(overlap="forward")] if policy.forward else []
    if freely:
        found += [plain._replace(codes="updates")]  # a round of one step has nothing to run beside
    for every in local_steps(policy.max_local_steps or (most if freely else 1)):
        found += [plain._replace(codes="updates", every=every)]
        whole = plain._replace(codes="updates", every=every, overlap="round")
        found += [whole._replace(fragments=count) for count in fragments(every, parts)] if freely else []
    return found


def local_steps(most: int) -> list[int]:
    """
    >>> local_steps(1), local_steps(4), local_steps(6)
    ([], [2, 4], [2, 4, 6])
    """
    doubled = [2**i for i in range(1, most.bit_length()) if 2**i < most]
    return [*doubled, most] if most > 1 else []


def fragments(every: int, most: int) -> list[int]:
    """
    >>> fragments(8, 64), fragments(12, 64), fragments(64, 5)
    ([1, 2, 4, 8], [1, 2, 4], [1, 2, 4])
    """
    doubled = (2**i for i in range(1, every.bit_length()))
    return [1, *(count for count in doubled if count <= most and every % count == 0)]


def _late(plain: Found) -> Iterator[Found]:
    """With a part of the buckets, those that are ready last, whose results are used a step late."""
    plan, inputs = plain.plan, plain.entry.inputs
    job, _, cluster, profile, policy = inputs
    gradients = [b.id for b in plan.buckets if b.served and not job.tensors[b.slices[0].tensor].buffer]
    least = plain.price
    for share in (8, 4, 2, 1):
        late = set(gradients[len(gradients) - -(-len(gradients) // share) :])
        made = structs.replace(plan, buckets=tuple(structs.replace(b, stale=b.id in late) for b in plan.buckets))
        more = plan_excess(made, job, cluster, profile, policy)
        excess = more.high if plain.entry.ways.steps_count else 0.0
        price = exact_s(made, job, cluster, profile, policy) * (1 + excess)
        if price < least * (1 - WORTH):
            least = price
            yield Found(price, excess, more.loss_high, made, plain.entry, price)
