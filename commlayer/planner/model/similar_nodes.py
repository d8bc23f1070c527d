"""Merges nearly equal nodes into one kind, so that planning time depends on the number of kinds.

Measured links always differ a little. A kind is as slow as its slowest node, for which the others wait anyway. Small clusters
keep every node as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from commlayer.planner.model.cluster import Cluster, Link, Node

EXACT = 6
"""Up to this many kinds are kept as they are."""
FEW = 3
"""Target number of kinds if there are more, while merged nodes differ by less than FAR; otherwise EXACT."""
ERROR, FAR = 0.05, 0.5
"""Relative difference between two measurements of one link; doubled until few kinds remain. Beyond FAR, nodes count as
different."""


def condensed(cluster: Cluster) -> Cluster:
    """The same nodes at the same places, reduced to few kinds.

    >>> links = [Link(1e8 * (1 + i / 100), 1e9, 0.01) for i in range(20)]
    >>> made = condensed(Cluster(tuple(Node(f"n{i}", 1, "cpu", link) for i, link in enumerate(links))))
    >>> [round(bps / 1e6) for bps in sorted({node.link.up_bps for node in made.nodes})]
    [100, 111]
    """
    if len({_unnamed(node) for node in cluster.nodes}) <= EXACT:
        return cluster
    error, groups = ERROR, _groups(cluster.nodes, ERROR)
    least = len({_sort(node) for node in cluster.nodes})
    while len(groups) > max(least, FEW if 2 * error <= FAR else EXACT):
        error *= 2
        groups = _groups(cluster.nodes, error)
    nodes = list(cluster.nodes)
    for places in groups:
        slowest = _slowest([cluster.nodes[place] for place in places])
        for place in places:
            nodes[place] = structs.replace(slowest, name=cluster.nodes[place].name)
    return structs.replace(cluster, nodes=tuple(nodes))


def _groups(nodes: Sequence[Node], error: float) -> list[list[int]]:
    """Groups of nodes whose rates differ by at most `error`. Each group starts with the slowest node left."""
    left = sorted(range(len(nodes)), key=lambda place: (_sort(nodes[place]), _rates(nodes[place]), place))
    groups = []
    while left:
        first = nodes[left[0]]
        group = [left[0]]
        low = high = _rates(first)
        for place in left[1:]:
            each = _rates(nodes[place])
            lower, higher = tuple(map(min, low, each)), tuple(map(max, high, each))
            if _sort(nodes[place]) == _sort(first) and all(b <= a * (1 + error) for a, b in zip(lower, higher, strict=True)):
                low, high = lower, higher
                group.append(place)
        groups.append(group)
        taken = set(group)
        left = [place for place in left if place not in taken]
    return groups


def _sort(node: Node) -> tuple[object, ...]:
    """Properties in which nodes of one kind must be equal."""
    return node.device, node.ranks, node.server


def _rates(node: Node) -> tuple[float, ...]:
    """Rates, larger is faster; only those that the node has."""
    inside = (node.intra_bps, 1 / max(node.intra_alpha_s, 1e-9)) if node.ranks > 1 else ()
    # Latencies below 0.02 ms do not distinguish links.
    return (node.link.up_bps, node.link.down_bps, node.speed, 1 / max(node.link.alpha_s, 2e-5), *inside)


def _slowest(nodes: Sequence[Node]) -> Node:
    link = Link(min(n.link.up_bps for n in nodes), min(n.link.down_bps for n in nodes), max(n.link.alpha_s for n in nodes))
    return structs.replace(nodes[0], link=link, speed=min(n.speed for n in nodes), intra_bps=min(n.intra_bps for n in nodes),
                           intra_alpha_s=max(n.intra_alpha_s for n in nodes))


def _unnamed(node: Node) -> Node:
    return structs.replace(node, name="")
