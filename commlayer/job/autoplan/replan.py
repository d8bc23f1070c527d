"""Finds a plan for a running job from what its ranks measured. Knows a connection's servers and budget; changes nothing."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import NamedTuple

from msgspec import structs

from commlayer import planner
from commlayer.compressors import build
from commlayer.job.autoplan import loss_limits
from commlayer.job.autoplan.cpu_contention import dearer, factor
from commlayer.job.autoplan.link_probes import Measured, homes_of
from commlayer.job.shares.comm_cost import communication
from commlayer.job.start import Connection
from commlayer.measure import bucket_overheads, codec_costs
from commlayer.measure.coding_slowdown import load_of, under
from commlayer.measure.collective_costs import Grouped
from commlayer.observe import RecordedStep
from commlayer.planner.model.cluster import Basis, Cluster, Line, Link, Node, PlanInputs, Policy, Profile
from commlayer.planner.model.codec_sizes import codec_loss
from commlayer.planner.model.default_plan import COLLECTIVE_NBYTES
from commlayer.planner.model.option import DENSE
from commlayer.planner.pricing.path_cost import bare
from commlayer.records import Job, Plan

Price = tuple[float, float]
"""Seconds of communication, and the part of computing that hides it."""


class Replan(NamedTuple):
    """The best plan, and the one in force by the same prices."""

    basis: Basis
    """With the plan as the planner has it: workers know some of its paths by other names, which have no price."""
    answer: Plan
    """For the servers that run."""
    present: Plan
    present_s: float
    alone_s: float
    """Of the plan in force, by prices that know nothing of a crowd; see job/autoplan/cpu_contention.py."""
    price: Price
    present_price: Price
    took_s: float
    without: Replan | None = None
    """The same with the plan that sends gradients as they are, through collectives."""

    @property
    def plan(self) -> Plan:
        return self.basis.plan


class ReplanVerdict(NamedTuple):
    """What planning found: seconds of a step."""

    measured_s: float
    """Under the plan in force, as all ranks measured it."""
    priced_s: float
    """Under the same plan, by prices that this figure did not go into."""
    found_s: float
    """Under the best plan found, by prices fitted to it."""


class Replanner:
    """Measures this machine's codecs once, then plans as often as asked."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._profile: Profile | None = None
        self._steps: list[RecordedStep] = []
        self._step_s = self._crowd = 0.0

    def measured(self, steps: list[RecordedStep], step_s: float) -> None:
        """Steps under the plan in force, and how long all ranks took; what was measured before is old."""
        self._profile, self._steps, self._step_s, self._crowd = None, steps, step_s, 0.0

    def find(self, current: Plan, known: Plan | None, job: Job, cluster: Cluster, collectives: Grouped) -> Replan:
        """`current` is in force; `known`: the same as the planner has it, if it is the planner's."""
        if self._profile is None:
            self._profile = _profile(current, self._steps, collectives, loss_limits.codecs(self._connection))
        begin = time.perf_counter()
        alone, policy = loss_limits.bounded(self._connection, self._profile, Policy(devices=("cpu",)))
        present = known or at_home(current, homes_of(self._connection))

        @functools.cache
        def present_s(crowd: float) -> float:
            return planner.simulate(present, job, cluster, dearer(alone, crowd), policy).step_s

        self._crowd = self._crowd or factor(self._step_s, present_s)
        profile = dearer(alone, self._crowd)
        made = planner.plan(job, cluster, profile, policy)
        price, present_price = (_price(plan, job, cluster, profile, policy) for plan in (made, present))
        answer = on_servers(made, homes_of(self._connection))
        basis = Basis(made, PlanInputs(job, cluster, profile, policy))
        found = Replan(basis, answer, present, present_s(self._crowd), present_s(1.0), price, present_price, 0.0)
        without = _without(found)
        return found._replace(took_s=time.perf_counter() - begin, without=without)


def at_home(plan: Plan, homes: Sequence[int]) -> Plan:
    """Its servers as the planner counts them: one for each node that has any. `homes`: the node of each server that runs."""
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
    links: Sequence[Link], rows: Sequence[Measured], inside: Grouped, homes: Sequence[int], *, cuda: bool = False,
) -> Cluster:
    """Nodes as measured: a link for each, a row for each rank. Servers elsewhere are as well connected as the best."""
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
    return Cluster(tuple(nodes))


def _without(found: Replan) -> Replan | None:
    """Nothing, where that is what is in force."""
    made_from = found.basis.inputs
    inputs = made_from.job, made_from.cluster, made_from.profile, made_from.policy
    plain = planner.default_plan(
        made_from.job, codec=DENSE, path="allreduce", servers=0, ranks_per_node=found.answer.ranks_per_node,
        fuse_nbytes=COLLECTIVE_NBYTES, cut_nbytes=COLLECTIVE_NBYTES,
    )
    if plain.buckets == found.present.buckets:
        return None
    plain = structs.replace(plain, step_s=planner.simulate(plain, *inputs).step_s)
    return found._replace(basis=found.basis._replace(plan=plain), answer=plain, price=_price(plain, *inputs))


def _price(plan: Plan, job: Job, cluster: Cluster, profile: Profile | None, policy: Policy | None) -> Price:
    priced = communication(plan, job, cluster, profile, policy)
    return priced.seconds(tuple(range(cluster.ranks))), priced.overlap


_overheads = functools.cache(bucket_overheads.measure)
_copies = functools.cache(codec_costs.copies)
"""Once in a process: they are this machine's."""


def _profile(current: Plan, steps: list[RecordedStep], collectives: Grouped, codecs: Sequence[str]) -> Profile:
    """Costs as they are here, beside training; codecs as plans spell them, in full.

    What these lose nobody can measure now: the tables guess.
    """
    used = {codec for b in current.buckets for codec in (b.codec, b.down) if codec}
    names = sorted({str(build(bare(codec))) for codec in (*codecs, *used)})
    alone = codec_costs.measure(names)
    load = load_of(steps, current, alone)
    costs = tuple(structs.replace(under(load, cost), loss=codec_loss(cost.codec)) for cost in alone)
    besides, copy = _overheads(), _copies()
    return Profile(costs, besides.server, besides.bucket.floor_s, copy or Line(0.0), across=collectives.across,
                   source="measured")
