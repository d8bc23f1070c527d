"""The verb `plan`: enumerates tree paths, codecs, sync modes and server hosts, and chooses by simulated steps.

A scenario is one layout of buckets, one set of hosts and one sync mode. Scenarios are compared by their best uniform choice;
the best few are searched (choices.py) and placed, and the plan with the fewest seconds to a loss is taken. Other sync modes
are searched with the buckets and hosts of the best synchronous plan.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import NamedTuple

import numpy as np
from msgspec import structs

from commlayer.errors import InvalidInput
from commlayer.planner import buckets
from commlayer.planner.buckets import ELEMENT_NBYTES, Limits
from commlayer.planner.choices import Choice, uniform
from commlayer.planner.convergence import Recipe, late_measured, measured_local_steps
from commlayer.planner.costs import Prices, plan_excess, weights
from commlayer.planner.explanation import explained
from commlayer.planner.inputs import checked_inputs
from commlayer.planner.model import DENSE, NO_LIMIT, Cluster, Policy, Profile, bare, condensed
from commlayer.planner.options import Catalog, allowed_codecs, criteria, options
from commlayer.planner.placement import Hosts, even, host_sets
from commlayer.planner.scenario import Inputs, Layout, PricedPlan, Scenario
from commlayer.planner.simulation import locally, slowest
from commlayer.planner.tensors import full
from commlayer.records import MAX_BUCKET_NBYTES, Job, Plan

PAYS = 0.02
"""Compression, or another sync mode, must win this fraction: both have risks."""
FINALISTS = 3
"""Number of scenarios that are searched in full, by their best uniform choice; as many sync modes."""
PLACED = 0.1
"""A placed plan is faster than the searched choice by at most this fraction."""
UNBALANCED = 1.1
"""Fragments take longer by this factor than estimated, since each waits for the server that has most."""
ALIKE = 0.1
"""Layouts whose numbers of buckets differ by at most this fraction are not both tried."""
MOST_LOCAL_STEPS = 512
"""Limit of the search over local steps, if measured rows show how their cost grows. Beyond measured numbers the cost is
extrapolated."""
MOST_FRAGMENTS = 64
LEAST_FRAGMENT_NBYTES = 64 << 10
"""Least part of the model in a fragment: smaller ones are mostly latency."""


def plan(job: Job, cluster: Cluster, profile: Profile | None = None, policy: Policy | None = None) -> Plan:
    """The plan that reaches a loss first, by simulated steps and convergence factor; with objective="step", the plan with
    the shortest step. Equal arguments give equal plans."""
    search = PlanSearch(job, cluster, profile, policy)
    return search.explained(search.best(exact=search.policy.exact))


@contextmanager
def _uncollected() -> Iterator[None]:
    """Disables garbage collection. Planning allocates a few hundred thousand objects that live until its end; scanning
    them for cycles finds none and takes a quarter of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class PlanSearch:
    """The search for one job, whose synchronous part is shared by several calls of `best`."""

    @_uncollected()
    def __init__(self, job: Job, cluster: Cluster, profile: Profile | None = None, policy: Policy | None = None) -> None:
        profile, self.policy, timing = checked_inputs(job, cluster, profile, policy)
        # Zeros are left out only between a node's only rank and a server.
        sparse = any(node.server for node in cluster.nodes) and max(node.ranks for node in cluster.nodes) == 1
        self.inputs = Inputs(job if sparse else full(job), timing, cluster, condensed(cluster), profile, self.policy, {})
        self._recipe = Recipe(self.policy.optimizer, workers=cluster.ranks, numel=job.numel)
        self._by_recipe: dict[Recipe, list[tuple[Scenario, Choice]]] = {}
        self.synchronous = self._synchronous()

    def _synchronous(self) -> PricedPlan:
        """The best plan with an exchange of gradients in every step."""
        tried: list[Scenario] = []
        layouts = self._layouts()
        for i, hosts in enumerate((Hosts(()), *host_sets(self.inputs.searched))):
            if i > 1 and even(self.inputs.cluster) and not any(c.catalog.prices.hosts for c in _best(tried)):
                break
            # Buckets go to servers in rotation, which is nearly as if each were spread over all of them.
            prices = Prices(self.inputs.searched, self.inputs.profile, hosts.places, spread=hosts.parts)
            catalog = Catalog(prices, options(prices, self.policy), steps_count=self.inputs.steps_count,
                              budget=self.policy.max_loss < NO_LIMIT)
            tried += [Scenario(self.inputs, catalog, layout, self._recipe) for layout in layouts if catalog.options]
            layouts = list(dict.fromkeys(scenario.layout for scenario in _best(tried))) if i else layouts
        if not tried:
            raise InvalidInput("E-PLAN-CODEC-COST", f"profile {self.inputs.profile.source!r} has no cost of {DENSE}: "
                               "over servers alone, nothing could go as it is")
        priced = _soonest([(c, choice) for c in _best(tried) for choice in (c.searched, c.quick)])
        densest = min(tried, key=lambda c: c.dense.price)
        return _soonest([(densest, densest.dense)], priced, by=-PAYS)

    def _layouts(self) -> list[Layout]:
        """The layouts to try; of those with nearly equal numbers of buckets, the first."""
        layouts: list[Layout] = []
        allowed = [bare(codec) for codec in allowed_codecs(self.inputs.profile, self.policy) or (DENSE,)]
        matrices = any(name.needs_shape for name in allowed)
        small = self.policy.whole_tree
        for limits in buckets.limits(self.inputs.job, MAX_BUCKET_NBYTES, matrices=matrices, small=small):
            layout = Layout.of(self.inputs.job, self.inputs.timing, limits)
            if all(abs(len(layout.pieces) - len(other.pieces)) > ALIKE * len(other.pieces) for other in layouts):
                layouts.append(layout)
        return layouts

    @_uncollected()
    def best(self, *, exact: bool) -> PricedPlan:
        """The best of all sync modes that the policy allows.

        `exact` overrides the policy's setting: True excludes local steps and stale results. False, under an exact policy,
        allows at most as many local steps as were measured.
        """
        policy, plain = self.policy, self.synchronous
        if exact and not policy.exact:
            policy = structs.replace(policy, exact=True, max_local_steps=1, staleness=False)
        elif policy.exact and not exact:
            policy = structs.replace(policy, exact=False, max_local_steps=measured_local_steps(self.inputs.profile.learning))
        best = plain
        # Modes without measurements are used only if the policy names them.
        freely = not policy.exact and self.inputs.steps_count
        measured = freely and late_measured(self.inputs.profile.learning, policy.optimizer)
        if measured if policy.staleness is None else policy.staleness:
            best = min([plain, *self._stale(plain)], key=lambda priced: priced.price)
        best = _soonest([pair for recipe in self._recipes(policy, freely) for pair in self._choices(recipe)], best)
        # The forward overlap changes nothing that is learnt, so it has no risk that must be paid for.
        return best if best.scenario.recipe.overlap == "forward" or best.price < plain.price * (1 - PAYS) else plain

    @_uncollected()
    def explained(self, priced: PricedPlan) -> Plan:
        """The plan with predictions and reasons."""
        return explained(priced)

    def _recipes(self, policy: Policy, freely: bool) -> list[Recipe]:
        """The most promising sync modes: those with a result in the next forward pass or compressed updates, and of local
        steps the best by estimate."""
        updates = self._recipe._replace(codes="updates")
        recipes = [self._recipe._replace(overlap="forward")] if policy.forward else []
        recipes += [updates._replace(overlap=overlap) for overlap in ("", "round")] if freely else []
        most = policy.max_local_steps or (searched_local_steps(self.inputs.profile) if freely else 1)
        job = full(self.inputs.job)
        parts = max(1, job.numel * ELEMENT_NBYTES // LEAST_FRAGMENT_NBYTES) if policy.fragments else 1
        local = [updates._replace(every=every, overlap=overlap, fragments=count)
                 for every in local_steps(most) for overlap in (("", "round") if freely else ("",))
                 for count in (fragment_counts(every, parts) if overlap else [1])]
        prices = {recipe: self._estimate(recipe) for recipe in local}
        best = sorted(local, key=lambda recipe: prices[recipe])[:FINALISTS]
        return recipes + [recipe for recipe in best if prices[recipe] < self.synchronous.price]

    def _estimate(self, recipe: Recipe) -> float:
        """The price of local steps with the best uniform choice: exchanges take as long as after a single step, and each
        fragment has its own latencies."""
        timing, every = self.inputs.timing, recipe.every
        prices = self.synchronous.scenario.catalog.prices
        computing_s = (timing.forward_s + timing.backward_s + timing.update_s) / slowest(prices)
        excess, loss = self.synchronous.scenario.catalog.costs(recipe)
        seconds = [math.inf]
        for exchange in self._exchanges[recipe.overlap]:
            if sum(loss[o] * part for o, part in exchange.parts.items()) > self.policy.max_loss:
                continue
            exchange_s = exchange.step_s - computing_s + (recipe.fragments - 1) * exchange.latency_s
            exchange_s *= UNBALANCED if recipe.fragments > 1 else 1.0
            step_s = max(computing_s, exchange_s / every) if recipe.overlap else computing_s + exchange_s / every
            seconds.append(step_s * (1 + sum(excess[o] * part for o, part in exchange.parts.items())))
        return min(seconds)

    @cached_property
    def _exchanges(self) -> dict[str, list[TypicalExchange]]:
        """Uniform choices for updates that are waited for, by overlap, which determines the usable part of links."""
        updates = self._recipe._replace(codes="updates")
        result: dict[str, list[TypicalExchange]] = {}
        for overlap in ("", "round"):
            scenario = self._scenario(updates)
            if overlap:
                scenario = Scenario(scenario.inputs, scenario.catalog.hidden, scenario.layout, updates)
            part = weights(scenario.inputs.job, [piece.slices for piece in scenario.layout.pieces],
                           self.inputs.profile.energy)
            result[overlap] = []
            for choice in uniform(scenario.space._replace(max_loss=math.inf), scenario.starts):
                parts: dict[int, float] = {}
                for mine, place, weight in zip(scenario.useful, choice.options, part, strict=True):
                    parts[mine[place]] = parts.get(mine[place], 0.0) + weight
                latency_s = max(float(criteria(scenario.catalog.template(o), np.zeros(1))[0, 0]) for o in parts)
                result[overlap].append(TypicalExchange(choice.step_s, latency_s, parts))
        return result

    def _scenario(self, recipe: Recipe) -> Scenario:
        """The scenario of a sync mode, with large tensors cut for its fragments."""
        plain, inputs, timing = self.synchronous.scenario, self.inputs, self.inputs.timing
        if locally(recipe):
            inputs = inputs._replace(job=full(inputs.job))
        most = inputs.job.numel * ELEMENT_NBYTES // recipe.fragments
        limits = Limits(*(min(limit, most) for limit in plain.layout.limits))
        layout = plain.layout
        if inputs.job is not self.inputs.job or limits != layout.limits:
            layout = Layout.of(inputs.job, timing, limits)
        return Scenario(inputs, plain.catalog, layout, recipe)

    def _choices(self, recipe: Recipe) -> list[tuple[Scenario, Choice]]:
        """The choice of another sync mode, if any keeps the loss budget."""
        if recipe not in self._by_recipe:
            scenario = self._scenario(recipe)
            try:
                self._by_recipe[recipe] = [(scenario, scenario.searched)]
            except InvalidInput:  # no choice keeps the loss budget
                self._by_recipe[recipe] = []
        return self._by_recipe[recipe]

    def _stale(self, plain: PricedPlan) -> Iterator[PricedPlan]:
        """Plans in which a part of the buckets, those that are ready last, is one step stale."""
        job, _, cluster, _, profile, policy, _ = self.inputs
        gradients = [b.id for b in plain.plan.buckets if b.served and not job.tensors[b.slices[0].tensor].buffer]
        for share in (8, 4, 2, 1):
            stale = set(gradients[len(gradients) - -(-len(gradients) // share) :])
            changed = structs.replace(plain.plan, buckets=tuple(
                structs.replace(b, stale=b.id in stale) for b in plain.plan.buckets))
            more = plan_excess(changed, job, cluster, profile, policy)
            if more.loss_high <= policy.max_loss:
                excess = more.high if self.inputs.steps_count else 0.0
                yield plain._replace(plan=changed, price=self.inputs.exact_s(changed) * (1 + excess), excess=excess)


class TypicalExchange(NamedTuple):
    """One uniform choice of compressed updates."""

    step_s: float
    """With computing before the exchange."""
    latency_s: float
    parts: dict[int, float]
    """Part of the model that each option carries."""


def _best(tried: Sequence[Scenario]) -> list[Scenario]:
    """The cheapest scenarios, and the cheapest with other hosts: even parts, which are simpler to search, would exclude
    it."""
    ranked = sorted(tried, key=lambda c: c.price(c.quick))
    others = [c for c in ranked if c.catalog is not ranked[0].catalog]
    return list(dict.fromkeys([*ranked[: FINALISTS - 1], *others[:FINALISTS]]))


def _soonest(choices: Sequence[tuple[Scenario, Choice]], best: PricedPlan | None = None, *, by: float = 0.0) -> PricedPlan:
    """The best of these choices as plans, if it is better than `best` by this fraction; hopeless ones are not placed."""
    for scenario, choice in sorted(choices, key=lambda pair: pair[0].price(pair[1])):
        if best is None or scenario.price(choice) * (1 - PLACED) < best.price * (1 - by):
            priced = scenario.placed(choice)
            best = priced if best is None or priced.price < best.price * (1 - by) else best
    assert best is not None
    return best


def searched_local_steps(profile: Profile) -> int:
    """Limit if the policy sets none. A single measured number of local steps does not show how the cost grows."""
    measured = {row.every for row in profile.learning if row.every > 1}
    return MOST_LOCAL_STEPS if len(measured) > 1 else max(measured, default=1)


def local_steps(most: int) -> list[int]:
    """Powers of two up to `most`.

    >>> local_steps(1), local_steps(4), local_steps(6), local_steps(9999)[-1]
    ([], [2, 4], [2, 4], 512)
    """
    return [2**i for i in range(1, MOST_LOCAL_STEPS.bit_length()) if 2**i <= most]


def fragment_counts(every: int, most: int) -> list[int]:
    """
    >>> fragment_counts(8, 64), fragment_counts(64, 5)
    ([1, 2, 4, 8], [1, 2, 4])
    """
    return [2**i for i in range(every.bit_length()) if 2**i <= min(most, MOST_FRAGMENTS)]
