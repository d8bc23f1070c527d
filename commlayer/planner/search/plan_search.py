"""Implements `plan`: enumerates paths, codecs, sync modes and server hosts, simulates their steps, and chooses a plan.

A scenario is one layout of buckets, one set of hosts and one sync mode. Scenarios are compared by their best uniform choice.
The best few are searched (choices.py) and turned into complete plans, of which the search returns the one with the fewest
seconds to a loss. Other sync modes use the buckets and hosts of the best synchronous plan.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from msgspec import structs

from commlayer.errors import InvalidInput
from commlayer.planner import buckets
from commlayer.planner.buckets import ELEMENT_NBYTES, LEAST_FRAGMENT_NBYTES, BucketLimits
from commlayer.planner.convergence import Recipe, late_allowed, late_measured, measured_local_steps
from commlayer.planner.costs import Prices, plan_excess
from commlayer.planner.data.noise import find_noise
from commlayer.planner.inputs import checked_inputs
from commlayer.planner.model import DENSE, NO_LIMIT, Cluster, Policy, Profile, bare, merge_nodes
from commlayer.planner.plan_rules import bucket_codecs
from commlayer.planner.search.choices import Choice, uniform
from commlayer.planner.search.options import Catalog, allowed_codecs, criteria, options
from commlayer.planner.search.placement import Hosts, equal_links, host_sets
from commlayer.planner.search.reasons import with_explanation
from commlayer.planner.search.scenario import Layout, PricedPlan, Scenario, StepTimes
from commlayer.planner.simulation import slowest_speed, steps_locally
from commlayer.planner.tensors import with_dense_gradients
from commlayer.records import Job, Plan

FRAGMENT_CUT_NBYTES = 4 << 20
"""Largest part of a tensor in a fragment: larger ones would divide a fragment unevenly among servers."""
PAYS = 0.02
"""Fraction of the time to a loss that compression, or another sync mode, must save: both have risks."""
FINALISTS, MODES = 3, 5
"""Number of scenarios, and of modes of local steps, that are searched in full: those that are best when all buckets use the
same option."""
ALIKE = 0.1
"""Of layouts whose numbers of buckets differ by at most this fraction, only one is tried."""
MOST_LOCAL_STEPS = 512
"""Largest number of local steps that the search tries if measured rows show how the cost grows. Costs beyond measured numbers
are extrapolated."""
MOST_FRAGMENTS = 64


@contextmanager
def _garbage_collection_paused() -> Iterator[None]:
    """Disables garbage collection. Planning allocates a few hundred thousand objects that live until its end; scanning
    them for cycles finds none and takes a quarter of the time. A scan follows when collection begins again, unless the objects
    are gone by then."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_garbage_collection_paused()
def plan(job: Job, cluster: Cluster, profile: Profile | None = None, policy: Policy | None = None) -> Plan:
    """The plan that reaches a loss first, by simulated steps and convergence factor; with objective="step", the plan with
    the shortest step. Equal arguments give equal plans."""
    search = PlanSearch(job, cluster, profile, policy)
    return search.with_explanation(search.best(exact=search.policy.exact))


class PlanSearch:
    """The search for one job. Several calls of `best` share its synchronous part."""

    @_garbage_collection_paused()
    def __init__(self, job: Job, cluster: Cluster, profile: Profile | None = None, policy: Policy | None = None) -> None:
        question = checked_inputs(job, cluster, profile, policy)
        # Zeros are omitted only between a node's only rank and a server.
        sparse = any(node.server for node in cluster.nodes) and max(node.ranks for node in cluster.nodes) == 1
        self.question = question if sparse else question._replace(job=with_dense_gradients(job))
        self.policy = question.policy
        self._times = StepTimes()
        self._recipe = Recipe(self.policy.optimizer, workers=cluster.ranks, numel=job.numel, noise=find_noise(job))
        self._by_recipe: dict[Recipe, list[tuple[Scenario, Choice]]] = {}
        self.synchronous = self._synchronous()

    def _synchronous(self) -> PricedPlan:
        """The best plan with an exchange of gradients in every step."""
        tried: list[Scenario] = []
        layouts, question = self._layouts(), self.question
        searched = merge_nodes(question.cluster)
        for i, hosts in enumerate((Hosts(()), *host_sets(searched))):
            if i > 1 and equal_links(question.cluster) and not any(c.catalog.prices.hosts for c in _best_scenarios(tried)):
                break
            # Buckets are assigned to servers in rotation; spreading each bucket over all servers approximates this.
            prices = Prices(searched, question.profile, hosts.places, spread=hosts.parts)
            catalog = Catalog(prices, options(prices, self.policy), steps_count=question.steps_count,
                              budget=self.policy.max_loss < NO_LIMIT)
            tried += [Scenario(question, self._times, catalog, layout, self._recipe) for layout in layouts if catalog.options]
            layouts = list(dict.fromkeys(scenario.layout for scenario in _best_scenarios(tried))) if i else layouts
        if not tried:
            raise InvalidInput("E-PLAN-CODEC-COST", f"profile {question.profile.source!r} has no cost of {DENSE}: "
                               "plans over servers need it for buffers and uncompressed buckets")
        priced = _best_plan([(c, choice) for c in _best_scenarios(tried) for choice in (c.best, c.quick)])
        densest = min(tried, key=attrgetter("dense.price"))
        return _best_plan([(densest, densest.dense)], priced, by=-PAYS)

    def _layouts(self) -> list[Layout]:
        """The layouts to try: the first of each set of layouts with nearly equal numbers of buckets."""
        layouts: list[Layout] = []
        allowed = [bare(codec) for codec in allowed_codecs(self.question.profile, self.policy) or (DENSE,)]
        matrices = any(name.needs_shape for name in allowed)
        for limits in buckets.limits(self.question.job, matrices=matrices, small=self.policy.whole_tree):
            groups = buckets.groups(self.question.job, limits)
            if all(abs(len(groups) - len(other.pieces)) > ALIKE * len(other.pieces) for other in layouts):
                layouts.append(Layout.of(self.question.job, limits, groups, self.question.profile.energy))
        return layouts

    @_garbage_collection_paused()
    def best(self, *, exact: bool, averages: bool = True) -> PricedPlan:
        """The best of all sync modes that the policy allows.

        `exact` overrides the policy's setting: True excludes local steps and one-step-late averages. False with an exact policy
        allows at most as many local steps as were measured. `averages`: False excludes averaged gradients, if anything else is
        allowed.
        """
        policy, plain = self.policy, self.synchronous
        if exact and not policy.exact:
            policy = structs.replace(policy, exact=True, max_local_steps=1, staleness=False)
        elif policy.exact and not exact:
            policy = structs.replace(policy, exact=False, max_local_steps=measured_local_steps(self.question.profile.learning))
        best = plain
        # Sync modes without measurements are used only if the policy names them.
        freely = not policy.exact and self.question.steps_count
        measured = freely and late_measured(self.question.profile.learning, policy.optimizer)
        if measured if policy.staleness is None else policy.staleness:
            best = min([plain, *self._stale(plain)], key=attrgetter("price"))
        choices = [pair for recipe in self._recipes(policy, freely, averages=averages) for pair in self._choices(recipe)]
        if choices and not averages:
            return _best_plan(choices)
        best = _best_plan(choices, best)
        # The forward overlap does not change training, so it needs no minimum saving.
        return best if best.scenario.recipe.overlap == "forward" or best.price < plain.price * (1 - PAYS) else plain

    @_garbage_collection_paused()
    def with_explanation(self, priced: PricedPlan) -> Plan:
        """The plan with its predicted times and reasons filled in."""
        return with_explanation(priced)

    def _recipes(self, policy: Policy, freely: bool, *, averages: bool) -> list[Recipe]:
        """The most promising sync modes: overlap with the next forward pass, compressed updates, and the local-step modes with
        the best estimates."""
        updates = self._recipe._replace(codes="updates")
        recipes = [self._recipe._replace(overlap="forward")] if policy.forward and averages else []
        recipes += [updates._replace(overlap=overlap) for overlap in ("", "round")] if freely else []
        most = policy.max_local_steps or (searched_local_steps(self.question.profile) if freely else 1)
        parts = max(1, self.question.job.numel * ELEMENT_NBYTES // LEAST_FRAGMENT_NBYTES) if policy.fragments else 1
        local = [updates._replace(every=every, overlap=overlap, fragments=count)
                 for every in local_steps(most) for overlap in (("", "round") if freely else ("",))
                 for count in (fragment_counts(every, parts) if overlap else [1])]
        prices = {recipe: self._estimate(recipe) for recipe in local}
        best = sorted(local, key=prices.__getitem__)[:MODES]
        return recipes + [recipe for recipe in best if not averages or prices[recipe] < self.synchronous.price]

    def _estimate(self, recipe: Recipe) -> float:
        """Estimates the time to a loss of a local-step mode in which all buckets use the same option. Assumes that an exchange
        takes as long as after a single step, and that each fragment adds its own latencies."""
        timing, every = self.question.timing, recipe.every
        prices = self.synchronous.scenario.catalog.prices
        computing_s = (timing.forward_s + timing.backward_s + timing.update_s) / slowest_speed(prices)
        excess, loss = self.synchronous.scenario.catalog.costs(recipe)
        seconds = [math.inf]
        for exchange in self._exchanges[recipe.overlap]:
            if sum(loss[o] * part for o, part in exchange.parts.items()) > self.policy.max_loss:
                continue
            exchange_s = exchange.step_s - computing_s + (recipe.fragments - 1) * exchange.latency_s
            step_s = max(computing_s, exchange_s / every) if recipe.overlap else computing_s + exchange_s / every
            seconds.append(step_s * (1 + sum(excess[o] * part for o, part in exchange.parts.items())))
        return min(seconds)

    @cached_property
    def _exchanges(self) -> dict[str, list[TypicalExchange]]:
        """Maps each overlap ("" or "round"), which determines the usable fraction of links, to the durations of blocking
        exchanges of updates in which all buckets use the same option."""
        updates = self._recipe._replace(codes="updates")
        result: dict[str, list[TypicalExchange]] = {}
        for overlap in ("", "round"):
            scenario = self._scenario(updates)
            if overlap:
                scenario = Scenario(scenario.question, self._times, scenario.catalog.hidden, scenario.layout, updates)
            result[overlap] = []
            for choice in uniform(scenario.space._replace(max_loss=math.inf), scenario.starts):
                parts: dict[int, float] = {}
                for mine, place, piece in zip(scenario.useful, choice.options, scenario.layout.pieces, strict=True):
                    parts[mine[place]] = parts.get(mine[place], 0.0) + piece.weight
                alone_s = criteria([scenario.catalog.template(o) for o in parts], np.zeros(1))[:, 0]
                result[overlap].append(TypicalExchange(choice.step_s, float(alone_s.max()), parts))
        return result

    def _scenario(self, recipe: Recipe) -> Scenario:
        """The search's input for a sync mode: buckets, options and hosts, with large tensors cut for the mode's fragments."""
        plain, question = self.synchronous.scenario, self.question
        if steps_locally(recipe):
            question = question._replace(job=with_dense_gradients(question.job))
        most = question.job.numel * ELEMENT_NBYTES // recipe.fragments
        limits = BucketLimits(*(min(limit, most) for limit in plain.layout.limits))
        if recipe.fragments > 1:
            limits = limits._replace(cut_nbytes=min(limits.cut_nbytes, FRAGMENT_CUT_NBYTES))
        layout = plain.layout
        if question.job is not self.question.job or limits != layout.limits:
            layout = Layout.of(question.job, limits, buckets.groups(question.job, limits), question.profile.energy)
        return Scenario(question, self._times, plain.catalog, layout, recipe)

    def _choices(self, recipe: Recipe) -> list[tuple[Scenario, Choice]]:
        """The best choice in another sync mode; empty if no choice is within the loss budget."""
        if recipe not in self._by_recipe:
            scenario = self._scenario(recipe)
            try:
                self._by_recipe[recipe] = [(scenario, scenario.best)]
            except InvalidInput:  # no choice is within the loss budget
                self._by_recipe[recipe] = []
        return self._by_recipe[recipe]

    def _stale(self, plain: PricedPlan) -> Iterator[PricedPlan]:
        """Plans in which the buckets that are ready last (an eighth, a quarter, half, all of them) are applied one step
        late. If `plain` has codecs that are too sparse for that, they are derived from the best plan without these codecs."""
        job, cluster, profile, policy = self.question
        used = {codec for bucket in plain.plan.buckets for codec in bucket_codecs(bucket)}
        if not all(late_allowed(profile.learning, codec, policy.optimizer) for codec in used):
            fine = tuple(codec for codec in allowed_codecs(profile, policy)
                         if late_allowed(profile.learning, codec, policy.optimizer))
            if not fine:
                return
            plain = PlanSearch(job, cluster, profile, structs.replace(policy, codecs=fine)).synchronous
        gradients = [b.id for b in plain.plan.buckets if b.served and not job.tensors[b.slices[0].tensor].buffer]
        for share in (8, 4, 2, 1):
            stale = set(gradients[len(gradients) - -(-len(gradients) // share) :])
            changed = structs.replace(plain.plan, buckets=tuple(
                structs.replace(b, stale=b.id in stale) for b in plain.plan.buckets))
            more = plan_excess(changed, self.question)
            if more.loss_high <= policy.max_loss:
                excess = more.high if self.question.steps_count else 0.0
                step_s = self._times.seconds(changed, self.question)
                yield plain._replace(plan=changed, price=step_s * (1 + excess), excess=excess)


class TypicalExchange(NamedTuple):
    """A blocking exchange of compressed updates in which all buckets use the same option."""

    step_s: float
    """Seconds of computing and the exchange after it."""
    latency_s: float
    parts: dict[int, float]
    """Maps the option's number to the fraction of the model that uses it."""


def _best_scenarios(tried: Sequence[Scenario]) -> list[Scenario]:
    """The cheapest scenarios, and the cheapest with other server hosts. Without the second group, hosts with equal parts, which
    are simpler to search, would exclude the others."""
    ranked = sorted(tried, key=lambda c: c.price(c.quick))
    others = [c for c in ranked if c.catalog is not ranked[0].catalog]
    return list(dict.fromkeys([*ranked[: FINALISTS - 1], *others[:FINALISTS]]))


def _best_plan(choices: Sequence[tuple[Scenario, Choice]], best: PricedPlan | None = None, *, by: float = 0.0) -> PricedPlan:
    """The best of these choices as a complete plan, or `best` unless the gain exceeds the fraction `by`. Choices that cannot
    win are not turned into plans."""
    ranked = sorted(choices, key=lambda pair: pair[0].price(pair[1]))
    if best is None:
        (scenario, choice), *ranked = ranked
        best = scenario.place(choice)
    for scenario, choice in ranked:
        if scenario.least_price(choice) < best.price * (1 - by):
            priced = scenario.place(choice)
            best = priced if priced.price < best.price * (1 - by) else best
    return best


def searched_local_steps(profile: Profile) -> int:
    """Largest number of local steps to try if the policy sets no limit. A single measured number does not show how the cost
    grows."""
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
