"""Enumerates the options of a bucket (paths of Espresso's tree with codecs) in one cluster with one set of servers, with their
costs.

A path is kept if it is the best by some criterion for small, medium or large buckets. Paths are compared only for the codecs
that send most and least, since there are hundreds of two-level paths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from statistics import median

import numpy as np

from commlayer.codec_spec import parse_spec
from commlayer.errors import InvalidInput
from commlayer.planner import tree
from commlayer.planner.buckets import Contents
from commlayer.planner.convergence import Recipe
from commlayer.planner.costs import FULL, Excesses, Prices, overlapped_cluster
from commlayer.planner.model import DENSE, Cluster, Option, Policy, Profile, bare
from commlayer.planner.problem import COMPUTE, Load, Reals, TaskGraph, Template, join_templates
from commlayer.planner.tensors import EXACT, keeps_zeros
from commlayer.planner.tree import ALIASES, Path, Promise, find_misfits, format_path, on_gpus, parse, promise_from_cost

SIZES = np.exp2(np.array([8.0, 12.0, 16.0, 20.0, 25.0]))
"""Bucket sizes in elements for which paths are compared."""
CRITERIA = 8
EVENLY = 0.9
"""Fraction of the usable rate that a hidden exchange may fill by the search's estimate. The estimate spreads buckets evenly
over servers."""
SLOW = 0.6
"""A node whose uplink is below this fraction of the median uplink may use a codec that sends less."""


def options(prices: Prices, policy: Policy) -> list[Option]:
    """All options worth trying, uncompressed ones first: over servers if `prices` has hosts, else over collectives. A plan that
    mixed both would have few buckets per server, and therefore unbalanced servers."""
    cluster, profile, served = prices.cluster, prices.profile, bool(prices.hosts)
    codecs = {cost.codec: cost for cost in profile.codecs}
    floats: tuple[tree.Kind, ...] = ("flat", "two-level") if max(n.ranks for n in cluster.nodes) > 1 else ("flat",)
    kinds = ("service",) if served else floats
    dense = best_paths(prices, [] if served and DENSE not in codecs else tree.usable_paths(
        cluster, devices=("cpu",), max_encodes=int(served), kinds=kinds, dense=not served), DENSE)
    result = [Option(_name(path, cluster)) for path in dense]
    alike: dict[tuple[Promise, tuple[str, ...]], list[str]] = {}
    for name in sorted(allowed_codecs(profile, policy), key=lambda name: (codecs[name].nbytes.slope_s, name)):
        if name != DENSE:
            alike.setdefault((promise_from_cost(codecs[name]), _devices(prices, name)), []).append(name)
    for (promise, priced), names in alike.items() if dense else ():
        devices = [device for device in policy.devices if device in priced]
        paths = [path for path in tree.usable_paths(cluster, devices=devices, max_encodes=policy.max_encodes, sums=promise.sums,
                                                    kinds=kinds if served else (*kinds, "sum"), dense=False,
                                                    servers="cpu" in priced)
                 if not any(find_misfits(path, [promise], gpus=on_gpus(cluster) and not policy.whole_tree))]
        kept = dict.fromkeys(path for name in dict.fromkeys((names[0], names[-1])) for path in best_paths(prices, paths, name))
        result += [Option(_name(path, cluster), name) for path in kept for name in names]
        result += _asymmetric_options(cluster, names, promise, [path for path in kept if tree.uses_server(path)])
    return result


def best_paths(prices: Prices, paths: Sequence[Path], codec: str) -> list[Path]:
    """The paths that are best by some criterion at some bucket size, in the order of `paths`."""
    if not paths:
        return []
    each = criteria([prices.template(path, codec) for path in paths], SIZES)
    return [paths[i] for i in sorted(set(each.argmin(axis=0).ravel().tolist()))]


def criteria(templates: Sequence[Template], sizes: Reals) -> Reals:
    """Seconds by template, criterion and bucket size. Each template has one option. The criteria are sums of: the bucket's time
    on idle resources (`alone`), the busiest resource, the busiest link, the busiest GPU, and the busiest CPU or server."""
    alike: dict[TaskGraph, list[int]] = {}
    for place, template in enumerate(templates):
        alike.setdefault(template.graphs[0], []).append(place)
    result = np.empty((len(templates), CRITERIA, len(sizes)))
    for graph, places in alike.items():
        seconds, latency = (lines[..., :1] + lines[..., 1:] * sizes for lines in (
            np.stack([templates[place].seconds for place in places], axis=1),
            np.stack([templates[place].latency for place in places], axis=1)))
        result[places] = _criteria(graph, seconds, latency)
    return result


def _criteria(graph: TaskGraph, seconds: Reals, latency: Reals) -> Reals:
    """The criteria of templates with the same structure. The first index of `seconds` and `latency` is the task."""
    zero = np.zeros(latency.shape[1:])
    busy: dict[str, Reals] = {}
    ends: list[Reals] = []
    at = 0
    for lanes, after, late in zip(graph.lanes, graph.after, latency, strict=True):
        longest = zero
        for lane, of_lane in zip(lanes, seconds[at : at + len(lanes)], strict=True):
            busy[lane] = busy.get(lane, zero) + of_lane
            longest = np.maximum(longest, of_lane)
        at += len(lanes)
        ends.append(_maximum([ends[i] for i in after], zero) + longest + late)

    def most(*kinds: str) -> Reals:
        return _maximum([of_lane for lane, of_lane in busy.items() if lane.partition(":")[0] in kinds], zero)

    alone, busiest = _maximum(ends, zero), _maximum(list(busy.values()), zero)
    links, gpu, cpu = most("up", "down", "intra"), most(COMPUTE), most("cpu", "server")
    return np.stack([alone, busiest, alone + busiest, links, cpu, gpu + alone, gpu + links, links + cpu + 10 * gpu], axis=1)


def _maximum(each: Sequence[Reals], zero: Reals) -> Reals:
    result = zero
    for seconds in each:
        result = np.maximum(result, seconds)
    return result


def _devices(prices: Prices, codec: str) -> tuple[str, ...]:
    """Device kinds on which every node could use the codec, according to the profile. Servers encode on CPUs."""
    priced = {cost.device for cost in prices.profile.codecs if cost.codec == codec}
    gpus = {node.device for node in prices.cluster.nodes if node.ranks and node.device != "cpu"}
    return (*(("gpu",) if "gpu" in priced or gpus <= priced else ()), *(("cpu",) if "cpu" in priced else ()))


def _asymmetric_options(cluster: Cluster, codecs: Sequence[str], promise: Promise, served: Sequence[Path]) -> Iterator[Option]:
    """Yields options that only servers allow: a smaller codec for slow nodes, or different codecs of one family for upload and
    download."""
    if not promise.alone:
        return
    workers = [node for node in cluster.nodes if node.ranks]
    slow = [node.link.up_bps < SLOW * median(n.link.up_bps for n in workers) for node in workers]
    families: dict[str, list[str]] = {}
    for name in codecs:
        families.setdefault(parse_spec(name).family, []).append(name)
    for path in served:
        text = _name(path, cluster)
        for less, more in (pair for family in families.values() for pair in pairwise(family)):
            if any(slow) and not all(slow) and parse_spec(less).without_ratio() == parse_spec(more).without_ratio():
                yield Option(text, more, by_node=tuple(less if is_slow else more for is_slow in slow))
            if any(op.name == "pull" for op in path) and not any(find_misfits(path, [promise], down=promise)):
                yield Option(text, more, down=less)
                yield Option(text, less, down=more)


def _name(path: Path, cluster: Cluster) -> str:
    """The short name of a path if there is one, else the path's operations."""
    widest = max(node.ranks for node in cluster.nodes)
    return next((alias for alias in ALIASES if parse(alias, widest) == path), format_path(path))


def allowed_codecs(profile: Profile, policy: Policy) -> list[str]:
    """The profile's codecs that the policy allows, as the profile spells them."""
    known = {bare(cost.codec): cost.codec for cost in profile.codecs}
    # Collectives need no measured cost for uncompressed floats.
    unknown = sorted(codec for codec in policy.codecs if bare(codec) not in {*known, bare(DENSE)})
    if unknown:
        raise InvalidInput("E-PLAN-CODEC-COST",
                           f"policy: codecs has {unknown[0]}, but profile {profile.source!r} has no cost of this codec; "
                           f"it has: {', '.join(sorted(known.values()))}")
    allowed = {bare(codec) for codec in policy.codecs} or {*known}
    return sorted(text for name, text in known.items() if name in allowed)


class Catalog:
    """Numbers the options and holds their costs. Costs assume that each bucket is spread over all hosts.

    `steps_count` False: convergence factors are ignored. `budget` False: losses are ignored.
    """

    def __init__(self, prices: Prices, options: Sequence[Option], *, steps_count: bool = False, budget: bool = True) -> None:
        self.prices, self.options, self.steps_count, self.budget = prices, tuple(options), steps_count, budget
        self._excesses = Excesses(prices.profile)
        self._costs: dict[Recipe, tuple[list[float], list[float]]] = {}
        self._useful: dict[tuple[Contents, int], tuple[int, ...]] = {}
        self._joined: dict[tuple[int, ...], tuple[Template, list[int]]] = {}

    @cached_property
    def hidden(self) -> Catalog:
        """The catalog with link rates for overlapped exchanges. Servers get unequal parts, so an exchange that just fits by the
        search's estimate would make steps longer."""
        prices = self.prices
        slower = Prices(overlapped_cluster(prices.cluster, EVENLY * FULL), prices.profile, prices.hosts, spread=prices.spread)
        reduced = Catalog(slower, self.options, steps_count=self.steps_count, budget=self.budget)
        reduced._useful = self._useful
        return reduced

    def template(self, option: int) -> Template:
        o = self.options[option]
        return self.prices.template(o.path, o.codec, 0, 0, o.down, o.by_node)

    def costs(self, recipe: Recipe) -> tuple[list[float], list[float]]:
        """Two lists by option, for a whole model that uses the option: additional steps and relative increase of the loss, by
        cautious estimates."""
        if recipe not in self._costs:
            keys = [(o.by_node or (o.codec,), o.down) for o in self.options]
            of = {key: self._excesses.of(*key, recipe) for key in dict.fromkeys(keys)}
            self._costs[recipe] = ([of[key].high if self.steps_count else 0.0 for key in keys],
                                   [of[key].loss_high for key in keys])
        return self._costs[recipe]

    def useful(self, sort: Contents, octave: int, recipe: Recipe) -> tuple[int, ...]:
        """Returns the useful options for buckets with these contents and 2^(octave - 1) to 2^octave elements. These are all
        uncompressed options and, for each level of convergence cost, the options that are best by some criterion. Costs are
        linear, so an option that is best at both ends of the octave is best between them."""
        if (sort, octave) not in self._useful:
            dense = [o for o, option in enumerate(self.options) if option.codec == DENSE]
            only = {Contents.DOUBLES: [o for o in dense if self.options[o].path == EXACT], Contents.BUFFERS: dense,
                    Contents.SPARSE: [o for o, option in enumerate(self.options) if keeps_zeros(option)]}.get(sort, [])
            self._useful[sort, octave] = tuple(only) or tuple(sorted({*dense, *self._best(octave, recipe)}))
        return self._useful[sort, octave]

    @cached_property
    def _criteria(self) -> Reals:
        """The criteria of each option at sizes of 1, 2, 4, ... elements."""
        return criteria([self.template(o) for o in range(len(self.options))], np.exp2(np.arange(32)))

    def _best(self, octave: int, recipe: Recipe) -> list[int]:
        excess, losses = self.costs(recipe)
        levels: dict[tuple[float, float], list[int]] = {}
        for o in range(len(self.options)):
            levels.setdefault((round(excess[o], 6), round(losses[o], 6) if self.budget else 0.0), []).append(o)
        kept: dict[int, Reals] = {}
        for (_, loss), level in sorted(levels.items()):
            prices = self._criteria[level, :, octave - 1 : octave + 1].reshape(len(level), -1)
            for i in sorted(set(prices.argmin(axis=0).tolist())):
                mine = np.append(prices[i], loss)
                if not any((theirs <= mine).all() for theirs in kept.values()):
                    kept[level[i]] = mine
        return list(kept)

    def loads(
        self, options: Sequence[tuple[int, ...]], numels: Sequence[int], urgencies: Sequence[float],
    ) -> tuple[list[Load], list[list[float]]]:
        """The load of each bucket with its options, and each option's busy seconds summed over all lanes (links, CPUs, GPUs,
        servers)."""
        loads: dict[int, Load] = {}
        held_s: dict[int, list[float]] = {}
        members: dict[tuple[int, ...], list[int]] = {}
        for b, mine in enumerate(options):
            members.setdefault(mine, []).append(b)
        for mine, buckets in members.items():
            if mine not in self._joined:
                each = [self.template(o) for o in mine]
                self._joined[mine] = join_templates(each), [*accumulate([len(t.seconds) for t in each], initial=0)]
            template, edges = self._joined[mine]
            seconds, latency = template.at(np.array([[numels[b]] for b in buckets]))
            done_s = np.insert(np.cumsum(seconds, axis=1), 0, 0.0, axis=1)
            for b, held, own_s, late_s in zip(buckets, np.diff(done_s[:, edges]).tolist(), seconds, latency, strict=True):
                loads[b], held_s[b] = Load(template.graphs, own_s, late_s, urgencies[b]), held
        return [loads[b] for b in range(len(options))], [held_s[b] for b in range(len(options))]
