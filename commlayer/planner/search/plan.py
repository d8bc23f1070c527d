"""The verb `plan`: chooses buckets, and for each a path, codec and server, by search over simulated steps."""

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
from commlayer.records import MAX_BUCKET_NBYTES, Job, Plan

FINALISTS = 2
"""Number of layouts with hosts that are searched in full, after all were tried with uniform choices."""
PAYS = 0.02
"""Compression must win this fraction, else the plan is dense: compression has risks."""

CHANCE = 0.02
"""Fraction by which a placed plan may be shorter than others by chance."""
NEAR = 0.01
"""A placed plan is faster than the searched choice, with buckets spread over all servers, by at most this fraction."""
WRITTEN = 2000
"""Limit for the sum of squared server counts in placed simulations. Where simulations are expensive, only the first few
are run."""
ALIKE = 0.1
"""Layouts whose numbers of buckets differ by at most this fraction are not both tried."""
EVEN = 0.1
"""Links that differ by at most this fraction count as equal when hosts are chosen."""
LEAST_PART = 0.05
"""A node that would sum less than this part of the busiest server's share gets no server."""


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


class PlainFound:
    """A plan on averaged gradients: the start for searching all other sync modes."""

    def __init__(self, entry: LayoutCandidate, found: ChoiceFound, cluster: Cluster) -> None:
        self.policy, self._cluster = entry.inputs.policy, cluster
        self._others = OtherWays(entry, found)

    @_uncollected()
    def best(self, *, exact: bool) -> Found:
        """The best of all sync modes; `exact` overrides the policy's setting."""
        return self._others.best(exact=exact)

    @_uncollected()
    def explained(self, found: Found) -> Plan:
        """The plan with predictions and reasons, which take a good part of the search time."""
        return explained(found.plan, found.entry, found.choice, self._cluster)


def plan(job: Job, cluster: Cluster, profile: Profile | None = None, policy: Policy | None = None) -> Plan:
    """The plan that reaches a loss first, by simulated steps and convergence factor; with objective="step", the plan with
    the shortest step. Equal arguments give equal plans."""
    plain_found = plain(job, cluster, profile, policy)
    return plain_found.explained(plain_found.best(exact=plain_found.policy.exact))


@_uncollected()
def plain(job: Job, cluster: Cluster, profile: Profile | None = None, policy: Policy | None = None) -> PlainFound:
    """The shared part of a search for plans in several sync modes, which takes most of the time."""
    profile, policy, timing = checked_inputs(job, cluster, profile, policy)
    # Zeros are left out only between a node's only rank and a server.
    thin = any(node.server for node in cluster.nodes) and max(node.ranks for node in cluster.nodes) == 1
    inputs = SearchInputs(job if thin else full(job), timing, condensed(cluster), profile, policy)
    tried = _tried(inputs)
    finalists = _finalists(tried)
    choices = [(entry, entry.searched) for entry in finalists if _promising(entry, finalists)]
    choices += [(entry, entry.quick) for entry in finalists]
    entry, choice = _best(choices)
    entry, choice = _best([(entry, choice), entry.refined(choice)])
    pays = entry.exact(choice) * (1 + PAYS)
    if able := [each for each in tried if _about(each, each.dense) < pays]:
        densest, = _cheapest(able, 1, lambda entry: entry.dense)
        if densest.exact(densest.dense) < pays:
            entry, choice = densest, densest.dense
    return PlainFound(entry, choice, cluster)


def _best(choices: list[tuple[LayoutCandidate, ChoiceFound]]) -> tuple[LayoutCandidate, ChoiceFound]:
    """The best choice by exact simulation of the placed plan; hopeless ones are skipped."""
    (entry, choice), *others = sorted(choices, key=lambda pair: _about(*pair))
    for other in others:
        if _about(*other) < entry.exact(choice) and other[0].exact(other[1]) < entry.exact(choice):
            entry, choice = other
    return entry, choice


def _about(entry: LayoutCandidate, found: ChoiceFound) -> float:
    """Lower bound for the placed price."""
    return found.price / entry.local_steps * (1 - NEAR)


def _promising(entry: LayoutCandidate, finalists: list[LayoutCandidate]) -> bool:
    """Whether a search could make it the best. It can gain at most the difference between its quick choice and its lower
    bound; the search does not see further costs of placement."""
    gain = (entry.quick.price - entry.least_price) / entry.local_steps
    return entry.exact(entry.quick) - gain <= min(each.exact(each.quick) for each in finalists) * (1 + CHANCE)


def _tried(inputs: SearchInputs) -> list[LayoutCandidate]:
    """All layouts with all sets of hosts. With one host and equal links, only the best layouts."""
    layouts = _layouts(inputs)
    plain = Recipe(inputs.policy.optimizer, workers=inputs.cluster.ranks)
    steps_count = inputs.policy.objective == "loss" and bool(inputs.profile.learning)
    tried: list[LayoutCandidate] = []
    for hosts in host_sets(inputs.cluster):
        if tried and not _one_may_do(inputs.cluster, _finalists(tried)):
            break
        # Buckets go to servers in rotation, which is nearly as if each were spread over all of them.
        prices = Prices(inputs.cluster, inputs.profile, hosts.places, spread=hosts.parts)
        ways = Ways(prices, options(prices, inputs.policy), plain, steps_count=steps_count)
        tried += [LayoutCandidate(inputs, ways, layout) for layout in layouts]
        if _even(inputs.cluster):
            layouts = [entry.layout for entry in _finalists(tried)]
    return tried


def _layouts(inputs: SearchInputs) -> list[Layout]:
    """The layouts to try; of those with nearly equal numbers of buckets, the first."""
    layouts: list[Layout] = []
    allowed = [bare(codec) for codec in allowed_codecs(inputs.profile, inputs.policy) or (DENSE,)]
    matrices = any(name.needs_shape for name in allowed)
    small = inputs.policy.objective == "step"
    for limits in buckets.limits(inputs.job, MAX_BUCKET_NBYTES, matrices=matrices, small=small):
        layout = Layout(inputs.job, inputs.timing, limits)
        if all(abs(len(layout.sizes) - len(other.sizes)) > ALIKE * len(other.sizes) for other in layouts):
            layouts.append(layout)
    return layouts


def _finalists(tried: list[LayoutCandidate]) -> list[LayoutCandidate]:
    """The cheapest candidates. One whose servers share by links is kept as well, since even parts, which are simpler to
    search, would exclude it."""
    evenly, by_links = ([e for e in tried if _by_links(e) is such] for such in (False, True))
    return _cheapest(evenly, FINALISTS, lambda entry: entry.quick) + _cheapest(by_links, 1, lambda entry: entry.quick)


def _cheapest(
    tried: list[LayoutCandidate], most: int, which: Callable[[LayoutCandidate], ChoiceFound],
) -> list[LayoutCandidate]:
    """The cheapest by placed price, which exceeds the searched price by a few per cent, not equally for all."""
    ranked: list[tuple[float, int, LayoutCandidate]] = []
    left = WRITTEN
    for place, entry in enumerate(sorted(tried, key=lambda entry: which(entry).price)):
        kind = which(entry)
        if len(ranked) == most and (kind.price >= ranked[-1][0] or left <= 0):
            break
        left -= len(entry.hosts) ** 2
        ranked = sorted([*ranked, (max(kind.price, entry.exact(kind)), place, entry)])[:most]
    return [entry for *_, entry in ranked]


def _by_links(entry: LayoutCandidate) -> bool:
    able = sum(node.server for node in entry.inputs.cluster.nodes)
    return len(entry.hosts) > 1 and (entry.fitted or len(entry.hosts) < able)


def _one_may_do(cluster: Cluster, finalists: list[LayoutCandidate]) -> bool:
    """Whether a server on a single node could be better than servers on all nodes: if a link stands out, or if servers are
    used anyway."""
    return not _even(cluster) or any(
        entry.uses(choice, lambda option: option.served) for entry in finalists for choice in (entry.quick, entry.searched)
    )


def _even(cluster: Cluster) -> bool:
    rates = [_bps(node) for node in cluster.nodes if node.server]
    return not rates or max(rates) <= min(rates) * (1 + EVEN)


class Hosts(NamedTuple):
    """Nodes that run servers, and each one's part of the sums; no parts for a single server."""

    places: tuple[int, ...]
    parts: tuple[float, ...] = ()


def host_sets(cluster: Cluster) -> list[Hosts]:
    """Sets of nodes to run servers: all that can, evenly; those chosen by links, in proportion; the one with the fastest
    link.

    Even parts balance adding and coding best; parts by links balance the transfers.
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
