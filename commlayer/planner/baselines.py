"""Compares a plan with its baselines (no compression, DDP's fp16 hook, one machine alone); `what_if` plans for changed
clusters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from msgspec import structs

from commlayer.errors import InvalidInput
from commlayer.planner.buckets import default_plan
from commlayer.planner.convergence import NONE, measured_noise, one_worker_factor
from commlayer.planner.costs import Prices, plan_excess
from commlayer.planner.data.noise import find_noise
from commlayer.planner.data.tables import gpus, job_speed
from commlayer.planner.inputs import checked_inputs
from commlayer.planner.model import DENSE, NO_LIMIT, Cluster, LinearCost, Link, Node, Policy, Profile, Question
from commlayer.planner.plan_rules import main_codec, sync_mode
from commlayer.planner.search.plan_search import PAYS, plan
from commlayer.planner.simulation import bucket_template, server_hosts, step_seconds
from commlayer.planner.tensors import sent_numel
from commlayer.records import MAX_BUCKET_NBYTES, Job, Plan, Record, Timing

ALONE, PLAN, SYNCHRONOUS = "one machine alone", "this plan", "best synchronous"
SERVED = ("net.push", "net.pull", "net.forward")
"""Transfers between a machine and a summation server."""
DDP_NBYTES = 25 << 20
"""Bucket size of DistributedDataParallel."""


class Baseline(Record, frozen=True):
    """A plan or a baseline, with its step time and convergence factor."""

    name: str
    step_s: float
    steps: float = 1.0
    """Convergence factor: steps to the same loss relative to dense training; the median. `steps_high` is a cautious
    estimate."""
    steps_high: float = 1.0
    node: str = ""
    """The machine of `ALONE`; empty for all machines."""
    nbytes: float = 0.0
    """Bytes that the busiest machine sends and receives per step."""

    @property
    def to_loss_s(self) -> float:
        """Step time in seconds times the cautious convergence factor: proportional to the time to a given loss."""
        return self.step_s * self.steps_high


class TrainingCost(Record, frozen=True):
    """Time and cost of a whole training, by the median convergence factor."""

    name: str
    hours: float
    gpu_hours: float
    server_cost: float = 0.0
    """Price of the rented servers; 0: there are none, or the price is unknown."""
    kwh: float = 0.0
    """Energy of the GPUs at their data sheets' power; 0: the power of some device is unknown."""
    gbytes: float = 0.0
    """GB that the busiest machine sends and receives."""


def training_costs(
    rows: Sequence[Baseline], cluster: Cluster, steps: int, price: float = 0.0,
) -> tuple[TrainingCost, ...]:
    """Returns the costs of the plan and of the fastest machine alone, for a training of `steps` synchronous steps without
    compression. `price` per hour of one rented server; 0: unknown."""
    rented = sum(1 for node in cluster.nodes if not node.ranks)
    result = []
    for row in [rows[0], *(row for row in rows if row.name == ALONE)]:
        nodes = [node for node in cluster.nodes if node.ranks and row.node in ("", node.name)]
        hours = steps * row.step_s * row.steps / 3600
        power = [node.ranks * gpus()[node.device].watts if node.device in gpus() else 0.0 for node in nodes]
        kwh = hours * sum(power) / 1000 if all(power) else 0.0
        result.append(TrainingCost(row.name, hours, hours * sum(node.ranks for node in nodes),
                                   0.0 if row.node else price * rented * hours, kwh, row.nbytes * steps * row.steps / 1e9))
    return tuple(result)


class Verdict(Record, frozen=True):
    """The output of `commlayer estimate --json`."""

    verdict: str
    gain_over_alone: float
    """The plan's speedup to the same loss over the fastest machine alone, by median factors; 0: there is only one machine, or
    the training does not fit into memory."""
    gain_over_alone_cautious: float
    gain_over_alone_high: float
    """The gain if the gradient noise scale is large. It equals `gain_over_alone` unless the noise scale is unknown, for which
    that is the gain with the noise scale of small models."""
    gain_over_alone_step: float
    """The gain of sync="step"."""
    alternatives: tuple[Baseline, ...]
    assumptions: tuple[str, ...]
    plan: Plan
    training: tuple[TrainingCost, ...] = ()
    """With --steps: the costs of the whole training, first with the plan, then on the fastest machine alone."""


class Gains(NamedTuple):
    """Speedups to the same loss over the fastest machine alone, by median factors; 0: there is only one machine."""

    plan: float
    cautious: float
    high: float
    """The gain with a large gradient noise scale, while `plan` is the gain with a small one. Equal to `plan` if the noise scale
    is known."""
    step: float
    """That of the best plan that averages gradients in every step."""
    step_high: float

    @property
    def noise_scale_known(self) -> bool:
        return self.high == self.plan


def gains(rows: Sequence[Baseline], high: Sequence[Baseline] = ()) -> Gains:
    """`rows` and `high` as `baselines` returns them, for a small and for a large gradient noise scale."""
    def over_alone(rows: Sequence[Baseline], name: str, *, cautious: bool = False) -> float:
        row = next((row for row in rows if row.name == name), rows[0])
        alone = next((row for row in rows if row.name == ALONE), None)
        if alone is None or not row.step_s:
            return 0.0
        return alone.to_loss_s / row.to_loss_s if cautious else alone.step_s * alone.steps / (row.step_s * row.steps)

    return Gains(over_alone(rows, PLAN), over_alone(rows, PLAN, cautious=True), over_alone(high or rows, PLAN),
                 over_alone(rows, SYNCHRONOUS), over_alone(high or rows, SYNCHRONOUS))


def verdict(gain: Gains) -> str:
    """States in one line whether the plan is faster than the fastest machine alone.

    >>> verdict(Gains(2.4, 2.2, 2.4, 0.5, 0.5)), verdict(Gains(1.3, 1.1, 2.24, 0.5, 0.6))
    ('2.4x faster than your fastest machine alone (2.2x by the cautious estimate)', \
'1.3x to 2.2x faster than your fastest machine alone: the noise scale of your training is unknown')
    >>> verdict(Gains(1.1, 0.92, 1.1, 0.5, 0.5))
    'UNSURE: 1.1x faster than your fastest machine alone, 0.92x by the cautious estimate'
    >>> verdict(Gains(0.9, 0.8, 1.4, 0.5, 0.5))
    'UNSURE: 0.90x to 1.4x as fast as your fastest machine alone: the noise scale of your training is unknown'
    >>> verdict(Gains(1 / 3, 0.3, 1 / 3, 0.1, 0.1)), verdict(Gains(0.25, 0.25, 0.5, 0.1, 0.2))
    ('NOT WORTH IT: your fastest machine alone is 3.0x faster; try a larger batch or faster links', \
'NOT WORTH IT: your fastest machine alone is at least 2.0x faster; try a larger batch or faster links')
    """
    alone = "your fastest machine alone"
    if not gain.plan:
        return "one machine: nothing to exchange"
    if gain.high <= 1:
        least = "" if gain.noise_scale_known else "at least "
        faster = "as fast" if times_text(1 / gain.high) == "1.0x" else f"{least}{times_text(1 / gain.high)} faster"
        return f"NOT WORTH IT: {alone} is {faster}; try a larger batch or faster links"
    if not gain.noise_scale_known:
        unsure, how = ("", "faster than") if gain.plan > 1 else ("UNSURE: ", "as fast as")
        return f"{unsure}{times_text(gain.plan, gain.high)} {how} {alone}: the noise scale of your training is unknown"
    if gain.cautious <= 1:
        return f"UNSURE: {times_text(gain.plan)} faster than {alone}, {times_text(gain.cautious)} by the cautious estimate"
    median, cautious = times_text(gain.plan), times_text(gain.cautious)
    return f"{median} faster than {alone}" + (f" ({cautious} by the cautious estimate)" if cautious != median else "")


def times_text(factor: float, high: float = 0.0) -> str:
    """
    >>> times_text(0.581), times_text(2.42), times_text(1.3, 2.2), times_text(1.31, 1.32)
    ('0.58x', '2.4x', '1.3x to 2.2x', '1.3x')
    """
    low, most = (f"{value:.2f}x" if value < 1 else f"{value:.1f}x" for value in (factor, high or factor))
    return low if low == most else f"{low} to {most}"


def noise_range(question: Question) -> tuple[Question, Question]:
    """The question with the noise scale of small models, and with an unlimited one, if the job's own is unknown; else the
    question twice."""
    job = question.job
    if find_noise(job):
        return question, question
    least = measured_noise(question.profile.learning, question.policy.optimizer)
    low, high = (structs.replace(job, timing=structs.replace(job.timed, noise_scale=(job.batch or 1) * noise))
                 for noise in (least, math.inf))
    return question._replace(job=low), question._replace(job=high)


def baselines(planned: Plan, question: Question, synchronous: Plan | None = None) -> tuple[Baseline, ...]:
    """The plan first, then its baselines. `synchronous`: the best plan that averages gradients in every step, if `planned` is a
    different one."""
    dense = uncompressed_plan(question)
    return (*planned_rows(planned, question, synchronous),
            Baseline("dense fp32", dense.step_s, nbytes=busiest_nbytes(dense, question)),
            Baseline("DDP fp16", ddp_fp16_s(question), nbytes=busiest_nbytes(_ddp_plan(question), question) / 2),
            *one_machine(question))


def planned_rows(planned: Plan, question: Question, synchronous: Plan | None = None) -> list[Baseline]:
    """The plan, and the best one that averages gradients in every step, if that is a different one: with the convergence
    factors that follow from the job's noise scale."""
    rows = []
    for name, each in ((PLAN, planned), *(((SYNCHRONOUS, synchronous),) if synchronous else ())):
        more = plan_excess(each, question) if each.steps else NONE
        rows.append(Baseline(name, each.step_s, 1 + more.steps, 1 + more.high, nbytes=busiest_nbytes(each, question)))
    return rows


def busiest_nbytes(plan: Plan, question: Question) -> float:
    """Bytes that the training machine with most traffic sends and receives per step, without headers."""
    cluster, nbytes = question.cluster, dict[str, float]()
    prices = Prices(cluster, question.profile, server_hosts(plan, cluster))
    links = {f"{end}:{node.name}": bps for node in cluster.nodes if node.ranks
             for end, bps in (("up", node.link.up_bps), ("down", node.link.down_bps))}
    for bucket in plan.buckets:
        numel = sent_numel(plan, bucket, question.job)
        for task in bucket_template(prices, bucket).tasks:
            for lane, seconds in task.lanes:
                if lane in links:
                    # A collective occupies all links as long as the slowest link needs; the link of a host carries the traffic
                    # of all other nodes.
                    carried = seconds.slope_s * numel * links[lane] / 8 if task.op in SERVED else task.nbytes(numel)
                    node = lane.partition(":")[2]
                    nbytes[node] = nbytes.get(node, 0.0) + carried
    return max(nbytes.values(), default=0.0) / plan.local_steps


def uncompressed_plan(question: Question) -> Plan:
    """The best plan without compression that exchanges in every step."""
    job, cluster, profile, policy = question
    return plan(job, cluster, profile, structs.replace(policy, codecs=(DENSE,), objective="step", max_loss=NO_LIMIT, exact=True,
                                                       max_local_steps=1, staleness=False, forward=False))


def one_machine(question: Question) -> list[Baseline]:
    """The fastest machine alone: either with the global batch, or with its own batch and the additional steps that the gradient
    noise scale predicts. Empty if there is only one machine."""
    job, cluster, profile, policy = question
    candidates, timing = [], job.timed
    for node in cluster.nodes:
        if 0 < node.ranks < cluster.ranks:
            computing_s, others = (timing.forward_s + timing.backward_s) / node.speed, cluster.ranks / node.ranks
            candidates.append(Baseline(ALONE, computing_s * others + timing.update_s / node.speed, node=node.name))
            steps = one_worker_factor(profile.learning, policy.optimizer, others, find_noise(job), job.numel)
            if steps and policy.objective == "loss":
                candidates.append(Baseline(ALONE, computing_s + timing.update_s / node.speed, steps, steps, node.name))
    return [min(candidates, key=attrgetter("to_loss_s"))] if candidates else []


def ddp_fp16_s(question: Question) -> float:
    """Step time with an all-reduce of fp16 values, modeled as fp32 over links twice as fast. The conversion counts as free."""
    cluster, profile = question.cluster, question.profile
    nodes = tuple(structs.replace(node, intra_bps=2 * node.intra_bps, link=node.link.scaled(2)) for node in cluster.nodes)
    halved = {name: LinearCost(line.floor_s, line.slope_s / 2, line.error)
              for name, line in (("inside", profile.inside), ("across", profile.across))}
    faster = question._replace(cluster=structs.replace(cluster, nodes=nodes), profile=structs.replace(profile, **halved))
    return step_seconds(_ddp_plan(question), faster)


def _ddp_plan(question: Question) -> Plan:
    """All-reduces of fp32 values in DDP's buckets."""
    return default_plan(question.job, codec=DENSE, path="allreduce", servers=0,
                        ranks_per_node=question.cluster.ranks_per_node, fuse_nbytes=DDP_NBYTES, cut_nbytes=MAX_BUCKET_NBYTES)


LEAST_BPS, MOST_BPS = 1e5, 1e12
HALVINGS = 7
"""Number of bisection steps between two swept rates; the break-even rate is then exact to a fraction of a per cent."""


class SweepResult(Record, frozen=True):
    """The result for one cluster of a sweep."""

    label: str
    x: float
    """The swept value: bit/s or number of nodes; for other sweeps, the point's index."""
    plan_s: float
    dense_s: float
    """Step time in seconds without compression."""
    samples_per_s: float
    """Samples per second of all workers together; 0 if the job has no batch size."""
    steps: float = 0.0
    """The plan's convergence factor; 0: unknown."""
    steps_high: float = 0.0
    local_steps: int = 1
    mode: str = ""
    """The plan's sync mode; empty for an exchange in every step."""
    codec: str = ""
    """The codec that compresses most elements."""
    fp16_s: float = 0.0
    """Step time with DDP's fp16 hook; 0: not computed."""
    alone_s: float = 0.0
    """Step seconds times cautious convergence factor of the fastest machine alone; 0: there is only one machine."""

    @property
    def to_loss_s(self) -> float:
        """Step time in seconds times the cautious convergence factor: proportional to the time to a given loss."""
        return self.plan_s * (self.steps_high or 1.0)

    @property
    def gain(self) -> float:
        """The plan's speedup over training without compression."""
        return self.dense_s / self.to_loss_s if self.plan_s else 1.0

    @property
    def lead(self) -> float:
        """The plan's speedup over the best baseline: no compression, DDP's fp16 hook, or one machine alone."""
        return min(s for s in (self.dense_s, self.fp16_s, self.alone_s) if s) / self.to_loss_s if self.plan_s else 1.0


class Curve(Record, frozen=True):
    """The points of a sweep and, for a bandwidth sweep, the link rate below which compression is faster (None: no such
    rate)."""

    swept: str
    points: tuple[SweepResult, ...]
    break_even_bps: float | None = None


def point(label: str, x: float, question: Question) -> SweepResult:
    """Plans for one cluster and compares the plan with its baselines."""
    job, cluster, _, policy = question
    planned, dense = plan(*question), uncompressed_plan(question)
    if policy.objective == "step":  # convergence does not count
        planned = structs.replace(planned, steps=0.0, steps_high=0.0)
    # The dense plan needs no codec and is always possible, but a search may miss it.
    if dense.step_s < planned.step_s * (planned.steps_high or 1.0):
        planned = structs.replace(dense, steps=float(planned.steps > 0), steps_high=float(planned.steps > 0))
    batch, plan_s = (job.batch or 0) * cluster.ranks, planned.step_s
    alone_s = sum(one.to_loss_s for one in one_machine(question))
    return SweepResult(label, x, plan_s, dense.step_s, batch / plan_s if plan_s else 0.0, planned.steps, planned.steps_high,
                       planned.local_steps, sync_mode(planned), main_codec(planned),
                       ddp_fp16_s(question), alone_s)


def what_if(
    job: Job, cluster: Cluster, profile: Profile | None = None, policy: Policy | None = None, *,
    bandwidths: Sequence[float] = (), add_nodes: Sequence[Node] = (), counts: Sequence[int] = (), gpus: Sequence[str] = (),
) -> Curve:
    """Plans for several clusters that differ in one of four arguments. `bandwidths`: rates in bit/s, in both directions, of
    every training node's link. `add_nodes`: nodes that are added one by one. `counts`: numbers of nodes, which are copies of
    the last one. `gpus`: the GPU of all nodes. A profile must cover all clusters."""
    question = checked_inputs(job, cluster, profile, policy)
    variants = {
        "bandwidth": [(rate_text(bps), bps, with_link_rate(cluster, bps)) for bps in bandwidths],
        "add_node": _clusters_with_more_nodes(cluster, add_nodes) if add_nodes else [],
        "nodes": [(f"{count} nodes", float(count), _cluster_of_count(cluster, count)) for count in counts],
        "gpu": [(name, float(i), _with_gpu(cluster, name, job.timing)) for i, name in enumerate(gpus)],
    }
    swept = [name for name, each in variants.items() if each]
    if len(swept) != 1:
        raise InvalidInput("E-PLAN-QUESTION",
                           f"what_if sweeps one thing at a time: bandwidths, add_nodes, counts or gpus; got {len(swept)}")
    points = tuple(point(label, x, checked_inputs(job, machines, profile, policy)) for label, x, machines in variants[swept[0]])
    return Curve(swept[0], points, _break_even(points, question) if swept[0] == "bandwidth" else None)


def _break_even(points: Sequence[SweepResult], question: Question) -> float | None:
    """Finds by bisection the rate between the fastest swept rate at which compression is faster and the next rate. Returns None
    if compression is faster at all rates or at none."""
    points = sorted(points, key=attrgetter("x"))
    paying = [i for i, p in enumerate(points) if p.gain > 1 + PAYS]
    if not paying or paying[-1] + 1 == len(points):
        return None
    low, high = points[paying[-1]].x, points[paying[-1] + 1].x
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        pays = point("", middle, question._replace(cluster=with_link_rate(question.cluster, middle))).gain > 1 + PAYS
        low, high = (middle, high) if pays else (low, middle)
    return math.sqrt(low * high)


def with_link_rate(cluster: Cluster, bps: float) -> Cluster:
    """A copy of the cluster with every training node's link at `bps` in both directions; latencies stay."""
    if not LEAST_BPS <= bps <= MOST_BPS:
        raise InvalidInput("E-PLAN-QUESTION", f"bandwidth: got {bps:g} bit/s, allowed: {LEAST_BPS:g} to {MOST_BPS:g}")
    nodes = tuple(structs.replace(node, link=Link(bps, bps, node.link.alpha_s)) if node.ranks else node
                  for node in cluster.nodes)
    return structs.replace(cluster, nodes=nodes)


def _clusters_with_more_nodes(cluster: Cluster, added: Sequence[Node]) -> list[tuple[str, float, Cluster]]:
    """Returns the cluster, then the cluster with one more of these nodes at a time."""
    grown = [("unchanged", cluster)] + [
        (f"+ {node.device} {rate_text(node.link.up_bps)} up", structs.replace(cluster, nodes=(*cluster.nodes, *added[: n + 1])))
        for n, node in enumerate(added)]
    return [(label, float(sum(1 for node in each.nodes if node.ranks)), each) for label, each in grown]


def _cluster_of_count(cluster: Cluster, count: int) -> Cluster:
    """The cluster with this number of training nodes; nodes that only host servers stay."""
    if count < 1:
        raise InvalidInput("E-PLAN-QUESTION", f"nodes: got {count}, allowed: 1 or more")
    trained = [i for i, node in enumerate(cluster.nodes) if node.ranks]
    left_out, last = set(trained[count:]), cluster.nodes[trained[-1]]
    kept = tuple(node for i, node in enumerate(cluster.nodes) if i not in left_out)
    copies = tuple(structs.replace(last, name=f"{last.name}+{i}") for i in range(count - len(trained)))
    return structs.replace(cluster, nodes=kept + copies)


def _with_gpu(cluster: Cluster, name: str, timing: Timing | None) -> Cluster:
    return structs.replace(cluster, nodes=tuple(
        structs.replace(node, device=name, speed=job_speed(name, timing)) if node.ranks else node for node in cluster.nodes))


def break_even(curve: Curve) -> str:
    """Describes the result of a bandwidth sweep. The sentence is about compression only, or about all modes other than a dense
    exchange in every step."""
    pays = [p.gain > 1 + PAYS for p in curve.points]
    otherwise = any(p.mode for p, such in zip(curve.points, pays, strict=True) if such)
    what = "a mode other than a dense exchange in every step" if otherwise else "compression"
    if curve.break_even_bps is not None:
        return f"{what} pays below {rate_text(float(f'{curve.break_even_bps:.2g}'))}"
    if any(pays) and not all(pays):
        return f"{what} pays at some of these rates; sweep more rates to find the limit"
    return f"{what} pays at {'all' if any(pays) else 'none'} of these rates"


def rate_text(bps: float) -> str:
    """
    >>> rate_text(20e6), rate_text(2.5e9)
    ('20 Mb/s', '2.5 Gb/s')
    """
    return f"{bps / 1e9:g} Gb/s" if bps >= 1e9 else f"{bps / 1e6:g} Mb/s"
