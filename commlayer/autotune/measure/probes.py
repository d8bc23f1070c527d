"""Measures the links of a running job's nodes: by probes in turns, and from the traffic of steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple, TypeVar

import torch

from commlayer.autotune.measure import link_rates
from commlayer.cluster.processes.collectives import Groups, all_or_none
from commlayer.config import host_port
from commlayer.engine.job.job import DistributedJob
from commlayer.observe.interface_counters import InterfaceCounters, Throughput, counter_reader
from commlayer.observe.link_monitor import PAYLOAD, Rates
from commlayer.observe.step_trace import RecordedStep
from commlayer.planner.model import Link
from commlayer.transport import own_address

WAITED = 0.5
"""A recorded step was limited by communication if it waited for at least this fraction of its time."""
NodeLink = tuple[float, float, float]
"""Upload and download rate of a node in bit/s, and latency to the core of the network in seconds."""
UNKNOWN = Rates(0.0, 0.0)
TRIP = 4
"""A round trip crosses this many links of similar latency: from each machine to the core of the network and back."""
SHORTER, LONGER = 0.5, 10.0
"""The rates of the last run hold if the round trip is between SHORTER and LONGER times that of the last run."""
NEAREST_S = 0.001
"""Shorter round trips, in seconds, count as this long there, since busy machines answer later."""
SENDING = 7
"""Round trips of a probe's turn in which data is sent. TCP windows double in each, from 14 kB a connection. On links of up to
about 100 Mb/s they open in the first four or five, and the last ones show the rate."""
DRAINED = 3
"""Round trips at the end of a probe's turn, in which sent data arrives. The rest arrives while the windows of the
next turn open."""
LEAST_TURNS, FEW_SERVERS_TURNS = 1, 4
"""Minimum number of turns per direction: if all nodes have servers, and if fewer do. Where all have servers, each node may send
to all others at once, because each receives as much as it sends. The download then counts as no faster than the others'
uploads. With fewer servers, senders would share them."""
LONGEST_S = 0.3
"""Longest round trip, in seconds, that turns allow for. With longer round trips probes measure little, and only the traffic of
steps shows the rate."""
FAST_BPS = 20e6
"""Links faster than this many bit/s are always probed, because CPUs, or servers that wait for each other, may have limited the
steps."""
BUSY, BUSY_TRIPS = 0.25, 8
"""A link limited the steps if the link was busy for at least this fraction of their time, and for this many round trips; TCP
windows open in fewer."""


def communication_bound(steps: Sequence[RecordedStep]) -> bool:
    """Returns whether steps mostly waited for communication after their backward passes. If the steps did not wait, gradients
    may have come too slowly to fill the link, so the link did not limit the step."""
    waited_s = median(s.marks["end"] - s.marks["backward"] for s in steps)
    return waited_s >= WAITED * median(s.marks["end"] for s in steps)


T = TypeVar("T", bound=tuple[float, ...])


def gather_rows(groups: Groups, row: T) -> list[T]:
    """Exchanges one row of numbers of each rank, and returns all rows in rank order; collective."""
    rows = groups.gather_all(torch.tensor(row, dtype=torch.float64, device=groups.device)).tolist()
    return [type(row)(*values) for values in rows]


class KnownLink(NamedTuple):
    """What a node knows about its link before a probe. Integers, which all nodes exchange; 0: unknown."""

    up_bps: int = 0
    down_bps: int = 0
    round_trip_ns: int = 0
    can_probe: int = 0
    """1: the node can probe a server on another node; otherwise 0."""

    @property
    def round_trip_s(self) -> float:
        return self.round_trip_ns / 1e9


class SeenTraffic(NamedTuple):
    """Traffic of a node's link during steps, from the interface counters."""

    carried: Throughput
    """Traffic while the link was busy."""
    since_s: float
    """Seconds that the counters cover, including time outside steps."""


def read_traffic(meter: InterfaceCounters) -> SeenTraffic:
    """Returns the traffic since the previous reading of the counters."""
    since_s = meter.since_s
    return SeenTraffic(meter.look(), since_s)


def known_links(
    context: DistributedJob, budget_s: float, seen: SeenTraffic | None = None, steps_s: float = 0.0, *,
    last: Link | None = None,
) -> list[KnownLink]:
    """Measures round trips, and returns what is known about the link of each node; collective. `seen`: traffic in steps of
    `steps_s` seconds in total. `last`: an earlier measurement of this node's link, which is believed if the round
    trip is 0.5 to 10 times as long as then (RFC 9959)."""
    groups = context.groups
    network, patience_s, away = _probing(context, budget_s)
    with all_or_none(groups, "probing links", len(KnownLink._fields)) as exchange:
        if away and groups.local == 0:
            round_trip_s = link_rates.round_trip(network, away[0], patience_s)
            rates = find_limiting_rates(seen, steps_s, round_trip_s)
            before_s, now_s = (max(NEAREST_S, seconds) for seconds in (TRIP * last.alpha_s if last else 0.0, round_trip_s))
            if last is not None and SHORTER * before_s <= now_s <= LONGER * before_s:
                rates = rates[0] or last.up_bps, rates[1] or last.down_bps
            exchange.mine = [*KnownLink(round(rates[0]), round(rates[1]), round(1e9 * round_trip_s), 1)]
    return [KnownLink(*exchange.rows[first]) for first in groups.first_ranks]


def _probing(context: DistributedJob, budget_s: float) -> tuple[link_rates.RequestNetwork, float, list[int]]:
    """Returns the network of a probe, the longest wait for its answers in seconds, and the servers on other nodes."""
    groups = context.groups
    # No home has a server, and homes are renumbered when members change.
    away = [server.id for server in context.uplink.epoch.servers if context.elastic or server.node != groups.node]
    return link_rates.RequestNetwork(context.uplink.probe), min(10 * budget_s + 10, groups.timeout_s), away


def probe_own_link(
    context: DistributedJob, nodes: Sequence[KnownLink], budget_s: float, *, expected: Rates = UNKNOWN,
) -> NodeLink:
    """Measures this node's link against servers on other nodes, unless the rates of all `nodes` are known; returns zeros if
    there are none. All ranks must call this function and then `gather_rows`, which waits for the last rank. `expected`: known
    lower bounds of the rates, which set the initial TCP windows."""
    groups = context.groups
    network, patience_s, away = _probing(context, budget_s)
    mine = nodes[groups.node] if groups.local == 0 else KnownLink()
    measured: list[float] = [mine.up_bps, mine.down_bps]
    with all_or_none(groups, "probing links"):
        # If a node's download was not busy, a slow receiving node may have limited the uploads of others.
        farthest_s = max(node.round_trip_s for node in nodes)
        if mine.can_probe and any(node.can_probe and not (node.up_bps and node.down_bps) for node in nodes):
            longest_s = min(LONGEST_S, max(link_rates.LEAST_ROUND_TRIP_S, farthest_s))
            asking = [number for number, node in enumerate(nodes) if node.can_probe]
            everywhere = len({server.node for server in context.uplink.epoch.servers}) >= len(asking)
            turns, turn_s = plan_probe_turns(len(asking), budget_s, longest_s, everywhere=everywhere)
            mine_at = asking.index(groups.node) % turns
            begin = time.monotonic()  # all ranks have just exchanged values, so turns need no further synchronization
            for direction in (link_rates.UP, link_rates.DOWN):
                time.sleep(max(0.0, begin + (direction * turns + mine_at) * turn_s - time.monotonic()))
                expected_bps = max(expected[direction], measured[link_rates.UP] if direction == link_rates.DOWN else 0.0)
                measured[direction] = max(measured[direction], link_rates.rate(
                    network, direction, away, mine.round_trip_s, turn_s - DRAINED * longest_s, patience_s,
                    expected_bps=expected_bps))
    return measured[link_rates.UP], measured[link_rates.DOWN], mine.round_trip_s / TRIP


def own_uplink(context: DistributedJob, budget_s: float) -> float:
    """Measures the upload rate of this rank's link by itself, in bit/s; 0 if there is no server on another node."""
    network, patience_s = link_rates.RequestNetwork(context.uplink.probe), 10 * budget_s + 10
    servers = [server.id for server in context.uplink.epoch.servers]
    round_trip_s = link_rates.round_trip(network, servers[0], patience_s) if servers else 0.0
    return link_rates.rate(network, link_rates.UP, servers, round_trip_s, budget_s, patience_s) if servers else 0.0


def find_limiting_rates(seen: SeenTraffic | None, steps_s: float, round_trip_s: float) -> tuple[float, float]:
    """Returns the upload and download rates that limited the steps; 0 for a direction in which the link did not limit them."""
    if seen is None:
        return 0.0, 0.0
    least_s = max(BUSY * steps_s, BUSY_TRIPS * round_trip_s)
    busy = [direction.bps < FAST_BPS and direction.share * seen.since_s >= least_s for direction in seen.carried]
    up, down = (PAYLOAD * direction.bps if known else 0.0 for direction, known in zip(seen.carried, busy, strict=True))
    return up, down


def plan_probe_turns(nodes: int, budget_s: float, round_trip_s: float, *, everywhere: bool = True) -> tuple[int, float]:
    """Returns the number of turns per direction, and seconds per turn; as many turns as the time allows. If only some nodes
    have servers, nodes that send in the same turn share them, so each measures only a part of its rate. `everywhere`: True: all
    nodes have servers."""
    least_s = (SENDING + DRAINED) * round_trip_s
    turns = min(nodes, max(LEAST_TURNS if everywhere else FEW_SERVERS_TURNS, int(budget_s / 2 / least_s)))
    return turns, max(budget_s / 2 / turns, least_s)


def raise_rates(link: NodeLink, carried: Throughput | None = None, fastest_down_bps: float = 0.0) -> NodeLink:
    """Returns `link` with rates raised to those of the steps, because short probes measure too low rates. The download is also
    raised to the fastest one that the interface has counted during the probes, because probes on a busy machine wait for its
    threads."""
    up_bps, down_bps, alpha_s = link
    if not up_bps:  # there is no server on another node
        return link
    carried_up_bps, carried_down_bps = (0.0, 0.0) if carried is None else (direction.bps for direction in carried)
    return max(up_bps, PAYLOAD * carried_up_bps), max(down_bps, PAYLOAD * max(carried_down_bps, fastest_down_bps)), alpha_s


def make_traffic_meter(context: DistributedJob) -> InterfaceCounters | None:
    """Returns a reader of this node's interface counters. Returns None on all ranks of a node except its first, and if the
    system has no counters."""
    if context.groups.local:
        return None
    servers = [host_port(server.address)[0] for server in context.uplink.epoch.servers]
    counters = counter_reader(own_address.interface_towards(servers))
    return None if counters is None else InterfaceCounters(counters)
