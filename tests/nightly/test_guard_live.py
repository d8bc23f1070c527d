"""The guard in a running job: what is too lossy is made finer on all ranks at one step, what is exact is left alone."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.attached import Run, Setting, coordinators, mlp, play
from support.fidelity import measure
from support.rank_pool import pool
from torch import nn

import commlayer
from commlayer.autotune import quality as policy
from commlayer.autotune import replanner
from commlayer.autotune.quality import SETTLE
from commlayer.balance import loss_model
from commlayer.balance.loss_model import LossModel, LossPoint
from commlayer.compressors import parse, wrap
from commlayer.engine import gradient_comparison, plan_choice
from commlayer.engine.connection import JobContext
from commlayer.engine.optimizers import job_of
from commlayer.engine.plan_choice import unsuited
from commlayer.planner import default_plan
from commlayer.planner.inputs import cluster_from_line
from commlayer.planner.model import Policy
from commlayer.planner.tables import DEFAULT_CODECS, profile_from_tables
from commlayer.records import Bucket, Job, Plan, Slice, TensorInfo

WORLD, SERVERS = 2, 2
LATEST = 260
"""Steps until a codec that loses nearly everything has become fine enough."""


def train(run: Run, steps: int) -> dict[str, Any]:
    """Looks as often as it may, whatever that costs: time decides nothing here."""
    policy.TIME_PART = 1e9
    logging.getLogger("commlayer").setLevel(logging.ERROR)
    model = mlp()
    wrapped = run.wrap(model)
    session = run.sessions[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    levels, sent = [], [0.0]
    for step in range(steps):
        made = torch.Generator().manual_seed(2 * step + run.rank)
        x = torch.randn(6, 12, generator=made)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(wrapped(x), torch.stack([x[:, 0], x[:, 2], x.mean(1)], 1))
        loss.backward()
        session.report(loss)
        optimizer.step()
        levels.append(plan_choice.lowest(session.inspect.plan))
        sent.append(session.stats()["sent_nbytes"])
    return {"levels": levels, "sent": [b - a for a, b in itertools.pairwise(sent)], "said": session.inspect.decisions(),
            "weights": torch.cat([p.detach().view(-1) for p in model.parameters()]), "stats": session.stats()}


def ran(steps: int, codec: str, how: str = "module", **fields: Any) -> list[dict[str, Any]]:
    with coordinators(1, WORLD, SERVERS) as made:
        setting = Setting(how, (made[0].address,), codec, servers=SERVERS, fields=tuple(fields.items()))
        return list(pool(WORLD).call(play, WORLD, train, setting, steps))


@pytest.mark.parametrize(("how", "codec"), [
    ("module", "topk(ratio=0.0001)"), ("ddp", "topk(ratio=0.0001)"),
])
def test_a_codec_that_loses_too_much_is_made_finer_at_one_step(how: str, codec: str) -> None:
    results = ran(LATEST, codec, how, guard="act", max_loss=0.005)
    levels, sent = results[0]["levels"], results[0]["sent"]
    assert levels == results[1]["levels"], "both ranks at the same step"
    assert torch.equal(results[0]["weights"], results[1]["weights"])
    assert levels[0] < levels[-1]
    changes = [step for step in range(1, LATEST) if levels[step] != levels[step - 1]]
    assert all(levels[step] > levels[step - 1] for step in changes[:2])
    assert max(sent[: changes[0]]) * 1.5 < min(sent[-20:]), "what is finer sends more"
    assert results[0]["stats"]["guard_s"] > 0


@pytest.mark.parametrize(("codec", "fields"), [
    ("identity()", {"guard": "act", "max_loss": 0.005}), ("fp16()", {"guard": "act", "max_loss": 0.005}),
    ("topk(ratio=0.0001)", {}), ("topk(ratio=0.0001)", {"guard": "off", "max_loss": 0.005}),
])
def test_what_is_exact_or_not_guarded_is_left_alone(codec: str, fields: dict[str, Any]) -> None:
    results = ran(40, codec, **fields)
    assert len(set(results[0]["levels"])) == 1
    assert results[0]["said"] == []
    compared = codec == "fp16()"
    assert (results[0]["stats"]["guard_s"] > 0) == compared


def test_a_plan_that_was_asked_for_stays_and_the_user_hears_why() -> None:
    results = ran(40, "topk(ratio=0.0001)", max_loss=0.005)
    assert len(set(results[0]["levels"])) == 1
    assert any("the plan stays as it was asked for" in line for line in results[0]["said"])
    assert len(results[0]["said"]) <= 3, "each complaint once"


def test_a_coarser_plan_that_somebody_goes_over_to_is_not_undone() -> None:
    with coordinators(1, WORLD, SERVERS) as made:
        setting = Setting("module", (made[0].address,), servers=SERVERS, fields=(("guard", "act"), ("max_loss", 0.05)))
        for codecs, said, compared in pool(WORLD).call(play, WORLD, dense_then_coarser, setting):
            assert codecs == [{"identity()"}, {"int8()"}, {"topk(ratio=0.3)"}]
            assert said == []
            assert compared


def dense_then_coarser(run: Run) -> Any:
    """The codecs in force at the end of each plan, what was said, and whether the guard looked."""
    policy.TIME_PART = 1e9
    logging.getLogger("commlayer").setLevel(logging.ERROR)
    model = mlp()
    run.wrap(model)
    session, seen = run.sessions[0], []
    for codec in ("", "int8()", "topk(ratio=0.3)"):
        if codec:
            commlayer.switch(session, default_plan(job_of(model), codec=codec, path="service", servers=SERVERS,
                                                   ranks_per_node=1, fuse_nbytes=2048, cut_nbytes=4096))
        for step in range(16):
            x = torch.randn(6, 12, generator=torch.Generator().manual_seed(2 * step + run.rank))
            model.zero_grad()
            nn.functional.mse_loss(model(x), torch.stack([x[:, 0], x[:, 2], x.mean(1)], 1)).backward()
        seen.append({b.codec for b in session.inspect.plan.buckets})
    return seen, session.inspect.decisions(), session.stats()["guard_s"] > 0


def test_a_loss_that_rises_is_heard_on_all_ranks() -> None:
    with coordinators(1, WORLD, SERVERS) as made:
        fields = (("guard", "act"), ("max_loss", 0.05))
        setting = Setting("module", (made[0].address,), "int8(block=32)", servers=SERVERS, fields=fields)
        results = pool(WORLD).call(play, WORLD, with_losses, setting)
    assert results[0] == results[1]
    said, codecs = results[0]
    assert "the loss has risen by" in said[0]
    assert set(codecs) <= {"fp16()", "identity()"}


def with_losses(run: Run) -> Any:
    """What was said, and the codecs at the end, when one rank reports a loss that doubles."""
    policy.TIME_PART = 1e9
    logging.getLogger("commlayer").setLevel(logging.ERROR)
    model = mlp()
    run.wrap(model)
    session = run.sessions[0]
    for step in range(130):
        model.zero_grad()
        nn.functional.mse_loss(model(torch.ones(2, 12)), torch.ones(2, 3)).backward()
        session.report(1.0 + (run.rank == 1 and step > 80))
    return session.inspect.decisions(), [b.codec for b in session.inspect.plan.buckets]


def look_closely(run: Run, codec: str) -> dict[str, Any]:
    """Every comparison of a few steps, beside what it should have seen, computed from the gradients themselves."""
    policy.TIME_PART = 1e9
    model = mlp()
    wrapped = run.wrap(model)
    session = run.sessions[0]
    session.weight(1.0 + run.rank)
    seen: list[dict[str, Any]] = []
    real, locally = gradient_comparison.everywhere, gradient_comparison.here
    payloads: list[tuple[Any, Any]] = []

    def decoded(worker: Any, of: Any, mine: torch.Tensor, groups: Any, deadline_s: float) -> Any:
        found = locally(worker, of, mine, groups, deadline_s)
        if run.setting is not None and run.setting.ranks_per_node == 1:
            bucket = of.bucket
            payloads.append((found.fidelity(), measure(bucket.codec, mine, bucket.state["_sent"], bucket.state)))
        return found

    def watched(of: Any, mine: torch.Tensor, groups: Any, deadline_s: float) -> Any:
        own = mine.clone()
        found = real(of, mine, groups, deadline_s)
        seen.append({"slices": of.bucket.slices, "start": of.start, "stop": of.stop, "own": own, "exact": mine.clone(),
                     "back": of.bucket.y[of.start : of.stop].clone(), "dots": found})
        return found

    gradient_comparison.everywhere, gradient_comparison.here = watched, decoded
    try:
        grads = []
        for step in range(3 * SETTLE):
            made = torch.Generator().manual_seed(10 * step + run.rank)
            x = torch.randn(6, 12, generator=made)
            share = (1.0 + run.rank) * WORLD / sum(1.0 + rank for rank in range(WORLD))  # parts of the mean are coded
            alone = mlp()
            alone.load_state_dict(model.state_dict())
            nn.functional.mse_loss(alone(x), x[:, :3]).backward()
            grads.append([p.grad.detach().view(-1) * share for p in alone.parameters() if p.grad is not None])
            model.zero_grad()
            nn.functional.mse_loss(wrapped(x), x[:, :3]).backward()
    finally:
        gradient_comparison.everywhere, gradient_comparison.here = real, locally
    steps = [s for s in range(len(grads)) if s >= SETTLE and (s - SETTLE) % SETTLE == 0]
    return {"seen": seen, "grads": [grads[s] for s in steps], "payloads": payloads}


@pytest.mark.parametrize(("codec", "ranks_per_node"), [("topk(ratio=0.1)", 1), ("int8(block=32)", 1), ("topk(ratio=0.1)", 2)])
def test_all_ranks_compare_with_the_exact_sum(codec: str, ranks_per_node: int) -> None:
    with coordinators(1, WORLD, 1) as made:
        setting = Setting("module", (made[0].address,), codec, ranks_per_node=ranks_per_node, fields=(("guard", "warn"),))
        results = pool(WORLD).call(play, WORLD, look_closely, setting, codec)
    assert len(results[0]["seen"]) == len(results[0]["grads"]) == 2
    for number in range(2):
        mine, theirs = (r["seen"][number] for r in results)
        expected = []
        for rank in range(WORLD):
            whole = torch.cat([results[rank]["grads"][number][s.tensor][s.start : s.stop] for s in mine["slices"]])
            piece = whole[mine["start"] : mine["stop"]]
            assert torch.allclose(results[rank]["seen"][number]["own"], piece, rtol=1e-5, atol=1e-7)
            expected.append(piece)
        total = expected[0] + expected[1]
        assert torch.allclose(mine["exact"], total, rtol=1e-5, atol=1e-7), "the exact mean, but for the number of workers"
        assert mine["dots"].fidelity().cosine == pytest.approx(float(nn.functional.cosine_similarity(total, mine["back"], 0)),
                                                               rel=1e-4)
        assert mine["dots"] == pytest.approx(theirs["dots"], rel=1e-6), "sums of equal numbers in some order"
    for from_residuals, from_payload in results[0]["payloads"]:
        assert from_residuals == pytest.approx(from_payload, rel=1e-4, abs=1e-4), "what left, told by what stayed"
    assert bool(results[0]["payloads"]) == (ranks_per_node == 1)


def test_under_auto_it_acts_until_somebody_asks_for_a_plan() -> None:
    with coordinators(1, WORLD, SERVERS) as made:
        setting = Setting("module", (made[0].address,), servers=SERVERS, plan="auto", fields=(("max_loss", 0.005),))
        results = pool(WORLD).call(play, WORLD, left_to_it_then_asked_for, setting)
    for before, after, said, floor in results:
        assert min(before) > 0.01, "no bucket stays at the codec that a job begins with"
        assert max(after) == 0.001, "nor is the one that was asked for changed"
        assert any("the plan stays as it was asked for" in line for line in said), "though it was looked at"
        assert floor > 0.01, "the planner hears of it"
    assert results[0] == results[1]


def left_to_it_then_asked_for(run: Run) -> Any:
    """Levels of the plan's buckets after some steps under "auto", then under a plan that is handed in."""
    policy.TIME_PART = 1e9
    logging.getLogger("commlayer").setLevel(logging.ERROR)
    model = mlp()
    run.wrap(model)
    session = run.sessions[0]

    def levels() -> list[float]:
        assert session.inspect.plan is not None
        return [plan_choice.level(parse(b.codec)) for b in session.inspect.plan.buckets]

    def steps(count: int) -> None:
        for step in range(count):
            x = torch.randn(6, 12, generator=torch.Generator().manual_seed(2 * step + run.rank))
            model.zero_grad()
            nn.functional.mse_loss(model(x), torch.stack([x[:, 0], x[:, 2], x.mean(1)], 1)).backward()

    coarse = default_plan(job_of(model), codec="topk(ratio=0.01)", path="service", servers=SERVERS, ranks_per_node=1,
                          fuse_nbytes=2048, cut_nbytes=4096)
    commlayer.switch(session, coarse)
    session.inspect.connection.terms.auto = True  # as if it had been found by itself
    steps(60)
    before, said = levels(), len(session.inspect.decisions())
    asked = default_plan(job_of(model), codec="topk(ratio=0.001)", path="service", servers=SERVERS, ranks_per_node=1,
                         fuse_nbytes=2048, cut_nbytes=4096)
    commlayer.switch(session, asked)
    steps(20)
    return before, levels(), session.inspect.decisions()[said:], session.inspect.connection.terms.floor


# ---- plans made finer


JOB = Job((TensorInfo("w", (300, 40)), TensorInfo("b", (40,))))


def bucket(codec: str, path: str = "service", **fields: Any) -> Bucket:
    return Bucket(0, (Slice(0, 0, 12000),), path, codec, **fields)


@pytest.mark.parametrize(("before", "floor", "codec"), [
    (bucket("topk(ratio=0.01)"), 0.02, "topk(ratio=0.02, values='int8', exact=False)"),
    (bucket("topk(ratio=0.01)"), 0.01, "topk(ratio=0.01)"),
    (bucket("topk(ratio=0.01)"), 0.0262144, "topk(ratio=0.0262, values='int8', exact=False)"),
    (bucket("topk(ratio=0.1)"), 0.4, "fp16()"),
    (bucket("error_feedback(topk(ratio=0.01))"), 0.3, "error_feedback(topk(ratio=0.3, values='int8', exact=False))"),
    (bucket("onebit()"), 0.06, "int8()"), (bucket("int8()"), 0.2, "int8()"), (bucket("int8()"), 0.5, "fp16()"),
    (bucket("fp16()"), 1.0, "identity()"), (bucket("powersgd(rank=1)", shape=(300, 40)), 0.5, "fp16()"),
    (bucket("topk(ratio=0.01)", "encode@cpu all.allgather decode@cpu"), 0.5, "fp16()"),
])
def test_a_bucket_below_the_floor_takes_the_next_finer_codec_that_fits(before: Bucket, floor: float, codec: str) -> None:
    made = plan_choice.lift(Plan(JOB.digest(), (before,), 1), floor, nodes=2)
    assert parse(made.buckets[0].codec) == parse(codec)
    assert not unsuited(made, 2, 1)
    assert plan_choice.lift(made, floor, nodes=2) == made
    assert plan_choice.lowest(made) >= min(floor, 1.0) * plan_choice.EQUAL


def test_both_ways_and_all_nodes_are_made_finer() -> None:
    uneven = bucket("topk(ratio=0.1)", down="topk(ratio=0.02)", by_node=("topk(ratio=0.1)", "topk(ratio=0.01)"))
    made = plan_choice.lift(Plan(JOB.digest(), (uneven,), 1), 0.05, nodes=2).buckets[0]
    assert [plan_choice.level(parse(text)) for text in (made.codec, made.down, *made.by_node)] == [0.1, 0.05, 0.1, 0.05]
    coarse_down = plan_choice.lift(Plan(JOB.digest(), (bucket("fp16()", down="topk(ratio=0.1)"),), 1), 0.4, nodes=2).buckets[0]
    assert (coarse_down.codec, coarse_down.down) == ("fp16()", "")
    dense = bucket("identity()", "allreduce")
    assert plan_choice.lift(Plan(JOB.digest(), (dense,)), 1.0, nodes=2).buckets == (dense,)
    assert not plan_choice.lossy(dense)


@pytest.mark.parametrize(("codecs", "compared"), [
    (("topk(ratio=0.1)", "topk(ratio=0.1)"), True), (("momentum(topk(ratio=0.1))", "topk(ratio=0.1)"), False),
    (("topk(ratio=0.1)", "momentum(topk(ratio=0.1))"), False),
])
def test_ranks_of_one_bucket_compare_together_or_not_at_all(codecs: tuple[str, str], compared: bool) -> None:
    mixed = bucket(codecs[0], by_node=codecs)
    for codec in codecs:
        own = SimpleNamespace(planned=mixed, buffer=False, late=False, codec=wrap(parse(codec)))
        worker: Any = SimpleNamespace(buckets=[own])
        assert (gradient_comparison.watched(worker) == [own]) is compared, "whichever codec is this rank's"


# ---- what the planner of a running job hears


def test_the_planner_keeps_above_the_floor_and_within_the_budget(tmp_path: Path) -> None:
    connection = JobContext()
    cluster = cluster_from_line("2xrtx3060@100/20Mb")
    assert replanner.codecs(connection) == list(DEFAULT_CODECS)
    profile, policy = profile_from_tables(cluster), Policy(devices=("cpu",))
    assert replanner.bounded(connection, profile, policy) == (profile, policy)
    connection.terms.floor = 0.04
    assert replanner.codecs(connection) == ["identity()", "fp16()", "int8()", "int4()", "topk(ratio=0.1)", "topk(ratio=0.04)"]
    bounded = replanner.bounded(connection, profile, policy)[1]
    assert set(bounded.codecs) == {"identity()", "fp16()", "int8()", "int4()", "topk(ratio=0.1)"}
    loss_model.write(tmp_path / "loss.json", LossModel((LossPoint("topk", 0.1, 0.02), LossPoint("topk", 0.01, 0.03))))
    connection.terms.loss, connection.terms.max_loss = str(tmp_path / "loss.json"), 0.025
    measured, bound = replanner.bounded(connection, profile, policy)
    assert (set(bound.codecs), bound.max_loss) == ({"identity()", "topk(ratio=0.1)"}, 0.025)
    assert {c.task_loss for c in measured.codecs if c.codec == "topk(ratio=0.01)"} == {0.03}
