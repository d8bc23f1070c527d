"""Chooses the nodes that host summation servers, how much each of them sums, and the server of each part of a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from commlayer.codec_spec import parse_spec
from commlayer.planner.buckets import ELEMENT_NBYTES, assign, cut_slices, divide_into_fragments, spread
from commlayer.planner.model import ZERO, Cluster, Node
from commlayer.planner.search.options import Catalog
from commlayer.planner.tensors import nonzero_numel
from commlayer.records import Job, Slice

EVEN = 0.1
"""Relative tolerance: link rates that differ by at most this fraction count as equal."""
LEAST_PART = 0.05
"""A node gets no server if its part of the sums would be smaller than this fraction of the largest part."""


class Hosts(NamedTuple):
    """Indices of the nodes that run servers, and each server's fraction of the sums; `parts` is empty for a single server."""

    places: tuple[int, ...]
    parts: tuple[float, ...] = ()


def host_sets(cluster: Cluster) -> list[Hosts]:
    """Sets of nodes to run servers: all nodes that can, with equal parts; nodes with parts in proportion to their links; the
    node with the fastest link only.

    Equal parts balance summation and encoding best; parts in proportion to links balance transfers.
    """
    able = [i for i, node in enumerate(cluster.nodes) if node.server]
    if len(able) < 2:
        return [Hosts(tuple(able))]
    evenly = Hosts(tuple(able), (1 / len(able),) * len(able))
    owned = link_shares(cluster)
    parts = {i: part for i, part in enumerate(owned) if part >= LEAST_PART * max(owned)}
    fitted = Hosts(tuple(parts), tuple(part / sum(parts.values()) for part in parts.values()) if len(parts) > 1 else ())
    alike = fitted.places == evenly.places and max(fitted.parts) <= min(fitted.parts) * (1 + EVEN)
    fastest = Hosts((max(able, key=lambda i: (_bps(cluster.nodes[i]), -i)),))
    return list(dict.fromkeys([evenly, evenly if alike else fitted, fastest]))


def equal_links(cluster: Cluster) -> bool:
    rates = [_bps(node) for node in cluster.nodes if node.server]
    return not rates or max(rates) <= min(rates) * (1 + EVEN)


def _bps(node: Node) -> float:
    return min(node.link.up_bps, node.link.down_bps)


def link_shares(cluster: Cluster) -> tuple[float, ...]:
    """The fraction of the model that each node of the cluster sums in the fastest split, if every training node sends and
    receives the whole model. All fractions sum to 1; a node without a server has 0."""
    n = sum(1 for node in cluster.nodes if node.ranks)
    # A training node sends and receives all bytes, unless it is the only one and hosts the server. Seconds are for one bit.
    low_s = max((1 / _bps(node) for node in cluster.nodes if node.ranks and not (node.server and n == 1)), default=0.0)
    high_s = max([low_s, *(n / _bps(node) for node in cluster.nodes if node.server)]) * 2
    for _ in range(200):
        middle_s = (low_s + high_s) / 2
        if middle_s in (low_s, high_s):
            break
        if sum(_capacity(node, n, middle_s) for node in cluster.nodes) >= 1:
            high_s = middle_s
        else:
            low_s = middle_s
    rooms = [_capacity(node, n, high_s) for node in cluster.nodes]
    total = sum(rooms)
    return tuple(room / total for room in rooms)


def _capacity(node: Node, n: int, seconds: float) -> float:
    """The largest fraction of a bit that the node can sum within `seconds`."""
    passes = seconds * _bps(node)
    if not node.server:
        return 0.0
    if not node.ranks:
        return passes / n
    if n <= 2:
        # The node's link is busy for 1 - share + (n-1) share passes, which does not grow with share if n <= 2.
        return 1.0 if passes >= n - 1 else 0.0
    return min(1.0, max(0.0, (passes - 1) / (n - 2)))


class PlacedPart(NamedTuple):
    """A bucket of the future plan: one bucket of the search, or a part of one."""

    origin: int
    """Index of the bucket of the search."""
    slices: tuple[Slice, ...]
    numel: int
    option: int
    server: int = 0
    owner: int = 0


ANY = -1
"""Placeholder for the server of a part that has not been assigned to a server yet."""


def cut_and_place(
    job: Job, groups: Sequence[tuple[Slice, ...]], options: Sequence[int], catalog: Catalog, finely: int, *,
    fragments: int, ranks_per_node: int, last_first: bool, least_nbytes: int,
) -> list[PlacedPart]:
    """Cuts buckets and assigns the parts to servers; `options` has the index of each bucket's option.

    Buckets that use servers are cut so that each server gets at least `finely` parts, and a part of each fragment. Each part
    goes to the server, and to the rank of the node, with the least load.

    `last_first`: places the last parts first. If computing hides the exchange of the others, a step waits for the server that
    has most of the last ones. `least_nbytes`: smallest part.
    """
    hosts, shares = len(catalog.prices.hosts), catalog.prices.spread
    sizes = [sum(s.numel for s in slices) for slices in groups]
    total = max(1, sum(numel for numel, option in zip(sizes, options, strict=True) if catalog.options[option].served))
    result: list[PlacedPart] = []
    for b, (slices, numel, option) in enumerate(zip(groups, sizes, options, strict=True)):
        cuts = catalog.options[option].served and not parse_spec(catalog.options[option].codec).needs_shape
        count = -(-numel * max(finely, fragments) * hosts // total) if cuts else 1
        count = max(1, min(count, hosts, numel * ELEMENT_NBYTES // least_nbytes))
        each = len(set(shares)) > 1 and count == hosts  # servers sum unequal parts
        ends = [int(numel * end) for end in accumulate(shares[:-1])] if each else [numel * i // count for i in range(1, count)]
        pieces = cut_slices(slices, ends) if ends else [slices]
        for host, ((start, stop), piece) in enumerate(zip(pairwise((0, *ends, numel)), pieces, strict=True)):
            result.append(PlacedPart(b, piece, stop - start, option, host if each else ANY))
    served = [i for i, part in enumerate(result) if catalog.options[part.option].served]
    sent = {option: sum([task.nbytes for task in catalog.template(option).tasks], ZERO)
            for option in dict.fromkeys(result[i].option for i in served)}
    weights = {i: int(sent[result[i].option](nonzero_numel(job, result[i].slices))) for i in served}
    for i, owner in zip(served, spread(list(weights.values()), ranks_per_node), strict=True):
        result[i] = result[i]._replace(owner=owner)
    loads = [0.0] * hosts
    for places in divide_into_fragments(result, min(fragments, len(result))):
        free = [i for i in places if i in weights and result[i].server == ANY]
        if fragments > 1:  # a fragment waits for the server with the most bytes, so place the largest first
            free.sort(key=weights.__getitem__, reverse=True)
        elif last_first:
            free.reverse()
        for i, server in zip(free, assign([weights[i] for i in free], shares or (1.0,), loads), strict=True):
            result[i] = result[i]._replace(server=server)
    return [part._replace(server=max(part.server, 0)) for part in result]
