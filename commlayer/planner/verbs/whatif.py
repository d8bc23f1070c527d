"""The verb `what_if`: the same job with other links, more nodes or another GPU, and where compression begins to pay."""

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
"""Of the gap between two swept bandwidths: to a fraction of a percent."""


class Point(Record, frozen=True):
    """One cluster of a sweep."""

    label: str
    x: float
    """What was swept: bps, number of nodes; else the place in the sweep."""
    plan_s: float
    dense_s: float
    """Without any codec."""
    free_s: float
    samples_per_s: float
    """Of all workers together; 0 where the job has no batch."""
    steps: float = 0.0
    """How many times as many steps the plan needs as dense training; 0: nobody knows."""
    steps_high: float = 0.0
    local_steps: int = 1
    way: str = ""
    """How steps are taken, where that is not the plain way."""
    codec: str = ""
    """That of most elements."""
    fp16_s: float = 0.0
    """Of a step with DDP's fp16 hook; 0: not looked at."""
    alone_s: float = 0.0
    """Of one machine alone, to a loss, as `to_loss_s`; 0: there is no other."""
    floor_s: float = 0.0
    """To a loss by its latencies alone, if links and codecs took no time."""
    looser_s: float = 0.0
    """As `to_loss_s`, of the plan that the budget of loss keeps out; 0: there is none, or none was looked for."""
    looser_loss: float = 0.0
    """By what part that plan loses."""

    @property
    def to_loss_s(self) -> float:
        """Cautiously, for each step that dense training would take."""
        return self.plan_s * (self.steps_high or 1.0)

    @property
    def gain(self) -> float:
        """Over what is not compressed."""
        return self.dense_s / self.to_loss_s if self.plan_s else 1.0

    @property
    def lead(self) -> float:
        """Over the best of what there is without a plan: no compression, DDP's fp16 hook, one machine alone."""
        return min(s for s in (self.dense_s, self.fp16_s, self.alone_s) if s) / self.to_loss_s if self.plan_s else 1.0


class Curve(Record, frozen=True):
    """A sweep, and the bandwidth below which plans pay that are not dense, where that was asked for and there is one."""

    swept: str
    points: tuple[Point, ...]
    break_even_bps: float | None = None


def point(
    label: str, x: float, job: Job, cluster: Cluster, profile: Profile | None = None, policy: Policy | None = None, *,
    budget: bool = True,
) -> Point:
    """`budget`: looks, too, for what a budget of loss keeps out."""
    profile, policy, timing = checked_inputs(job, cluster, profile, policy)
    made = plan(job, cluster, profile, policy)
    dense = uncompressed(job, cluster, profile, policy)
    if policy.objective == "step":  # whatever it learns
        made = structs.replace(made, steps=0.0, steps_high=0.0)
    # What needs no codec is open to both, and a search may miss it.
    if dense.step_s < made.step_s * (made.steps_high or 1.0):
        made = structs.replace(dense, steps=float(made.steps > 0), steps_high=float(made.steps > 0))
    other = looser(made, job, cluster, profile, policy) if budget else None
    floor_s = latencies_s(made, job, cluster, profile, policy) * (made.steps_high or 1.0)
    batch, plan_s = (job.batch or 0) * cluster.ranks, made.step_s
    alone = by_itself(timing, cluster, profile, policy)
    return Point(label, x, plan_s, dense.step_s, min(made.free_s, plan_s), batch / plan_s if plan_s else 0.0, made.steps,
                 made.steps_high, made.local_steps, way_of(made), most_used(made), halves_s(job, cluster, profile, policy),
                 alone[0].to_loss_s if alone else 0.0, floor_s, other.after_s if other else 0.0, other.loss if other else 0.0)


def what_if(
    job: Job, cluster: Cluster, profile: Profile | None = None, policy: Policy | None = None, *,
    bandwidths: Sequence[float] = (), add_nodes: Sequence[Node] = (), counts: Sequence[int] = (), gpus: Sequence[str] = (),
) -> Curve:
    """Sweeps one of: links (every node's, each way, at these bps), nodes added one after the other, this many copies of the
    last node, other GPUs in all nodes. A profile handed in must cover what is swept.
    """
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
    points = tuple(point(label, x, job, made, profile, policy) for label, x, made in clusters)
    pays = None
    if swept[0] == "bandwidth":
        pays = _break_even(points, lambda bps: point("", bps, job, at_rate(cluster, bps), profile, policy, budget=False))
    return Curve(swept[0], points, pays)


def _break_even(points: Sequence[Point], priced: Callable[[float], Point]) -> float | None:
    """By bisection between the fastest swept link where compression pays and the next; None where it pays at all or none."""
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
    """The link of every node that trains at this rate each way, with its own latency."""
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
    """Of nodes that train; those that only serve stay."""
    trained = [place for place, node in enumerate(cluster.nodes) if node.ranks]
    for n in counts:
        if n < 1:
            raise InvalidInput("E-PLAN-QUESTION", f"nodes: got {n}, allowed: 1 or more")
        left_out, last = set(trained[n:]), cluster.nodes[trained[-1]]
        kept = tuple(node for place, node in enumerate(cluster.nodes) if place not in left_out)
        copies = tuple(structs.replace(last, name=f"{last.name}+{i}") for i in range(n - len(trained)))
        yield f"{n} nodes", float(n), structs.replace(cluster, nodes=kept + copies)


def _with_gpus(cluster: Cluster, gpus: Sequence[str], *, half: bool) -> Iterator[tuple[str, float, Cluster]]:
    """In nodes that train."""
    for i, name in enumerate(gpus):
        nodes = tuple(structs.replace(node, device=name, speed=speed(name, half=half)) if node.ranks else node
                      for node in cluster.nodes)
        yield name, float(i), structs.replace(cluster, nodes=nodes)


def break_even(curve: Curve) -> str:
    """What a sweep over bandwidths says of compression; or of that and other ways to take steps, where these pay, too."""
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
