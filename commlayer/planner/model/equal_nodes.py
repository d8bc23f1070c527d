"""Folds equal nodes into groups, so that planning time depends on the number of different nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from commlayer.errors import InvalidInput
from commlayer.planner.model.cluster import Cluster, Node


class Group(NamedTuple):
    """Nodes that do the same work at the same time. The first node's lanes represent those of all."""

    name: str
    """Name in lanes: the first node's."""
    node: Node
    members: tuple[int, ...]
    """Places in the cluster."""
    hosts: bool
    """Whether each of them runs a summation server."""

    @property
    def nodes(self) -> int:
        return len(self.members)

    @property
    def workers(self) -> int:
        """Number of its nodes that train."""
        return self.nodes if self.node.ranks else 0


def fold(cluster: Cluster, hosts: Sequence[int], *, spread: bool = False) -> tuple[Group, ...]:
    """Groups in the order of their first nodes. `hosts` are the places of the nodes with servers.

    A node with a server is its own group, unless every bucket is `spread` over all servers. Nodes that neither train nor host
    a server are left out.
    """
    for host in hosts:
        if not 0 <= host < len(cluster.nodes):
            raise InvalidInput("E-PLAN-INPUT", f"host {host}: the cluster has nodes 0 to {len(cluster.nodes) - 1}")
    places_of: dict[object, list[int]] = {}
    for place, node in enumerate(cluster.nodes):
        if not node.ranks and place not in hosts:
            continue
        alone = place if place in hosts and not spread else -1
        same = (node.ranks, node.device, node.link, node.intra_bps, node.intra_alpha_s, node.speed)
        places_of.setdefault((same, place in hosts, alone), []).append(place)
    return tuple(
        Group(cluster.nodes[places[0]].name, cluster.nodes[places[0]], tuple(places), places[0] in hosts)
        for places in places_of.values()
    )
