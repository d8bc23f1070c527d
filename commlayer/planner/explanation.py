"""The verb `explain`: one bucket's decision, with its tasks in the simulated step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from msgspec import structs

from commlayer.errors import InvalidInput
from commlayer.planner.buckets import default_plan
from commlayer.planner.convergence import alone
from commlayer.planner.costs import Excesses, plan_excess, recipe_of
from commlayer.planner.inputs import checked_inputs, tables_profile
from commlayer.planner.model import DENSE, NO_LIMIT, ZERO, Cluster, Line, Link, Node, Policy, Profile
from commlayer.planner.plan_rules import most_used, way_of
from commlayer.planner.search import PAYS, plan
from commlayer.planner.simulation import Span, exact_s, simulate
from commlayer.planner.tables import speed
from commlayer.records import MAX_BUCKET_NBYTES, Bucket, Job, Plan, Record, Timing


class Explanation(Record, frozen=True):
    bucket: Bucket
    tensors: tuple[str, ...]
    """Names of its tensors, with ranges if a tensor is cut."""
    ready_s: float
    done_s: float
    step_s: float
    compute_s: float
    """Compute time of the `local_steps` steps that share this exchange."""
    local_steps: int
    spans: tuple[Span, ...]
    steps: float = 0.0
    """The plan's convergence factor, median and cautious; 0: unknown."""
    steps_high: float = 0.0
    codec_steps: float = 0.0
    codec_steps_high: float = 0.0
    """The same if the whole model were sent like this bucket."""
    fragments: int = 1
    """Fragments of a round, which are exchanged one after the other."""
    fp16_s: float = 0.0
    """Seconds to a loss with DDP's fp16 hook, per step of dense training."""
    alone_s: float = 0.0
    """The same for one machine alone; 0: there is only one machine."""


def explain(
    plan: Plan, bucket: int, job: Job, cluster: Cluster, profile: Profile | None = None, policy: Policy | None = None,
) -> Explanation:
    """Explains one bucket. Its reason and runner-up are those that the planner wrote into the plan."""
    if not 0 <= bucket < len(plan.buckets):
        raise InvalidInput("E-PLAN-QUESTION", f"bucket {bucket}: the plan has buckets 0 to {len(plan.buckets) - 1}")
    timeline = simulate(plan, job, cluster, profile, policy)
    costs, checked_policy, timing = checked_inputs(job, cluster, profile, policy)
    alone = by_itself(timing, cluster, costs, checked_policy)
    chosen = plan.buckets[bucket]
    spans = sorted((s for s in timeline.spans if s.bucket == bucket), key=lambda s: (s.start_s, s.end_s))
    return Explanation(
        chosen, tensor_names(chosen, job), timeline.ready_s[bucket], timeline.done_s[bucket], timeline.step_s,
        timeline.compute_s, plan.local_steps, tuple(spans), plan.steps, plan.steps_high,
        *_alone(chosen, plan, cluster, profile, policy), plan.fragments, halves_s(job, cluster, costs, checked_policy),
        alone[0].to_loss_s if alone else 0.0,
    )


def _alone(bucket: Bucket, plan: Plan, cluster: Cluster, profile: Profile | None, policy: Policy | None) -> tuple[float, float]:
    policy = policy or Policy()
    profile = profile or tables_profile(cluster, policy)
    if not profile.learning:
        return 0.0, 0.0
    recipe = recipe_of(plan, cluster, policy)._replace(late=bucket.stale)
    more = Excesses(profile).of(bucket.by_node or (bucket.codec,), bucket.down, recipe)
    return 1 + more.steps, 1 + more.high


def tensor_names(bucket: Bucket, job: Job) -> tuple[str, ...]:
    names = []
    for part in bucket.slices:
        info = job.tensors[part.tensor]
        names.append(info.name if part.numel == info.numel else f"{info.name}[{part.start}:{part.stop}]")
    return tuple(names)


def bucket_of(plan: Plan, job: Job, text: str) -> int:
    """The bucket for a number or a tensor's name (of a cut tensor, its first part)."""
    if text.isdigit():
        return int(text)
    tensor = next((i for i, info in enumerate(job.tensors) if info.name == text), None)
    numbers = [b.id for b in plan.buckets for s in b.slices if s.tensor == tensor]
    if not numbers:
        raise InvalidInput("E-PLAN-QUESTION",
                           f"bucket {text!r}: neither a number from 0 to {len(plan.buckets) - 1} nor a tensor of the model")
    return min(numbers)


ALONE = "one machine alone"
WORTH = 0.03
"""A larger loss budget is named if it gains at least this fraction."""
DDP_NBYTES = 25 << 20
"""Size of DistributedDataParallel's buckets."""
ENDLESS_BPS = 1e15


class Beside(Record, frozen=True):
    """One baseline and its time to a loss."""

    name: str
    step_s: float
    steps: float = 1.0
    """Convergence factor relative to dense training in every step: the median, and a cautious estimate."""
    steps_high: float = 1.0

    @property
    def to_loss_s(self) -> float:
        """Cautious estimate, per step of dense training."""
        return self.step_s * self.steps_high


def beside(
    made: Plan, job: Job, cluster: Cluster, profile: Profile | None, policy: Policy | None, synchronous: Plan | None = None,
) -> tuple[Beside, ...]:
    """The plan first, then its baselines. `synchronous`: the best plan that averages gradients in every step, if not
    `made`."""
    profile, policy, timing = checked_inputs(job, cluster, profile, policy)
    dense = uncompressed(job, cluster, profile, policy)
    others = [] if synchronous is None else \
        [Beside("best synchronous", synchronous.step_s, synchronous.steps or 1.0, synchronous.steps_high or 1.0)]
    others += [Beside("dense fp32", dense.step_s), Beside("DDP fp16", halves_s(job, cluster, profile, policy))]
    others += by_itself(timing, cluster, profile, policy)
    floor_s = latencies_s(made, job, cluster, profile, policy)
    return (Beside("this plan", made.step_s, made.steps or 1.0, made.steps_high or 1.0), *others,
            Beside("its latencies alone", floor_s, made.steps or 1.0, made.steps_high or 1.0))


def latencies_s(made: Plan, job: Job, cluster: Cluster, profile: Profile, policy: Policy) -> float:
    """Seconds of a step if links and codecs took no time."""
    codecs = tuple(structs.replace(cost, encode=ZERO, decode=ZERO) for cost in profile.codecs)
    return exact_s(made, job, endless(cluster), structs.replace(profile, codecs=codecs, copy=ZERO), policy)


def uncompressed(job: Job, cluster: Cluster, profile: Profile | None, policy: Policy | None) -> Plan:
    """The best plan without compression that exchanges in every step."""
    policy = structs.replace(policy or Policy(), codecs=(DENSE,), objective="step", max_loss=NO_LIMIT)
    return plan(job, cluster, profile, structs.replace(policy, exact=True, max_local_steps=1, staleness=False, forward=False))


class Looser(NamedTuple):
    """The best plan without the loss budget."""

    plan: Plan
    loss: float
    """Cautious estimate of its relative increase of the loss."""
    before_s: float
    """The policy's objective for the plan within the budget, and for this one."""
    after_s: float
    to_loss: bool
    """Whether the objective is seconds to a loss per step of dense training; else seconds of a step."""


def looser(made: Plan, job: Job, cluster: Cluster, profile: Profile | None, policy: Policy | None) -> Looser | None:
    """None if a larger budget would not help."""
    profile, policy, _ = checked_inputs(job, cluster, profile, policy)
    if policy.max_loss >= NO_LIMIT:
        return None
    other = plan(job, cluster, profile, structs.replace(policy, max_loss=NO_LIMIT))
    to_loss = policy.objective == "loss"
    before_s, after_s = (p.step_s * ((p.steps_high if to_loss else 0.0) or 1.0) for p in (made, other))
    if after_s >= before_s * (1 - WORTH):
        return None
    return Looser(other, plan_excess(other, job, cluster, profile, policy).loss_high, before_s, after_s, to_loss)


def by_itself(timing: Timing, cluster: Cluster, profile: Profile, policy: Policy) -> list[Beside]:
    """The fastest machine alone: with the whole batch, or with its own batch and as many more steps as trainings were
    measured to need. Empty if there is only one machine."""
    candidates = []
    for node in cluster.nodes:
        if 0 < node.ranks < cluster.ranks:
            computing_s, others = (timing.forward_s + timing.backward_s) / node.speed, cluster.ranks / node.ranks
            candidates.append(Beside(ALONE, computing_s * others + timing.update_s / node.speed))
            if steps := policy.objective == "loss" and alone(profile.learning, policy.optimizer, others):
                candidates.append(Beside(ALONE, computing_s + timing.update_s / node.speed, steps, steps))
    return [min(candidates, key=lambda one: one.to_loss_s)] if candidates else []


def halves_s(job: Job, cluster: Cluster, profile: Profile, policy: Policy) -> float:
    """An all-reduce of fp16 values. It takes as long as one of floats over links twice as fast; conversion counts as free."""
    ranks = {node.ranks for node in cluster.nodes if node.ranks}
    per_node = ranks.pop() if len(ranks) == 1 else 1
    ddp_plan = default_plan(job, codec=DENSE, path="allreduce", servers=0, ranks_per_node=per_node, fuse_nbytes=DDP_NBYTES,
                        cut_nbytes=MAX_BUCKET_NBYTES)
    links = [Link(2 * node.link.up_bps, 2 * node.link.down_bps, node.link.alpha_s) for node in cluster.nodes]
    nodes = tuple(structs.replace(node, intra_bps=2 * node.intra_bps, link=link)
                  for node, link in zip(cluster.nodes, links, strict=True))
    halved = {name: Line(line.floor_s, line.slope_s / 2, line.error)
              for name, line in (("inside", profile.inside), ("across", profile.across))}
    return exact_s(ddp_plan, job, structs.replace(cluster, nodes=nodes), structs.replace(profile, **halved), policy)


def endless(cluster: Cluster) -> Cluster:
    """The cluster with infinitely fast links; latencies stay."""
    nodes = tuple(structs.replace(n, intra_bps=ENDLESS_BPS if n.intra_bps else 0.0,
                                  link=Link(ENDLESS_BPS, ENDLESS_BPS, n.link.alpha_s)) for n in cluster.nodes)
    return structs.replace(cluster, nodes=nodes)


class Change(Record, frozen=True):
    tensor: str
    before: str
    after: str


class Difference(Record, frozen=True):
    fields: tuple[tuple[str, str, str], ...]
    """Differences of the whole plans: name, before, after."""
    changes: tuple[Change, ...]
    step_s: tuple[float, float]
    buckets: tuple[int, int]
    steps: tuple[float, float] = (0.0, 0.0)
    """Convergence factors; 0: unknown."""
    steps_high: tuple[float, float] = (0.0, 0.0)

    @property
    def equal(self) -> bool:
        return not self.fields and not self.changes


WHOLE = ("servers", "hosts", "ranks_per_node", "local_steps", "codes", "overlap", "fragments", "ratio_over", "warmup", "schema")


def diff(before: Plan, after: Plan, job: Job | None = None) -> Difference:
    """Compares by tensor; with the job, by its tensors' names."""
    if before.job != after.job:
        raise InvalidInput("E-PLAN-QUESTION", f"the plans are of different models: job {before.job} and job {after.job}")
    fields = tuple(
        (name, str(getattr(before, name)), str(getattr(after, name)))
        for name in WHOLE if getattr(before, name) != getattr(after, name)
    )
    old, new = _by_tensor(before), _by_tensor(after)
    changes = tuple(
        Change(job.tensors[t].name if job else f"tensor {t}", old.get(t, "nothing"), new.get(t, "nothing"))
        for t in sorted({*old, *new}) if old.get(t) != new.get(t)
    )
    return Difference(fields, changes, (before.step_s, after.step_s), (len(before.buckets), len(after.buckets)),
                      (before.steps, after.steps), (before.steps_high, after.steps_high))


def _by_tensor(plan: Plan) -> dict[int, str]:
    spellings: dict[int, list[str]] = {}
    for bucket in plan.buckets:
        for part in bucket.slices:
            spellings.setdefault(part.tensor, []).append(spelled(bucket))
    return {tensor: _tally(ways) for tensor, ways in spellings.items()}


def _tally(ways: list[str]) -> str:
    distinct = dict.fromkeys(ways)
    return "; ".join(way if len(ways) == 1 else f"{ways.count(way)} x {way}" for way in distinct)


def spelled(bucket: Bucket) -> str:
    """How a bucket is sent, in one line."""
    parts = [bucket.codec, "over", bucket.path]
    parts += [f"down {bucket.down}"] if bucket.down else []
    parts += ["by node"] if bucket.by_node else []
    parts += ["a step late"] if bucket.stale else []
    return " ".join(parts)


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
    return Point(label, x, plan_s, dense.step_s, batch / plan_s if plan_s else 0.0,
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
