"""Plans: legal, reproducible, within their limits, between the bound and the dense plan, and as good as trying everything."""

from __future__ import annotations

import itertools
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from oracle.schedule import PortableSchedule
from support.learning import learnt
from support.planner import random_space
from support.plans import cluster, toy_job

from commlayer import records
from commlayer.engine.plan_choice import unsuited
from commlayer.planner import choices
from commlayer.planner.choices import search, uniform
from commlayer.planner.costs import plan_excess
from commlayer.planner.inputs import checked_inputs
from commlayer.planner.model import DENSE, Cluster, Line, Link, Policy
from commlayer.planner.plan_lint import lint
from commlayer.planner.plan_rules import lower
from commlayer.planner.search import plan
from commlayer.planner.simulation import simulate
from commlayer.planner.tables import profile_from_tables
from commlayer.records import Job

DENSE_ONLY = Policy(codecs=(DENSE,))


@pytest.mark.parametrize("budget", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_the_search_finds_what_trying_everything_finds(seed: int, budget: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    space, _, counts = random_space(seed, budget=budget)
    every = itertools.product(*map(range, counts))
    within = (c for c in every if sum(space.loss[b][o] for b, o in enumerate(c)) <= space.max_loss + 1e-9)
    best_s = min(space.steps.run(list(c)) for c in within)
    found = search(space, uniform(space))
    assert found.step_s == pytest.approx(best_s, rel=1e-9)
    assert found.loss <= space.max_loss + 1e-9
    monkeypatch.setattr(choices, "FEW", 0)
    assert search(space, uniform(space)).step_s <= best_s * 1.1, "also without trying everything it comes near"


@pytest.mark.parametrize("seed", range(4))
def test_the_search_is_the_same_without_a_compiler(seed: int) -> None:
    space, problem, _ = random_space(seed, budget=True)
    portable = space._replace(steps=PortableSchedule(problem))
    assert search(portable, uniform(portable)) == search(space, uniform(space))


CLUSTERS = {
    "homes": cluster(4, "home-100/20", reachable=False),
    "one server": cluster(3, "home-100/20", reachable=False, servers=1),
    "rack": cluster(4, "10g"),
    "two GPUs each": cluster(2, "1g", ranks=2),
    "CPUs": cluster(3, "100m", device="cpu"),
    "alone": cluster(1, "1g"),
    "uneven": Cluster((*cluster(3, "fiber-500", reachable=False).nodes,
                       structs.replace(cluster(1, "home-50/5").nodes[0], name="far", speed=0.5)), False),
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_plans_are_legal_and_lie_between_the_bound_and_the_dense_plan(name: str) -> None:
    job, machines = toy_job(), CLUSTERS[name]
    profile, policy, _ = checked_inputs(job, machines, None, None)
    made = plan(job, machines)
    assert lint(made, job, machines, profile) == []
    dense = plan(job, machines, None, DENSE_ONLY)
    assert {b.codec for b in dense.buckets} == {DENSE}
    assert made.step_s <= dense.step_s * (1 + 1e-9)
    assert made.step_s == simulate(made, job, machines, profile, policy).step_s
    assert all(b.why is not None and b.why.reason for b in made.buckets)


def test_equal_arguments_give_equal_plans() -> None:
    made = [records.encode(plan(toy_job(), CLUSTERS["uneven"])) for _ in range(2)]
    assert made[0] == made[1]


def test_fast_links_get_no_compression() -> None:
    assert {b.codec for b in plan(toy_job(), cluster(4, "100g")).buckets} == {DENSE}


def test_slow_links_get_compression_and_only_servers_over_the_internet() -> None:
    made = plan(toy_job(), CLUSTERS["homes"])
    assert {b.path == "service" or "net.push" in b.path for b in made.buckets} == {True}
    sent = sum(b.numel for b in made.buckets if b.codec != DENSE)
    assert sent > 0.9 * toy_job().numel


@settings(max_examples=8, deadline=None)
@given(bps=st.floats(1e6, 1e10), factor=st.floats(1.0, 10.0))
@pytest.mark.nightly
def test_more_bandwidth_is_never_slower(bps: float, factor: float) -> None:
    """To a hair: list schedules may lose a little by a task that ends sooner (Graham's anomalies)."""
    def step_s(rate: float) -> float:
        nodes = tuple(structs.replace(n, link=Link(rate, rate, 1e-3)) for n in cluster(3, "1g").nodes)
        return plan(toy_job(6), Cluster(nodes), None, Policy(objective="step")).step_s

    assert step_s(bps * factor) <= step_s(bps) * 1.02


@pytest.mark.parametrize("max_loss", [0.0, 0.1, 0.3])
def test_the_loss_budget_holds(max_loss: float) -> None:
    job, machines = toy_job(), CLUSTERS["homes"]
    for objective in ("loss", "step"):
        profile, policy, _ = checked_inputs(job, machines, learnt(machines), Policy(max_loss=max_loss, objective=objective))
        made = plan(job, machines, profile, policy)
        lost = plan_excess(made, job, machines, profile, policy).loss_high
        assert lost <= max_loss + 1e-9
        assert lost > 0.2 * max_loss or objective == "loss" or not max_loss, "and uses it where only the step counts"


@pytest.mark.parametrize(("link", "narrow"), [("home-100/20", "down"), ("home-20/100", "up")])
def test_the_narrow_way_sends_less_for_the_same_loss(link: str, narrow: str) -> None:
    """A hundredth both ways would lose more than the budget has, a tenth both ways would send too much the narrow way.

    It is the link of the home with the server that counts: its up-link carries what goes down to the three others.
    """
    job, machines = toy_job(4, 4_000_000), cluster(4, link, reachable=False, servers=1)
    some, few = "topk(ratio=0.1)", "topk(ratio=0.01)"
    budget = Policy(codecs=(some, few), max_loss=0.1, objective="step")
    made = plan(job, machines, learnt(machines), budget)
    sent = {(b.codec, b.down or b.codec): 0 for b in made.buckets}
    for b in made.buckets:
        sent[b.codec, b.down or b.codec] += b.numel
    assert max(sent, key=sent.__getitem__) == ((few, some) if narrow == "up" else (some, few))
    assert made.step_s < 0.8 * plan(job, machines, learnt(machines), structs.replace(budget, codecs=(some,))).step_s


def test_local_steps_come_only_where_they_are_allowed_and_pay() -> None:
    homes = CLUSTERS["homes"]
    slow = Policy(max_local_steps=8, codecs=("fp16()",))
    assert plan(toy_job(), homes, None, slow).local_steps == 8
    assert plan(toy_job(), homes, None, structs.replace(slow, max_local_steps=6)).local_steps == 4, "powers of two"
    assert plan(toy_job(), homes, None, structs.replace(slow, max_local_steps=1)).local_steps == 1
    assert plan(toy_job(), cluster(4, "100g"), None, Policy(max_local_steps=8)).local_steps == 1


def test_late_results_are_used_only_where_that_is_allowed_and_pays() -> None:
    late, timely = (Policy(staleness=staleness, objective="step") for staleness in (True, False))
    made = plan(toy_job(), CLUSTERS["homes"], None, late)
    assert any(b.stale for b in made.buckets)
    assert made.step_s < plan(toy_job(), CLUSTERS["homes"], None, timely).step_s
    assert all(b.path == "service" for b in lower(made).buckets if b.stale), "what the runtime can have late"
    several = lower(plan(toy_job(), cluster(4, "home-100/20", ranks=2), None, late))
    assert any(b.stale for b in several.buckets)
    assert not unsuited(several, 4, 2), "nor do nodes of several ranks refuse it"
    assert not any(b.stale for b in plan(toy_job(), cluster(4, "100g"), None, late).buckets)


def test_a_slow_node_may_send_less_than_the_others() -> None:
    policy = Policy(codecs=("topk(ratio=0.1)", "topk(ratio=0.01)"), max_loss=0.1, objective="step")
    made = plan(toy_job(4, 4_000_000), CLUSTERS["uneven"], learnt(CLUSTERS["uneven"]), policy)
    assert any(b.by_node and len(set(b.by_node)) > 1 for b in made.buckets)


def test_a_codec_without_a_price_is_named() -> None:
    machines, asked = cluster(2, "1g"), Policy(codecs=("powersgd()",))
    with pytest.raises(ValueError, match=r"powersgd\(\).* identity.*E-PLAN-CODEC-COST"):
        plan(toy_job(), machines, None, asked)
    with pytest.raises(ValueError, match=r"policy: codecs .*powersgd\(\).* 'tables'.*E-PLAN-CODEC-COST"):
        plan(toy_job(), machines, profile_from_tables(machines), asked)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_numbers_that_are_none_are_named_wherever_they_stand(value: float) -> None:
    """What files cannot hold, Python can."""
    job, machines = toy_job(), cluster(2, "1g")
    profile, policy, timing = checked_inputs(job, machines, None, None)
    node = machines.nodes[0]

    def with_link(**fields: float) -> Cluster:
        return Cluster((structs.replace(node, link=structs.replace(node.link, **fields)), *machines.nodes[1:]))

    def with_times(**fields: object) -> Job:
        return structs.replace(job, timing=structs.replace(timing, **fields))

    wrong = Line(0.0, value)
    for name, arguments in {
        "link.up_bps": (job, with_link(up_bps=value), profile, policy),
        "link.down_bps": (job, with_link(down_bps=value), profile, policy),
        "link.alpha_s": (job, with_link(alpha_s=value), profile, policy),
        "node n0: speed": (job, Cluster((structs.replace(node, speed=value), *machines.nodes[1:])), profile, policy),
        "timing.needed_s of layer0.weight": (with_times(needed_s=(value, *timing.needed_s[1:])), machines, profile, policy),
        "timing.update_s": (with_times(update_s=value), machines, profile, policy),
        "server.slope_s": (job, machines, structs.replace(profile, server=wrong), policy),
        "decode.slope_s of identity() on cpu": (
            job, machines, structs.replace(profile, codecs=(structs.replace(profile.codecs[0], decode=wrong),)), policy),
        "bucket_s": (job, machines, structs.replace(profile, bucket_s=value), policy),
        **({} if value == math.inf else {"max_loss": (job, machines, profile, structs.replace(policy, max_loss=value))}),
    }.items():
        with pytest.raises(ValueError, match=f"{re.escape(name)} is {value:g}.*E-PLAN-INPUT"):
            plan(*arguments)


def test_a_budget_that_no_choice_keeps_is_refused() -> None:
    space, _, _ = random_space(3, budget=True)
    losses = [[loss + 2.0 for loss in each] for each in space.loss]
    with pytest.raises(ValueError, match=r"max_loss is 1\b.* 4\b.*E-PLAN-INPUT"):
        uniform(space._replace(loss=losses))


def test_an_empty_job_has_an_empty_plan() -> None:
    timing = structs.replace(toy_job().timing, ready_s=(), needed_s=())
    assert plan(Job((), timing=timing), cluster(2, "1g")).buckets == ()
