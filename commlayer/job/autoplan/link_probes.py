"""All ranks measure the links between them, tell each other, and keep to what they carry. Plans nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from commlayer.config import host_port
from commlayer.job.connection import Connection
from commlayer.measure import link_rates
from commlayer.observe import InterfaceCounters, Throughput, counters_towards
from commlayer.observe.link_watch import PAYLOAD
from commlayer.planner.model.cluster import Link
from commlayer.transport.groups import Groups


class RankMeasurement(NamedTuple):
    """What one rank measured."""

    compute_s: float
    step_s: float
    up_bps: float
    down_bps: float
    alpha_s: float
    weighed: float = 0.0
    """Whether its script weighs shares of a batch."""


def server_nodes_of(made: Connection) -> list[int]:
    """The node of each server, beside those of the workers that there are."""
    assert made.uplink is not None
    nodes = [s.node for s in made.uplink.view.servers]
    if made.members is None:
        return nodes
    elsewhere = sorted(set(nodes))  # no home has one, and homes are counted anew when others go or come
    return [made.world + elsewhere.index(node) for node in nodes]


Ways = tuple[float, float, float]
"""(bit/s up, bit/s down, seconds to the core of the network)."""


UP_SHARE = 0.4
"""Part of a probe's time for sending: all nodes send at once, as they do in a step. They receive in turn, or the senders' links
would set the rate."""
DRAINED = 3
"""Round trips behind a turn until what was under way is through."""


def probed(made: Connection, budget_s: float) -> Ways:
    """Rates of this node's link; all ranks call it together, and `gathered` behind it, which waits for the last. It asks
    servers on other nodes; zeros where there are none."""
    groups = _groups(made)
    assert made.uplink is not None
    nodes = groups.world // groups.ranks_per_node
    away = [server.id for server in made.uplink.view.servers if server.node != groups.node]
    asks = bool(away) and groups.local == 0
    up_s, down_s = UP_SHARE * budget_s, (1 - UP_SHARE) * budget_s / nodes
    network, patience_s = link_rates.Asking(made.uplink.probe), min(10 * budget_s + 10, groups.timeout_s)
    up_bps = down_bps = round_trip_s = 0.0
    if asks:
        round_trip_s = link_rates.round_trip(network, away[0], patience_s)
    groups.barrier()
    if asks:
        up_bps = link_rates.rate(network, link_rates.UP, away, round_trip_s, up_s, patience_s)
    told = groups.gather_all(torch.tensor([round_trip_s], dtype=torch.float64, device=groups.device))
    if asks:
        # All have heard the others at about the same time, so turns need no meeting, which takes three round trips.
        time.sleep(groups.node * (down_s + DRAINED * float(told.max())))
        down_bps = link_rates.rate(network, link_rates.DOWN, away, round_trip_s, down_s, patience_s, expected_bps=up_bps)
    # To the server and back, and from each machine to the network between them: four ways of about equal length.
    return up_bps, down_bps, round_trip_s / 4


def at_least(ways: Ways, carried: Throughput | None) -> Ways:
    """What a link was seen to carry in steps it can carry: a probe is short, and all nodes send at once in it."""
    up_bps, down_bps, alpha_s = ways
    if carried is None or not up_bps:  # there is no other node's server to ask
        return ways
    return max(up_bps, PAYLOAD * carried.up.bps), max(down_bps, PAYLOAD * carried.down.bps), alpha_s


def gathered(made: Connection, row: RankMeasurement) -> list[RankMeasurement]:
    """The rows of all ranks, in rank order; all call it together."""
    groups = _groups(made)
    rows = groups.gather_all(torch.tensor(row, dtype=torch.float64, device=groups.device)).tolist()
    return [RankMeasurement(*r) for r in rows]


def links_of(made: Connection, rows: Sequence[RankMeasurement]) -> list[Link]:
    """One of each node. A node with the only server has no other to ask: its link is as fast as the fastest that others saw."""
    firsts = rows[:: _groups(made).ranks_per_node]
    seen = [row for row in firsts if row.up_bps]
    # What others received from there is its own way up, what they sent is its way down.
    best = Link(max(r.down_bps for r in seen), max(r.up_bps for r in seen), min(r.alpha_s for r in seen))
    return [Link(r.up_bps, r.down_bps, r.alpha_s) if r.up_bps else best for r in firsts]


def meter_of(made: Connection) -> InterfaceCounters | None:
    """A meter of what this node's link carries, on the node's first rank, where the system counts it."""
    assert made.uplink is not None
    if _groups(made).local:
        return None
    counters = counters_towards([host_port(server.address) for server in made.uplink.view.servers])
    return None if counters is None else InterfaceCounters(counters)


def pace(made: Connection, links: Sequence[Link]) -> None:
    """From now on this rank, and the servers on its node, send little faster than the node's link carries."""
    groups = _groups(made)
    assert made.uplink is not None
    up_bps = link_rates.HEADROOM * links[groups.node].up_bps
    made.uplink.pace(up_bps / groups.ranks_per_node)
    if groups.local == 0:
        made.uplink.pace_servers(groups.node, up_bps)


def _groups(made: Connection) -> Groups:
    assert made.groups is not None
    return made.groups
