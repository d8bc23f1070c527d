"""Measured losses in the planner: the codecs that a budget permits, on the command line and before a job has a plan."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from commlayer import loss_budget
from commlayer.balance import loss_model
from commlayer.balance.loss_model import LossModel, LossPoint
from commlayer.engine.start.plan_choice import FINE, LEAST_RATIO, SPARSE
from commlayer.planner import plan
from commlayer.planner.data import tables as machines
from commlayer.planner.data.models import builtin
from commlayer.planner.data.tables import profile_from_tables
from commlayer.planner.inputs import cluster_from_line
from commlayer.planner.model import Cluster, Policy

MODEL = LossModel((LossPoint("topk", 0.1, 0.004), LossPoint("topk", 0.01, 0.03), LossPoint("int8", 1.0, 0.001),
                   LossPoint("int4", 1.0, 0.002), LossPoint("mine", 1.0, 0.0)))
NODES = "2xrtx3060@100/20Mb,rtx4090@1Gb"
SLOW = cluster_from_line(NODES)


def lossiest(model: LossModel, max_loss: float) -> float:
    """The mean measured penalty of the plan that keeps to `max_loss`, by elements; each direction has half of its codec's."""
    job = builtin("lstm", None)
    request = Policy(max_loss=max_loss, objective="step")
    profile, policy = loss_budget.with_loss_penalties(loss_budget.tables(SLOW, model, max_loss), request, model)
    result = plan(job, SLOW, profile, policy)
    both = [sum(loss_budget.penalty(model, codec) for codec in (b.codec, b.down or b.codec)) / 2 for b in result.buckets]
    return sum(b.numel * penalty for b, penalty in zip(result.buckets, both, strict=True)) / job.numel


@pytest.mark.parametrize("max_loss", [0.02, 0.003, 0.0])
def test_plan_meets_the_budget_in_measured_units(max_loss: float) -> None:
    spent = lossiest(MODEL, max_loss)
    assert spent <= max_loss * (1 + 1e-6)
    assert spent > 0.5 * max_loss or max_loss == 0, "and uses it, for the links are slow"


def test_unmeasured_codecs_are_excluded() -> None:
    profile, policy = loss_budget.with_loss_penalties(profile_from_tables(SLOW), Policy(), MODEL)
    assert set(policy.codecs) == {"identity()", "int8()", "int4()", "topk(ratio=0.1)", "topk(ratio=0.01)"}
    assert {c.codec: c.task_loss for c in profile.codecs if c.codec in policy.codecs} == {
        "identity()": 0.0, "int8()": 0.001, "int4()": 0.002, "topk(ratio=0.1)": 0.004, "topk(ratio=0.01)": 0.03}
    assert len(profile.codecs) == len(profile_from_tables(SLOW).codecs), "active plans are priced, too"
    with pytest.raises(ValueError, match=r"fp16\(\) .*int4 1:1, int8 1:1, mine 1:1, topk 0\.01:0\.1 .*E-LOSS-MODEL"):
        loss_budget.with_loss_penalties(profile_from_tables(SLOW), Policy(codecs=("fp16()",)), MODEL)


def test_smallest_ratio_within_the_budget_is_priced() -> None:
    result = loss_budget.names(MODEL, 0.01)
    sparse = [name for name in result if name.startswith("topk") and name not in machines.DEFAULT_CODECS]
    assert sparse == ["topk(ratio=0.059)"]
    assert 0.005 < loss_budget.penalty(MODEL, sparse[0]) <= 0.01
    assert "int4()" in result
    assert "mine()" not in result, "no table prices it"
    assert loss_budget.names(None, 0.01) == list(machines.DEFAULT_CODECS)
    assert profile_from_tables(Cluster(()), result).codecs


SPARSE_ONLY = LossModel((LossPoint("topk", 0.3, 0.001), LossPoint("topk", 0.1, 0.004), LossPoint("topk", 0.01, 0.03)))


@pytest.mark.parametrize(("model", "max_loss", "codec"), [
    (MODEL, 0.05, "int4()"), (MODEL, 0.002, "int4()"), (MODEL, 0.0019, "int8()"), (MODEL, 0.0009, "identity()"),
    (LossModel((LossPoint("int8", 1.0, 0.0),)), 0.05, "int8()"),
    (LossModel((LossPoint("onebit", 1.0, 0.0),)), 0.05, "identity()"),
    (SPARSE_ONLY, 0.05, "topk(ratio=0.1, values='int8')"), (SPARSE_ONLY, 0.001, "topk(ratio=0.3, values='int8')"),
])
def test_job_starts_with_fine_codecs_within_its_budget(model: LossModel, max_loss: float, codec: str) -> None:
    """The tuner's losses hold from the start: the first steps tolerate least, and links are not known yet."""
    assert loss_budget.first_codec(model, max_loss, FINE, SPARSE, LEAST_RATIO) == codec


@pytest.mark.parametrize(("text", "message"), [
    ("{", "E-LOSS-MODEL"), ('{"points": []}', "points.*E-LOSS-MODEL"),
    ('{"points": [{"codec": "topk", "ratio": 0, "penalty": 0}]}', r"ratio of topk .*\b0, .*E-LOSS-MODEL"),
    ('{"points": [{"codec": "topk", "ratio": 0.1, "penalty": 1e999}]}', r"points\[0\]\.penalty.*E-LOSS-MODEL"),
    ('{"points": [{"codec": "topk", "ratio": 0.1, "loss": 0}]}', "`loss`.*E-LOSS-MODEL"),
    ('{"version": 3, "points": []}', "`version`.*`commlayer tune`.*E-LOSS-MODEL"),
])
def test_invalid_file_is_one_line(text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.json").write_text(text)
    with pytest.raises(ValueError, match=f"^loss model bad.json: .*{message}") as caught:
        loss_model.read(Path("bad.json"))
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="none.json: No such file.*E-LOSS-MODEL"):
        loss_model.read(Path("none.json"))


def test_command_plans_with_measured_losses(commlayer: Callable[..., tuple[int, str, str]]) -> None:
    loss_model.write(Path("loss.json"), MODEL)
    wished = ("--loss", "loss.json", "--max-loss", "0.01", "--sync", "step")
    assert commlayer("plan", "create", "lstm", "--nodes", NODES, *wished, "--out", "plan.json")[0] == 0
    used = {b["codec"] for b in json.loads(Path("plan.json").read_text())["buckets"]}
    assert "topk(ratio=0.059)" in used
    assert all(math.isfinite(loss_budget.penalty(MODEL, codec)) for codec in used)
    assert commlayer("plan", "lint", "plan.json") == (0, "plan.json: nothing wrong\n", "")
    assert "because: " in commlayer("plan", "explain", "0")[1]
    assert commlayer("plan", "whatif", "--gpu", "rtx4090,rtx3060", "--json", "told.json")[0] == 0
    points = json.loads(Path("told.json").read_text())["points"]
    assert len(points) == 2, "machines that the plan was not made for are priced by the same losses"
    assert commlayer("plan", "create", "lstm", "--nodes", NODES, "--loss", "none.json")[0] == 2
