"""Finds a plan for a running job from what its ranks measured. Knows a connection's servers and budget; changes nothing."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence

from msgspec import structs

from commlayer import planner
from commlayer.compressors import build
from commlayer.job.autoplan import loss_limits
from commlayer.job.autoplan.candidate import Candidate, Price, steps_of
from commlayer.job.autoplan.cpu_contention import dearer, factor
from commlayer.job.autoplan.link_probes import RankMeasurement, homes_of
from commlayer.job.autoplan.measuring import Measurements
from commlayer.job.connection import Connection
from commlayer.job.shares.comm_cost import communication
from commlayer.job.ways import in_updates
from commlayer.measure import bucket_overheads, codec_costs
from commlayer.measure.coding_slowdown import load_of, under
from commlayer.measure.collective_costs import Grouped
from commlayer.observe import RecordedStep
from commlayer.planner.model.cluster import Basis, Cluster, Line, Link, Node, PlanInputs, Policy, Profile
from commlayer.planner.model.default_plan import COLLECTIVE_NBYTES
from commlayer.planner.model.learning import LearningRow
from commlayer.planner.model.option import DENSE
from commlayer.planner.pricing.path_cost import bare
from commlayer.planner.tables.machines import learning_rows
from commlayer.records import Job, Plan

KEEPS_UP = 1.5
"""Times as long as computing alone: where averaging gradients in every step takes the loss no farther off, nothing else is
looked for."""
LEAVES = 0.75
"""Else it is left for what is at the loss in this part of the time, or sooner."""


class Replanner:
    """Measures this machine's codecs once behind each measuring of the job, then plans as often as asked."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._measured: Measurements | None = None
        self._profile: Profile | None = None
        self._energy: tuple[float, ...] = ()
        """As the first measuring saw it: under a sparse plan what comes back is no whole gradient."""
        self._contention = 0.0
        """How much dearer work on processors is than alone; 0 before it was fitted."""

    def measured(self, measurements: Measurements) -> None:
        """Under the plan in force; what was measured before is old."""
        self._measured, self._profile, self._contention = measurements, None, 0.0
        self._energy = self._energy or measurements.energy

    @property
    def rows(self) -> list[RankMeasurement]:
        return self._begun().rows

    def find(self, current: Plan, known: Plan | None, links: Sequence[Link], allowed: Policy) -> Candidate:
        """The best plan for nodes with these links.

        `current` is in force; `known`: the same as the planner has it, if it is the planner's. `allowed`: by the script.
        """
        measured, homes = self._begun(), homes_of(self._connection)
        if self._profile is None:
            codecs = loss_limits.codecs(self._connection)
            self._profile = structs.replace(_profile(current, measured.steps, measured.collectives, codecs),
                                            energy=self._energy)
        begin = time.perf_counter()
        worker, groups = self._connection.worker, self._connection.groups
        cuda = worker is not None and worker.device.type == "cuda"
        job, cluster = measured.job, cluster_of(links, measured.rows, measured.collectives, homes, cuda=cuda,
                                                  reachable=groups is None or groups.members.reachable)
        rows = harder_by(learning_rows(), self._connection.harder)
        alone, policy = loss_limits.bounded(self._connection, structs.replace(self._profile, learning=rows), allowed)
        as_planned = known or at_home(current, homes)

        @functools.cache
        def current_s(contention: float) -> float:
            return step_s(as_planned, PlanInputs(job, cluster, dearer(alone, contention), policy))

        self._contention = self._contention or factor(measured.step_s, current_s)
        profile = dearer(alone, self._contention)
        inputs = PlanInputs(job, cluster, profile, policy)
        apart = current.steps_locally and loss_limits.remembers(self._connection)
        best, leaves = _best(inputs, current, apart=apart)
        price, current_price = (_price(plan, job, cluster, profile, policy) for plan in (best, as_planned))
        found = Candidate(
            Basis(best, inputs), on_servers(best, homes), as_planned, current_s(self._contention), current_s(1.0), price,
            current_price, 0.0, steps_of(best, inputs), steps_of(as_planned, inputs), leaves)
        plain = _plain(found, apart=apart)
        return found._replace(took_s=time.perf_counter() - begin, plain=plain)

    def _begun(self) -> Measurements:
        assert self._measured is not None, "planning follows measuring"
        return self._measured


def at_home(plan: Plan, homes: Sequence[int]) -> Plan:
    """The plan with servers as the planner counts them: one for each node that has any. `homes`: the node of each server."""
    hosts = sorted(set(homes[: plan.servers]))
    buckets = tuple(structs.replace(b, server=hosts.index(homes[b.server]) if hosts else 0) for b in plan.buckets)
    return structs.replace(plan, buckets=buckets, servers=len(hosts), hosts=tuple(hosts))


def on_servers(plan: Plan, homes: Sequence[int]) -> Plan:
    """The reverse: the planner's hosts as the numbers of servers that run."""
    if not plan.servers:
        return plan
    hosts = plan.hosts or tuple(sorted(set(homes))[: plan.servers])
    number = [homes.index(host) for host in hosts]
    buckets = tuple(structs.replace(b, server=number[b.server]) for b in plan.buckets)
    return structs.replace(plan, buckets=buckets, servers=len(homes), hosts=())


def cluster_of(
    links: Sequence[Link], rows: Sequence[RankMeasurement], inside: Grouped, homes: Sequence[int], *, cuda: bool = False,
    reachable: bool = True,
) -> Cluster:
    """The cluster as measured: a link of each node, a row of each rank. Servers elsewhere count as connected like the best."""
    per_node = len(rows) // len(links)
    fastest_s = min(row.compute_s for row in rows)
    line = inside.inside
    nodes = []
    for number, link in enumerate(links):
        mine = rows[number * per_node : (number + 1) * per_node]
        nodes.append(Node(
            f"node{number}", per_node, "gpu" if cuda else "cpu", link, 8 / line.slope_s if line.slope_s else 0.0, line.floor_s,
            speed=fastest_s / max(row.compute_s for row in mine), server=number in homes,
        ))
    best = max(links, key=lambda link: link.up_bps + link.down_bps)
    nodes += [Node(f"node{number}", 0, "cpu", best) for number in range(len(links), max(homes, default=0) + 1)]
    return Cluster(tuple(nodes), reachable)


@functools.lru_cache(4)
def harder_by(rows: tuple[LearningRow, ...], times: float) -> tuple[LearningRow, ...]:
    """For a model that needs so many times the excess of steps that the median of models does, by what codecs lose of it: no
    less than is cautious for all."""
    if times <= 1.0:
        return rows
    more = [row.steps if row.codec == DENSE else 1 + times * (row.steps - 1) for row in rows]
    return tuple(structs.replace(row, steps=steps, steps_high=max(row.steps_high, steps))
                 for row, steps in zip(rows, more, strict=True))


def step_s(plan: Plan, made_from: PlanInputs) -> float:
    """Seconds of a step, each of those that share an exchange bearing its part."""
    timeline = planner.simulate(plan, made_from.job, made_from.cluster, made_from.profile, made_from.policy, spans=False)
    return timeline.step_s / plan.local_steps


def _best(made_from: PlanInputs, current: Plan, *, apart: bool = False) -> tuple[Plan, str]:
    """The plan that is first at a loss; and where it leaves averaged gradients, why, and how to keep to them.

    That needs more than a plan that is a little better: what optimizer states mean changes with it. `apart`: they have come to
    differ, so nothing goes back to averaged gradients, and what is found for them is counted as it would run.
    """
    job, cluster, profile, policy = made_from.job, made_from.cluster, made_from.profile, made_from.policy
    assert policy is not None
    assert job.timing is not None
    plain = _as_asked(planner.plan(job, cluster, profile, structs.replace(policy, exact=True)), current)
    plain = _in_updates(plain, made_from) if apart else plain
    plain_s = plain.step_s * steps_of(plain, made_from)
    computing_s = (job.timing.forward_s + job.timing.backward_s) / min(node.speed for node in cluster.nodes if node.ranks)
    if policy.exact or (not apart and plain_s <= KEEPS_UP * computing_s):
        return plain, ""
    other = _as_asked(planner.plan(job, cluster, profile, policy), current)
    if not other.steps_locally or other.step_s * steps_of(other, made_from) > (1.0 if apart else LEAVES) * plain_s:
        return plain, ""
    how = f"{other.local_steps} local steps" if other.local_steps > 1 else "steps on own gradients"
    if other.overlap == "round":
        how += ", exchanged while the next are taken"
    said = [f"{1e3 * plan.step_s:.1f} ms a step, {steps_of(plan, made_from):.2f} times as many to the loss"
            for plan in (plain, other)]
    return other, "" if not exact(current) else (
        f"nothing on averaged gradients keeps up with these links ({said[0]} at best): goes over to {how} ({said[1]}); "
        "attach(..., exact=True) keeps to averaged gradients")


def exact(plan: Plan) -> bool:
    """Whether each step is one on the average of its own gradients, up to coding."""
    return not plan.steps_locally and not any(b.stale for b in plan.buckets)


def _in_updates(plan: Plan, made_from: PlanInputs) -> Plan:
    """As it runs where optimizers remember different things, and what that takes."""
    made = structs.replace(in_updates(plan), free_s=0.0, steps=0.0, steps_high=0.0)
    return structs.replace(made, step_s=step_s(made, made_from))


def _plain(found: Candidate, *, apart: bool = False) -> Candidate | None:
    """The plan without compression by the same prices; None where that is in force, or no node reaches another."""
    made_from = found.basis.inputs
    if not made_from.cluster.reachable:
        return None
    inputs = made_from.job, made_from.cluster, made_from.profile, made_from.policy
    plain = planner.default_plan(
        made_from.job, codec=DENSE, path="allreduce", servers=0, ranks_per_node=found.runnable.ranks_per_node,
        fuse_nbytes=COLLECTIVE_NBYTES, cut_nbytes=COLLECTIVE_NBYTES,
    )
    if plain.buckets == found.current.buckets:
        return None
    plain = _in_updates(plain, made_from) if apart else structs.replace(plain, step_s=step_s(plain, made_from))
    plain = _as_asked(plain, found.runnable)
    return found._replace(basis=found.basis._replace(plan=plain), runnable=plain, price=_price(plain, *inputs),
                          steps=steps_of(plain, made_from), leaves="")


def _as_asked(plan: Plan, before: Plan) -> Plan:
    """What a job was told of its ratios holds for all its plans."""
    return structs.replace(plan, ratio_over=before.ratio_over, warmup=before.warmup)


def _price(plan: Plan, job: Job, cluster: Cluster, profile: Profile | None, policy: Policy | None) -> Price:
    priced = communication(plan, job, cluster, profile, policy)
    return priced.seconds(tuple(range(cluster.ranks))), priced.overlap


_overheads = functools.cache(bucket_overheads.measure)
_copies = functools.cache(codec_costs.copies)
"""Measured once in a process, for they are this machine's."""


def _profile(current: Plan, steps: list[RecordedStep], collectives: Grouped, codecs: Sequence[str]) -> Profile:
    """Costs on this machine, beside training; codecs as plans spell them, in full."""
    used = {codec for b in current.buckets for codec in (b.codec, b.down) if codec}
    names = sorted({str(build(bare(codec))) for codec in (*codecs, *used)})
    alone = codec_costs.measure(names)
    load = load_of(steps, current, alone)
    costs = tuple(under(load, cost) for cost in alone)
    besides, copy = _overheads(), _copies()
    return Profile(costs, besides.server, besides.bucket.floor_s, copy or Line(0.0), across=collectives.across,
                   source="measured")
