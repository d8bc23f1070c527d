"""All ranks measure the links between them, tell each other, and keep to what they carry. Plans nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from commlayer.autotune.measure import link_rates
from commlayer.cluster.groups import Groups
from commlayer.config import host_port
from commlayer.engine.connection import Connection
from commlayer.observe import InterfaceCounters, Rates, Throughput, counters_towards
from commlayer.observe.link_watch import PAYLOAD
from commlayer.planner.model.cluster import Link


class RankMeasurement(NamedTuple):
    """What one rank measured."""

    compute_s: float
    step_s: float
    up_bps: float
    down_bps: float
    alpha_s: float
    balanced: float = 0.0
    """Whether its script moves shares of the batch."""


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
UNKNOWN = Rates(0.0, 0.0)


OPENING = 4
"""Round trips of a turn in which windows open. They begin at what steps carried, where that is known."""
DRAINED = 3
"""Round trips at the end of a turn in which most of what is under way comes through; the rest does while others' windows
open."""
LEAST_TURNS, FEW_SERVERS_TURNS = 2, 4
"""Each way. With half of the nodes in each turn and servers on all of them, a server hears no more at once than one sender's
part. Where fewer nodes have servers, others share these."""
LONGEST_S = 0.3
"""Of a round trip that turns wait for. Behind a longer one a probe finds little, and what steps carried is what is known."""
TOLD_BPS = 20e6
"""Faster links are probed in any case: what held steps up may have been processors, or servers that wait for each other."""
BUSY, BUSY_TRIPS = 0.35, 8
"""What went on for this part of the steps, and for so many round trips, which is longer than windows take to open, was held up
by the link."""


class _Known(NamedTuple):
    """What a node tells the others ahead of a probe. 0: it does not know."""

    up_bps: float = 0.0
    down_bps: float = 0.0
    round_trip_s: float = 0.0
    asks: float = 0.0
    """Whether it has another node's server to ask."""


class Seen(NamedTuple):
    """Of a node's link in steps, by its counters."""

    carried: Throughput
    """What it carried."""
    since_s: float
    """In so many seconds, other than steps' among them."""


def seen_by(meter: InterfaceCounters) -> Seen:
    """Since the last look."""
    since_s = meter.since_s
    return Seen(meter.look(), since_s)


def probed(
    made: Connection, budget_s: float, seen: Seen | None = None, steps_s: float = 0.0, *, expected: Rates = UNKNOWN,
) -> Ways:
    """Rates of this node's link; all ranks call it together, and `gathered` behind it, which waits for the last. It asks
    servers on other nodes; zeros where there are none. `seen`: in steps that took `steps_s` in all; what that tells on all
    nodes is not measured. `expected`: what the link carries at least, as far as is known: windows begin there."""
    groups = _groups(made)
    assert made.uplink is not None
    away = [server.id for server in made.uplink.view.servers if server.node != groups.node]
    asks = bool(away) and groups.local == 0
    network, patience_s = link_rates.Asking(made.uplink.probe), min(10 * budget_s + 10, groups.timeout_s)
    mine = _Known()
    if asks:
        round_trip_s = link_rates.round_trip(network, away[0], patience_s)
        mine = _Known(*sustained(seen, steps_s, round_trip_s), round_trip_s, 1.0)
    nodes = _told(groups, mine)
    # Where some node's way down was not busy, what held up the others' ways up may have been a slow node that they send to.
    if asks and any(node.asks and not (node.up_bps and node.down_bps) for node in nodes):
        longest_s = min(LONGEST_S, max(link_rates.LEAST_ROUND_TRIP_S, *(node.round_trip_s for node in nodes)))
        asking = [number for number, node in enumerate(nodes) if node.asks]
        everywhere = len({server.node for server in made.uplink.view.servers}) >= len(asking)
        turns, turn_s = turns_of(len(asking), budget_s, longest_s, everywhere=everywhere)
        mine_at = asking.index(groups.node) % turns
        begin = time.monotonic()  # all have heard the others at about the same time, so turns need no meeting
        found = [mine.up_bps, mine.down_bps]
        for way in (link_rates.UP, link_rates.DOWN):
            time.sleep(max(0.0, begin + (way * turns + mine_at) * turn_s - time.monotonic()))
            expected_bps = max(expected[way], found[link_rates.UP] if way == link_rates.DOWN else 0.0)
            found[way] = max(found[way], link_rates.rate(
                network, way, away, mine.round_trip_s, turn_s - DRAINED * longest_s, patience_s, expected_bps=expected_bps))
        mine = mine._replace(up_bps=found[link_rates.UP], down_bps=found[link_rates.DOWN])
    # To the server and back, and from each machine to the network between them: four ways of about equal length.
    return mine.up_bps, mine.down_bps, mine.round_trip_s / 4


def sustained(seen: Seen | None, steps_s: float, round_trip_s: float) -> tuple[float, float]:
    """Rates up and down that steps have shown to be the link's; 0 where they have not."""
    if seen is None:
        return 0.0, 0.0
    least_s = max(BUSY * steps_s, BUSY_TRIPS * round_trip_s)
    busy = [way.bps < TOLD_BPS and way.share * seen.since_s >= least_s for way in seen.carried]
    up, down = (PAYLOAD * way.bps if known else 0.0 for way, known in zip(seen.carried, busy, strict=True))
    return up, down


def turns_of(nodes: int, budget_s: float, round_trip_s: float, *, everywhere: bool = True) -> tuple[int, float]:
    """In how many turns nodes send, and then receive, and the seconds of one: as many as there is time for. Nodes that send at
    once meet at servers, and find a part of what each could send alone. `everywhere`: all of them have servers."""
    least_s = (OPENING + DRAINED) * round_trip_s
    turns = min(nodes, max(LEAST_TURNS if everywhere else FEW_SERVERS_TURNS, int(budget_s / 2 / least_s)))
    return turns, max(budget_s / 2 / turns, least_s)


def _told(groups: Groups, mine: _Known) -> list[_Known]:
    """Of all nodes, in their order."""
    rows = groups.gather_all(torch.tensor(mine, dtype=torch.float64, device=groups.device)).tolist()
    return [_Known(*row) for row in rows[:: groups.ranks_per_node]]


def at_least(ways: Ways, carried: Throughput | None) -> Ways:
    """What a link was seen to carry in steps it can carry: a probe is short."""
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
