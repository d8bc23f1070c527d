"""The plan with which a job begins over slow links."""

from __future__ import annotations

import pytest
from msgspec import structs
from support.autotuning import JOB, START

from commlayer.autotune.opening import SLOW_S, exchange_s, opening_plan
from commlayer.planner.model import Link
from commlayer.planner.plan_rules import verify

FAST, SLOW, SLOWEST = Link(1e10, 1e10, 0.002), Link(3e8, 3e8, 0.01), Link(1e5, 1e5, 0.02)


@pytest.mark.parametrize(("links", "every"), [((FAST, FAST), None), ((FAST, SLOW), 16), ((SLOW, SLOWEST), 32)])
def test_slow_exchanges_mean_local_steps_in_fragments(links: tuple[Link, ...], every: int | None) -> None:
    plan = opening_plan(JOB, START, links)
    assert (exchange_s(START, links) >= SLOW_S) is (plan is not None)
    assert (plan and plan.local_steps) == every
    if plan is not None:
        assert verify(plan, JOB) == []
        assert (plan.overlap, plan.fragments, plan.servers) == ("round", plan.local_steps // 2, START.servers)
        assert {b.codec for b in plan.buckets} == {b.codec for b in START.buckets}


def test_an_exchange_sends_and_receives_with_each_codec() -> None:
    buckets = tuple(structs.replace(b, down="fp16()") for b in START.buckets)
    up, down = Link(1e6, 1e12, 0.0), Link(1e12, 1e6, 0.0)
    plan = structs.replace(START, buckets=buckets)
    assert exchange_s(plan, [down]) > 3 * exchange_s(plan, [up]) > 0
    assert exchange_s(plan, [down]) == pytest.approx(8 * 2 * JOB.numel / 1e6, rel=0.01)
