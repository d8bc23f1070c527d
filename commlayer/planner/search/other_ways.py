"""How else steps could be taken: local steps, coded updates, overlapped exchanges, late results. Knows no codecs.

Each is searched with the buckets and servers of the plain plan that was found, and must be worth leaving it. A round that
overlaps may go in fragments, as even as cut tensors make them: that costs fewer steps, but each turn has latencies of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from msgspec import structs

from commlayer.planner.model.cluster import Policy, Profile
from commlayer.planner.model.default_plan import ELEMENT_NBYTES
from commlayer.planner.model.learning import Recipe, late_measured, measured_local_steps
from commlayer.planner.model.thin import full
from commlayer.planner.pricing.steps_needed import plan_excess
from commlayer.planner.search.choices import ChoiceFound
from commlayer.planner.search.layout import Layout
from commlayer.planner.search.layout_candidate import FINEST, LayoutCandidate
from commlayer.planner.simulation.computing import locally
from commlayer.planner.simulation.timeline import exact_s
from commlayer.records import Plan

WORTH = 0.02
"""By what part such a way must win over the plain one; and over one that is nearer to it."""
TURNS = 0.1
"""By so much (as a fraction) may what is written be faster than what was searched: in short turns, where each bucket waits for
all servers, it was 4 %."""
LEAST_TURN_NBYTES = 64 << 10
"""Of the model, in a turn: less takes its latencies and little else."""
MOST_LOCAL_STEPS = 512
"""Local steps to an exchange that are searched, where measured rows show how their cost grows. Beyond what was measured it is
extrapolated."""
MOST_FRAGMENTS = 64
SEARCHED = 3
"""Of those that look best with one option for every bucket, so many are searched in full."""


class Found(NamedTuple):
    """Where a plan is from, seconds for each step that dense training needs, and what it needs and loses besides."""

    entry: LayoutCandidate
    choice: ChoiceFound
    price: float
    excess: float
    loss: float
    shortest: float
    """Its price before anything became finer at the cost of some of it."""
    late: Plan | None = None
    """With results that are used a step late."""

    @property
    def plan(self) -> Plan:
        return self.late or self.entry.emit(self.choice)


class OtherWays:
    """Beside a plain plan that was found. Each way is searched once, whatever is allowed of them."""

    def __init__(self, entry: LayoutCandidate, found: ChoiceFound) -> None:
        self._plain = entry, found
        self._anew = LayoutCandidate(entry.inputs, entry.ways, entry.layout)
        self._cut: dict[Layout, LayoutCandidate] = {self._anew.layout: self._anew}
        self._tried: dict[Recipe, LayoutCandidate] = {}
        self._made: dict[tuple[LayoutCandidate, ChoiceFound], Found] = {}

    def best(self, *, exact: bool) -> Found:
        """Of the plain plan and of what the policy allows besides; of nearly equal ones the finest. `exact`: in place of the
        policy's: then no local steps and nothing late; or, where the policy keeps to averaged gradients, no more local steps
        than were measured."""
        plain, _ = self._plain
        policy = plain.inputs.policy
        if exact and not policy.exact:
            policy = structs.replace(policy, exact=True, max_local_steps=1, staleness=False)
        elif policy.exact and not exact:
            policy = structs.replace(policy, exact=False, max_local_steps=measured_local_steps(plain.inputs.profile.learning))
        kept = [self._found(*self._plain)]
        # What nobody has measured is done only where it is asked for by name.
        freely = not policy.exact and plain.ways.steps_count
        measured = freely and late_measured(plain.inputs.profile.learning, policy.optimizer)
        if measured if policy.staleness is None else policy.staleness:
            kept += [late for late in _late(kept[0]) if late.loss <= policy.max_loss]
        most = searched_local_steps(plain.inputs.profile)
        parts = max(1, plain.inputs.job.numel * ELEMENT_NBYTES // LEAST_TURN_NBYTES) if policy.fragments else 1
        tried = [self._entry(recipe) for recipe in _recipes(plain.recipe, policy, freely, most, parts)]
        # Two local steps may not pay, for they cannot hide behind backward as an exchange in every step does; four still may.
        able = [each for each in tried if _least(each) < kept[0].price * (1 - WORTH) and each.kept_budget]
        worth = FINEST if plain.ways.steps_count else WORTH

        def near() -> float:  # of what was made finer already, the slack is not given twice
            return min(each.shortest for each in kept) * (1 + worth)

        looked = _near(able, min(each.shortest for each in kept), worth)
        searched = _shortest(looked, SEARCHED)
        for each in searched:
            if _least(each) <= near():
                kept += [self._found(each, choice) for choice in dict.fromkeys((each.quick, each.searched))]
        most_price = near()
        rest = [each for each in looked if each not in searched and _about(each) <= most_price]
        kept += [self._found(each, each.quick) for each in sorted(rest, key=lambda each: each.exact(each.quick))]
        # Of equal ones the first. Time is given up for what is finer, not for what exchanges more rarely.
        most_price, soonest = near(), min(kept, key=lambda each: each.shortest).entry.local_steps
        return min((each for each in kept if each.price <= most_price and each.entry.local_steps <= soonest),
                   key=lambda each: each.excess)

    def _entry(self, recipe: Recipe) -> LayoutCandidate:
        """With large tensors cut for its turns."""
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
    """What the price of what is written of its quick choice is surely not below."""
    return entry.quick.price / entry.local_steps * (1 - TURNS)


def _least(entry: LayoutCandidate) -> float:
    return entry.least_price / entry.local_steps


def _near(able: Iterable[LayoutCandidate], least: float, worth: float) -> list[LayoutCandidate]:
    """Those that can be among the nearly equal ones; `least`: the lowest price so far."""
    found = []
    for each in sorted(able, key=_least):
        if _least(each) > least * (1 + worth):
            break
        if _about(each) < least:
            least = min(least, each.exact(each.quick))
        found.append(each)
    return found


def _shortest(looked: Sequence[LayoutCandidate], most: int) -> list[LayoutCandidate]:
    """By what would be written of their quick choices, which is looked at only where it may be among the shortest."""
    found: list[tuple[float, int, LayoutCandidate]] = []
    for place, each in enumerate(sorted(looked, key=_about)):
        if len(found) == most and _about(each) >= found[-1][0]:
            break
        found = sorted([*found, (each.exact(each.quick), place, each)])[:most]
    return [each for *_, each in found]


def searched_local_steps(profile: Profile) -> int:
    """Where the policy does not limit them. One measured number of local steps does not show how the cost of more grows."""
    measured = {row.every for row in profile.learning if row.every > 1}
    return MOST_LOCAL_STEPS if len(measured) > 1 else max(measured, default=1)


def _recipes(plain: Recipe, policy: Policy, freely: bool, most: int, parts: int) -> list[Recipe]:
    """Those that the policy allows, the plainest first; `most`: local steps, where it does not say; `parts`: fragments."""
    found = [plain._replace(overlap="forward")] if policy.forward else []
    if freely:
        found += [plain._replace(codes="updates"), plain._replace(codes="updates", overlap="round")]
    for every in local_steps(policy.max_local_steps or (most if freely else 1)):
        found += [plain._replace(codes="updates", every=every)]
        whole = plain._replace(codes="updates", every=every, overlap="round")
        found += [whole._replace(fragments=count) for count in fragments(every, parts)] if freely else []
    return found


def local_steps(most: int) -> list[int]:
    """Powers of two: `most` only cuts the search off.

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
            yield plain._replace(price=price, excess=excess, loss=more.loss_high, shortest=price, late=made)
