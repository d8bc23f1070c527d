"""Decides how much each server sums, and which bucket goes to which server.

A server on a node that trains costs its link (n-1) times the owned bytes in each direction instead of 1: the n-1 others push
them; its own part never leaves the node. A server elsewhere costs n times. With n training nodes, k others, a model of M
bytes and all links at B bytes per second, the step is shortest if all links are busy equally long (Jiang et al., OSDI 2020):

  D = n^2 + kn - 2k     others own 2(n-1)M/D each, training nodes (n-k)M/D     t = 2n(n-1)M/(DB)     for k <= n

`shares` finds the same split by bisection on t, for unequal links.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from commlayer.errors import InvalidInput
from commlayer.planner.model.cluster import Cluster, Node


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
    whole = sum(rooms)
    owned = tuple(room / whole for room in rooms)
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
