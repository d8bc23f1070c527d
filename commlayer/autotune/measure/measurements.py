"""What the ranks of a running job have measured: steps, gradients and links, as inputs of planning."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from statistics import median, median_low
from typing import NamedTuple

import torch
from msgspec import structs

from commlayer.autotune.measure.calibration import CollectiveCosts
from commlayer.cluster.processes.channels import node_ranks
from commlayer.engine.job.job import DistributedJob
from commlayer.engine.worker.site import LocalSite
from commlayer.engine.worker.worker import Worker
from commlayer.planner.model import Cluster, Link, Node
from commlayer.records import Job
from commlayer.transport.zero_chunks import CHUNK_NBYTES

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


class RankMeasurement(NamedTuple):
    """Measurements of one rank. Numbers only, because ranks exchange them as a tensor."""

    compute_s: float
    step_s: float
    up_bps: float
    down_bps: float
    alpha_s: float
    balanced: float = 0.0
    """1: the rank's script uses load balancing; otherwise 0."""
    uplink_bps: float = 0.0
    """The upload rate without the home's caps (cluster/calls/home_traffic.py)."""
    limited: float = 0.0
    """1: caps held during the recorded steps; otherwise 0."""
    averages: float = 0.0
    """1: the rank's script averages every step; 0: it allows local steps."""


def squared_norms(worker: Worker, site: LocalSite, deadline_s: float) -> tuple[float, ...]:
    """Returns the energy (squared norm) of each tensor's average gradient in the last step, up to a common factor; empty if it
    was not finite. The averages are in the buckets until the next step. The ranks of a sharded model's site call it together.
    """
    energies = torch.zeros(len(worker.job.tensors), dtype=torch.float64)
    for bucket in worker.buckets:
        if not bucket.buffer:
            parts = bucket.y.split([s.numel for s in bucket.slices])
            energy = torch.stack([part.double().square().sum() for part in parts]).cpu() / float(bucket.exchange.scaled) ** 2
            # Each rank of the site adds tensors that are not sharded.
            energies.index_add_(0, torch.tensor([s.tensor for s in bucket.slices]), energy * bucket.ranks)
    site.add(energies, time.monotonic() + deadline_s, lambda: worker.error)
    total = float(energies.sum())
    return tuple(energies.tolist()) if 0.0 < total < math.inf else ()


def nonzero_fractions(worker: Worker, workers: int) -> tuple[float, ...]:
    """Returns each tensor's nonzero fraction of the last step's gradient, averaged over this rank's gradient and the received
    average. Empty if all are 1.

    Only one of the two is still in memory. The nonzero fraction of the other one is estimated: all ranks are assumed to send
    equally many nonzero elements, and a sum has at most all of these.
    """
    nonzero = [0.0] * len(worker.job.tensors)
    for bucket in worker.buckets:
        for s, x in zip(bucket.slices, bucket.x.split([s.numel for s in bucket.slices]), strict=True):
            part = 1.0 if bucket.buffer else _nonzero(x)
            # Unless the codec keeps its input, the result has overwritten the gradient.
            up_part, down_part = (part, min(1.0, workers * part)) if bucket.needs_undo else (part / workers, part)
            nonzero[s.tensor] += s.numel * (1.0 if part == 1.0 else (up_part + down_part) / 2)
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


def number_server_nodes(context: DistributedJob) -> list[int]:
    """Returns the node number of each server. Servers on other machines get numbers after those of the workers' nodes."""
    nodes = [s.node for s in context.uplink.epoch.servers]
    if not context.elastic:
        return nodes
    elsewhere = sorted(set(nodes))  # no site has a server, and sites are renumbered when members change
    return [len(context.groups.sites) + elsewhere.index(node) for node in nodes]


def measured_links(context: DistributedJob, rows: Sequence[RankMeasurement]) -> list[Link]:
    """Returns one link per node. A node with the only server cannot probe its link; the link counts as fast as the fastest
    other one."""
    firsts = [rows[first] for first in context.groups.first_ranks]
    probes = [row for row in firsts if row.up_bps]
    # The other nodes' downloads are uploads of the node with the server, and their uploads are its downloads.
    best = Link(max(r.down_bps for r in probes), max(r.up_bps for r in probes), min(r.alpha_s for r in probes))
    return [Link(r.up_bps, r.down_bps, r.alpha_s) if r.up_bps else best for r in firsts]


def remove_caps(links: Sequence[Link], uplinks_bps: Sequence[float]) -> tuple[Link, ...]:
    """Returns the links without caps; empty if no home is capped. `uplinks_bps`: the upload rate of each node without caps; 0:
    it was not measured."""
    free = tuple(structs.replace(link, up_bps=max(link.up_bps, bps)) for link, bps in zip(links, uplinks_bps, strict=True))
    return free if free != tuple(links) else ()


def measured_cluster(
    links: Sequence[Link], rows: Sequence[RankMeasurement], inside: CollectiveCosts, server_nodes: Sequence[int], *,
    cuda: bool = False,
    reachable: bool = True, elsewhere_bps: float = 0.0, sites: Sequence[Sequence[int]] = (),
) -> Cluster:
    """Returns the measured cluster: one link per node, one measurement per rank. `sites`: the ranks of each node, if nodes may
    have different numbers of ranks. Each node then counts as if it had as many ranks as the largest one.

    `elsewhere_bps`: upload rate of servers on other machines, if step times have shown it. Otherwise servers on other machines
    are assumed to upload as fast as the median node receives from them: a node that shares its machine with a server measures
    no link. Their download rate is assumed to be that of all nodes together, since most links receive faster than they send.

    Speeds are relative to rank 0, which plans with its own step timing and codec costs.
    """
    sites = sites or node_ranks(len(rows), len(rows) // len(links))
    per_node, line = max(map(len, sites)), inside.inside
    nodes = []
    for number, (link, site) in enumerate(zip(links, sites, strict=True)):
        mine = [rows[rank] for rank in site]
        nodes.append(Node(
            f"node{number}", per_node, "gpu" if cuda else "cpu", link, 8 / line.slope_s if line.slope_s else 0.0, line.floor_s,
            speed=rows[0].compute_s / max(row.compute_s for row in mine), server=number in server_nodes,
        ))
    elsewhere = Link(elsewhere_bps or median_low(link.down_bps for link in links), sum(link.up_bps for link in links),
                     min(link.alpha_s for link in links))
    nodes += [Node(f"node{number}", 0, "cpu", elsewhere) for number in range(len(links), max(server_nodes, default=0) + 1)]
    return Cluster(tuple(nodes), reachable)
