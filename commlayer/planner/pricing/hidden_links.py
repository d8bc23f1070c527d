"""What of a link transfers can count on that are to hide behind computing for long. Knows a cluster; no plan."""

from __future__ import annotations

from msgspec import structs

from commlayer.planner.model.cluster import Cluster

FULL = 0.75
"""Part of a link. Four hosts at 10 Mb/s and 80 ms hid exchanges that filled two thirds of their links, and waited for nearly
every one that was to fill 90 % or more: flows that share a long link leave some of it empty, at times for seconds. An exchange
that is waited for is as long as it is, whatever it fills."""


def hidden(cluster: Cluster) -> Cluster:
    """With links that carry no more than that."""
    return structs.replace(cluster, nodes=tuple(
        structs.replace(node, link=structs.replace(node.link, up_bps=FULL * node.link.up_bps,
                                                   down_bps=FULL * node.link.down_bps)) for node in cluster.nodes))
