"""Ratios of a whole plan and their warmup: how entries are divided, sent and answered."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support import codecs
from support import workers as kit

from commlayer.compressors import make_codec, parse, wrap
from commlayer.compressors.global_budget import (
    FIRST_RATIO,
    MAX_SHARE,
    MOST_CHANGE,
    BudgetedTopK,
    Demand,
    MagnitudeTail,
    share_budget,
    with_budget,
)
from commlayer.engine.buckets.bucket import EncodedBucket
from commlayer.engine.job.plan_checks import node_problems
from commlayer.engine.worker.plan_handover import hand_over
from commlayer.planner import default_plan, verify
from commlayer.records import Bucket, Plan, Slice, Spec

SHAPES: list[tuple[int, ...]] = [(40_000,), (20_000,), (6000,), (6000,), (500,)]
SCALES = [0.2, 1.0, 3.0, 0.05, 1.0]
NUMEL = sum(math.prod(shape) for shape in SHAPES)


def plan(codec: str = "topk(0.02)", down: str = "", **fields: Any) -> Plan:
    result = default_plan(kit.job(SHAPES), codec=codec, path="service", servers=1, ranks_per_node=1, fuse_nbytes=4,
                          cut_nbytes=1 << 20)
    return replace(result, buckets=tuple(replace(b, down=down) for b in result.buckets), **fields)


def gradients(rank: int, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [scale * torch.randn(shape, generator=generator) for scale, shape in zip(SCALES, SHAPES, strict=True)]


def entries(payload: Any) -> int:
    return int.from_bytes(payload[8:12], "little")


class Run:
    """What workers sent and received, bucket by bucket in each step."""

    def __init__(self, of: Plan, steps: int, world: int = 2, first: int = 0) -> None:
        with kit.Rig(world, "", shapes=SHAPES, plan=of) as rig:
            for worker in rig.workers:
                worker.now.number = first
            self.sent: list[list[list[int]]] = [[] for _ in range(world)]
            self.received: list[list[int]] = []

            def body(rank: int) -> None:
                worker = rig.workers[rank]
                for step in range(first, first + steps):
                    kit.step(worker, list(gradients(rank, step)))
                    self.sent[rank].append([entries(b.coder.payload) for b in worker.buckets if isinstance(b, EncodedBucket)])
                    if rank == 0:
                        cells = rig.sums[0].cells
                        self.received.append([entries(cells[b.id].results[(step, 0)][1]) for b in worker.buckets])

            for result in kit.on_ranks(world, body):
                if isinstance(result, BaseException):
                    raise result


@pytest.mark.parametrize("codec", ["topk(0.02)", "topk(0.02, exact=True)", "topk(0.02, values='fp16')"])
def test_budget_keeps_the_total_and_favours_large_gradients(codec: str) -> None:
    """In both directions, with sorted and with tracked thresholds; the server's reply follows what it received."""
    run = Run(plan(codec, ratio_over="plan"), 10)
    request = sum(math.ceil(0.02 * math.prod(shape)) for shape in SHAPES)
    for sent in run.sent:
        assert all(abs(sum(step) / request - 1) < 0.1 for step in sent)
    assert all(abs(sum(step) / request - 1) < 0.1 for step in run.received)
    shares = [sent / math.prod(shape) for sent, shape in zip(run.sent[0][-1], reversed(SHAPES), strict=True)]
    large, small = shares[2], shares[1]
    assert large > 0.06
    assert small <= 0.02 / MAX_SHARE * 1.1 + 1e-3, "the fewest that a bucket may be left with"
    # One of small gradients, where entries gather in the residual until they are as large as the others'.
    assert run.received[-1][2] > 3 * run.received[-1][1]


def test_warmup_follows_the_job_step_on_workers_and_servers() -> None:
    run = Run(plan(warmup=8), 10)
    totals = [sum(step) for step in run.sent[0]]
    assert totals[0] == pytest.approx(FIRST_RATIO * NUMEL, rel=0.1)
    assert all(after < 1.1 * before for before, after in pairwise(totals))
    assert totals[8] == pytest.approx(0.02 * NUMEL, rel=0.1)
    assert all(sum(got) == pytest.approx(sent, rel=0.1) for got, sent in zip(run.received, totals, strict=True))
    later = Run(plan(warmup=8), 3, first=7)
    assert [sum(step) for step in later.sent[0]] == pytest.approx(totals[7:], rel=0.1), "a new worker in a running job"


@pytest.mark.parametrize("cut_nbytes", [1 << 20, 1 << 14])
def test_plan_change_keeps_the_budget_of_each_element(cut_nbytes: int) -> None:
    """The first step under the next plan divides entries as the last step did, whether or not bucket boundaries are equal."""
    before = plan(ratio_over="plan")
    after = default_plan(kit.job(SHAPES), codec="topk(0.01)", path="service", servers=1, ranks_per_node=1, fuse_nbytes=4,
                         cut_nbytes=cut_nbytes)
    after = replace(after, ratio_over="plan")
    with kit.Rig(1, "", shapes=SHAPES, plan=before) as rig, kit.Rig(1, "", shapes=SHAPES, plan=after) as later:
        for step in range(8):
            kit.step(rig.workers[0], list(gradients(0, step)))
        previous = by_tensor(rig.workers[0])
        hand_over(rig.workers[0], later.workers[0])
        kit.step(later.workers[0], list(gradients(0, 8)))
        has = by_tensor(later.workers[0])
    assert previous[2] > 4 * 0.02 * 6000
    assert has == pytest.approx([entries / 2 for entries in previous], rel=0.05, abs=10)


def by_tensor(worker: Any) -> list[int]:
    result = [0] * len(SHAPES)
    for bucket in worker.buckets:
        result[bucket.slices[0].tensor] += bucket.ledger.state["inner"]["entries"]
    return result


def budgeted(text: str, **how: Any) -> Any:
    return with_budget(wrap(parse(text)), None, **{"steps": 0, "shared": True} | how)


@pytest.mark.parametrize("text", ["topk(0.05)", "topk(0.05, values='fp32')", "topk(0.4, 'int4')", "block_threshold(0.05)"])
@pytest.mark.parametrize("numel", [1, 37, 5000, 40_000])
def test_payloads_are_within_the_bound(text: str, numel: int) -> None:
    codec, spec = budgeted(text, steps=5), Spec((numel,))
    assert isinstance(codec.inner, BudgetedTopK)
    state, out = codec.init(spec), codecs.room(codec, spec)
    most = min(numel, math.ceil(codec.inner.max_ratio * numel))
    for step, request in enumerate([most, 1, most, max(1, most // 3), max(1, most // 2)]):
        codec.inner.set_entries(state["inner"], request)
        nbytes = codec.start(codecs.noise(numel, step), state, out)
        run = 16 if "block" in text else 1
        assert entries(out) <= 1.1 * -(-request // run) * run + run
        assert entries(out) >= min(0.89 * request, numel)
        assert codec.decode(out[:nbytes], state, torch.empty(numel))


def test_plans_without_ratios_are_unchanged() -> None:
    for text in ("int8()", "randomk(0.1)", "powersgd(2)"):
        assert budgeted(text) == wrap(parse(text))
    assert budgeted("block_threshold(0.1)") == wrap(parse("block_threshold(0.1)")), "its sums of runs compare with no magnitude"
    bucket = Bucket(0, (Slice(0, 0, 100),), "encode@cpu all.allgather decode@cpu", "topk(0.1)")
    assert make_codec(bucket, plan=plan(ratio_over="plan")) == wrap(parse("topk(0.1)")), "collectives pay for the largest size"
    assert str(budgeted("topk(0.1)")) == str(wrap(parse("topk(0.1)")))


def test_plan_description_lists_only_active_settings() -> None:
    result = plan()
    assert verify(replace(result, ratio_over="all", warmup=-1), kit.job(SHAPES)) == [
        "warmup is -1, allowed: at least 0", "ratio_over is 'all', allowed: 'bucket' or 'plan'"]
    assert not verify(replace(result, ratio_over="plan", warmup=100), kit.job(SHAPES))
    assert not node_problems(replace(result, ratio_over="plan", warmup=100), 2, 1)


TAILS = st.builds(MagnitudeTail, st.integers(0, 5000), st.floats(1e-30, 1e30), st.floats(0.5, 40.0))


@st.composite
def asks(draw: st.DrawFn) -> list[Demand]:
    results = []
    for _ in range(draw(st.integers(1, 12))):
        plain = draw(st.integers(1, 5000))
        fewest, most = max(1, plain // 8), 8 * plain
        results.append(Demand(draw(st.integers(1, 3 * most)), fewest, plain, most, draw(st.none() | TAILS)))
    return results


@given(asks())
def test_total_equals_that_of_plain_shares_and_buckets_change_by_a_bounded_factor(given_: list[Demand]) -> None:
    """The factor holds if requests were for the same total, as in all steps outside warmup, and within the limits."""
    result = share_budget(given_)
    assert sum(result) == sum(ask.plain for ask in given_)
    assert all(ask.fewest <= entries <= ask.most for ask, entries in zip(given_, result, strict=True))
    assert share_budget(given_) == result
    settled = [ask._replace(now=now) for ask, now in zip(given_, result, strict=True)]
    for ask, entries in zip(settled, share_budget(settled), strict=True):
        assert ask.now / MOST_CHANGE - 1 <= entries <= ask.now * MOST_CHANGE + 1


def test_shares_converge_to_one_global_threshold() -> None:
    generator = torch.Generator().manual_seed(1)
    scales = [0.5, 1.0, 1.0, 1.3, 2.0]
    vectors = [scale * torch.randn(20_000, generator=generator).abs().pow(1.5) for scale in scales]
    plain, now = [200] * len(vectors), [200] * len(vectors)
    for _ in range(8):
        tails = []
        for v, k in zip(vectors, now, strict=True):
            top = v.topk(k).values
            tails.append(MagnitudeTail(k, float(top[-1]), 1 / max(float((top / top[-1]).log().mean()), 1e-3)))
        now = share_budget([Demand(k, p // 8, p, 8 * p, t) for k, p, t in zip(now, plain, tails, strict=True)])
    threshold = torch.cat(vectors).topk(sum(plain)).values[-1]
    best = [int((v >= threshold).sum()) for v in vectors]
    for mine, wanted in zip(now, best, strict=True):
        assert math.isclose(mine, max(wanted, 25), rel_tol=0.1, abs_tol=10)
