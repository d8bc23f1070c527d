"""`commlayer plan` as people call it: what it prints, what it writes, and one line with exit code 2 on what they can mend."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from rich.console import Console
from support.commands import commlayer_called  # noqa: F401  (a fixture)

from commlayer import records
from commlayer.cli import plan_output
from commlayer.engine.regroup import unfit
from commlayer.planner import builtin, plan
from commlayer.planner.baselines import Curve, one_machine, what_if
from commlayer.planner.convergence import ALONE
from commlayer.planner.explanation import diff, explain
from commlayer.planner.inputs import cluster_from_line
from commlayer.planner.model import Policy
from commlayer.planner.tables import profile_from_tables
from commlayer.records import Plan

NODES = "2xrtx3060@100/20Mb,rtx4090@1Gb"


def test_a_plan_is_made_explained_checked_compared_and_varied(commlayer, tmp_path: Path) -> None:
    code, out, _ = commlayer("plan", "create", "lstm", "--nodes", NODES, "--out", "plan.json")
    assert code == 0
    assert "3 ranks on 3 nodes" in out
    assert "exposed communication" in out
    assert max(map(len, out.splitlines())) <= 120
    code, out, _ = commlayer("plan", "explain", "0")
    assert code == 0
    assert "because: " in out
    assert "net.push" in out
    assert commlayer("plan", "lint", "plan.json") == (0, "plan.json: nothing wrong\n", "")
    code, out, _ = commlayer("plan", "diff", "plan.json", "plan.json")
    assert (code, out.strip()) == (0, "no differences")
    assert commlayer("plan", "create", "lstm", "--nodes", NODES, "--codec", "fp16()", "--out", "other.json")[0] == 0
    code, out, _ = commlayer("plan", "diff", "plan.json", "other.json")
    assert code == 1
    assert "fp16()" in out
    code, out, _ = commlayer("plan", "whatif", "--add", "rtx3060@100/20Mb")
    assert code == 0
    assert "as it is" in out
    assert "+ rtx3060 20 Mb/s up" in out


@pytest.mark.nightly
def test_json_is_one_record_in_a_file_besides_what_is_printed(commlayer) -> None:
    def told(*arguments: str) -> Any:
        plain, besides = commlayer("plan", *arguments), commlayer("plan", *arguments, "--json", "told.json")
        assert plain == besides
        return json.loads(Path("told.json").read_text())

    assert told("create", "lstm", "--nodes", NODES, "--out", "plan.json") == json.loads(Path("plan.json").read_text())
    assert told("explain", "1")["bucket"]["id"] == 1
    assert told("diff", "plan.json", "plan.json")["changes"] == []
    assert told("lint", "plan.json") == []
    assert [point["x"] for point in told("whatif", "--count", "2,3")["points"]] == [2.0, 3.0]
    for command in (("create", "lstm", "--nodes", NODES), ("explain", "1"), ("diff", "plan.json", "plan.json"),
                    ("lint", "plan.json"), ("whatif", "--count", "2")):
        assert commlayer("plan", *command, "--json", "absent/x.json")[0] == 2


def test_a_batch_is_heard_with_a_job_file_or_refused(commlayer) -> None:
    """Times are of the batch that they were measured with."""
    Path("j.json").write_text(json.dumps({**JOB, "batch": 8}))
    Path("silent.json").write_text(json.dumps(JOB))
    made = ("estimate", "j.json", "--nodes", "2xcpu@100m", "--batch")
    assert commlayer(*made, "8")[0] == 0
    code, out, errors = commlayer(*made, "16")
    assert (code, out) == (2, "")
    assert re.fullmatch(r"commlayer: --batch 16: .*j\.json.*\b8\b.*\[E-CLI-OPTION\]\n", errors)
    _, out, _ = commlayer("estimate", "silent.json", "--nodes", "2xcpu@100m", "--batch", "16")
    assert " samples a second" in out


@pytest.mark.nightly
def test_homes_are_behind_nat_with_one_rented_server_and_their_rounds_go_whole(commlayer) -> None:
    code, out, _ = commlayer("plan", "create", "gpt2", "--homes", "3xrtx3060@100/20Mb", "--out", "plan.json")
    assert code == 0
    assert "servers on server" in out
    inputs, made = json.loads(Path("plan.inputs.json").read_text()), json.loads(Path("plan.json").read_text())
    assert [(n["name"], n["ranks"], n["server"]) for n in inputs["cluster"]["nodes"]] == [
        ("server", 0, True), ("home-0", 1, False), ("home-1", 1, False), ("home-2", 1, False)]
    assert inputs["cluster"]["nodes"][0]["link"]["up_bps"] == 1e9
    assert not inputs["cluster"]["reachable"]
    assert made["overlap"] == "round"
    assert made["fragments"] == 1, "what a job with --min-workers runs"
    assert unfit(records.decode(Path("plan.json").read_bytes(), Plan, "")) == ""
    commlayer("plan", "create", "gpt2", "--homes", "3xrtx3060@100/20Mb", "--allow", "fragments", "--server", "100Mb", "--out",
              "parts.json")
    assert json.loads(Path("parts.json").read_text())["fragments"] > 1
    assert json.loads(Path("parts.inputs.json").read_text())["cluster"]["nodes"][0]["link"]["down_bps"] == 1e8
    code, _, _ = commlayer("plan", "whatif", "--add", "rtx3060@100/20Mb")
    assert code == 0


@pytest.mark.parametrize(("model", "said"), [
    ("gpt2", ["8 samples of 1,024 tokens", "rtx3060 in bf16, 10.2 TFLOP/s: 40% of the 25.4", "about 7.0 of 12 GB"]),
    ("lstm", ["80 samples of 20 tokens", "rtx3060 in FP32", "published times of a V100", "activations are not known"]),
    ("vgg16", ["32 samples per worker"]),
])
def test_what_a_verdict_rests_on_is_said_before_it(commlayer, model: str, said: list[str]) -> None:
    _, out, _ = commlayer("estimate", model, "--homes", "3xrtx3060@100/20Mb")
    head = out[: out.index("to a loss")]
    assert [each for each in [*said, "optimizer: AdamW", "network: homes behind NAT", "mode: "] if each not in head] == []
    assert "WARNING" not in head


@pytest.mark.nightly
def test_a_batch_that_does_not_fit_is_warned_of_with_one_that_does(commlayer) -> None:
    made = ("estimate", "gpt2", "--homes", "3xrtx3060@100/20Mb", "--batch")
    _, out, _ = commlayer(*made, "64")
    told = re.search(r"WARNING: this does not fit into rtx3060, .*: --batch (\d+) fits", " ".join(out.split()))
    assert told is not None
    assert "WARNING" not in commlayer(*made, told[1])[1]
    assert "WARNING" in commlayer(*made, str(int(told[1]) + 1))[1]


def test_a_plan_of_local_steps_says_so_and_stands_beside_the_best_synchronous_one(commlayer) -> None:
    made = ("estimate", "gpt2", "--homes", "3xrtx3060@100/20Mb")
    _, local, _ = commlayer(*made)
    assert local.splitlines()[1].startswith("mode: local steps (H=")
    _, exact, _ = commlayer(*made, "--sync", "step")
    assert exact.splitlines()[1].startswith("mode: synchronous")
    row = r"^ {} +([\d,.]+) "
    best, mine = re.search(row.format("best synchronous"), local, re.M), re.search(row.format("this plan"), exact, re.M)
    assert best is not None
    assert mine is not None
    assert best[1] == mine[1]
    assert "best synchronous" not in exact


def test_one_machine_alone_counts_by_its_own_batch_where_that_is_sooner() -> None:
    job, machines = builtin("lstm"), cluster_from_line("4xrtx3060@3Mb")
    policy = Policy(exact=False, optimizer="adam")
    shipped = profile_from_tables(machines)
    slow = structs.replace(shipped, learning=tuple(
        structs.replace(row, steps=5.0, steps_high=5.0) if row.workers == ALONE else row for row in shipped.learning))
    own, together = (one_machine(job.timing, machines, costs, policy)[0] for costs in (shipped, slow))
    assert own.steps == next(row.steps for row in shipped.learning if row.workers == ALONE and row.optimizer == "adam")
    assert together.steps == 1.0, "everybody's batch is sooner than five times as many steps"
    assert own.step_s < together.step_s
    point, = what_if(job, machines, shipped, policy, bandwidths=[3e6]).points
    assert point.alone_s == own.to_loss_s
    assert point.lead == pytest.approx(own.to_loss_s / point.to_loss_s), "a gain is over the best of what there is"
    console = Console(width=120, file=io.StringIO(), highlight=False)
    for part in plan_output.curve(Curve("bandwidth", (point,)), 120):
        console.print(part)
    out = console.file.getvalue()  # type: ignore[attr-defined]
    assert ("one machine alone is faster than this plan: 3 Mb/s" in out) is (own.to_loss_s < point.to_loss_s)
    assert all(word in out for word in ("DDP fp16", "alone", f"{1e3 * own.to_loss_s:.1f}"))


def test_a_first_cluster_file_can_be_planned_with(commlayer) -> None:
    assert commlayer("plan", "init")[0] == 0
    assert commlayer("estimate", "lstm", "--cluster", "cluster.toml")[0] == 0
    assert re.fullmatch(r"commlayer: cluster\.toml .*\[E-CLI-OPTION\]\n", commlayer("plan", "init")[2])


@pytest.mark.parametrize(
    ("arguments", "code", "values"),
    [
        (("create", "lstn", "--nodes", NODES), "E-MODEL-NAME", "model 'lstn'"),
        (("create", "lstm"), "E-CLI-OPTION", "got none"),
        (("create", "gpt3", "--nodes", NODES), "E-MODEL-NAME", "model 'gpt3' is not built in, nearest are gpt2"),
        (("create", "lstm", "--nodes", NODES, "--homes", NODES), "E-CLI-OPTION", "got --homes and --nodes"),
        (("create", "lstm", "--homes", NODES, "--cluster", "c.toml"), "E-CLI-OPTION", "got --homes and --cluster"),
        (("create", "lstm", "--homes", "3xrtx3060"), "E-PLAN-INPUT", "homes: got '3xrtx3060'"),
        (("create", "lstm", "--homes", "0xrtx3060@100/20Mb"), "E-PLAN-INPUT", "homes: got '0xrtx3060@100/20Mb'"),
        (("create", "lstm", "--homes", "rtx36@100/20Mb"), "E-GPU-NAME", "GPU 'rtx36'"),
        (("create", "lstm", "--homes", NODES, "--server", "fast"), "E-LINK-NAME", "link 'fast'"),
        (("create", "lstm", "--nodes", NODES, "--server", "1Gb"), "E-CLI-OPTION", "--server 1Gb"),
        (("create", "lstm", "--nodes", NODES, "--batch", "0"), "E-CLI-OPTION", "commlayer: --batch: got 0"),
        (("create", "lstm", "--nodes", "3x"), "E-PLAN-INPUT", "nodes: got '3x'"),
        (("create", "lstm", "--nodes", "rtx3060@0Mb"), "E-LINK-NAME", "link 'fiber-0'"),
        (("create", "lstm", "--nodes", "rtx36@1Gb"), "E-GPU-NAME", "GPU 'rtx36'"),
        (("create", "lstm", "--nodes", NODES, "--codec", "gzip()"), "E-CODEC-NAME", "--codec: codec 'gzip()'"),
        (("create", "lstm", "--nodes", NODES, "--codec", "topk(ratio=0)"), "E-CODEC-ARGUMENT", "--codec: topk: ratio is 0"),
        (("create", "lstm", "--nodes", NODES, "--codec", ""), "E-CODEC-NAME", "--codec: codec ''"),
        (("create", "lstm", "--nodes", NODES, "--max-loss", "nan"), "E-CLI-OPTION", "--max-loss nan"),
        (("create", "lstm", "--nodes", NODES, "--max-loss", "2.4"), "E-CLI-OPTION", "--max-loss 2.4"),
        (("create", "lstm", "--nodes", NODES, "--optimizer", "lion"), "E-CLI-OPTION", "--optimizer lion: "),
        (("create", "lstm", "--nodes", NODES, "--sync", "fame"), "E-CLI-OPTION", "--sync fame"),
        (("create", "lstm", "--nodes", NODES, "--allow", "fame"), "E-CLI-OPTION", "--allow fame"),
        (("create", "lstm", "--nodes", NODES, "--profile", "none.json"), "E-PLAN-FILE", "profile none.json: No such file"),
        (("create", "lstm", "--cluster", "none.toml"), "E-PLAN-FILE", "cluster none.toml: No such file"),
        (("create", "none.json", "--nodes", NODES), "E-PLAN-FILE", "job none.json: No such file"),
        (("create", "lstn", "--nodes", NODES, "--sync", "step", "--allow", "staleness"), "E-CLI-OPTION", "--allow staleness"),
        (("explain", "0"), "E-PLAN-FILE", "plan plan.json: No such file"),
        (("lint", "none.json"), "E-PLAN-FILE", "plan none.json: No such file"),
        (("whatif", "--add", "rtx3060"), "E-PLAN-FILE", "plan.inputs.json: no such file"),
        (("whatif", "--count", "2"), "E-PLAN-FILE", "plan.inputs.json: no such file"),
        (("whatif",), "E-CLI-OPTION", "--add LINE, --bandwidth RATES, --count COUNTS or --gpu NAMES; got none"),
        (("whatif", "--count", "2", "--gpu", "v100"), "E-CLI-OPTION", "got --count and --gpu"),
        (("create", "lstn", "--nodes", NODES, "--out", "absent/p.json"), "E-CLI-OPTION", "absent/p.json: the folder "),
        (("create", "lstn", "--nodes", NODES, "--out", "."), "E-CLI-OPTION", ".: is a folder"),
    ],
)
def test_what_can_be_mended_is_one_line(commlayer, arguments: tuple[str, ...], code: str, values: str) -> None:
    exit_code, out, errors = commlayer("plan", *arguments)
    assert (exit_code, out) == (2, "")
    assert values in errors
    assert errors.endswith(f"[{code}]\n")
    assert errors.count("\n") == 1


JOB = {"tensors": [{"name": "a", "shape": [8]}], "timing": {"ready_s": [0.5], "needed_s": [0], "backward_s": 1, "forward_s": 1}}
COST = {"codec": "identity()", "device": "cpu", "encode": {"floor_s": 0}, "decode": {"floor_s": 0},
        "nbytes": {"floor_s": 0, "slope_s": 4}}
PROFILE = {"codecs": [COST], "server": {"floor_s": 0}, "source": "mine"}


@pytest.mark.parametrize(
    ("job", "profile", "message"),
    [
        ({**JOB, "timing": {**JOB["timing"], "ready_s": [-0.5]}}, PROFILE, "job: timing.ready_s of a is -0.5"),
        ({**JOB, "timing": {**JOB["timing"], "ready_s": []}}, PROFILE, "job: timing.ready_s has 0 entries for 1 tensors"),
        ({**JOB, "timing": {**JOB["timing"], "needed_s": [1.5]}}, PROFILE, "a is needed after 1.5 s"),
        ({**JOB, "timing": {**JOB["timing"], "ready_s": [1.5]}}, PROFILE, "a is ready after 1.5 s"),
        ({**JOB, "tensors": [{"name": "a", "shape": [-8]}]}, PROFILE, "job: shape of a is [-8]"),
        ({**JOB, "tensors": [{"name": "a", "shape": [10**9, 10**9]}]}, PROFILE, "68719476736"),
        ({**JOB, "tensors": JOB["tensors"] * 2}, PROFILE, "job: two tensors are called 'a'"),
        ({**JOB, "batch": 0}, PROFILE, "job: batch is 0"),
        ({"tensors": JOB["tensors"]}, PROFILE, "job has no timing"),
        (JOB, {**PROFILE, "codecs": []}, "profile p.json: profile 'mine' has no codecs"),
        (JOB, {**PROFILE, "codecs": [COST, COST]}, "profile 'mine': identity() on cpu stands there twice"),
        (JOB, {**PROFILE, "codecs": [{**COST, "encode": {"floor_s": -1}}]},
         "encode.floor_s of identity() on cpu is -1.0"),
        (JOB, {**PROFILE, "codecs": [{**COST, "decode": {"floor_s": 0, "error": -1}}]},
         "decode.error of identity() on cpu is -1.0"),
        (JOB, {**PROFILE, "codecs": [{**COST, "nbytes": {"floor_s": 0}}]}, "nbytes of identity() on cpu is 0"),
        (JOB, {**PROFILE, "codecs": [{**COST, "codec": "gzip"}]}, "profile 'mine': codec 'gzip'"),
        (JOB, {**PROFILE, "codecs": [COST, {**COST, "device": "rtx9999"}]},
         "device 'rtx9999'"),
        (JOB, {**PROFILE, "codecs": [{**COST, "rounds": 0}]}, "rounds of identity() on cpu is 0"),
        (JOB, {**PROFILE, "server": {"floor_s": 0, "slope_s": -1}}, "'mine': server.slope_s is -1.0"),
        (JOB, {**PROFILE, "inside": {"floor_s": -1}}, "'mine': inside.floor_s is -1.0"),
        (JOB, {**PROFILE, "across": {"floor_s": 0, "slope_s": -1}}, "'mine': across.slope_s is -1.0"),
        (JOB, {**PROFILE, "bucket_s": -1}, "'mine': bucket_s is -1.0"),
        (JOB, {**PROFILE, "bucket_s": "much"}, "profile p.json: Expected `float`, got `str` - at `$.bucket_s`"),
        (JOB, {"codecs": [COST]}, "profile p.json: Object missing required field `server`"),
    ],
)
def test_what_is_wrong_in_a_file_is_one_line(commlayer, job: dict, profile: dict, message: str) -> None:
    Path("j.json").write_text(json.dumps(job))
    Path("p.json").write_text(json.dumps(profile))
    code, out, errors = commlayer("plan", "create", "j.json", "--nodes", "2xcpu@100m", "--profile", "p.json", "--out", "made")
    assert (code, out) == (2, "")
    assert not [*Path().glob("made*")], "nothing is half written"
    assert message in errors
    assert errors.startswith("commlayer: ")
    assert errors.endswith("[E-CODEC-NAME]\n" if "codec 'gzip'" in message else "[E-PLAN-INPUT]\n")
    assert errors.count("\n") == 1


def test_a_plan_edited_by_hand_is_told_by_bucket(commlayer) -> None:
    commlayer("plan", "create", "lstm", "--nodes", NODES, "--out", "plan.json")
    file = Path("plan.json")
    made = json.loads(file.read_text())
    made["buckets"][0]["path"] = "encode@cpu net.push decode@cpu"
    made["buckets"][1]["codec"] = "zip()"
    file.write_text(json.dumps(made))
    code, out, _ = commlayer("plan", "lint", "plan.json")
    assert code == 2
    assert any(line.startswith("bucket 0: path") for line in out.splitlines())
    assert any(re.fullmatch(r"bucket 1: codec 'zip\(\)'.*\[E-CODEC-NAME\]", line) for line in out.splitlines())
    made["schema"] = 1
    file.write_text(json.dumps(made))
    assert re.search(r"\bschema 1\b.*\[E-PLAN-REFUSED\]", commlayer("plan", "explain", "0")[2])


def test_a_plan_file_has_a_line_for_each_bucket_and_says_what_keeps_it_from_being_one(commlayer) -> None:
    commlayer("plan", "create", "lstm", "--nodes", NODES, "--out", "plan.json")
    text = Path("plan.json").read_text()
    made = json.loads(text)
    assert len(text.splitlines()) == len(made["buckets"]) + 2
    assert all(json.loads(line.rstrip(","))["id"] == i for i, line in enumerate(text.splitlines()[1:-1]))
    damaged = json.loads(text)
    damaged["servers"] = "two"
    damaged["buckets"][0]["server"] = None
    damaged["buckets"][2]["colour"] = "red"
    for name, data, lines in (
        ("wrong", json.dumps(damaged), ["Expected `int`, got `str` - at `$.servers`",
                                        "bucket 0: Expected `int`, got `null` - at `$.server`",
                                        "bucket 2: Object contains unknown field `colour`"]),
        ("later", json.dumps({**damaged, "schema": 9}), ["plan has schema 9, this commlayer reads 4: make the plan again"]),
        ("cut", text[: len(text) // 2], ["is not JSON, or is cut short: Input data was truncated"]),
        ("list", "[]", ["expected a JSON object with job and buckets, got `list`"]),
        ("bare", "{}", ["Object missing required field `job`"]),
    ):
        Path(f"{name}.json").write_text(data)
        assert commlayer("plan", "lint", f"{name}.json") == (2, "".join(f"{line}\n" for line in lines), "")
        # whoever needs a plan stops at the first
        said = f"commlayer: plan {name}.json: {lines[0]} [E-PLAN-FILE]\n"
        assert commlayer("plan", "explain", "0", "--plan", f"{name}.json") == (2, "", said)


def test_lint_tells_of_damaged_inputs_and_of_the_plan_beside_them(commlayer) -> None:
    commlayer("plan", "create", "lstm", "--nodes", NODES, "--out", "plan.json")
    made = json.loads(Path("plan.json").read_text())
    Path("plan.json").write_text(json.dumps({**made, "local_steps": 0, "servers": -1, "step_s": -1}))
    Path("plan.inputs.json").write_text("{")
    code, out, errors = commlayer("plan", "lint", "plan.json")
    assert (code, errors) == (2, "")
    for line in ("inputs plan.inputs.json: Input data was truncated [E-PLAN-FILE]", "local_steps is 0, allowed: at least 1",
                 "servers is -1, allowed: at least 0", "step_s is -1.0, allowed: seconds, 0 or more"):
        assert line in out.splitlines(), out


def test_what_cannot_be_written_leaves_nothing_behind(commlayer, tmp_path: Path) -> None:
    (tmp_path / "plan.inputs.json").mkdir()
    code, out, errors = commlayer("plan", "create", "lstm", "--nodes", NODES, "--out", "plan.json")
    assert (code, out) == (2, "")
    assert re.fullmatch(r"commlayer: plan\.inputs\.json: .*\[E-CLI-OPTION\]\n", errors)
    obstacle = f"next.inputs.json.{os.getpid()}.part"
    (tmp_path / obstacle).mkdir()
    code, out, errors = commlayer("plan", "create", "lstm", "--nodes", NODES, "--out", "next.json")
    assert (code, out, errors) == (2, "", "commlayer: next.inputs.json: Is a directory [E-CLI-OPTION]\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == [obstacle, "plan.inputs.json"]


@pytest.mark.parametrize("width", [80, 120])
def test_tables_keep_to_the_page_and_break_no_words(width: int) -> None:
    job, machines = builtin("bert-base"), cluster_from_line("2xrtx3060@100/20Mb,rtx4090@1Gb")
    made, other = plan(job, machines), plan(job, machines, None, Policy(codecs=("topk(ratio=0.01)",)))
    big = max(made.buckets, key=lambda b: b.numel)
    curve = what_if(job, machines, gpus=["v100"])
    console = Console(width=width, markup=False, highlight=False)
    for parts, whole in (
        ([plan_output.by_decision(made, job, width)],
         [big.codec, *big.path.split(), "such as", *{b.why.reason.split()[0] for b in made.buckets if b.why}]),
        (plan_output.explanation(explain(made, big.id, job, machines), width), ["encode@", "up:rtx3060-0", "." * 8]),
        (plan_output.difference(diff(made, other, job), "a.json", "b.json"), [big.codec, "topk(ratio=0.01)"]),
        (plan_output.curve(curve, width), ["v100", *(word for point in curve.points for word in point.codec.split())]),
    ):
        with console.capture() as told:
            for part in parts:
                console.print(part)
        assert max(map(len, told.get().splitlines())) <= width
        assert [word for word in whole if word not in told.get()] == []
