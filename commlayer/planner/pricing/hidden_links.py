"""Reduces link rates for transfers that should stay hidden behind computing."""

from __future__ import annotations

from msgspec import structs

from commlayer.planner.model.cluster import Cluster

FULL = 0.75
"""Usable part of a link. Four hosts at 10 Mb/s and 80 ms hid exchanges that filled two thirds of their links. They waited
for nearly every exchange planned to fill 90 % or more: flows that share a long link leave part of it idle, at times for
seconds. Exchanges that are waited for are not affected."""


def hidden(cluster: Cluster) -> Cluster:
    """The cluster with links at that part of their rate."""
    return structs.replace(cluster, nodes=tuple(
        structs.replace(node, link=structs.replace(node.link, up_bps=FULL * node.link.up_bps,
                                                   down_bps=FULL * node.link.down_bps)) for node in cluster.nodes))
