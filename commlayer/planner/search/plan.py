"""The verb `plan`: buckets, and for each a path, codec and place, by search over simulated steps. Knows no runtime."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from commlayer.planner.model import buckets
from commlayer.planner.model.cluster import Cluster, Node, Policy, Profile
from commlayer.planner.model.learning import Recipe
from commlayer.planner.model.option import DENSE
from commlayer.planner.model.similar_nodes import condensed
from commlayer.planner.model.thin import full
from commlayer.planner.pricing.input_checks import checked_inputs
from commlayer.planner.pricing.path_cost import Prices, bare
from commlayer.planner.search.candidates import allowed_codecs, options
from commlayer.planner.search.choices import ChoiceFound
from commlayer.planner.search.layout import Layout
from commlayer.planner.search.layout_candidate import LayoutCandidate, SearchInputs
from commlayer.planner.search.other_ways import Found, OtherWays
from commlayer.planner.search.placement import shares
from commlayer.planner.search.reasons import explained
from commlayer.planner.search.ways import Ways
from commlayer.records import Job, Plan

FINALISTS = 2
"""Sets of limits and hosts that are searched in full, after all have been tried with one option for every bucket."""
PAYS = 0.02
"""Compression must win this fraction, else the plan does without it: it is not free of risk."""

CHANCE = 0.02
"""By so much (as a fraction) what is written may be shorter than others by chance."""
NEAR = 0.01
"""What is written is no more than this fraction faster than what was searched, where buckets are spread over all servers."""
WRITTEN = 2000
"""Squares of servers, as which simulating what would be written costs: where it is dear, the first few alone are looked at."""
ALIKE = 0.1
"""Layouts whose numbers of buckets differ by no more than this fraction are not tried both."""
EVEN = 0.1
"""Links that differ by no more than this fraction are equal, where it is asked who should host."""
LEAST_PART = 0.05
"""Whoever would sum less than this of what the busiest server sums is not worth one."""


@contextmanager
def _uncollected() -> Iterator[None]:
    """Planning makes a few hundred thousand objects that all stay until its end: looking for cycles among them again and again
    finds none, and takes a quarter of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class PlainFound:
    """Buckets, paths and codecs of steps on averaged gradients: what all other ways are searched from, whatever is allowed."""

    def __init__(self, entry: LayoutCandidate, found: ChoiceFound, cluster: Cluster) -> None:
        self.policy, self._cluster = entry.inputs.policy, cluster
        self._others = OtherWays(entry, found)

    @_uncollected()
    def best(self, *, exact: bool) -> Found:
        """Of all ways; `exact` in place of the policy's own."""
        return self._others.best(exact=exact)

    @_uncollected()
    def explained(self, found: Found) -> Plan:
        """With its predictions and reasons, which takes a good part of what finding it takes."""
        return explained(found.plan, found.entry, found.choice, self._cluster)


def plan(job: Job, cluster: Cluster, profile: Profile | None = None, policy: Policy | None = None) -> Plan:
    """The plan that is first at a loss within the policy, by simulated steps and by how many of them it needs; or, where the
    policy's objective is the step, the one whose step is shortest. Equal arguments give equal plans."""
    found = plain(job, cluster, profile, policy)
    return found.explained(found.best(exact=found.policy.exact))


@_uncollected()
def plain(job: Job, cluster: Cluster, profile: Profile | None = None, policy: Policy | None = None) -> PlainFound:
    """For who wants plans of several ways: what they have in common, which takes most of a search."""
    profile, policy, timing = checked_inputs(job, cluster, profile, policy)
    # Zeros stay out of what goes between a node's only rank and a server.
    thin = any(node.server for node in cluster.nodes) and max(node.ranks for node in cluster.nodes) == 1
    inputs = SearchInputs(job if thin else full(job), timing, condensed(cluster), profile, policy)
    tried = _tried(inputs)
    finalists = _finalists(tried)
    choices = [(entry, entry.searched) for entry in finalists if _promising(entry, finalists)]
    choices += [(entry, entry.quick) for entry in finalists]
    entry, found = _best(choices)
    entry, found = _best([(entry, found), entry.refined(found)])
    pays = entry.exact(found) * (1 + PAYS)
    if able := [each for each in tried if _about(each, each.dense) < pays]:
        densest, = _cheapest(able, 1, lambda entry: entry.dense)
        if densest.exact(densest.dense) < pays:
            entry, found = densest, densest.dense
    return PlainFound(entry, found, cluster)


def _best(choices: list[tuple[LayoutCandidate, ChoiceFound]]) -> tuple[LayoutCandidate, ChoiceFound]:
    """By the exact simulation of what would be written, of those that may be the best."""
    (entry, found), *others = sorted(choices, key=lambda pair: _about(*pair))
    for other in others:
        if _about(*other) < entry.exact(found) and other[0].exact(other[1]) < entry.exact(found):
            entry, found = other
    return entry, found


def _about(entry: LayoutCandidate, found: ChoiceFound) -> float:
    """What the price of what was searched is surely not below."""
    return found.price / entry.local_steps * (1 - NEAR)


def _promising(entry: LayoutCandidate, finalists: list[LayoutCandidate]) -> bool:
    """Whether a search could put it ahead. It can gain no more than what its quick choice is above its bound; what being
    written down costs beside that it does not see."""
    gain = (entry.quick.price - entry.least_price) / entry.local_steps
    return entry.exact(entry.quick) - gain <= min(each.exact(each.quick) for each in finalists) * (1 + CHANCE)


def _tried(inputs: SearchInputs) -> list[LayoutCandidate]:
    """All limits with all hosts; with one host, where all have equal links, those that were best."""
    layouts = _layouts(inputs)
    plain = Recipe(inputs.policy.optimizer, workers=inputs.cluster.ranks)
    steps_count = inputs.policy.objective == "loss" and bool(inputs.profile.learning)
    tried: list[LayoutCandidate] = []
    for hosts in host_sets(inputs.cluster):
        if tried and not _one_may_do(inputs.cluster, _finalists(tried)):
            break
        # Buckets go to several servers in turn, which is nearly as if each were spread over all of them.
        prices = Prices(inputs.cluster, inputs.profile, hosts.places, spread=hosts.parts)
        ways = Ways(prices, options(prices, inputs.policy), plain, steps_count=steps_count)
        tried += [LayoutCandidate(inputs, ways, layout) for layout in layouts]
        if _even(inputs.cluster):
            layouts = [entry.layout for entry in _finalists(tried)]
    return tried


def _layouts(inputs: SearchInputs) -> list[Layout]:
    """Of those with nearly as many buckets the first."""
    made: list[Layout] = []
    allowed = [bare(codec) for codec in allowed_codecs(inputs.profile, inputs.policy) or (DENSE,)]
    most, matrices = min(name.most_nbytes for name in allowed), any(name.shaped for name in allowed)
    small = inputs.policy.objective == "step"
    for limits in buckets.limits(inputs.job, most, matrices=matrices, small=small):
        layout = Layout(inputs.job, inputs.timing, limits)
        if all(abs(len(layout.sizes) - len(other.sizes)) > ALIKE * len(other.sizes) for other in made):
            made.append(layout)
    return made


def _finalists(tried: list[LayoutCandidate]) -> list[LayoutCandidate]:
    """Of those that share sums by links one besides, which even parts, simpler to search, would else leave behind."""
    evenly, by_links = ([e for e in tried if _by_links(e) is such] for such in (False, True))
    return _cheapest(evenly, FINALISTS, lambda entry: entry.quick) + _cheapest(by_links, 1, lambda entry: entry.quick)


def _cheapest(
    tried: list[LayoutCandidate], most: int, which: Callable[[LayoutCandidate], ChoiceFound],
) -> list[LayoutCandidate]:
    """By what would be written of them, which takes some per cent longer than what was searched, and not all alike."""
    found: list[tuple[float, int, LayoutCandidate]] = []
    left = WRITTEN
    for place, entry in enumerate(sorted(tried, key=lambda entry: which(entry).price)):
        kind = which(entry)
        if len(found) == most and (kind.price >= found[-1][0] or left <= 0):
            break
        left -= len(entry.hosts) ** 2
        found = sorted([*found, (max(kind.price, entry.exact(kind)), place, entry)])[:most]
    return [entry for *_, entry in found]


def _by_links(entry: LayoutCandidate) -> bool:
    able = sum(node.server for node in entry.inputs.cluster.nodes)
    return len(entry.hosts) > 1 and (entry.fitted or len(entry.hosts) < able)


def _one_may_do(cluster: Cluster, finalists: list[LayoutCandidate]) -> bool:
    """Whether a server on one node could be better than on all: where its link stands out, or servers are worth it anyway."""
    return not _even(cluster) or any(
        entry.uses(found, lambda option: option.served) for entry in finalists for found in (entry.quick, entry.searched)
    )


def _even(cluster: Cluster) -> bool:
    rates = [_bps(node) for node in cluster.nodes if node.server]
    return not rates or max(rates) <= min(rates) * (1 + EVEN)


class Hosts(NamedTuple):
    """Nodes that run servers, and the part of the sums that each has; no parts: there is one."""

    places: tuple[int, ...]
    parts: tuple[float, ...] = ()


def host_sets(cluster: Cluster) -> list[Hosts]:
    """Who could run the servers: all that can, evenly; those that links ask for, as they ask; the one with the fastest link.

    Evenly, adding and coding sums is shared best; by links, the transfers are.
    """
    able = [i for i, node in enumerate(cluster.nodes) if node.server]
    if len(able) < 2:
        return [Hosts(tuple(able))]
    evenly = Hosts(tuple(able), (1 / len(able),) * len(able))
    owned = shares(cluster).shares
    parts = {i: part for i, part in enumerate(owned) if part >= LEAST_PART * max(owned)}
    fitted = Hosts(tuple(parts), tuple(part / sum(parts.values()) for part in parts.values()) if len(parts) > 1 else ())
    alike = fitted.places == evenly.places and max(fitted.parts) <= min(fitted.parts) * (1 + EVEN)
    fastest = Hosts((max(able, key=lambda i: (_bps(cluster.nodes[i]), -i)),))
    return list(dict.fromkeys([evenly, evenly if alike else fitted, fastest]))


def _bps(node: Node) -> float:
    return min(node.link.up_bps, node.link.down_bps)
