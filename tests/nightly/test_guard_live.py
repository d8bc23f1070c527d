"""The quality guard in a running job: it compares compressed with exact gradients and refines codecs on all ranks together."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.attached import Run, Setting, coordinators, mlp, plan_of, play, sharded, whole
from support.fidelity import measure
from support.jobs import FakeJob
from support.rank_pool import pool
from torch import nn

from commlayer.autotune import plan_limits
from commlayer.autotune.quality import policy
from commlayer.autotune.quality.policy import SETTLE
from commlayer.balance import loss_model
from commlayer.balance.loss_model import LossModel, LossPoint
from commlayer.compressors import parse
from commlayer.engine.guards import gradient_comparison
from commlayer.engine.job import codec_floor
from commlayer.engine.job.plan_checks import node_problems
from commlayer.planner.data.tables import DEFAULT_CODECS, profile_from_tables
from commlayer.planner.inputs import cluster_from_line
from commlayer.planner.model import Policy
from commlayer.records import Bucket, Job, Plan, Slice, TensorInfo

WORLD, SERVERS = 2, 2
COARSE, STEPS, LATEST = "topk(ratio=0.0001)", 40, 260
"""LATEST: steps until a codec that loses nearly everything has become fine enough."""


@mock.patch.object(policy, "TIME_PART", 1e9)
def train(run: Run, rises_at: int, *parts: tuple[str, int]) -> dict[str, Any]:
    """Trains that many steps under each codec ("": the current plan; "auto: ...": as if chosen automatically).

    Gradients are compared as often as possible. `rises_at`: the step from which rank 1 reports a doubled loss; 0: none.
    """
    logging.getLogger("commlayer").setLevel(logging.ERROR)
    model = mlp() if run.world == WORLD else sharded(mlp(), run.world)
    wrapped = run.wrap(model)
    session, step = run.sessions[0], 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    levels, sent, codecs, decisions = list[float](), [0.0], list[set[str]](), [0]
    for text, count in parts:
        if text:
            session.switch(plan_of(model, text.removeprefix("auto: "), servers=SERVERS))
            session.inspect.context.terms.auto = text.startswith("auto: ")
        for _ in range(count):
            x = torch.randn(6, 12, generator=torch.Generator().manual_seed(2 * step + run.rank))
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(wrapped(x), torch.stack([x[:, 0], x[:, 2], x.mean(1)], 1))
            loss.backward()
            session.log_loss(1.0 + (run.rank == 1 and step > rises_at) if rises_at else loss)
            optimizer.step()
            levels.append(codec_floor.lowest(session.inspect.plan))
            sent.append(session.metrics()["sent_nbytes"])
            step += 1
        codecs.append({b.codec for b in session.inspect.plan.buckets})
        decisions.append(len(session.inspect.decisions()))
    return {"levels": levels, "sent": [b - a for a, b in itertools.pairwise(sent)], "codecs": codecs,
            "decisions": session.inspect.decisions(), "decisions before": decisions, "guard_s": session.metrics()["guard_s"],
            "weights": torch.cat([whole(p).view(-1) for p in model.parameters()]),
            "floor": session.inspect.context.terms.floor}


def ran(codec: str, how: str = "module", parts: tuple[Any, ...] = (("", STEPS),), plan: str = "codec", world: int = WORLD,
        rises_at: int = 0, **fields: Any) -> list[dict[str, Any]]:
    """The results of two ranks, which are equal but for times and bytes. A model of more ranks is sharded."""
    with coordinators(1, world, SERVERS) as servers:
        setting = Setting(how, (servers[0].address,), codec, servers=SERVERS, plan=plan, fields=tuple(fields.items()))
        results = list(pool(world).call(play, world, train, setting, rises_at, *parts))
    for name in ("levels", "codecs"):
        assert results[0][name] == results[1][name], "both ranks at the same step"
    assert torch.equal(results[0]["weights"], results[1]["weights"])
    return results


@pytest.mark.parametrize(("how", "world"), [("module", WORLD), ("ddp", WORLD), ("module", 2 * WORLD)])
def test_codec_with_a_large_error_is_refined(how: str, world: int) -> None:
    result, *_ = ran(COARSE, how, (("", LATEST),), world=world, guard="act", max_loss=0.005)
    levels, sent = result["levels"], result["sent"]
    changes = [step for step in range(1, LATEST) if levels[step] != levels[step - 1]]
    assert changes
    assert all(levels[step] > levels[step - 1] for step in changes[:2])
    assert levels[0] < levels[-1]
    assert max(sent[: changes[0]]) * 1.5 < min(sent[-20:]), "finer codecs send more"
    assert result["guard_s"] > 0


@pytest.mark.parametrize(("codec", "fields", "compared"), [
    ("identity()", {"guard": "act", "max_loss": 0.005}, False), ("fp16()", {"guard": "act", "max_loss": 0.005}, True),
    (COARSE, {}, False), (COARSE, {"guard": "off", "max_loss": 0.005}, False),
])
def test_exact_plan_or_plan_without_guard_is_unchanged(codec: str, fields: dict[str, Any], compared: bool) -> None:
    result, _ = ran(codec, **fields)
    assert len(set(result["levels"])) == 1
    assert result["decisions"] == []
    assert (result["guard_s"] > 0) is compared


def test_switch_to_a_coarser_plan_is_not_undone() -> None:
    result, _ = ran("identity()", parts=(("", 16), ("int8()", 16), ("topk(ratio=0.3)", 16)), guard="act", max_loss=0.05)
    assert result["codecs"] == [{"identity()"}, {"int8()"}, {"topk(ratio=0.3)"}]
    assert result["decisions"] == []
    assert result["guard_s"] > 0


def test_rising_loss_on_one_rank_changes_the_plan_on_all() -> None:
    results = ran("int8(block=32)", parts=(("", 130),), rises_at=80, guard="act", max_loss=0.05)
    for result in results:
        assert "the loss has risen by" in result["decisions"][0]
        assert result["codecs"][0] <= {"fp16()", "identity()"}


def test_under_the_automatic_plan_the_guard_acts_until_the_script_requests_a_plan() -> None:
    coarse, requested = "topk(ratio=0.01)", "topk(ratio=0.001)"
    for result in ran("", plan="auto", parts=((f"auto: {coarse}", 60), (requested, 60)), max_loss=0.005):
        first, second = result["codecs"]
        assert min(codec_floor.level(parse(codec)) for codec in first) > 0.01
        assert {codec_floor.level(parse(codec)) for codec in second} == {0.001}
        later = result["decisions"][result["decisions before"][1] :]
        assert any("the plan stays as the user set it" in line for line in later)
        assert result["floor"] > 0.01, "the planner learns it"


@mock.patch.object(policy, "TIME_PART", 1e9)
def compare(run: Run, codec: str) -> dict[str, Any]:
    """The comparisons of a few steps, and the expected ones, computed from the gradients themselves."""
    model = mlp() if run.world == WORLD else sharded(mlp(), run.world)
    wrapped = run.wrap(model)
    weights = [1.0 + rank * WORLD // run.world for rank in range(run.world)]
    run.sessions[0].weight(weights[run.rank])
    seen: list[dict[str, Any]] = []
    payloads: list[tuple[Any, Any]] = []
    everywhere, own_part = gradient_comparison.compare_sums, gradient_comparison.compare_on_node

    def watched_part(of: Any, mine: torch.Tensor, groups: Any, deadline_s: float) -> Any:
        result = own_part(of, mine, groups, deadline_s)
        if run.setting is not None and run.setting.ranks_per_node == 1 and of.bucket is not None:
            state = of.bucket.ledger.state
            payloads.append((result.fidelity(), measure(of.bucket.codec, mine, state["_sent"], state)))
        return result

    def watched(of: Any, mine: torch.Tensor, groups: Any, deadline_s: float) -> Any:
        own = mine.clone()
        result = everywhere(of, mine, groups, deadline_s)
        seen.append({"slices": of.planned.slices, "start": of.start, "stop": of.stop, "own": own, "exact": mine.clone(),
                     "back": None if of.bucket is None else of.bucket.y[of.start : of.stop].clone(), "dots": result})
        return result

    grads = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_comparison, "compare_sums", watched)
        patch.setattr(gradient_comparison, "compare_on_node", watched_part)
        for step in range(3 * SETTLE):
            x = torch.randn(6, 12, generator=torch.Generator().manual_seed(10 * step + run.rank))
            share = weights[run.rank] * run.world / sum(weights)
            alone = mlp()
            alone.load_state_dict({name: whole(p) for name, p in model.state_dict().items()})
            nn.functional.mse_loss(alone(x), x[:, :3]).backward()
            grads.append([p.grad.detach().view(-1) * share for p in alone.parameters() if p.grad is not None])
            model.zero_grad()
            nn.functional.mse_loss(wrapped(x), x[:, :3]).backward()
    return {"seen": seen, "grads": [grads[s] for s in (SETTLE, 2 * SETTLE)], "payloads": payloads}


@pytest.mark.parametrize(("codec", "ranks_per_node", "world"), [
    ("topk(ratio=0.1)", 1, WORLD), ("int8(block=32)", 1, WORLD), ("topk(ratio=0.1)", 2, WORLD),
    ("topk(ratio=0.1)", 1, 2 * WORLD)])
def test_all_ranks_compare_with_the_exact_mean(codec: str, ranks_per_node: int, world: int) -> None:
    """The model is sharded over the ranks of each of two sites if there are four."""
    with coordinators(1, world, 1) as servers:
        setting = Setting("module", (servers[0].address,), codec, ranks_per_node=ranks_per_node, fields=(("guard", "warn"),))
        results = pool(world).call(play, world, compare, setting, codec)
    assert len(results[0]["seen"]) == 2
    for number in range(2):
        mine, theirs = (r["seen"][number] for r in results if r["seen"][number]["back"] is not None)
        expected = []
        for result in results:
            whole_bucket = torch.cat([result["grads"][number][s.tensor][s.start : s.stop] for s in mine["slices"]])
            expected.append(whole_bucket[mine["start"] : mine["stop"]])
            if world == WORLD:
                assert torch.allclose(result["seen"][number]["own"], expected[-1], rtol=1e-5, atol=1e-7)
        total = torch.stack(expected).sum(0)
        assert torch.allclose(mine["exact"], total, rtol=1e-5, atol=1e-7), "the mean, times the number of workers"
        cosine = float(nn.functional.cosine_similarity(total, mine["back"], 0))
        assert mine["dots"].fidelity().cosine == pytest.approx(cosine, rel=1e-4)
        assert mine["dots"] == pytest.approx(theirs["dots"], rel=1e-6), "the order of sums may differ"
    payloads = [each for result in results for each in result["payloads"]]
    for from_residuals, from_payload in payloads:
        assert from_residuals == pytest.approx(from_payload, rel=1e-4, abs=1e-4)
    assert len(payloads) == (2 * WORLD if ranks_per_node == 1 else 0)


@pytest.mark.parametrize(("codecs", "compared"), [
    (("topk(ratio=0.1)", "topk(ratio=0.1)"), True), (("momentum(topk(ratio=0.1))", "topk(ratio=0.1)"), False),
    (("topk(ratio=0.1)", "momentum(topk(ratio=0.1))"), False),
])
def test_ranks_compare_a_bucket_together_or_not_at_all(codecs: tuple[str, str], compared: bool) -> None:
    mixed = bucket(codecs[0], by_node=codecs)
    assert (gradient_comparison.compared_buckets(Plan("", (mixed,), 1), JOB) == [mixed]) is compared


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
def test_bucket_below_the_floor_gets_the_next_finer_codec(before: Bucket, floor: float, codec: str) -> None:
    plan = codec_floor.raise_precision(Plan(JOB.digest(), (before,), 1), floor, nodes=2)
    assert parse(plan.buckets[0].codec) == parse(codec)
    assert not node_problems(plan, 2, 1)
    assert codec_floor.raise_precision(plan, floor, nodes=2) == plan
    assert codec_floor.lowest(plan) >= min(floor, 1.0) * codec_floor.EQUAL


def test_both_directions_and_all_nodes_are_refined() -> None:
    def lifted(before: Bucket, floor: float) -> Bucket:
        return codec_floor.raise_precision(Plan(JOB.digest(), (before,), 1), floor, nodes=2).buckets[0]

    uneven = lifted(bucket("topk(ratio=0.1)", down="topk(ratio=0.02)", by_node=("topk(ratio=0.1)", "topk(ratio=0.01)")), 0.05)
    assert [codec_floor.level(parse(text)) for text in (uneven.codec, uneven.down, *uneven.by_node)] == [0.1, 0.05, 0.1, 0.05]
    coarse_down = lifted(bucket("fp16()", down="topk(ratio=0.1)"), 0.4)
    assert (coarse_down.codec, coarse_down.down) == ("fp16()", "")
    dense = bucket("identity()", "allreduce")
    assert lifted(dense, 1.0) == dense
    assert not codec_floor.is_lossy(dense)


def test_planner_stays_above_the_floor_and_within_the_budget(tmp_path: Path) -> None:
    connection, cluster = FakeJob(), cluster_from_line("2xrtx3060@100/20Mb")
    profile, policy = profile_from_tables(cluster), Policy(devices=("cpu",))
    assert plan_limits.codecs(connection) == list(DEFAULT_CODECS)
    assert plan_limits.limit_to_budget(connection, profile, policy) == (profile, policy)
    connection.terms.floor = 0.04
    assert plan_limits.codecs(connection) == ["identity()", "fp16()", "int8()", "int4()", "topk(ratio=0.1)", "topk(ratio=0.04)"]
    bounded = plan_limits.limit_to_budget(connection, profile, policy)[1]
    assert set(bounded.codecs) == {"identity()", "fp16()", "int8()", "int4()", "topk(ratio=0.1)"}
    loss_model.write(tmp_path / "loss.json", LossModel((LossPoint("topk", 0.1, 0.02), LossPoint("topk", 0.01, 0.03))))
    connection.terms.loss, connection.terms.max_loss = str(tmp_path / "loss.json"), 0.025
    measured, bound = plan_limits.limit_to_budget(connection, profile, policy)
    assert (set(bound.codecs), bound.max_loss) == ({"identity()", "topk(ratio=0.1)"}, 0.025)
    assert {c.task_loss for c in measured.codecs if c.codec == "topk(ratio=0.01)"} == {0.03}


@pytest.mark.commit(1)
@pytest.mark.parametrize("chosen", ["auto: ", ""])
def test_rising_loss_has_no_effect_without_a_budget(chosen: str) -> None:
    for result in ran("", plan="auto", parts=((f"{chosen}int8(block=32)", 130),), rises_at=80):
        assert not [line for line in result["decisions"] if "the loss has risen" in line or "codecs are finer" in line]
        assert chosen or result["codecs"] == [{"int8(block=32)"}]
        assert (result["guard_s"] > 0) is bool(chosen), "a requested plan is not judged without a budget"
