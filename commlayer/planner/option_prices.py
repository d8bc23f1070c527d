"""Options for sending a bucket in one cluster, priced as lines over its size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, chain, pairwise
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec import structs

from commlayer.codec_spec import parse_spec
from commlayer.errors import InvalidInput
from commlayer.planner import buckets
from commlayer.planner.buckets import ELEMENT_NBYTES, fragments_of, least_spread_nbytes, spread
from commlayer.planner.convergence import Excess, Recipe
from commlayer.planner.costs import ZERO, Excesses, Lines, Prices, Template, hidden
from commlayer.planner.model import Cluster, Node, Option, Profile
from commlayer.planner.problem import COMPUTE, Load, Shape
from commlayer.planner.simulation import urgent
from commlayer.planner.tensors import full, travels
from commlayer.records import Job, Slice, Timing

Kind = tuple[buckets.Sort, int]
"""A bucket's contents and its octave of size. Buckets of one kind begin with the same options."""


class Piece(NamedTuple):
    """A bucket, or one of the parts into which it is cut."""

    slices: tuple[Slice, ...]
    numel: int
    """Elements that are sent."""
    urgency: float


class Layout:
    """One way to cut the model. Lists are by bucket."""

    def __init__(self, job: Job, timing: Timing, limits: buckets.Limits) -> None:
        self._job, self._limits = job, limits
        groups = buckets.groups(job, limits)
        self.sizes = [sum([s.numel for s in group]) for group in groups]
        self.pieces = [Piece(group, travels(job, group), urgent(timing, group)) for group in groups]
        self.kinds: list[Kind] = [
            (buckets.sort_of(job, group), size.bit_length()) for group, size in zip(groups, self.sizes, strict=True)
        ]
        self._timing = timing
        self._cut: dict[tuple[int, tuple[int, ...]], list[Piece]] = {}
        self._turns: dict[int, Layout] = {}

    @cached_property
    def full(self) -> Layout:
        """The layout for dense gradients; this one if no gradients are sparse."""
        return self if (job := full(self._job)) is self._job else Layout(job, self._timing, self._limits)

    def in_turns(self, count: int) -> Layout:
        """A layout in which no bucket exceeds one fragment's part of the model; this one if it already complies."""
        if count not in self._turns:
            most = self._job.numel * ELEMENT_NBYTES // count
            limits = buckets.Limits(*(min(limit, most) for limit in self._limits))
            finer = self if limits == self._limits else Layout(self._job, self._timing, limits)
            self._turns[count] = self if finer.sizes == self.sizes else finer
        return self._turns[count]

    def cut(self, b: int, ends: tuple[int, ...]) -> list[Piece]:
        """The parts of bucket b that end at `ends`, and the rest."""
        if not ends:
            return [self.pieces[b]]
        if (b, ends) not in self._cut:
            cut = [buckets.between(self.pieces[b].slices, start, stop) for start, stop in pairwise((0, *ends, self.sizes[b]))]
            self._cut[b, ends] = [Piece(slices, travels(self._job, slices), urgent(self._timing, slices)) for slices in cut]
        return self._cut[b, ends]


EDGES = np.exp2(np.arange(32))
"""Elements at the ends of octaves of size."""


class Ways:
    """Options by number, in one cluster with one set of servers.

    `recipe`: the sync mode by which options are compared. Without `steps_count` all steps count equally.
    """

    def __init__(
        self, prices: Prices, options: Sequence[Option], recipe: Recipe = Recipe(""), *, steps_count: bool = False,
    ) -> None:
        self.prices, self.recipe, self.steps_count = prices, recipe, steps_count
        self.options = tuple(options)
        self._known = Excesses(prices.profile)
        self._useful: dict[tuple[int, int], list[int]] = {}
        self._unbeaten: dict[tuple[int, int], list[int]] = {}
        self._at_edges: dict[int, list[list[float]]] = {}
        self.excess, self.losses = self.under(recipe)
        """By option, if the whole model used it: excess steps, and relative increase of the loss."""

    def under(self, recipe: Recipe) -> tuple[list[float], list[float]]:
        """`excess` and `losses` under another recipe, both by cautious estimates."""
        by_codec: dict[tuple[tuple[str, ...], str], Excess] = {}
        for o in self.options:
            key = o.by_node or (o.codec,), o.down
            if key not in by_codec:
                by_codec[key] = self._known.of(*key, recipe)
        each = [by_codec[o.by_node or (o.codec,), o.down] for o in self.options]
        return [one.high if self.steps_count else 0.0 for one in each], [one.loss_high for one in each]

    def at(self, prices: Prices) -> Ways:
        return Ways(prices, self.options, self.recipe, steps_count=self.steps_count)

    @cached_property
    def placed(self) -> Ways:
        """The same options with each bucket on one server, instead of spread over all servers."""
        prices = self.prices
        return self.at(Prices(prices.cluster, prices.profile, prices.hosts)) if prices.spread else self

    def template(self, option: int, server: int = 0, owner: int = 0) -> Template:
        o = self.options[option]
        return self.prices.template(o.path, o.codec, server, owner, o.down, o.by_node)

    def useful(self, least: int, most: int) -> list[int]:
        """A few options for sizes from `least` to `most` elements: for each level of steps and loss, the best ones by some
        criterion.

        Prices are linear, so an option that is best at both ends is best between them.
        """
        if (least, most) in self._useful:
            return self._useful[least, most]
        levels: dict[tuple[float, float], list[int]] = {}
        for option in range(len(self.options)):
            levels.setdefault((round(self.excess[option], 6), round(self.losses[option], 6)), []).append(option)
        kept: dict[int, list[float]] = {}
        for (_, loss), level in sorted(levels.items()):
            prices = {option: [*self._respects(option, least), *self._respects(option, most)] for option in level}
            ranked = sorted(level, key=lambda option: sum(prices[option]))
            best = {min(ranked, key=lambda option: prices[option][i]) for i in range(len(prices[level[0]]))}
            for option in sorted(best):
                mine = [*prices[option], loss]
                if not any(all(a <= b for a, b in zip(theirs, mine, strict=True)) for theirs in kept.values()):
                    kept[option] = mine
        chosen = self._useful[least, most] = sorted(kept)
        return chosen

    def unbeaten(self, least: int, most: int) -> list[int]:
        """Options for these sizes that no other option beats in loss, steps, time on every lane and time alone."""
        if (least, most) in self._unbeaten:
            return self._unbeaten[least, most]
        sizes = np.array([float(least), float(most)])
        busy = [busy_s(self.template(option), sizes) for option in range(len(self.options))]
        lanes = sorted({lane for each in busy for lane in each})
        column = {lane: 2 * i for i, lane in enumerate(lanes)}
        weights = np.zeros((len(busy), 2 * len(lanes) + 4))
        for option, (row, each) in enumerate(zip(weights, busy, strict=True)):
            for lane, seconds in each.items():
                row[column[lane] : column[lane] + 2] = seconds
            row[-4:-2] = alone_s(self.template(option), sizes)
            row[-2:] = self.losses[option], self.excess[option]
        kept: list[int] = []
        # Cheap options first: they beat most others. The first of equal options stays.
        for option in np.argsort(weights.sum(axis=1), kind="stable").tolist():
            if not (weights[kept] <= weights[option]).all(axis=1).any():
                kept.append(option)
        chosen = self._unbeaten[least, most] = sorted(kept)
        return chosen

    def _respects(self, option: int, numel: int) -> list[float]:
        if numel & (numel - 1):
            return _respects(self.template(option), np.array([float(numel)]))[0]
        if option not in self._at_edges:
            self._at_edges[option] = _respects(self.template(option), EDGES)
        return self._at_edges[option][numel.bit_length() - 1]


def _respects(template: Template, sizes: Reals) -> list[list[float]]:
    """Criteria by size: time alone; busiest lane; both; links; coding; load on GPUs plus time alone; load on GPUs plus
    links."""
    busy = busy_s(template, sizes)
    zero = np.zeros(len(sizes))
    of: dict[str, list[Reals]] = {}
    for lane, seconds in busy.items():
        of.setdefault(lane.partition(":")[0], []).append(seconds)

    def most(*kinds: str) -> Reals:
        return longest([seconds for kind in kinds for seconds in of.get(kind, ())], zero)

    alone, busiest = alone_s(template, sizes), longest(list(busy.values()), zero)
    links, gpu = most("up", "down", "intra"), most(COMPUTE)
    respects = [alone, busiest, alone + busiest, links, most("cpu", "server"), gpu + alone, gpu + links]
    rows: list[list[float]] = np.stack(respects, axis=1).tolist()
    return rows


def free(profile: Profile) -> Profile:
    """The profile with coding that takes no time: the limit of what compression could gain."""
    codecs = tuple(structs.replace(cost, encode=ZERO, decode=ZERO) for cost in profile.codecs)
    return structs.replace(profile, codecs=codecs, copy=ZERO)


K = TypeVar("K")

SHARED = 4
"""Target number of parts of the model per server; fewer could be balanced badly."""
LEAST_NBYTES = 16 << 10
"""Least bytes of a part when cutting every bucket for every server is tried."""
ANY = -1
"""Placeholder for a part that may go to the server with the least load."""


class CandidatePart(NamedTuple):
    """A bucket of the future plan."""

    origin: int
    """The searched bucket of which this is all or a part."""
    piece: Piece
    option: int
    server: int
    owner: int


class OptionPrices:
    """Prices of options by bucket, for all sync modes."""

    def __init__(self, ways: Ways, layout: Layout, useful: list[list[int]]) -> None:
        self.ways, self._layout, self._useful = ways, layout, useful
        ranks = {node.ranks for node in ways.prices.cluster.nodes if node.ranks}
        self.per_node = ranks.pop() if len(ranks) == 1 else 1
        self._weights: dict[tuple[int, int], int] = {}
        self._parts: dict[tuple[tuple[int, ...], int, int], list[CandidatePart]] = {}
        self._placed: dict[tuple[tuple[int, ...], int, int], list[Load]] = {}

    @cached_property
    def hidden(self) -> OptionPrices:
        """The prices with links reduced to what hidden transfers can rely on."""
        prices = self.ways.prices
        reduced = Prices(hidden(prices.cluster), prices.profile, prices.hosts, spread=prices.spread)
        return OptionPrices(self.ways.at(reduced), self._layout, self._useful)

    @cached_property
    def loads(self) -> tuple[list[Load], list[list[float]]]:
        """Loads, and seconds on lanes."""
        return loads_of(self.ways, [[(option, 0, 0) for option in mine] for mine in self._useful], self._layout.pieces)

    @cached_property
    def alone_s(self) -> list[float]:
        """Seconds until each bucket is done, if sent alone by its fastest option."""
        shortest = [0.0] * len(self._useful)
        for options, places in _alike(self._useful):
            numels = np.array([float(self._layout.pieces[b].numel) for b in places])
            soonest = np.min([alone_s(self.ways.template(option), numels) for option in options], axis=0)
            for b, seconds in zip(places, soonest, strict=True):
                shortest[b] = float(seconds)
        return shortest

    def parts(self, sent: tuple[int, ...], finely: int, turns: int = 1) -> list[CandidatePart]:
        """Cuts and places the places of a plan; each is sent by the option of that number in `sent`.

        A bucket priced as spread over all servers is cut: each server gets at least `finely` parts of the model, and a part
        of each turn. Served places go to the server with the least load, and among a node's ranks to the one with the least.
        """
        key = sent, max(finely, turns), turns
        if key not in self._parts:
            self._parts[key] = self._cut(*key)
        return self._parts[key]

    def placed(self, sent: tuple[int, ...], finely: int, turns: int = 1) -> list[Load]:
        """Loads of these parts, each on its own server."""
        key = sent, max(finely, turns), turns
        if key not in self._placed:
            parts = self.parts(*key)
            ways = [((part.option, part.server, part.owner),) for part in parts]
            self._placed[key], _ = loads_of(self.ways.placed, ways, [part.piece for part in parts])
        return self._placed[key]

    def _cut(self, sent: tuple[int, ...], finely: int, turns: int) -> list[CandidatePart]:
        ways, layout = self.ways, self._layout
        hosts, bound_for = len(ways.prices.hosts), ways.prices.spread
        new_parts, total = list[CandidatePart](), sum(piece.numel for piece in layout.pieces)
        least_nbytes = least_spread_nbytes(turns) if finely == SHARED else LEAST_NBYTES
        for b, (size, option) in enumerate(zip(layout.sizes, sent, strict=True)):
            cuts = ways.options[option].served and not parse_spec(ways.options[option].codec).needs_shape
            numel = layout.pieces[b].numel
            parts = -(-numel * finely * hosts // max(1, total)) if cuts else 1
            parts = max(1, min(parts, hosts, numel * ELEMENT_NBYTES // least_nbytes))
            each = len(set(bound_for)) > 1 and parts == hosts  # servers sum unequal parts, in proportion to their links
            even = [size * i // parts for i in range(1, parts)]
            ends = [int(size * end) for end in accumulate(bound_for[:-1])] if each else even
            new_parts += [CandidatePart(b, piece, option, host if each else ANY, 0)
                     for host, piece in enumerate(layout.cut(b, tuple(ends)))]
        served = [i for i, part in enumerate(new_parts) if ways.options[part.option].served]
        weights = {i: self._weight(new_parts[i].option, new_parts[i].piece.numel) for i in served}
        for i, owner in zip(served, spread(list(weights.values()), self.per_node), strict=True):
            new_parts[i] = new_parts[i]._replace(owner=owner)
        loads = [0.0] * hosts
        for places in fragments_of([part.piece for part in new_parts], min(turns, len(new_parts))):
            free = [i for i in places if i in weights and new_parts[i].server == ANY]
            if turns > 1:  # a turn waits for the server with the most bytes, so place the largest first
                free.sort(key=lambda i: -weights[i])
            for i, server in zip(free, assign([weights[i] for i in free], bound_for or (1.0,), loads), strict=True):
                new_parts[i] = new_parts[i]._replace(server=server)
        return [part._replace(server=max(part.server, 0)) for part in new_parts]

    def _weight(self, option: int, numel: int) -> int:
        """Bytes on all links."""
        if (option, numel) not in self._weights:
            self._weights[option, numel] = sum(self.ways.template(option).sent(numel))
        return self._weights[option, numel]


def loads_of(
    ways: Ways, useful: Sequence[Sequence[tuple[int, int, int]]], pieces: Sequence[Piece],
) -> tuple[list[Load], list[list[float]]]:
    """Loads by bucket, and each option's seconds on lanes. An option comes with a server and an owner; buckets with the
    same options are priced together."""
    by_bucket: dict[int, tuple[Load, list[float]]] = {}
    for options, places in _alike(useful):
        stacked = stack([ways.template(*option) for option in options], np.array([float(pieces[b].numel) for b in places]))
        for b, seconds, latency, held_s in zip(places, stacked.seconds, stacked.latency, stacked.held_s, strict=True):
            by_bucket[b] = Load(stacked.shapes, seconds, latency, pieces[b].urgency), held_s
    loads, held = zip(*[by_bucket[b] for b in range(len(pieces))], strict=True) if pieces else ((), ())
    return list(loads), list(held)


def _alike(useful: Sequence[Sequence[K]]) -> list[tuple[tuple[K, ...], list[int]]]:
    """Groups buckets by their options."""
    alike: dict[tuple[K, ...], list[int]] = {}
    for b, mine in enumerate(useful):
        alike.setdefault(tuple(mine), []).append(b)
    return list(alike.items())


class Split(NamedTuple):
    """How a model is divided among the nodes that host servers."""

    shares: tuple[float, ...]
    """Part of the bytes per node of the cluster; their sum is 1."""
    seconds: float
    """For one pass of all bytes, in both directions at once."""


def _bps(node: Node) -> float:
    return min(node.link.up_bps, node.link.down_bps)


def shares(cluster: Cluster, nbytes: float = 1.0) -> Split:
    """The split that ends soonest, if every training node sends and receives `nbytes`. Nodes without a server own 0."""
    n = sum(1 for node in cluster.nodes if node.ranks)
    hosts = [node for node in cluster.nodes if node.server]
    if not hosts:
        raise InvalidInput("E-PLAN-INPUT", "placement: no node of the cluster can host a server")
    if n == 0:
        raise InvalidInput("E-PLAN-INPUT", "placement: the cluster has no node with ranks")
    for node in cluster.nodes:
        if not _bps(node) > 0:
            raise InvalidInput("E-PLAN-INPUT",
                               f"node {node.name}: a link of {_bps(node):g} bps carries nothing, allowed: above 0")
    bits = 8 * nbytes
    # Training nodes without a server send and receive all bytes, whatever the split.
    low_s = max((bits / _bps(node) for node in cluster.nodes if node.ranks and not _lighter(node, n)), default=0.0)
    high_s = max([low_s, *(n * bits / _bps(node) for node in hosts)]) * 2
    for _ in range(200):
        middle_s = (low_s + high_s) / 2
        if middle_s in (low_s, high_s):
            break
        if sum(_room(node, n, middle_s, bits) for node in cluster.nodes) >= 1:
            high_s = middle_s
        else:
            low_s = middle_s
    rooms = [_room(node, n, high_s, bits) for node in cluster.nodes]
    total_room = sum(rooms)
    owned = tuple(room / total_room for room in rooms)
    return Split(owned, max(_busy_s(node, share, n, bits) for node, share in zip(cluster.nodes, owned, strict=True)))


def _lighter(node: Node, n: int) -> bool:
    """Whether owning a part reduces the node's own traffic: with n = 1 it then sends nothing."""
    return node.server and n < 2


def _busy_s(node: Node, share: float, n: int, bits: float) -> float:
    """Seconds that a node's link is busy, in each direction."""
    if node.ranks:
        return bits / _bps(node) * ((1 - share) + (n - 1) * share)
    return bits / _bps(node) * n * share


def _room(node: Node, n: int, seconds: float, bits: float) -> float:
    """The largest share that the node can own within that time."""
    passes = seconds * _bps(node) / bits
    if not node.server:
        return 0.0
    if not node.ranks:
        return passes / n
    if n <= 2:
        # Its link is busy for 1 - share + (n-1) share, which does not grow with the share.
        return 1.0 if passes >= n - 1 else 0.0
    return min(1.0, max(0.0, (passes - 1) / (n - 2)))


def assign(sizes: Sequence[float], weights: Sequence[float], loads: list[float] | None = None) -> list[int]:
    """A server for each bucket, in order: the one with the least load relative to its weight. Weight 0 gets none. `loads`:
    earlier loads, to which the sizes are added.

    Ties go to the lower number. With n servers, none exceeds its part by more than that part of n - 1 times its last bucket.
    This holds at any time, so early buckets keep all servers busy.
    """
    if not any(w > 0 for w in weights) or any(not w >= 0 or math.isinf(w) for w in weights):
        raise InvalidInput("E-PLAN-INPUT", f"weights of servers: got {list(weights)}, allowed: 0 or more, at least one above 0")
    loads = [0.0] * len(weights) if loads is None else loads
    able = [s for s, w in enumerate(weights) if w > 0]
    chosen = [0] * len(sizes)
    for bucket, size in enumerate(sizes):
        server = min(able, key=lambda s: ((loads[s] + size) / weights[s], s))
        loads[server] += size
        chosen[bucket] = server
    return chosen


Reals = npt.NDArray[np.float64]


class Stack(NamedTuple):
    """Options side by side for several sizes: `seconds` and `latency` by size, each row with one option after the other."""

    shapes: tuple[Shape, ...]
    seconds: list[list[float]]
    latency: list[list[float]]
    held_s: list[list[float]]
    """Seconds summed over all lanes, by size and option."""


def stack(templates: Sequence[Template], sizes: Reals) -> Stack:
    seconds: list[list[float]] = over(tuple(chain.from_iterable([each.seconds for each in templates])), sizes).T.tolist()
    latency: list[list[float]] = over(tuple(chain.from_iterable([each.latency for each in templates])), sizes).T.tolist()
    cuts = list(pairwise(accumulate([len(each.seconds) for each in templates], initial=0)))
    return Stack(tuple([each.shape for each in templates]), seconds, latency,
                 [[sum(row[start:stop]) for start, stop in cuts] for row in seconds])


def over(lines: Lines, sizes: Reals) -> Reals:
    """A row for each line, a column for each size."""
    values = np.array(lines).reshape(-1, 2)
    return values[:, :1] + values[:, 1:] * sizes


def longest(each: Sequence[Reals], zero: Reals) -> Reals:
    result = zero
    for seconds in each:
        result = np.maximum(result, seconds)
    return result


def alone_s(of: Template, sizes: Reals) -> Reals:
    """Seconds on idle lanes, where no task waits for another's lane."""
    seconds, latency = over(of.seconds, sizes), over(of.latency, sizes)
    zero = np.zeros(len(sizes))
    ends: list[Reals] = []
    at = 0
    for lanes, after, late in zip(of.shape.lanes, of.shape.after, latency, strict=True):
        begin = longest([ends[i] for i in after], zero)
        ends.append(begin + longest(list(seconds[at : at + len(lanes)]), zero) + late)
        at += len(lanes)
    return longest(ends, zero)


def busy_s(of: Template, sizes: Reals) -> dict[str, Reals]:
    busy: dict[str, Reals] = {}
    lanes = (lane for lanes in of.shape.lanes for lane in lanes)
    for lane, seconds in zip(lanes, over(of.seconds, sizes), strict=True):
        busy[lane] = busy[lane] + seconds if lane in busy else seconds
    return busy
