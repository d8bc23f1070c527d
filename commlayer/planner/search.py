"""The verb `plan`: chooses buckets, and for each a path, codec and server, by search over simulated steps."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from msgspec import structs

from commlayer.planner import buckets
from commlayer.planner.candidates import allowed_codecs, options
from commlayer.planner.choices import ChoiceFound
from commlayer.planner.convergence import Recipe
from commlayer.planner.costs import Prices, bare, plan_excess
from commlayer.planner.inputs import checked_inputs
from commlayer.planner.layout_candidate import FINEST, LayoutCandidate, SearchInputs
from commlayer.planner.model import DENSE, Cluster, Node, Policy, Profile, condensed
from commlayer.planner.option_prices import Layout, Ways, shares
from commlayer.planner.simulation import Timeline, per_step, simulate
from commlayer.planner.sync_modes import Found, OtherWays
from commlayer.planner.tensors import DOUBLE, full, is_thin, travels
from commlayer.records import MAX_BUCKET_NBYTES, Bucket, Job, Plan, Why

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


LOOKED_AT = 2.0
"""Steps longer by more than this factor with another option are not simulated exactly."""
SAME = 1e-6
"""Steps that differ by less than this fraction count as equal."""


def explained(plan: Plan, entry: LayoutCandidate, found: ChoiceFound, cluster: Cluster) -> Plan:
    """The plan with its predictions. `found`: the choice behind it. `cluster`: the real nodes, if the search merged
    similar ones."""
    job, _, searched, profile, policy = entry.inputs
    placed = entry.ways.placed.prices
    timeline = simulate(plan, job, cluster, profile, policy, spans=False,
                        prices=placed if placed.hosts == plan.hosts and searched == cluster else None)
    step_s = per_step(timeline, plan.local_steps)
    more = plan_excess(plan, job, cluster, profile, policy)
    free_s = min(step_s, entry.free_s() / plan.local_steps)
    verdicts: dict[int, Verdict] = {}
    origins = [part.origin for part in entry.parts(found)]
    for b in dict.fromkeys(origins):
        verdicts[b] = _verdict(b, entry, found)
    buckets = tuple(
        structs.replace(bucket, why=_why(bucket, verdicts[b], entry, timeline))
        for bucket, b in zip(plan.buckets, origins, strict=True)
    )
    steps = {"steps": 1 + more.steps, "steps_high": 1 + more.high} if profile.learning else {}
    return structs.replace(plan, buckets=buckets, step_s=step_s, free_s=free_s, **steps)


class Price(NamedTuple):
    """Price of a plan with one bucket's option replaced."""

    step_s: float
    to_loss_s: float
    """Seconds to a loss per step of dense training; the step time if all steps count equally."""


NEVER = Price(math.inf, math.inf)


class Verdict(NamedTuple):
    """A bucket's present option, its runner-up, and its best dense and compressed options; and bytes per element."""

    now: Price
    runner_up: str
    runner: Price
    dense: Price
    coded: Price | None
    nbytes: float
    barred: bool
    """Whether the loss budget excludes an option."""


def _verdict(b: int, entry: LayoutCandidate, found: ChoiceFound) -> Verdict:
    mine, place = entry.useful[b], found.choice[b]
    spare, loss = entry.inputs.policy.max_loss - found.loss, entry.space.loss[b]
    now = Price(found.step_s / entry.local_steps, found.price / entry.local_steps)
    others = [o for o in range(len(mine)) if o != place]
    dense, coded = (_best_other(b, [o for o in others if (entry.options[mine[o]].codec == DENSE) is such], entry, found)
                    for such in (True, False))
    runner = min((each for each in (dense, coded) if each is not None and each[0] != NEVER), default=None, key=_to_loss)
    present = now, place
    if entry.options[mine[place]].codec == DENSE:
        dense = min(present, dense or present, key=_to_loss)
    else:
        coded = min(present, coded or present, key=_to_loss)
    return Verdict(now, "" if runner is None else str(entry.options[mine[runner[1]]]), now if runner is None else runner[0],
                   now if dense is None else dense[0], None if coded is None else coded[0],
                   entry.ways.template(mine[place]).nbytes, any(loss[o] - loss[place] > spare for o in others))


def _to_loss(priced: tuple[Price, int]) -> tuple[float, int]:
    return priced[0].to_loss_s, priced[1]


def _best_other(b: int, among: list[int], entry: LayoutCandidate, found: ChoiceFound) -> tuple[Price, int] | None:
    """The best of these options for the bucket; None if there are none. Stops at an option as good as the chosen one;
    options far from it are not simulated exactly."""
    excess = entry.space.excess
    if not among:
        return None
    factors = None
    if excess is not None:
        rest = 1 + found.excess - excess[b][found.choice[b]]
        factors = [rest + more for more in excess[b]]
    steps = entry.space.schedule.sweep(list(found.choice), [b], LOOKED_AT * found.price, math.nan, 1, among,
                                       found.price * (1 + SAME), factors)
    each = [(Price(steps[o] / entry.local_steps, steps[o] / entry.local_steps * (factors[o] if factors else 1.0)), o)
            for o in among]
    return min(each, key=_to_loss)


def _why(bucket: Bucket, verdict: Verdict, entry: LayoutCandidate, timeline: Timeline) -> Why:
    now, runner = verdict.now, verdict.runner
    return Why(
        seconds=max(0.0, timeline.done_s[bucket.id] - timeline.ready_s[bucket.id]),
        nbytes=round(verdict.nbytes * travels(entry.inputs.job, bucket.slices)),
        reason=_reason(bucket, verdict, entry, timeline),
        runner_up=verdict.runner_up, runner_up_s=runner.step_s - now.step_s,
        runner_up_later=runner.to_loss_s / now.to_loss_s - 1 if entry.ways.steps_count else 0.0,
    )


def _reason(bucket: Bucket, verdict: Verdict, entry: LayoutCandidate, timeline: Timeline) -> str:
    now, dense, coded = verdict.now, verdict.dense, verdict.coded
    job, first = entry.inputs.job, bucket.slices[0].tensor
    if job.tensors[first].buffer:
        return "running statistics are sent as they are"
    if job.tensors[first].dtype == DOUBLE:
        return "float64 is kept by an all-reduce alone"
    if is_thin(job, first):
        return f"{100 * travels(job, bucket.slices) / bucket.numel:.2g} % of it is no zeros, and zeros do not travel"
    count = entry.ways.steps_count
    if bucket.codec != DENSE:
        if dense.to_loss_s > now.to_loss_s * (1 + SAME):
            return f"dense, {against(now, dense, count=count)}"
        return "takes load off the links at no cost to the " + ("time to a loss" if count else "step")
    if coded is None:
        return "no codec is allowed or worth trying at this size"
    if verdict.barred and coded.to_loss_s < now.to_loss_s * (1 - FINEST):
        return f"coded, {gained(now, coded, count=count)}, but max_loss would not be kept"
    if not math.isclose(coded.step_s, now.step_s, rel_tol=SAME):
        return f"coded, {against(now, coded, count=count)}"
    hidden = timeline.done_s[bucket.id] <= timeline.compute_s
    return "its transfer is hidden behind computing" if hidden else "coding it would not shorten the step: others end later"


def against(now: Price, other: Price, *, count: bool) -> str:
    """The effect of the other option, in words. `count`: whether steps count differently.

    >>> against(Price(1.0, 1.5), Price(1.2, 1.6), count=True), against(Price(1.0, 1.0), Price(1.2, 1.2), count=False)
    ('the step would be 200 ms longer, and a loss come 6.7 % later', 'the step would be 200 ms longer')
    >>> against(Price(1.0, 1.0), Price(0.9, 1.5), count=True)
    'the step would be 100 ms shorter, but a loss come 50 % later'
    >>> against(Price(1.0, 1.0), Price(0.9, 0.99), count=True)
    'a loss would come 1 % sooner, too little for a coarser codec'
    >>> against(Price(1.0, 1.0), NEVER, count=True), against(Price(1.0, 1.0), NEVER, count=False)
    ('a loss would take more than twice as long', 'the step would be more than twice as long')
    """
    if other == NEVER:
        return f"{'a loss would take' if count else 'the step would be'} more than twice as long"
    later = other.to_loss_s / now.to_loss_s - 1
    if count and later <= 0:
        return f"{gained(now, other, count=count)}, too little for a coarser codec"
    step, and_so = gained(now, other, count=False), "and" if other.step_s > now.step_s else "but"
    return f"{step}, {and_so} a loss come {100 * later:.2g} % later" if count else step


def gained(now: Price, other: Price, *, count: bool) -> str:
    """How much sooner a loss would come if `count`, else by how much the step time would differ.

    >>> gained(Price(4.0, 5.0), Price(0.902, 4.5), count=True), gained(Price(4.0, 4.0), Price(0.902, 0.902), count=False)
    ('a loss would come 10 % sooner', 'the step would be 3,098 ms shorter')
    """
    if count:
        return f"a loss would come {100 * (1 - other.to_loss_s / now.to_loss_s):.2g} % sooner"
    return f"the step would be {longer(other.step_s - now.step_s)}"


def longer(seconds: float) -> str:
    """
    >>> longer(0.01234), longer(-17.8)
    ('12.3 ms longer', '17,800 ms shorter')
    """
    how = "shorter" if seconds < 0 else "longer"
    ms = abs(seconds) * 1e3
    return f"{ms:,.0f} ms {how}" if ms >= 100 else f"{ms:.3g} ms {how}"
