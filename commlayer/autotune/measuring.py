"""Measurements of a running job: steps and links, for planning."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from statistics import median, median_low
from typing import NamedTuple

import torch

from commlayer.autotune.measure import link_rates
from commlayer.autotune.measure.calibration import CollectiveCosts
from commlayer.cluster.processes.collectives import Groups, all_or_none
from commlayer.config import host_port
from commlayer.engine.job.job import DistributedJob
from commlayer.engine.worker.worker import Worker
from commlayer.observe.link_monitor import PAYLOAD, InterfaceCounters, Rates, Throughput, counters_of
from commlayer.observe.step_trace import RecordedStep
from commlayer.planner.model import Cluster, Link, Node
from commlayer.records import Job
from commlayer.transport import own_address
from commlayer.transport.zero_chunks import CHUNK_NBYTES

WAITED = 0.5
"""A recorded step was limited by communication if it waited for at least this fraction of its time."""
CHUNK = CHUNK_NBYTES // 2
"""Elements of 16 bits in a zero chunk, which is sent or left out as one unit."""
LOOKED_AT = 4096
"""Maximum number of chunks per slice that are examined in order to count zeros."""


class Measurements(NamedTuple):
    """What a plan search knows about the job from measurements."""

    job: Job
    """The job's parameters, with this rank's step timing."""
    rows: list[RankMeasurement]
    """Measurements of all ranks, in rank order."""
    collectives: CollectiveCosts

    @property
    def step_s(self) -> float:
        """Median step time of the ranks, in seconds."""
        return median(row.step_s for row in self.rows)


def held_up(steps: Sequence[RecordedStep]) -> bool:
    """Returns whether steps mostly waited for communication after their backward passes. If they did not, gradients may have
    come too slowly to fill the link, so the link did not limit the step."""
    waited_s = median(s.marks["end"] - s.marks["backward"] for s in steps)
    return waited_s >= WAITED * median(s.marks["end"] for s in steps)


def energy_of(worker: Worker) -> tuple[float, ...]:
    """Returns the energy (squared norm) of each tensor's average gradient in the last step; empty if it was not finite. The
    averages are in the buckets until the next step."""
    energies = torch.zeros(len(worker.job.tensors), dtype=torch.float64)
    for bucket in worker.buckets:
        if not bucket.buffer:
            at = 0
            parts, y = [], bucket.y
            for s in bucket.slices:
                parts.append(y[at : at + s.numel].double().square().sum())
                at += s.numel
            energy = torch.stack(parts).cpu() / float(bucket.exchange.scaled) ** 2
            energies.index_add_(0, torch.tensor([s.tensor for s in bucket.slices]), energy)
    total = float(energies.sum())
    return tuple(energies.tolist()) if 0.0 < total < math.inf else ()


def filled_of(worker: Worker, workers: int) -> tuple[float, ...]:
    """Returns each tensor's nonzero fraction of the last step's gradient, averaged over this rank's gradient and the received
    average. Empty if all are 1.

    Only one of the two is still in memory. The other one is estimated: all ranks are assumed to send equally many nonzero
    elements, and a sum has at most all of these.
    """
    nonzero = [0.0] * len(worker.job.tensors)
    for bucket in worker.buckets:
        at = 0
        for s in bucket.slices:
            part = 1.0 if bucket.buffer else _nonzero(bucket.x[at : at + s.numel])
            # Unless the codec keeps its input, the result has overwritten the gradient.
            up_part, down_part = (part, min(1.0, workers * part)) if bucket.keeps else (part / workers, part)
            nonzero[s.tensor] += s.numel * (1.0 if part == 1.0 else (up_part + down_part) / 2)
            at += s.numel
    parts = tuple(part / info.numel if info.numel else 1.0 for part, info in zip(nonzero, worker.job.tensors, strict=True))
    return parts if min(parts, default=1.0) < 1.0 else ()


def _nonzero(x: torch.Tensor) -> float:
    """Estimates the nonzero fraction from a sample of chunks. Returns 1 if all elements are zero: such a step is not
    representative, because this rank had no gradient or no samples."""
    chunks = x[: x.numel() // CHUNK * CHUNK].view(-1, CHUNK)
    sample = chunks[:: (len(chunks) // LOOKED_AT) | 1]  # an odd stride does not hit the same column of every row
    part = float((sample != 0).any(1).float().mean()) if len(sample) else 1.0
    if part:
        return part
    return 1 / len(sample) if bool(x.any()) else 1.0


class RankMeasurement(NamedTuple):
    """Measurements of one rank. Numbers only, because ranks exchange them as a tensor."""

    compute_s: float
    step_s: float
    up_bps: float
    down_bps: float
    alpha_s: float
    balanced: float = 0.0
    """1: the rank's script uses load balancing; otherwise 0."""


def server_nodes_of(context: DistributedJob) -> list[int]:
    """Returns the node number of each server. Servers on other machines get numbers after those of the workers' nodes."""
    nodes = [s.node for s in context.uplink.epoch.servers]
    if not context.elastic:
        return nodes
    elsewhere = sorted(set(nodes))  # no site has a server, and sites are renumbered when members change
    return [context.world + elsewhere.index(node) for node in nodes]


Ways = tuple[float, float, float]
"""Upload and download rate of a node in bit/s, and latency to the core of the network in seconds."""
UNKNOWN = Rates(0.0, 0.0)


OPENING = 4
"""Round trips at the start of a probe's turn, in which TCP windows open. Windows start at the known rate, if there is one."""
DRAINED = 3
"""Round trips at the end of a probe's turn, in which sent data arrives. The rest arrives while the next senders' windows
open."""
LEAST_TURNS, FEW_SERVERS_TURNS = 2, 4
"""Minimum number of turns per direction: if all nodes have servers, and if fewer do. With two turns, half of the nodes send at
once, one per server. With fewer servers, senders would share them."""
LONGEST_S = 0.3
"""Longest round trip, in seconds, that turns allow for. With longer round trips probes measure little, and only the traffic of
steps shows the rate."""
FAST_BPS = 20e6
"""Links faster than this many bit/s are always probed, because CPUs, or servers that wait for each other, may have limited the
steps."""
BUSY, BUSY_TRIPS = 0.25, 8
"""A link limited the steps if it was busy for at least this fraction of their time, and for this many round trips; TCP windows
open in fewer."""


class _Known(NamedTuple):
    """What a node knows about its link before a probe. All nodes exchange these values; 0 means unknown."""

    up_bps: float = 0.0
    down_bps: float = 0.0
    round_trip_s: float = 0.0
    asks: float = 0.0
    """1: the node can probe a server on another node; otherwise 0."""


class SeenTraffic(NamedTuple):
    """Traffic of a node's link during steps, from the interface counters."""

    carried: Throughput
    """Traffic while the link was busy."""
    since_s: float
    """Seconds that the counters cover, including time outside steps."""


def seen_by(meter: InterfaceCounters) -> SeenTraffic:
    """Returns the traffic since the previous reading of the counters."""
    since_s = meter.since_s
    return SeenTraffic(meter.look(), since_s)


def probed(
    context: DistributedJob, budget_s: float, seen: SeenTraffic | None = None, steps_s: float = 0.0, *,
    expected: Rates = UNKNOWN,
) -> Ways:
    """Measures this node's link against servers on other nodes; returns zeros if there are none. All ranks must call this
    function and then `gathered`, which waits for the last rank. `seen`: traffic in steps of `steps_s` seconds in total; no
    link is probed if that traffic shows the rates of all nodes. `expected`: known lower bounds of the rates, which set the
    initial TCP windows."""
    groups = context.groups
    away = [server.id for server in context.uplink.epoch.servers if server.node != groups.node]
    asks = bool(away) and groups.local == 0
    network, patience_s = link_rates.RequestNetwork(context.uplink.probe), min(10 * budget_s + 10, groups.timeout_s)
    mine = _Known()
    with all_or_none(groups, "probing links"):
        if asks:
            round_trip_s = link_rates.round_trip(network, away[0], patience_s)
            mine = _Known(*sustained(seen, steps_s, round_trip_s), round_trip_s, 1.0)
    nodes = _shared(groups, mine)
    with all_or_none(groups, "probing links"):
        # If a node's download was not busy, a slow receiving node may have limited the uploads of others.
        if asks and any(node.asks and not (node.up_bps and node.down_bps) for node in nodes):
            longest_s = min(LONGEST_S, max(link_rates.LEAST_ROUND_TRIP_S, *(node.round_trip_s for node in nodes)))
            asking = [number for number, node in enumerate(nodes) if node.asks]
            everywhere = len({server.node for server in context.uplink.epoch.servers}) >= len(asking)
            turns, turn_s = turns_of(len(asking), budget_s, longest_s, everywhere=everywhere)
            mine_at = asking.index(groups.node) % turns
            begin = time.monotonic()  # all ranks have just exchanged values, so turns need no further synchronization
            rates = [mine.up_bps, mine.down_bps]
            for way in (link_rates.UP, link_rates.DOWN):
                time.sleep(max(0.0, begin + (way * turns + mine_at) * turn_s - time.monotonic()))
                expected_bps = max(expected[way], rates[link_rates.UP] if way == link_rates.DOWN else 0.0)
                rates[way] = max(rates[way], link_rates.rate(
                    network, way, away, mine.round_trip_s, turn_s - DRAINED * longest_s, patience_s, expected_bps=expected_bps))
            mine = mine._replace(up_bps=rates[link_rates.UP], down_bps=rates[link_rates.DOWN])
    # The round trip crosses four links of similar latency: from each machine to the core and back.
    return mine.up_bps, mine.down_bps, mine.round_trip_s / 4


def sustained(seen: SeenTraffic | None, steps_s: float, round_trip_s: float) -> tuple[float, float]:
    """Returns the upload and download rates that limited the steps; 0 for a direction in which the link did not limit them."""
    if seen is None:
        return 0.0, 0.0
    least_s = max(BUSY * steps_s, BUSY_TRIPS * round_trip_s)
    busy = [way.bps < FAST_BPS and way.share * seen.since_s >= least_s for way in seen.carried]
    up, down = (PAYLOAD * way.bps if known else 0.0 for way, known in zip(seen.carried, busy, strict=True))
    return up, down


def turns_of(nodes: int, budget_s: float, round_trip_s: float, *, everywhere: bool = True) -> tuple[int, float]:
    """Returns the number of turns per direction, and seconds per turn; as many turns as the time allows. Nodes that send in
    the same turn share servers, so each measures only a part of its rate. `everywhere`: True: all nodes have servers."""
    least_s = (OPENING + DRAINED) * round_trip_s
    turns = min(nodes, max(LEAST_TURNS if everywhere else FEW_SERVERS_TURNS, int(budget_s / 2 / least_s)))
    return turns, max(budget_s / 2 / turns, least_s)


def _shared(groups: Groups, mine: _Known) -> list[_Known]:
    """Exchanges the nodes' values and returns them in node order."""
    rows = groups.gather_all(torch.tensor(mine, dtype=torch.float64, device=groups.device)).tolist()
    return [_Known(*row) for row in rows[:: groups.ranks_per_node]]


def at_least(ways: Ways, carried: Throughput | None = None, fastest_down_bps: float = 0.0) -> Ways:
    """Returns `ways` with rates raised to those in steps, because short probes measure too low rates, and to the fastest
    download that the interface has counted meanwhile, because probes on a busy machine wait for its threads."""
    up_bps, down_bps, alpha_s = ways
    if not up_bps:  # there is no server on another node
        return ways
    carried_up_bps, carried_down_bps = (0.0, 0.0) if carried is None else (way.bps for way in carried)
    return max(up_bps, PAYLOAD * carried_up_bps), max(down_bps, PAYLOAD * max(carried_down_bps, fastest_down_bps)), alpha_s


def gathered(context: DistributedJob, row: RankMeasurement) -> list[RankMeasurement]:
    """Exchanges the measurements of all ranks and returns them in rank order; collective."""
    groups = context.groups
    rows = groups.gather_all(torch.tensor(row, dtype=torch.float64, device=groups.device)).tolist()
    return [RankMeasurement(*r) for r in rows]


def links_of(context: DistributedJob, rows: Sequence[RankMeasurement]) -> list[Link]:
    """Returns one link per node. A node with the only server cannot probe its link; the link counts as fast as the fastest
    other one."""
    firsts = rows[:: context.groups.ranks_per_node]
    probes = [row for row in firsts if row.up_bps]
    # The other nodes' downloads are uploads of the node with the server, and their uploads are its downloads.
    best = Link(max(r.down_bps for r in probes), max(r.up_bps for r in probes), min(r.alpha_s for r in probes))
    return [Link(r.up_bps, r.down_bps, r.alpha_s) if r.up_bps else best for r in firsts]


def cluster_of(
    links: Sequence[Link], rows: Sequence[RankMeasurement], inside: CollectiveCosts, server_nodes: Sequence[int], *,
    cuda: bool = False,
    reachable: bool = True, elsewhere_bps: float = 0.0,
) -> Cluster:
    """Returns the measured cluster: one link per node, one measurement per rank. `elsewhere_bps`: upload rate of servers on
    other machines, if step times have shown it. Else they upload as fast as the median node receives from them: a node that
    shares its machine with a server measures no link. They receive as fast as all nodes send, since most links receive faster
    than they send.

    Speeds are relative to rank 0, which plans with its own step timing and codec costs.
    """
    per_node = len(rows) // len(links)
    line = inside.inside
    nodes = []
    for number, link in enumerate(links):
        mine = rows[number * per_node : (number + 1) * per_node]
        nodes.append(Node(
            f"node{number}", per_node, "gpu" if cuda else "cpu", link, 8 / line.slope_s if line.slope_s else 0.0, line.floor_s,
            speed=rows[0].compute_s / max(row.compute_s for row in mine), server=number in server_nodes,
        ))
    elsewhere = Link(elsewhere_bps or median_low(link.down_bps for link in links), sum(link.up_bps for link in links),
                     min(link.alpha_s for link in links))
    nodes += [Node(f"node{number}", 0, "cpu", elsewhere) for number in range(len(links), max(server_nodes, default=0) + 1)]
    return Cluster(tuple(nodes), reachable)


def meter_of(context: DistributedJob) -> InterfaceCounters | None:
    """Returns a reader of this node's interface counters; None on ranks that are not the node's first, or if the system has no
    counters."""
    if context.groups.local:
        return None
    servers = [host_port(server.address)[0] for server in context.uplink.epoch.servers]
    counters = counters_of(own_address.interface_towards(servers))
    return None if counters is None else InterfaceCounters(counters)
