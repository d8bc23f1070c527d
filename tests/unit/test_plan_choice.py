"""The plan that attach() derives from a codec, a plan and their settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from support.plans import toy_job

from commlayer.cluster.servers.server_codecs import CodecOps
from commlayer.codec_spec import parse_spec
from commlayer.compressors import fp16, identity, int8, make_codec, parse, topk, two_way
from commlayer.config import Config
from commlayer.engine.job import plan_checks
from commlayer.engine.job.plan_checks import node_problems
from commlayer.engine.start import plan_choice
from commlayer.engine.sync.sync_modes import LocalSteps, requested_modes, with_modes
from commlayer.errors import find_error_code
from commlayer.plan_file import format_plan, read_plan_basis
from commlayer.planner import verify
from commlayer.planner.convergence import LearningRow
from commlayer.planner.costs import Prices
from commlayer.planner.data import tables as machines
from commlayer.planner.data.tables import profile_from_tables
from commlayer.planner.inputs import cluster_from_line
from commlayer.planner.model import CodecCost, LinearCost, Policy
from commlayer.planner.plan_lint import lint
from commlayer.planner.search.plan_search import plan as planned
from commlayer.planner.tensors import uncompressed_notices
from commlayer.records import MAX_BUCKET_NBYTES, Bucket, Job, Plan, Slice, TensorInfo


def describe_model(*shapes: tuple[int, ...]) -> Job:
    return Job(tuple(TensorInfo(f"t{i}", shape) for i, shape in enumerate(shapes)))


def asked_for(plan: Any, job: Job, **config: Any) -> Plan:
    """For a Plan, a path, "auto" or a codec."""
    codec = None if plan == "auto" or isinstance(plan, Plan | Path) else plan
    given = plan if isinstance(plan, Plan | Path) else None
    return plan_choice.resolve_plan(plan_choice.requested_plan(codec, given), job, Config(**config), 2, 1)


@pytest.mark.parametrize("optimizer", ["", "sgd", "adam", "other"])
def test_auto_starts_with_four_bits_in_both_directions(optimizer: str) -> None:
    result = plan_choice.resolve_plan("auto", describe_model((300, 20), (20,)), Config(), 2, 1, optimizer=optimizer)
    assert {(b.path, str(parse_spec(b.codec).core), b.down) for b in result.buckets} == {("service", "int4()", "")}
    assert plan_choice.resolve_plan("auto", describe_model((300, 20)), Config(), 2,
                                    2).servers == 0, "one machine has no link to save"


def row(optimizer: str, codec: str, loss: float) -> LearningRow:
    return LearningRow(optimizer, "gradients", codec, 1, "", False, 0, 1.0, 1.0, loss, loss, 5, 5)


@pytest.mark.parametrize(("sync", "wanted"), [
    (LocalSteps(8), 4), (LocalSteps(32), 8), (LocalSteps(2), 1), (LocalSteps(8, overlap=False), 1),
    (LocalSteps(8, fragments=2), 2), (LocalSteps(8, fragments=1), 1), (None, 1), ("forward", 1),
], ids=str)
@pytest.mark.parametrize("codec", ["auto", "int4"])
def test_local_steps_use_fragments_also_if_workers_can_leave(codec: str, sync: Any, wanted: int) -> None:
    job, requested = describe_model(*[(1000, 100)] * 10), requested_modes(sync)
    for may_leave in (False, True):
        made = plan_choice.resolve_plan(codec, job, Config(), 2, 1, requested=requested, elastic=may_leave)
        assert with_modes(made, requested).fragments == wanted
    assert plan_choice.resolve_plan("int4", describe_model((3,)), Config(), 2, 1,
                                    requested=requested).fragments == 1, "one bucket"
    given = asked_for("int4", job)
    assert plan_choice.resolve_plan(given, job, Config(), 2, 1, requested=requested) == given, "a given plan keeps its own"


ROWS = (row("sgd", "int4()", 0.0), row("sgd", "int8()", 0.0), row("adam", "int4()", 0.02), row("adam", "int8()", 0.005))


@pytest.mark.parametrize(("optimizer", "max_loss", "codec"), [
    ("adam", 0.0, "int4()"), ("adam", 0.02, "int4()"), ("adam", 0.01, "int8()"), ("adam", 0.001, "fp16()"),
    ("sgd", 0.001, "int4()"), ("other", 0.001, "fp16()"), ("", 0.01, "int8()"),
])
def test_auto_starts_within_its_budget_without_a_loss_model(
    optimizer: str, max_loss: float, codec: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machines, "learning_rows", lambda own="": ROWS)
    result = plan_choice.resolve_plan("auto", describe_model((300, 20)), Config(max_loss=max_loss), 2, 1, optimizer=optimizer)
    assert {str(parse_spec(b.codec).core) for b in result.buckets} == {codec}


@pytest.mark.parametrize("text", ["fp16()", "fp16", "topk(0.05)", " int8( block = 64 ) ", "error_feedback(topk(ratio=0.01))"])
def test_plan_may_be_a_codec_specification(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = describe_model((300, 20), (20,))
    assert asked_for(text, job) == asked_for(parse(text), job)
    assert read_plan_basis(text) is None


def test_plan_may_name_a_codec_for_each_direction() -> None:
    job = describe_model((300, 20), (20,))
    result = asked_for("two_way(topk(0.05), down=int8())", job)
    assert result == asked_for(two_way(topk(0.05), int8()), job)
    cores = {(str(parse_spec(b.codec).core), str(parse_spec(b.down).core)) for b in result.buckets}
    assert cores == {("topk(ratio=0.05)", "int8()")}


@pytest.mark.parametrize("kind", ["codec", "auto", "plan", "file"])
def test_ratio_settings_override_those_of_a_plan(kind: str, tmp_path: Path) -> None:
    job, settings = describe_model((300, 20), (20,)), {"ratio_over": "plan", "warmup": 40}
    plain = asked_for("topk(0.05)", job)
    (tmp_path / "plan.json").write_text(format_plan(plain))
    plan: Any = {"codec": "topk(0.05)", "auto": "auto", "plan": plain, "file": tmp_path / "plan.json"}[kind]
    result = asked_for(plan, job, **settings)
    assert (result.ratio_over, result.warmup) == ("plan", 40)
    assert result.buckets == asked_for(plan, job).buckets
    assert asked_for(result, job) == result
    assert asked_for(result, job, warmup=7) == structs.replace(result, warmup=7)


def test_path_is_read_as_a_plan_file(tmp_path: Path) -> None:
    job = describe_model((300, 20))
    result = asked_for(identity(), job)
    (tmp_path / "fp16()").write_text(format_plan(result))
    assert asked_for(tmp_path / "fp16()", job) == result


@pytest.mark.parametrize(("compression", "plan", "code", "text"), [
    ("fp17()", None, "E-CODEC-NAME", "'fp17'"), ("topk(ratio=2)", None, "E-CODEC-ARGUMENT", "ratio is 2"),
    ("missing.json", None, "E-CODEC-NAME", "'missing.json'"), ("two_way(fp16())", None, "E-CODEC-NAME", "down"),
    ("error_feedback(two_way(fp16(), fp16()))", None, "E-CODEC-NAME", "'two_way'"), ("a\0b", None, "E-CODEC-NAME", "a\\x00b"),
    (None, "fp16", "E-PLAN-NAME", "compression='fp16'"), (None, fp16(), "E-PLAN-NAME", "Fp16"), (None, 17, "E-PLAN-NAME", "17"),
    (None, "missing.json", "E-PLAN-FILE", "missing.json"),
    (None, "x" * 5000, "E-PLAN-FILE", "xxx"), (None, "a\0b", "E-PLAN-FILE", "a\\x00b"),
    ("int4", "p.json", "E-PLAN-NAME", "'p.json'"),
])
def test_other_arguments_are_one_error_line(compression: Any, plan: Any, code: str, text: str) -> None:
    with pytest.raises(ValueError) as caught:
        plan_choice.resolve_plan(plan_choice.requested_plan(compression, plan), describe_model((3,)), Config(), 2, 1)
    assert find_error_code(str(caught.value)) == code
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


GPT = describe_model((65, 384), (256, 384), *[shape for _ in range(6) for shape in (
    (384,), (384,), (1152, 384), (1152,), (384, 384), (384,), (1536, 384), (1536,), (384, 1536), (384,))])
MODELS = {
    "small matrices, fused": GPT, "matrices above the cut": describe_model((4096, 4096), (4096,), (1000, 4096), (1000,)),
    "a table above the largest bucket": describe_model((50257, 768), (1024, 768)),
    "convolutions": describe_model((64, 3, 7, 7), (64,), (512, 512, 3, 3), (512,)),
}


@pytest.mark.parametrize("codec", ["powersgd()", "momentum(powersgd(rank=2))", "error_feedback(powersgd())"])
@pytest.mark.parametrize("model", MODELS)
def test_matrices_keep_their_shape_at_the_default_limits(model: str, codec: str) -> None:
    job = MODELS[model]
    result = asked_for(codec, job)
    assert verify(result, job) == []
    assert node_problems(result, 2, 1) == []
    assert list(uncompressed_notices(result, job)) == []
    sent = sum(make_codec(b).bound(b.spec) for b in result.buckets)
    assert sent < 0.15 * 4 * job.numel, "a payload of either round, headers included"
    assert max(b.numel for b in result.buckets) * 4 <= MAX_BUCKET_NBYTES


def test_planned_buckets_are_matrices_if_possible() -> None:
    job = toy_job(4, 1_000_000)
    job = structs.replace(job, tensors=tuple(structs.replace(t, shape=(1000, 1000)) for t in job.tensors))
    machines = cluster_from_line("3xcpu@20Mb")
    cost = CodecCost("powersgd(rank=4)", "cpu", LinearCost(1e-6), LinearCost(1e-6), LinearCost(16, 0.01), rounds=2, sums=True,
                     alone=False,
                     answers=False)
    costs = structs.replace(profile_from_tables(machines), codecs=(*profile_from_tables(machines).codecs, cost))
    result = planned(job, machines, costs, Policy(codecs=("powersgd()",), objective="step"))
    coded = [b for b in result.buckets if parse_spec(b.codec).core.family == "powersgd"]
    assert coded
    assert all(b.shape or "shapes=" in b.codec for b in coded)
    assert lint(result, job, machines, costs) == []
    assert Prices(machines, costs).cost(coded[0].codec, "cpu", machines.nodes[0]) == cost


@pytest.mark.parametrize(("codec", "shape", "text"), [
    ("powersgd()", (), "100% of the model's elements are sent uncompressed by powersgd(): "),
    ("powersgd()", (300, 20), ""), ("powersgd(rank=200)", (300, 20), "by powersgd(rank=200)"), ("identity()", (), ""),
    ("topk(0.9, values='fp32')", (), "uncompressed by topk(ratio=0.9, values='fp32'): "),
])
def test_plan_that_sends_most_uncompressed_is_reported(codec: str, shape: tuple[int, ...], text: str) -> None:
    job = describe_model((300, 20))
    plan = Plan(job.digest(), (Bucket(0, (Slice(0, 0, 6000),), "service", codec, shape=shape),), 1)
    messages: list[str] = []
    plan_choice.with_server_nodes(plan, None, 2, messages.append)
    for lines in (messages, lint(plan, job)):
        assert len(lines) == bool(text), lines
        assert all(text in line for line in lines)


KEEPERS = ("topk(0.1)", "momentum(int8())", "powersgd()", "qsgd()")


@pytest.mark.parametrize("codec", KEEPERS)
def test_server_memory_is_known_in_advance(codec: str) -> None:
    for numel in (1, 1000, 20_000):
        bucket = Bucket(0, (Slice(0, 0, numel),), "service", codec)
        assert len(CodecOps(make_codec(bucket), bucket, "job").snapshot()) <= parse_spec(codec).max_state_nbytes(numel)


def test_payloads_larger_than_a_frame_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = Bucket(0, (Slice(0, 0, 1 << 16),), "service", "identity()")
    plan = Plan("", (bucket,), 1)
    assert node_problems(plan, 2, 1) == []
    monkeypatch.setattr(plan_checks, "MAX_FRAME_NBYTES", 200_000)
    (line,) = node_problems(plan, 2, 1)
    assert line.startswith("bucket 0: payloads of identity()")
    assert line.endswith("a frame is limited to 200000: split the bucket, or use a codec that sends less")
