"""The plan with which a job begins: local steps over slow links, no compression over fast ones."""

from __future__ import annotations

import pytest
from msgspec import structs
from support.autotuning import JOB, START

from commlayer.autotune.opening import SHORT_S, exchange_s, is_no_slower, opening_plan
from commlayer.autotune.planning.search import all_reduce_plan
from commlayer.planner.data.tables import profile_from_tables
from commlayer.planner.model import Cluster, LinearCost, Link, Node, Policy, Profile, Question
from commlayer.planner.plan_rules import verify

FAST, SLOW, NEARER, MIDDLE, SLOWER, SLOWEST = (Link(bps, bps, alpha_s) for bps, alpha_s in (
    (1e10, 0.002), (4e9, 0.01), (1e9, 0.01), (4e8, 0.01), (3e8, 0.01), (1e5, 0.02)))


@pytest.mark.parametrize(("links", "every"), [
    ((FAST, FAST), None), ((FAST, SLOW), 1), ((FAST, NEARER), 2), ((FAST, MIDDLE), 4), ((SLOW, SLOWER), 8),
    ((SLOW, SLOWEST), 32),
])
def test_slow_exchanges_mean_local_steps_in_fragments(links: tuple[Link, ...], every: int | None) -> None:
    assert (exchange_s(START, links) >= SHORT_S) is (every is not None)
    if every is None:
        assert opening_plan(JOB, START, links, forward=False) is None
        assert opening_plan(JOB, START, links, forward=True) == structs.replace(START, overlap="forward")
        return
    plan = opening_plan(JOB, START, links, forward=False)
    assert plan is not None
    assert plan == opening_plan(JOB, START, links, forward=True)
    assert verify(plan, JOB) == []
    assert (plan.local_steps, plan.overlap) == (every, "round")
    assert (plan.fragments, plan.servers) == (1 if every == 1 else max(2, every // 2), START.servers)
    assert plan.steps_locally
    assert {b.codec for b in plan.buckets} == {b.codec for b in START.buckets}


def test_an_exchange_sends_and_receives_with_each_codec() -> None:
    buckets = tuple(structs.replace(b, down="fp16()") for b in START.buckets)
    up, down = Link(1e6, 1e12, 0.0), Link(1e12, 1e6, 0.0)
    plan = structs.replace(START, buckets=buckets)
    assert exchange_s(plan, [down]) > 3 * exchange_s(plan, [up]) > 0
    assert exchange_s(plan, [down]) == pytest.approx(8 * 2 * JOB.numel / 1e6, rel=0.01)


def near(bps: float, profile: Profile | None = None) -> bool:
    """Whether four machines with these links begin without compression."""
    cluster = Cluster(tuple(Node(f"n{n}", 1, "cpu", Link(bps, bps, 5e-5)) for n in range(4)))
    inputs = Question(JOB, cluster, profile or profile_from_tables(cluster), Policy())
    return is_no_slower(all_reduce_plan(JOB, START), START, inputs)


def test_training_begins_without_compression_where_that_is_no_slower() -> None:
    assert [near(bps) for bps in (1e7, 1e8, 1e9, 1e10, 1e11)] == [False, False, False, True, True]


def test_costs_of_codecs_and_collectives_count() -> None:
    profile = profile_from_tables(Cluster(()))
    slow_codecs = structs.replace(profile, codecs=tuple(
        structs.replace(cost, encode=cost.encode * 100, decode=cost.decode * 100) if "int4" in cost.codec else cost
        for cost in profile.codecs))
    assert near(1e9, slow_codecs)
    assert not near(1e10, structs.replace(profile, across=LinearCost(1e-5, 1e-8)))
