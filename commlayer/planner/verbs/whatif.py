"""The verb `what_if`: the same job with other links, more nodes or other GPUs, and the rate below which compression pays."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from msgspec import structs

from commlayer.errors import InvalidInput
from commlayer.planner.model.cluster import Cluster, Link, Node, Policy, Profile
from commlayer.planner.model.plan_words import most_used, way_of
from commlayer.planner.pricing.input_checks import checked_inputs
from commlayer.planner.search.plan import PAYS, plan
from commlayer.planner.tables.machines import speed
from commlayer.planner.verbs.baselines import by_itself, halves_s, latencies_s, looser, uncompressed
from commlayer.records import Job, Record

LEAST_BPS, MOST_BPS = 1e5, 1e12
HALVINGS = 7
"""Bisection steps between two swept rates, to a fraction of a per cent."""


class Point(Record, frozen=True):
    """One cluster of a sweep."""

    label: str
    x: float
    """The swept value: bit/s or number of nodes; else the index in the sweep."""
    plan_s: float
    dense_s: float
    """Without compression."""
    free_s: float
    samples_per_s: float
    """Of all workers together; 0 if the job has no batch."""
    steps: float = 0.0
    """The plan's convergence factor; 0: unknown."""
    steps_high: float = 0.0
    local_steps: int = 1
    way: str = ""
    """The sync mode; empty for an exchange in every step."""
    codec: str = ""
    """The codec of most elements."""
    fp16_s: float = 0.0
    """Step time with DDP's fp16 hook; 0: not computed."""
    alone_s: float = 0.0
    """Of one machine alone, as `to_loss_s`; 0: there is only one machine."""
    floor_s: float = 0.0
    """As `to_loss_s`, with latencies only, if links and codecs took no time."""
    looser_s: float = 0.0
    """As `to_loss_s`, of the plan that the loss budget excludes; 0: none, or not computed."""
    looser_loss: float = 0.0
    """Relative increase of that plan's loss."""

    @property
    def to_loss_s(self) -> float:
        """Cautious estimate, per step of dense training."""
        return self.plan_s * (self.steps_high or 1.0)

    @property
    def gain(self) -> float:
        """Speedup over no compression."""
        return self.dense_s / self.to_loss_s if self.plan_s else 1.0

    @property
    def lead(self) -> float:
        """Speedup over the best baseline: no compression, DDP's fp16 hook, or one machine alone."""
        return min(s for s in (self.dense_s, self.fp16_s, self.alone_s) if s) / self.to_loss_s if self.plan_s else 1.0


class Curve(Record, frozen=True):
    """A sweep, and the rate below which compression pays, if that was requested and exists."""

    swept: str
    points: tuple[Point, ...]
    break_even_bps: float | None = None


def point(
    label: str, x: float, job: Job, cluster: Cluster, profile: Profile | None = None, policy: Policy | None = None, *,
    budget: bool = True,
) -> Point:
    """Plans for one cluster. `budget`: also computes what the loss budget excludes."""
    profile, policy, timing = checked_inputs(job, cluster, profile, policy)
    planned = plan(job, cluster, profile, policy)
    dense = uncompressed(job, cluster, profile, policy)
    if policy.objective == "step":  # steps count equally
        planned = structs.replace(planned, steps=0.0, steps_high=0.0)
    # The dense plan needs no codec and is always possible, but a search may miss it.
    if dense.step_s < planned.step_s * (planned.steps_high or 1.0):
        planned = structs.replace(dense, steps=float(planned.steps > 0), steps_high=float(planned.steps > 0))
    other = looser(planned, job, cluster, profile, policy) if budget else None
    floor_s = latencies_s(planned, job, cluster, profile, policy) * (planned.steps_high or 1.0)
    batch, plan_s = (job.batch or 0) * cluster.ranks, planned.step_s
    alone = by_itself(timing, cluster, profile, policy)
    return Point(label, x, plan_s, dense.step_s, min(planned.free_s, plan_s), batch / plan_s if plan_s else 0.0,
                 planned.steps, planned.steps_high, planned.local_steps, way_of(planned), most_used(planned),
                 halves_s(job, cluster, profile, policy), alone[0].to_loss_s if alone else 0.0, floor_s,
                 other.after_s if other else 0.0, other.loss if other else 0.0)


def what_if(
    job: Job, cluster: Cluster, profile: Profile | None = None, policy: Policy | None = None, *,
    bandwidths: Sequence[float] = (), add_nodes: Sequence[Node] = (), counts: Sequence[int] = (), gpus: Sequence[str] = (),
) -> Curve:
    """Sweeps one of: link rates (every training node, both directions, in bit/s), nodes added one by one, the number of
    nodes (copies of the last one), GPUs of all nodes. A given profile must cover all of them."""
    checked_inputs(job, cluster, profile, policy)
    swept = [name for name, values in (("bandwidth", bandwidths), ("add_node", add_nodes), ("nodes", counts), ("gpu", gpus))
             if values]
    if len(swept) != 1:
        raise InvalidInput("E-PLAN-QUESTION",
                           f"what_if sweeps one thing at a time: bandwidths, add_nodes, counts or gpus; got {len(swept)}")
    clusters = {
        "bandwidth": lambda: _at_rates(cluster, bandwidths), "add_node": lambda: _grown(cluster, add_nodes),
        "nodes": lambda: _counted(cluster, counts),
        "gpu": lambda: _with_gpus(cluster, gpus, half=job.timing is not None and job.timing.half),
    }[swept[0]]()
    points = tuple(point(label, x, job, swept_cluster, profile, policy) for label, x, swept_cluster in clusters)
    pays = None
    if swept[0] == "bandwidth":
        pays = _break_even(points, lambda bps: point("", bps, job, at_rate(cluster, bps), profile, policy, budget=False))
    return Curve(swept[0], points, pays)


def _break_even(points: Sequence[Point], priced: Callable[[float], Point]) -> float | None:
    """Bisection between the fastest swept rate at which compression pays and the next; None if it pays at all rates or at
    none."""
    points = sorted(points, key=lambda p: p.x)
    paying = [i for i, p in enumerate(points) if p.gain > 1 + PAYS]
    if not paying or paying[-1] + 1 == len(points):
        return None
    low, high = points[paying[-1]].x, points[paying[-1] + 1].x
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        if priced(middle).gain > 1 + PAYS:
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)


def at_rate(cluster: Cluster, bps: float) -> Cluster:
    """The cluster with every training node's link at this rate in both directions; latencies stay."""
    if not LEAST_BPS <= bps <= MOST_BPS:
        raise InvalidInput("E-PLAN-QUESTION", f"bandwidth: got {bps:g} bit/s, allowed: {LEAST_BPS:g} to {MOST_BPS:g}")
    nodes = tuple(structs.replace(node, link=Link(bps, bps, node.link.alpha_s)) if node.ranks else node
                  for node in cluster.nodes)
    return structs.replace(cluster, nodes=nodes)


def _at_rates(cluster: Cluster, bandwidths: Sequence[float]) -> Iterator[tuple[str, float, Cluster]]:
    return ((rate(bps), bps, at_rate(cluster, bps)) for bps in bandwidths)


def _grown(cluster: Cluster, added: Sequence[Node]) -> Iterator[tuple[str, float, Cluster]]:
    for n in range(len(added) + 1):
        nodes = cluster.nodes + tuple(added[:n])
        label = "as it is" if n == 0 else f"+ {added[n - 1].device} {rate(added[n - 1].link.up_bps)} up"
        yield label, float(sum(1 for node in nodes if node.ranks)), structs.replace(cluster, nodes=nodes)


def _counted(cluster: Cluster, counts: Sequence[int]) -> Iterator[tuple[str, float, Cluster]]:
    """Counts nodes that train; nodes that only serve stay."""
    trained = [place for place, node in enumerate(cluster.nodes) if node.ranks]
    for n in counts:
        if n < 1:
            raise InvalidInput("E-PLAN-QUESTION", f"nodes: got {n}, allowed: 1 or more")
        left_out, last = set(trained[n:]), cluster.nodes[trained[-1]]
        kept = tuple(node for place, node in enumerate(cluster.nodes) if place not in left_out)
        copies = tuple(structs.replace(last, name=f"{last.name}+{i}") for i in range(n - len(trained)))
        yield f"{n} nodes", float(n), structs.replace(cluster, nodes=kept + copies)


def _with_gpus(cluster: Cluster, gpus: Sequence[str], *, half: bool) -> Iterator[tuple[str, float, Cluster]]:
    for i, name in enumerate(gpus):
        nodes = tuple(structs.replace(node, device=name, speed=speed(name, half=half)) if node.ranks else node
                      for node in cluster.nodes)
        yield name, float(i), structs.replace(cluster, nodes=nodes)


def break_even(curve: Curve) -> str:
    """The result of a bandwidth sweep, in words: for compression, or for all modes other than a dense exchange in every
    step."""
    pays = [p.gain > 1 + PAYS for p in curve.points]
    otherwise = any(p.way for p, such in zip(curve.points, pays, strict=True) if such)
    what = "leaving dense exchange in each step" if otherwise else "compression"
    if curve.break_even_bps is not None:
        return f"{what} pays below {rate(float(f'{curve.break_even_bps:.2g}'))}"
    if all(pays):
        return f"{what} pays at all of these rates"
    return f"{what} pays at some of these rates; sweep more to see where it ends" if any(pays) else \
        f"{what} pays at none of these rates"


def rate(bps: float) -> str:
    """
    >>> rate(20e6), rate(2.5e9)
    ('20 Mb/s', '2.5 Gb/s')
    """
    return f"{bps / 1e9:g} Gb/s" if bps >= 1e9 else f"{bps / 1e6:g} Mb/s"
