"""Baselines for a plan: no compression, DDP's fp16 hook, one machine alone, and the plan's latencies alone.

All are priced by the same simulation. Seconds to a loss are per step of dense training.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec import structs

from commlayer.planner.model.cluster import NO_LIMIT, Cluster, Line, Link, Policy, Profile
from commlayer.planner.model.default_plan import default_plan
from commlayer.planner.model.learning import alone
from commlayer.planner.model.option import DENSE
from commlayer.planner.pricing.input_checks import checked_inputs
from commlayer.planner.pricing.steps_needed import plan_excess
from commlayer.planner.search.layout_candidate import FINEST
from commlayer.planner.search.plan import plan
from commlayer.planner.search.ways import free
from commlayer.planner.simulation.timeline import exact_s
from commlayer.records import MAX_BUCKET_NBYTES, Job, Plan, Record, Timing

ALONE = "one machine alone"
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
    return exact_s(made, job, endless(cluster), free(profile), policy)


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
    if after_s >= before_s * (1 - FINEST):
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
