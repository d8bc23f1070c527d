"""Plan search for a running job: finds the best plan from measured costs, and predicts the active plan's step time.

Pure and without torch; planning_process.py runs it in a child process.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec import structs

from commlayer.autotune.planning.candidate import LEAVES, MOST_STEPS, Candidate, Price, estimate_factor
from commlayer.autotune.planning.contention import factor, scale_processing_costs
from commlayer.codec_spec import parse_spec
from commlayer.planner.baselines import one_machine
from commlayer.planner.buckets import COLLECTIVE_NBYTES, default_plan
from commlayer.planner.convergence import Recipe, excess
from commlayer.planner.model import DENSE, Basis, Cluster, Node, Question
from commlayer.planner.search.plan_search import PlanSearch
from commlayer.planner.search.scenario import PricedPlan
from commlayer.planner.simulation import simulate, step_seconds
from commlayer.records import Job, Plan, with_updates

NEARLY = 0.03
"""A predicted step time counts as equal to the measured one if the prediction is longer by at most this fraction."""
ROUNDS = 6
"""Number of bisection steps for the rate of the links."""
FASTER = 2.0
"""Upper limit of the rate that is assumed for any node, as a multiple of the fastest measured one."""
FINE = ("identity", "fp16", "bf16", "int8", "int4")
"""Codec families to which a young job is limited."""
NOTHING_ELSE = 2.0
"""A young job uses all codecs only if the best plan with FINE codecs takes this many times as long to reach a loss."""
SOONER = 0.8
"""Local steps that the script has not allowed are suggested if they reduce the time to a loss to this fraction."""


class SearchOrder(NamedTuple):
    """Input of a plan search."""

    current: Plan
    """The active plan, as workers run it."""
    known: Plan | None
    """The planner's form of the active plan, if the planner made that plan; otherwise None."""
    server_nodes: tuple[int, ...]
    """The node number of each server."""
    inputs: Question
    """The planner's inputs, with costs that do not include contention for the CPU."""
    measured_s: float
    """Measured step time under the active plan, in seconds."""
    contention: float = 0.0
    """Slowdown of work on the CPU relative to work measured alone; 0: the search fits it to the measured step time."""
    apart: bool = False
    """True: optimizer states have diverged between ranks."""
    suggests: bool = False
    young: bool = False
    """See plan_limits.PlanLimits."""


class SearchResult(NamedTuple):
    candidate: Candidate
    contention: float
    elsewhere_bps: float = 0.0
    """Upload rate of servers on machines without ranks that explains the measured step time; 0: there are none."""


def search(order: SearchOrder) -> SearchResult:
    """Finds the best plan, and predicts the active plan's step time from the same costs."""
    job, cluster, alone, policy = order.inputs
    as_planned = order.known or number_servers_by_node(order.current, order.server_nodes)
    # Recorded steps wait for their results, even if the active plan overlaps them with the next forward pass.
    recorded = structs.replace(as_planned, overlap="") if as_planned.overlap == "forward" else as_planned
    if not order.contention:  # rates were just probed; in later searches they come from the traffic of steps
        cluster = sped_up(
            cluster, lambda faster: step_seconds(recorded, order.inputs._replace(cluster=faster)), order.measured_s)

    @functools.cache
    def current_s(contention: float) -> float:
        return step_seconds(as_planned, Question(job, cluster, scale_processing_costs(alone, contention), policy))

    contention = order.contention or factor(
        order.measured_s,
        lambda times: step_seconds(recorded, Question(job, cluster, scale_processing_costs(alone, times), policy)))
    profile = scale_processing_costs(alone, contention)
    inputs = Question(job, cluster, profile, policy)
    best = best_plan(inputs, order.current, apart=order.apart, suggests=order.suggests, young=order.young)
    current_price = predict_price(as_planned, inputs)

    def candidate(plan: Plan, leaves: str) -> Candidate:
        return Candidate(
            Basis(plan, inputs), number_servers_by_job(plan, order.server_nodes), as_planned, current_s(contention),
            current_s(1.0), predict_price(plan, inputs), current_price, estimate_factor(plan, inputs),
            estimate_factor(as_planned, inputs), leaves)

    alone_s = _fastest_alone_s(inputs)
    result = candidate(best.plan, best.leaves)._replace(
        alone_s=alone_s if alone_s < math.inf else 0.0, hint=best.hint, auto_times=best.auto_times)
    local = candidate(best.local, best.for_local) if best.local else None
    alternatives = tuple(each for each in (local, predict_uncompressed(result, apart=order.apart)) if each is not None)
    elsewhere_bps = max((node.link.up_bps for node in cluster.nodes if not node.ranks), default=0.0)
    return SearchResult(result._replace(alternatives=alternatives), contention, elsewhere_bps)


def sped_up(cluster: Cluster, step_s: Callable[[Cluster], float], measured_s: float) -> Cluster:
    """Returns the cluster with links raised to the lowest common rate that explains the measured step time. Links of servers on
    machines without ranks are raised first, because no probe measures them. Then all others are raised, because short probes
    measure too low rates. Returns it unchanged if the rates already explain that time, or if no rate does."""
    for faster, which in ((float(cluster.ranks), [node for node in cluster.nodes if not node.ranks]),
                          (FASTER, [node for node in cluster.nodes if node.ranks])):
        if not which or step_s(cluster) <= measured_s * (1 + NEARLY):
            continue

        def sending(least_bps: float, before: Cluster = cluster, which: Sequence[Node] = which) -> Cluster:
            return structs.replace(before, nodes=tuple(
                structs.replace(node, link=structs.replace(node.link, up_bps=max(least_bps, node.link.up_bps)))
                if node in which else node for node in before.nodes))

        low, high = min(node.link.up_bps for node in which), faster * max(node.link.up_bps for node in which)
        if step_s(sending(high)) > measured_s:
            if which[0].ranks:  # what remains is not explained by links
                return cluster
            cluster = sending(high)
            continue
        for _ in range(ROUNDS):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if step_s(sending(middle)) > measured_s else (low, middle)
        return sending(high)
    return cluster


def number_servers_by_node(plan: Plan, server_nodes: Sequence[int]) -> Plan:
    """Returns the plan with servers numbered as the planner does: one per node that has servers. `server_nodes`: the node
    number of each server."""
    hosts = sorted(set(server_nodes[: plan.servers]))
    buckets = tuple(structs.replace(b, server=hosts.index(server_nodes[b.server]) if hosts else 0) for b in plan.buckets)
    return structs.replace(plan, buckets=buckets, servers=len(hosts), hosts=tuple(hosts))


def number_servers_by_job(plan: Plan, server_nodes: Sequence[int]) -> Plan:
    """Returns the plan with the planner's servers, one per node, mapped to the running ones. The reverse of
    number_servers_by_node."""
    if not plan.servers:
        return plan
    hosts = plan.hosts or tuple(sorted(set(server_nodes))[: plan.servers])
    number = [server_nodes.index(host) for host in hosts]
    buckets = tuple(structs.replace(b, server=number[b.server]) for b in plan.buckets)
    return structs.replace(plan, buckets=buckets, servers=len(server_nodes), hosts=())


class BestPlan(NamedTuple):
    """The plan that is predicted to reach a loss first. If it gives up averaged gradients, `leaves` is the reason."""

    plan: Plan
    leaves: str = ""
    local: Plan | None = None
    """The local-step plan to try if averaged gradients turn out slower than predicted; None if there is none. `for_local` is
    the reason to log then."""
    for_local: str = ""
    hint: str = ""
    auto_times: float = 0.0
    """`hint`, `auto_times`: about local steps that the script has not allowed: see Candidate."""


def best_plan(
    question: Question, current: Plan, *, apart: bool = False, suggests: bool = False, young: bool = False,
) -> BestPlan:
    """Returns the best plan whose codecs have a convergence factor below MOST_STEPS; for a young job, one with FINE codecs if
    it is fast enough."""
    job, cluster, profile, policy = question
    recipe = Recipe(policy.optimizer, workers=cluster.ranks, numel=job.numel)
    allowed = _restrict_codecs(question, lambda codec: 1.0 + excess(profile.learning, codec, recipe).high < MOST_STEPS)
    finely = _restrict_codecs(allowed, lambda codec: parse_spec(codec).core.family in FINE)

    def search_for(inputs: Question) -> tuple[BestPlan, float]:
        best = _choose_sync_mode(inputs, current, apart=apart, suggests=suggests)
        return best, best.plan.step_s * estimate_factor(best.plan, inputs)

    if not young or finely == allowed:
        return search_for(allowed)[0]
    fine, fine_s = search_for(finely)
    if fine_s <= NOTHING_ELSE * _computing_s(question):  # no plan is faster than steps without communication
        return fine
    other, other_s = search_for(allowed)
    return fine if fine_s <= NOTHING_ELSE * other_s else other


def _restrict_codecs(question: Question, keeps: Callable[[str], bool]) -> Question:
    """Returns the inputs with the policy restricted to codecs for which `keeps` returns True; unchanged if there is none."""
    _, _, profile, policy = question
    codecs = policy.codecs or tuple(dict.fromkeys(cost.codec for cost in profile.codecs))
    fit = tuple(codec for codec in codecs if keeps(codec))
    return question._replace(policy=structs.replace(policy, codecs=fit)) if 0 < len(fit) < len(codecs) else question


def _fastest_alone_s(question: Question) -> float:
    """Returns the seconds that the fastest machine alone needs for the progress of one dense step; infinite if unknown."""
    return min((machine.to_loss_s for machine in one_machine(question)), default=math.inf)


def _computing_s(question: Question) -> float:
    """Returns the computing seconds of a step on the slowest node."""
    timing = question.timing
    return (timing.forward_s + timing.backward_s) / min(node.speed for node in question.cluster.nodes if node.ranks)


def _choose_sync_mode(question: Question, current: Plan, *, apart: bool, suggests: bool) -> BestPlan:
    """Chooses between averaged gradients and local steps. Local steps must be clearly faster, because they change the
    optimizer states, unless one machine alone is faster than averaged gradients.

    `apart`: True: states have diverged, so there is no return to averaged gradients. `suggests`: True: if the policy requires
    averaged gradients, reports how much faster local steps would be.
    """
    searched, policy = PlanSearch(*question), question.policy

    def timed(option: PricedPlan) -> Plan:
        plan = _with_ratios(option.plan, current)
        return structs.replace(plan, step_s=step_seconds(plan, question))

    def with_explanation(option: PricedPlan) -> Plan:
        return _with_ratios(searched.with_explanation(option), current)

    if apart:
        local = searched.best(exact=policy.exact, averages=policy.exact)
        if local.plan.steps_locally and estimate_factor(timed(local), question) < MOST_STEPS:
            return BestPlan(with_explanation(local))
        return BestPlan(_convert_to_updates(with_explanation(searched.best(exact=True)), question))
    averaged = searched.best(exact=True)
    plain = timed(averaged)
    plain_s = plain.step_s * estimate_factor(plain, question)
    enough = SOONER if policy.exact else LEAVES
    # Steps without communication are a lower bound.
    keeps_up = (policy.exact and not suggests) or enough * plain_s <= _computing_s(question)
    free = averaged if keeps_up else searched.best(exact=False)
    other = timed(free)
    other_s = other.step_s * estimate_factor(other, question)
    if not other.steps_locally or other_s > plain_s or estimate_factor(other, question) >= MOST_STEPS:
        return BestPlan(with_explanation(averaged))
    if policy.exact:
        hint = _suggest_mode(plain, other, question) if other_s <= SOONER * plain_s else ""
        return BestPlan(with_explanation(averaged), hint=hint, auto_times=plain_s / other_s)
    leaves = _describe_switch(plain, other, question) if current.synchronous else ""
    if other_s <= LEAVES * plain_s or plain_s > _fastest_alone_s(question):
        return BestPlan(with_explanation(free), leaves)
    return BestPlan(with_explanation(averaged), local=with_explanation(free), for_local=leaves)


def _describe_mode(other: Plan) -> str:
    how = f"{other.local_steps} local steps" if other.local_steps > 1 else "steps on own gradients"
    if other.overlap == "round":
        how += f", exchange overlapped{f' in {other.fragments} parts' if other.fragments > 1 else ''}"
    return how


def _suggest_mode(plain: Plan, other: Plan, question: Question) -> str:
    (plain_s, plain_steps), (other_s, other_steps) = ((plan.step_s, estimate_factor(plan, question)) for plan in (plain, other))
    times = plain_s * plain_steps / (other_s * other_steps)
    return (f"{_describe_mode(other)} would reach a loss {times:.1f} times as fast ({1e3 * other_s:.3g} instead of "
            f"{1e3 * plain_s:.3g} ms a step, factor {other_steps:.2f} instead of {plain_steps:.2f}): attach(..., sync='auto') "
            "allows them")


def _describe_switch(plain: Plan, other: Plan, question: Question) -> str:
    speeds = [f"{1e3 * plan.step_s:.3g} ms a step, factor {estimate_factor(plan, question):.2f}" for plan in (plain, other)]
    return (f"switching to {_describe_mode(other)} ({speeds[1]}): averaged gradients need {speeds[0]}; sync='step' would keep "
            f"them")


def _convert_to_updates(plan: Plan, question: Question) -> Plan:
    """Returns the plan as it runs when optimizer states differ between ranks, with its predicted step time."""
    converted = structs.replace(with_updates(plan), steps=0.0, steps_high=0.0)
    return structs.replace(converted, step_s=step_seconds(converted, question))


def predict_uncompressed(best: Candidate, *, apart: bool = False) -> Candidate | None:
    """Returns the plan without compression, predicted from the same costs. Returns None if the uncompressed plan is active
    already, or if workers cannot connect to each other."""
    inputs = best.basis.inputs
    if not inputs.cluster.reachable:
        return None
    plain = all_reduce_plan(inputs.job, best.runnable)
    if plain.buckets == best.current.buckets:
        return None
    plain = _convert_to_updates(plain, inputs) if apart else structs.replace(plain, step_s=step_seconds(plain, inputs))
    return best._replace(basis=best.basis._replace(plan=plain), runnable=plain, price=predict_price(plain, inputs),
                         steps=estimate_factor(plain, inputs), leaves="")


def all_reduce_plan(job: Job, before: Plan) -> Plan:
    """Returns a plan that exchanges what DistributedDataParallel does, with the compression-ratio settings of `before`."""
    plan = default_plan(job, codec=DENSE, path="allreduce", servers=0, ranks_per_node=before.ranks_per_node,
                        fuse_nbytes=COLLECTIVE_NBYTES, cut_nbytes=COLLECTIVE_NBYTES)
    return _with_ratios(plan, before)


def _with_ratios(plan: Plan, before: Plan) -> Plan:
    """Returns the plan with the compression-ratio settings of the job."""
    return structs.replace(plan, ratio_over=before.ratio_over, warmup=before.warmup)


def predict_price(plan: Plan, inputs: Question) -> Price:
    """Returns the predicted seconds of communication, and the fraction of computing that overlaps it. The prediction is exact
    for steps without computing, and for the job's own computing time. All nodes count as computing equally long, as balanced
    ones do."""
    timing = inputs.job.timed
    cluster = structs.replace(inputs.cluster, nodes=tuple(structs.replace(node, speed=1.0) for node in inputs.cluster.nodes))

    def exposed_s(part: float) -> float:
        job = structs.replace(inputs.job, timing=timing.scaled(part))
        return simulate(plan, job, cluster, inputs.profile, inputs.policy).exposed_s / plan.local_steps

    comm_s, compute_s = exposed_s(0.0), timing.forward_s + timing.backward_s + timing.update_s
    return comm_s, min(1.0, max(0.0, (comm_s - exposed_s(1.0)) / compute_s)) if compute_s else 0.0
