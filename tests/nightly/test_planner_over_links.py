"""Plans of known models over links from 1 Mb/s to 25 Gb/s with the shipped table: compression is no stronger than beneficial.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import pytest
from msgspec import structs

from commlayer.planner.baselines import baselines
from commlayer.planner.costs import plan_excess
from commlayer.planner.data.models import published_job
from commlayer.planner.inputs import checked_inputs, cluster_from_line
from commlayer.planner.model import Cluster, Policy, Profile, Question
from commlayer.planner.search.plan_search import PAYS, plan
from commlayer.planner.simulation import step_seconds
from commlayer.records import Bucket, Job, Plan

LADDER = ("topk(ratio=0.001)", "topk(ratio=0.01)", "topk(ratio=0.1)", "int4()", "int8()", "fp16()")
"""Each is finer than the one before."""
RATES = {"resnet50": (1, 10, 30, 100, 1000, 3000, 25000), "lstm": (1, 3, 10, 100, 300, 1000, 10000),
         "bert-base": (3, 100, 1000)}
"""Mb/s."""
SLACK = 1.04
"""The search is not exhaustive."""


def neighbours(result: Plan) -> Iterator[tuple[str, Plan]]:
    """What is coded finer in one respect, or exchanged sooner."""
    for coarse, fine in pairwise(LADDER):
        if any(coarse in (b.codec, b.down) for b in result.buckets):
            finer = tuple(with_finer(b, coarse, fine) for b in result.buckets)
            yield f"{fine} for {coarse}", structs.replace(result, buckets=finer)
    if result.local_steps > 2:
        half = result.local_steps // 2
        yield "half the local steps", structs.replace(result, local_steps=half, fragments=math.gcd(half, result.fragments))
    if result.overlap == "round":
        yield "rounds that are waited for", structs.replace(result, overlap="", fragments=1)
    if any(b.stale for b in result.buckets):
        yield "nothing late", structs.replace(result, buckets=tuple(structs.replace(b, stale=False) for b in result.buckets))


def with_finer(bucket: Bucket, coarse: str, fine: str) -> Bucket:
    codec, down = (fine if name == coarse else name for name in (bucket.codec, bucket.down))
    return structs.replace(bucket, codec=codec, down="" if down == codec else down)


def priced(result: Plan, job: Job, machines: Cluster, profile: Profile, policy: Policy) -> tuple[float, float]:
    """Seconds to a loss for each step of dense training, and how many times as many steps, cautiously."""
    question = Question(job, machines, profile, policy)
    steps = 1 + plan_excess(result, question).high
    return step_seconds(result, question) * steps, steps


@pytest.mark.parametrize(("model", "optimizer"), [("resnet50", "adam"), ("lstm", "sgd"), ("bert-base", "adam")])
def test_compression_is_no_stronger_than_the_link_requires(model: str, optimizer: str) -> None:
    """Beyond half of what compression must win."""
    job, results = published_job(model), []
    for rate in RATES[model]:
        machines = cluster_from_line(f"4xrtx3060@{rate}Mb")
        question = checked_inputs(job, machines, None, Policy(exact=False, optimizer=optimizer))
        _, _, profile, policy = question
        result = plan(job, machines, profile, policy)
        mine, steps = priced(result, job, machines, profile, policy)
        assert mine == pytest.approx(result.step_s * result.steps_high, rel=1e-6)
        for how, other in neighbours(result):
            theirs, needed = priced(other, job, machines, profile, policy)
            assert needed >= steps or theirs > mine * (1 - PAYS / 2), f"{rate} Mb/s: {how} would take no longer"
        besides = {row.name: row.to_loss_s for row in baselines(result, question)}
        assert mine <= min(besides["DDP fp16"], besides["dense fp32"]) * SLACK, f"{rate} Mb/s"
        results.append((mine, steps))
    for (slow_s, slow), (fast_s, fast) in pairwise(results):
        assert fast_s <= slow_s * SLACK, "a faster link is no later at a loss"
        assert fast <= slow * SLACK, "and asks for no coarser codec and no rarer exchange"
