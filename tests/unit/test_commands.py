"""The planning commands: what they print and write, and exit code 2 with one line for every user error."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from rich.console import Console
from support.commands import assert_error

from commlayer import plan_file
from commlayer.cli import output
from commlayer.cli.arguments import counted_job, import_function, import_model_function, job_named, timed_job
from commlayer.cli.main import run
from commlayer.cli.plan import report as plan_report
from commlayer.demo import report
from commlayer.demo.report import Progress
from commlayer.demo.settings import DemoSettings, WorkerReport
from commlayer.planner import builtin
from commlayer.planner.baselines import Curve, one_machine, what_if
from commlayer.planner.convergence import ALONE
from commlayer.planner.data.tables import device_named, profile_from_tables
from commlayer.planner.inputs import cluster_from_line
from commlayer.planner.model import Policy, Question

NODES = "2xrtx3060@100/20Mb,rtx4090@1Gb"


MADE: dict[str, bytes] = {}


@pytest.fixture
def planned(commlayer):
    """`commlayer` in a folder with a plan and its inputs, which are made once."""
    if not MADE:
        assert commlayer("plan", "create", "lstm", "--nodes", NODES, "--out", "plan.json")[0] == 0
        MADE.update((path.name, path.read_bytes()) for path in Path().glob("plan.*json"))
    for name, data in MADE.items():
        Path(name).write_bytes(data)
    return commlayer


def test_plan_commands_create_explain_lint_compare_and_vary(commlayer, tmp_path: Path) -> None:
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
    assert "unchanged" in out
    assert "+ rtx3060 20 Mb/s up" in out


@pytest.mark.nightly
def test_json_writes_one_record_to_a_file(commlayer) -> None:
    def warning(*arguments: str) -> Any:
        plain, besides = commlayer("plan", *arguments), commlayer("plan", *arguments, "--json", "told.json")
        assert plain == besides
        return json.loads(Path("told.json").read_text())

    assert warning("create", "lstm", "--nodes", NODES, "--out", "plan.json") == json.loads(Path("plan.json").read_text())
    assert warning("explain", "1")["bucket"]["id"] == 1
    assert warning("diff", "plan.json", "plan.json")["changes"] == []
    assert warning("lint", "plan.json") == []
    assert [point["x"] for point in warning("whatif", "--count", "2,3")["points"]] == [2.0, 3.0]
    for command in (("create", "lstm", "--nodes", NODES), ("explain", "1"), ("diff", "plan.json", "plan.json"),
                    ("lint", "plan.json"), ("whatif", "--count", "2")):
        assert commlayer("plan", *command, "--json", "absent/x.json")[0] == 2


def test_batch_option_with_a_job_file_is_used_or_refused(commlayer) -> None:
    """Measured times are valid for the batch that they were measured with."""
    Path("j.json").write_text(json.dumps({**JOB, "batch": 8}))
    Path("silent.json").write_text(json.dumps(JOB))
    record = ("estimate", "j.json", "--nodes", "2xcpu@100m", "--batch")
    assert commlayer(*record, "8")[0] == 0
    code, out, errors = commlayer(*record, "16")
    assert (code, out) == (2, "")
    assert re.fullmatch(r"commlayer: --batch 16: .*j\.json.*\b8\b.*\[E-CLI-OPTION\]\n", errors)
    _, out, _ = commlayer("estimate", "silent.json", "--nodes", "2xcpu@100m", "--batch", "16")
    assert " samples a second" in out


@pytest.mark.nightly
def test_sites_behind_nat_use_one_rented_server_and_local_steps(commlayer) -> None:
    code, out, _ = commlayer("plan", "create", "gpt2", "--homes", "3xrtx3060@100/20Mb", "--out", "plan.json")
    assert code == 0
    assert "summation servers: server" in " ".join(out.split())
    inputs, record = json.loads(Path("plan.inputs.json").read_text()), json.loads(Path("plan.json").read_text())
    assert [(n["name"], n["ranks"], n["server"]) for n in inputs["cluster"]["nodes"]] == [
        ("server", 0, True), ("home-0", 1, False), ("home-1", 1, False), ("home-2", 1, False)]
    assert inputs["cluster"]["nodes"][0]["link"]["up_bps"] == 1e9
    assert not inputs["cluster"]["reachable"]
    assert (record["local_steps"] > 1, record["fragments"] > 1) == (True, True)
    commlayer("plan", "create", "gpt2", "--homes", "3xrtx3060@100/20Mb", "--server", "100Mb", "--out",
              "parts.json")
    assert json.loads(Path("parts.inputs.json").read_text())["cluster"]["nodes"][0]["link"]["down_bps"] == 1e8
    code, _, _ = commlayer("plan", "whatif", "--add", "rtx3060@100/20Mb")
    assert code == 0


def test_batch_larger_than_memory_is_split_into_micro_batches(commlayer) -> None:
    machines = ("--homes", "2xrtx3060@100/20Mb,rtx4090@100/20Mb")
    _, out, _ = commlayer("estimate", "gpt2", *machines, "--batch", "512", "--sync", "step")
    parts = re.search(r"batch: 512 samples of 1,024 tokens per worker and step, as (\d+) micro-batches of (\d+)", out)
    assert parts is not None
    count, size = map(int, parts.groups())
    assert (count - 1) * size < 512 <= count * size
    needs = re.search(r"rtx3060 needs ([\d.]+) of 12 GB", out)
    assert needs is not None
    assert 10 < float(needs[1]) <= 11, "as large as fits beside the driver"
    assert "NOT FIT" not in out


@pytest.mark.nightly
def test_model_that_does_not_fit_has_no_gain_and_no_commands(commlayer) -> None:
    code, out, _ = commlayer("estimate", "llama3.2-3b", "--homes", "3xrtx3060@100/20Mb", "--json", "e.json")
    result = json.loads(Path("e.json").read_text())
    assert code == 0
    assert result["verdict"].startswith("DOES NOT FIT: ")
    assert result["verdict"].endswith("[E-PLAN-MEMORY]")
    assert {value for name, value in result.items() if name.startswith("gain")} == {0.0}
    assert "attach(" not in out
    assert "LoRA" in out.splitlines()[-1]
    _, adapters, _ = commlayer("estimate", "llama3.1-8b-lora16", "--homes", "3xrtx3060@100/20Mb")
    assert "QLoRA" in adapters.splitlines()[-1]
    assert "train adapters" not in adapters, "they are trained already"


@pytest.mark.parametrize(("model", "line", "more", "verdict"), [
    ("gpt2", "3xrtx3060@100/20Mb", (), "faster"), ("lstm", "3xrtx3060@1/1Mb", (), "slower"),
    ("gpt2", "3xrtx3060@100/20Mb", ("--noise-scale", "1"), "little"), ("lstm", "rtx3060@100/20Mb", (), "one"),
])
def test_verdict_is_printed_first(commlayer, model: str, line: str, more: tuple[str, ...], verdict: str) -> None:
    _, out, _ = commlayer("estimate", model, "--homes", line, *more, "--json", "estimate.json")
    result = json.loads(Path("estimate.json").read_text())
    assert out.startswith(result["verdict"])
    gain, cautious = result["gain_over_alone"], result["gain_over_alone_cautious"]
    assert cautious <= gain
    assert (verdict == "faster") == (gain > 2.3) == (cautious > 2)
    assert (verdict == "slower") == (0 < gain < 1) == result["verdict"].startswith("NOT WORTH IT")
    assert (verdict == "little") == (1 <= gain < 1.2)
    assert (verdict == "one") == (gain == 0)
    assert result["gain_over_alone_high"] == gain, "the noise scale is known"
    assert result["gain_over_alone_step"] <= gain
    last, attach = out.splitlines()[-1], 'commlayer.attach(model, optimizer, sync="auto")'
    assert (last == attach) == (gain > 1)
    assert last.startswith("Stay alone: ") == (gain <= 1)
    if gain:
        assert re.match(r'sync="auto": [\d.]+x, sync="step": [\d.]+x, one machine alone: 1x$', out.splitlines()[1])
    names = [each["name"] for each in result["alternatives"]]
    assert names[0] == "this plan"
    assert {"DDP fp16", "dense fp32"} < {*names}
    assert result["plan"]["buckets"]


def test_machines_of_different_speed_get_shares_of_the_batch(commlayer) -> None:
    def estimate(line: str) -> tuple[str, float]:
        _, out, _ = commlayer("estimate", "gpt2", "--homes", line, "--json", "estimate.json")
        return out, json.loads(Path("estimate.json").read_text())["gain_over_alone"]

    out, gain = estimate("rtx3090@100/20Mb,2xrtx3060@100/20Mb")
    shares = re.search(r"shares=\[(\d+), (\d+), (\d+)\]", out)
    assert shares is not None
    fast, slow, other = map(int, shares.groups())
    assert fast + slow + other == 24
    assert fast > 2 * slow == 2 * other
    assert gain > 1  # with equal shares the fast machine would wait, and train sooner alone
    assert "workers: samples of a step by speed" in out
    same, _ = estimate("2xrtx3060@100/20Mb")
    assert "shares=" not in same
    assert "workers: samples" not in same


def test_unknown_noise_scale_gives_a_range_and_a_way_to_measure_it(commlayer) -> None:
    def estimate(*more: str) -> tuple[str, Any]:
        _, out, _ = commlayer("estimate", "whisper-small", "--homes", "3xrtx3060@100/20Mb", *more, "--json", "e.json")
        return out, json.loads(Path("e.json").read_text())

    out, unknown = estimate()
    low, high = unknown["gain_over_alone"], unknown["gain_over_alone_high"]
    assert 1 < low < high < 3
    assert out.startswith(f"{low:.1f}x to {high:.1f}x faster")
    assert 'session.metrics()["noise_scale"]' in out
    for noise, gain in (("14", low), ("1e9", high)):  # 1.8 batches of 8 samples, as in small models
        assert estimate("--noise-scale", noise)[1]["gain_over_alone"] == pytest.approx(gain, rel=0.1)


@pytest.mark.nightly
def test_cost_of_a_training_includes_gpu_and_server_hours(commlayer) -> None:
    record = ("estimate", "gpt2", "--homes", "3xrtx3060@100/20Mb,rtx4090@100/20Mb", "--steps", "10000")
    _, out, _ = commlayer(*record, "--server", "1Gb,0.5", "--json", "e.json")
    result = json.loads(Path("e.json").read_text())
    mine, alone = result["training"]
    plan, *_, single = result["alternatives"]
    assert (plan["name"], single["name"]) == ("this plan", "one machine alone")
    assert out.splitlines()[2].startswith("a training of 10,000 steps: ")
    assert single["node"] == "home-3", "the fastest one"
    for cost, row, gpus, watts in ((mine, plan, 4, 3 * 170 + 450), (alone, single, 1, 450)):
        assert cost["hours"] == pytest.approx(10_000 * row["step_s"] * row["steps"] / 3600)
        assert cost["gpu_hours"] == pytest.approx(gpus * cost["hours"])
        assert cost["kwh"] == pytest.approx(watts * cost["hours"] / 1000)
    assert (mine["server_cost"], alone["server_cost"]) == (pytest.approx(0.5 * mine["hours"]), 0.0)
    assert mine["gbytes"] == pytest.approx(10_000 * plan["nbytes"] * plan["steps"] / 1e9)
    assert alone["gbytes"] == 0.0


@pytest.mark.parametrize("arguments", [
    ("--homes", NODES, "--steps", "0"), ("--homes", NODES, "--server", "1Gb,1"),
    ("--nodes", NODES, "--steps", "9", "--server", ",1"),
    *(("--homes", NODES, "--steps", "9", "--server", f"1Gb,{price}") for price in ("", "0", "-1", "nan", "inf", "cheap")),
])
def test_training_cost_needs_its_length_and_a_rented_server(commlayer, arguments: tuple[str, ...]) -> None:
    assert_error(commlayer("estimate", "lstm", *arguments), "E-CLI-OPTION")


@pytest.mark.parametrize("value", ["0", "-3", "nan"])
def test_noise_scale_must_be_positive(commlayer, value: str) -> None:
    result = commlayer("estimate", "lstm", "--homes", "3xrtx3060@100/20Mb", "--noise-scale", value)
    assert_error(result, "E-CLI-OPTION", "--noise-scale")


def test_single_machine_baseline_uses_its_own_batch_if_faster() -> None:
    lstm, machines = builtin("lstm"), cluster_from_line("4xrtx3060@3Mb")
    job = structs.replace(lstm, timing=structs.replace(lstm.timed, model=None))  # of an unknown noise scale
    policy = Policy(exact=False, optimizer="adam")
    shipped = profile_from_tables(machines)
    slow = structs.replace(shipped, learning=tuple(
        structs.replace(row, steps=5.0, steps_high=5.0) if row.workers == ALONE else row for row in shipped.learning))
    own, together = (one_machine(Question(job, machines, costs, policy))[0] for costs in (shipped, slow))
    assert own.steps == pytest.approx(next(
        row.steps for row in shipped.learning if row.workers == ALONE and row.optimizer == "adam"))
    assert together.steps == 1.0, "the whole batch is sooner than five times as many steps"
    assert own.step_s < together.step_s
    point, = what_if(job, machines, shipped, policy, bandwidths=[3e6]).points
    assert point.alone_s == own.to_loss_s
    assert point.lead == pytest.approx(own.to_loss_s / point.to_loss_s), "a gain is relative to the best existing option"
    console = Console(width=120, file=io.StringIO(), highlight=False)
    for part in plan_report.curve(Curve("bandwidth", (point,))):
        output.render(console, part)
    out = console.file.getvalue()  # type: ignore[attr-defined]
    assert ("one machine alone is faster than this plan: 3 Mb/s" in out) is (own.to_loss_s < point.to_loss_s)
    assert all(word in out for word in ("DDP fp16", "alone", f"{1e3 * own.to_loss_s:.1f}"))


@pytest.mark.parametrize(("arguments", "what", "page"), [
    (("--wrong",), "--wrong", ""), (("nothing",), "'nothing'", ""), (("join", "home-1@h:1"), "'SCRIPT'", " join"),
    (("plan", "create"), "'model'", " plan create"), (("serve", "--workers", "x"), "--workers: got x", " serve"),
    (("doctor", "a", "b"), "a b", " doctor"),
])
def test_wrong_arguments_are_one_line_with_a_code(commlayer, arguments: tuple[str, ...], what: str, page: str) -> None:
    code, out, errors = commlayer(*arguments)
    assert (code, out) == (2, "")
    assert re.fullmatch(rf"commlayer: .*{re.escape(what)}.*`commlayer{page} --help` \[E-CLI-OPTION\]\n", errors)


@pytest.mark.parametrize("arguments", [(), ("keys",), ("plan",)])
def test_command_without_arguments_lists_its_subcommands(commlayer, arguments: tuple[str, ...]) -> None:
    code, out, errors = commlayer(*arguments)
    assert code == 2
    assert errors == ""
    assert "Commands" in out


def test_generated_cluster_file_can_be_planned_with(commlayer) -> None:
    assert commlayer("plan", "init")[0] == 0
    assert commlayer("estimate", "lstm", "--cluster", "cluster.toml")[0] == 0
    assert re.fullmatch(r"commlayer: cluster\.toml .*\[E-CLI-OPTION\]\n", commlayer("plan", "init")[2])


@pytest.mark.parametrize(
    ("arguments", "code", "values"),
    [
        (("create", "lstn", "--nodes", NODES), "E-MODEL-NAME", "model 'lstn'"),
        (("create", "lstm"), "E-CLI-OPTION", "got none"),
        (("create", "lstm", "--nodes", NODES, "--homes", NODES), "E-CLI-OPTION", "got --homes and --nodes"),
        (("create", "lstm", "--homes", NODES, "--cluster", "c.toml"), "E-CLI-OPTION", "got --homes and --cluster"),
        (("create", "lstm", "--homes", "3xrtx3060"), "E-PLAN-INPUT", "homes: got '3xrtx3060'"),
        (("create", "lstm", "--homes", NODES, "--server", "fast"), "E-LINK-NAME", "link 'fast'"),
        (("create", "lstm", "--nodes", NODES, "--server", "1Gb"), "E-CLI-OPTION", "--server 1Gb"),
        (("create", "lstm", "--nodes", NODES, "--batch", "0"), "E-CLI-OPTION", "commlayer: --batch: got 0"),
        (("create", "lstm", "--nodes", "rtx3060@0Mb"), "E-LINK-NAME", "link '0Mb'"),
        (("create", "lstm", "--nodes", NODES, "--codec", "gzip()"), "E-CODEC-NAME", "--codec: codec 'gzip()'"),
        (("create", "lstm", "--nodes", NODES, "--codec", "topk(ratio=0)"), "E-CODEC-ARGUMENT", "--codec: topk: ratio is 0"),
        (("create", "lstm", "--nodes", NODES, "--max-loss", "2.4"), "E-CLI-OPTION", "--max-loss 2.4"),
        (("create", "lstm", "--nodes", NODES, "--optimizer", "prodigy"), "E-CLI-OPTION", "--optimizer prodigy: "),
        (("create", "lstm", "--nodes", NODES, "--sync", "fame"), "E-CLI-OPTION", "--sync fame"),
        (("create", "lstm", "--nodes", NODES, "--allow", "fame"), "E-CLI-OPTION", "--allow fame"),
        (("create", "lstm", "--nodes", NODES, "--profile", "none.json"), "E-PLAN-FILE", "profile none.json: No such file"),
        (("create", "none.json", "--nodes", NODES), "E-PLAN-FILE", "job none.json: No such file"),
        (("create", "lstn", "--nodes", NODES, "--sync", "step", "--allow", "staleness"), "E-CLI-OPTION", "--allow staleness"),
        (("explain", "0"), "E-PLAN-FILE", "plan plan.json: No such file"),
        (("whatif", "--add", "rtx3060"), "E-PLAN-FILE", "plan.inputs.json: no such file"),
        (("whatif",), "E-CLI-OPTION", "--add LINE, --bandwidth RATES, --count COUNTS or --gpu NAMES; got none"),
        (("whatif", "--count", "2", "--gpu", "v100"), "E-CLI-OPTION", "got --count and --gpu"),
        (("create", "lstn", "--nodes", NODES, "--out", "absent/p.json"), "E-CLI-OPTION", "absent/p.json: the folder "),
        (("create", "lstn", "--nodes", NODES, "--out", "."), "E-CLI-OPTION", ".: is a folder"),
    ],
)
def test_user_errors_are_one_line(commlayer, arguments: tuple[str, ...], code: str, values: str) -> None:
    assert_error(commlayer("plan", *arguments), code, values)


JOB = {"tensors": [{"name": "a", "shape": [8]}], "timing": {"ready_s": [0.5], "needed_s": [0], "backward_s": 1, "forward_s": 1}}
COST = {"codec": "identity()", "device": "cpu", "encode": {"floor_s": 0}, "decode": {"floor_s": 0},
        "nbytes": {"floor_s": 0, "slope_s": 4}}
PROFILE = {"codecs": [COST], "server": {"floor_s": 0}, "source": "mine"}


@pytest.mark.parametrize(
    ("job", "profile", "message"),
    [
        ({**JOB, "timing": {**JOB["timing"], "ready_s": [-0.5]}}, PROFILE, "job: timing.ready_s of a is -0.5"),
        ({**JOB, "timing": {**JOB["timing"], "ready_s": []}}, PROFILE, "job: timing.ready_s has 0 entries for 1 tensors"),
        ({**JOB, "timing": {**JOB["timing"], "ready_s": [1.5]}}, PROFILE, "a is ready after 1.5 s"),
        ({**JOB, "tensors": [{"name": "a", "shape": [-8]}]}, PROFILE, "job: shape of a is [-8]"),
        ({**JOB, "tensors": [{"name": "a", "shape": [10**9, 10**9]}]}, PROFILE, "68719476736"),
        ({**JOB, "tensors": JOB["tensors"] * 2}, PROFILE, "job: two tensors are called 'a'"),
        ({**JOB, "batch": 0}, PROFILE, "job: batch is 0"),
        (JOB, {**PROFILE, "codecs": []}, "profile p.json: profile 'mine' has no codecs"),
        (JOB, {**PROFILE, "codecs": [COST, COST]}, "profile 'mine': identity() on cpu is listed twice"),
        (JOB, {**PROFILE, "codecs": [{**COST, "encode": {"floor_s": -1}}]},
         "encode.floor_s of identity() on cpu is -1.0"),
        (JOB, {**PROFILE, "codecs": [{**COST, "decode": {"floor_s": 0, "error": -1}}]},
         "decode.error of identity() on cpu is -1.0"),
        (JOB, {**PROFILE, "codecs": [{**COST, "nbytes": {"floor_s": 0}}]}, "nbytes of identity() on cpu is 0"),
        (JOB, {**PROFILE, "codecs": [{**COST, "codec": "gzip"}]}, "profile 'mine': codec 'gzip'"),
        (JOB, {**PROFILE, "codecs": [COST, {**COST, "device": "rtx9999"}]},
         "device 'rtx9999'"),
        (JOB, {**PROFILE, "server": {"floor_s": 0, "slope_s": -1}}, "'mine': server.slope_s is -1.0"),
        (JOB, {**PROFILE, "bucket_s": "much"}, "profile p.json: Expected `float`, got `str` - at `$.bucket_s`"),
        (JOB, {"codecs": [COST]}, "profile p.json: Object missing required field `server`"),
    ],
)
def test_errors_in_a_file_are_one_line(commlayer, job: dict, profile: dict, message: str) -> None:
    Path("j.json").write_text(json.dumps(job))
    Path("p.json").write_text(json.dumps(profile))
    result = commlayer("plan", "create", "j.json", "--nodes", "2xcpu@100m", "--profile", "p.json", "--out", "record")
    assert_error(result, "E-CODEC-NAME" if "codec 'gzip'" in message else "E-PLAN-INPUT", message)
    assert not [*Path().glob("record*")], "no file is partly written"


def test_lint_names_the_bucket_of_an_edited_plan(planned) -> None:
    file = Path("plan.json")
    record = json.loads(file.read_text())
    record["buckets"][0]["path"] = "encode@cpu net.push decode@cpu"
    record["buckets"][1]["codec"] = "zip()"
    file.write_text(json.dumps(record))
    code, out, _ = planned("plan", "lint", "plan.json")
    assert code == 2
    assert any(line.startswith("bucket 0: path") for line in out.splitlines())
    assert any(re.fullmatch(r"bucket 1: codec 'zip\(\)'.*\[E-CODEC-NAME\]", line) for line in out.splitlines())
    record["schema"] = 1
    file.write_text(json.dumps(record))
    assert re.search(r"\bschema 1\b.*\[E-PLAN-REFUSED\]", planned("plan", "explain", "0")[2])


def test_plan_file_has_one_line_per_bucket_and_malformed_files_are_named(planned) -> None:
    text = Path("plan.json").read_text()
    record = json.loads(text)
    assert len(text.splitlines()) == len(record["buckets"]) + 2
    assert all(json.loads(line.rstrip(","))["id"] == i for i, line in enumerate(text.splitlines()[1:-1]))
    damaged = json.loads(text)
    damaged["servers"] = "two"
    damaged["buckets"][0]["server"] = None
    damaged["buckets"][2]["colour"] = "red"
    for name, data, lines in (
        ("wrong", json.dumps(damaged), ["Expected `int`, got `str` - at `$.servers`",
                                        "bucket 0: Expected `int`, got `null` - at `$.server`",
                                        "bucket 2: Object contains unknown field `colour`"]),
        ("later", json.dumps({**damaged, "schema": 9}),
         ["plan has schema 9, this version reads schema 4: create the plan again"]),
        ("cut", text[: len(text) // 2], ["is not JSON, or is cut short: Input data was truncated"]),
        ("list", "[]", ["expected a JSON object with job and buckets, got `list`"]),
        ("bare", "{}", ["Object missing required field `job`"]),
    ):
        Path(f"{name}.json").write_text(data)
        assert planned("plan", "lint", f"{name}.json") == (2, "".join(f"{line}\n" for line in lines), "")
        # commands that need the plan stop at the first
        line = f"commlayer: plan {name}.json: {lines[0]} [E-PLAN-FILE]\n"
        assert planned("plan", "explain", "0", "--plan", f"{name}.json") == (2, "", line)


def test_lint_reports_damaged_inputs_and_still_checks_the_plan(planned) -> None:
    record = json.loads(Path("plan.json").read_text())
    Path("plan.json").write_text(json.dumps({**record, "local_steps": 0, "servers": -1, "step_s": -1}))
    Path("plan.inputs.json").write_text("{")
    code, out, errors = planned("plan", "lint", "plan.json")
    assert (code, errors) == (2, "")
    for line in ("inputs plan.inputs.json: Input data was truncated [E-PLAN-FILE]", "local_steps is 0, allowed: at least 1",
                 "servers is -1, allowed: at least 0", "step_s is -1.0, allowed: seconds, 0 or more"):
        assert line in out.splitlines(), out


def test_failed_write_leaves_no_file(commlayer, tmp_path: Path) -> None:
    (tmp_path / "plan.inputs.json").mkdir()
    code, out, errors = commlayer("plan", "create", "lstm", "--nodes", NODES, "--out", "plan.json")
    assert (code, out) == (2, "")
    assert re.fullmatch(r"commlayer: plan\.inputs\.json: .*\[E-CLI-OPTION\]\n", errors)
    obstacle = f"next.inputs.json.{os.getpid()}.part"
    (tmp_path / obstacle).mkdir()
    code, out, errors = commlayer("plan", "create", "lstm", "--nodes", NODES, "--out", "next.json")
    assert (code, out, errors) == (2, "", "commlayer: next.inputs.json: Is a directory [E-CLI-OPTION]\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == [obstacle, "plan.inputs.json"]


MODEL = '''
import torch
from torch import nn


def make():
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    x = torch.randn(16, 64)
    return model, lambda: model(x).square().mean()
'''


def test_script_can_be_planned_in_one_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MODEL)
    words = ("mine.py", "--nodes", "2xcpu@20/5Mb", "--batch", "16", "--out", "plan.json")
    monkeypatch.setattr("sys.argv", ["commlayer", "plan", "create", *words])
    with pytest.raises(SystemExit, match="0"):
        run()
    out = capsys.readouterr().out
    assert "mine.py: 4 tensors, 18,696 elements, 2 ranks on 2 nodes\n" in out
    plan, inputs = plan_file.plan_in(Path("plan.json")), plan_file.read_plan_inputs(Path("plan.json"))
    assert plan.job == inputs.job.digest()
    assert inputs.job.batch == 16
    assert inputs.job.timing is not None
    assert inputs.job.timing.device == ""
    with pytest.raises(ValueError, match="^mine.py:absent: .*E-USER-CODE"):
        job_named("mine.py:absent", None)


@pytest.mark.parametrize(("driver", "name"), [
    ("NVIDIA GeForce RTX 4090", "rtx4090"), ("NVIDIA GeForce RTX 2080 Ti", "rtx2080ti"), ("Tesla T4", "t4"),
    ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA A100-SXM4-40GB", "a100"), ("NVIDIA L40S", "l40s"),
    ("NVIDIA GeForce RTX 3060 Laptop GPU", "rtx3060laptop"), ("NVIDIA GeForce RTX 4060 Ti", "rtx4060ti"), ("Radeon", ""),
])
def test_gpus_are_recognized_by_driver_names(driver: str, name: str) -> None:
    assert device_named(driver) == name


SCRIPT = '''
from __future__ import annotations

import dataclasses

import {beside}


@dataclasses.dataclass
class Settings:
    width: int = {beside}.WIDTH


def make():
    return Settings().width
'''


@pytest.mark.parametrize("name", ["{folder}/script.py:make", "{folder}/script.py", "script_of_mine:make"])
def test_script_can_import_neighbouring_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As if Python ran it; dataclasses included."""
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.chdir(tmp_path if name.startswith("script") else "/")
    beside = f"beside_{len(name)}"
    (tmp_path / f"{beside}.py").write_text("WIDTH = 7")
    for script in ("script.py", "script_of_mine.py"):
        (tmp_path / script).write_text(SCRIPT.format(beside=beside))
    assert import_function(name.format(folder=tmp_path), "make", "that returns a number")() == 7


ALLOWED = '''
"""A script."""
import logging
import os
import sys
import torch

sys.path.append("lib")
logging.basicConfig(level=logging.INFO)
log = logging.getLogger(__name__)
torch.manual_seed(0)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDTH: int = int(os.environ.get("WIDTH", "7"))
SIZES = [2 * n for n in (1, 2)]
rate = lambda step: work(step)
try:
    import numpy
except ImportError:
    numpy = None


class Net:
    made = work = None


def make():
    return WIDTH

if __name__ == "__main__":
    raise SystemExit(make())
else:
    BESIDE = 1
'''


def test_file_with_only_definitions_at_top_level_is_imported(tmp_path: Path) -> None:
    (tmp_path / "allowed.py").write_text(ALLOWED)
    assert import_function(f"{tmp_path}/allowed.py", "make", "")() == 7


@pytest.mark.parametrize(("top", "line", "more"), [
    ("model = nn.Linear(4, 4)\n", "model = nn.Linear(4, 4)", 0),
    ("X = 1\nfor step in range(9):\n    train()\nprint('done')\n", "for step in range(9):", 1),
    ("with open('mark', 'w') as f:\n    f.write('ran')\n", "with open('mark', 'w') as f:", 0),
    ("if True:\n    open('mark', 'w')\n", "open('mark', 'w')", 0),
    ("try:\n    open('mark', 'w')\nfinally:\n    X = 1\n", "open('mark', 'w')", 0),
    ("if __name__ == '__main__':\n    main()\nelse:\n    open('mark', 'w')\n", "open('mark', 'w')", 0),
    ("X: int = len(open('mark', 'w').name)\n", "X: int = len(open('mark', 'w').name)", 0),
])
def test_file_with_top_level_code_is_refused_unless_named_as_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, top: str, line: str, more: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("working.py").write_text(f"from torch import nn\n\ndef make():\n    return 7\n\n{top}")
    with pytest.raises(ValueError) as caught:
        import_function("working.py:make", "make", "")
    number = Path("working.py").read_text().splitlines().index(next(
        each for each in Path("working.py").read_text().splitlines() if each.strip() == line)) + 1
    assert str(caught.value).startswith(f"working.py:{number}: ")
    assert f"`{line}`" in str(caught.value)
    assert str(caught.value).endswith("[E-USER-CODE]")
    assert (f"and {more} more" in str(caught.value)) is (more > 0)
    assert "\n" not in str(caught.value)
    assert not Path("mark").exists(), "nothing has run"


def test_module_is_imported_without_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("runs_when_imported.py").write_text("mark = open('mark', 'w')\nmark.close()\n\ndef make():\n    return 7\n")
    assert import_function("runs_when_imported:make", "make", "")() == 7
    assert Path("mark").exists()


def test_job_reports_activation_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("kept.py").write_text(KEPT)
    for job in (timed_job(import_model_function("kept.py"), "kept.py", 8), counted_job("kept.py", 8)):
        # The input of each layer, and the result of the last for its square; no weights.
        assert job.timed.activation_nbytes == 4 * 8 * (100 + 200 + 300)


KEPT = '''
import torch
from torch import nn


def make():
    model = nn.Sequential(nn.Linear(100, 200, bias=False), nn.Linear(200, 300, bias=False))
    return model, lambda: model(torch.ones(8, 100)).square().sum()
'''

BROKEN = '''
import torch
from torch import nn


def raising():
    raise KeyError("weights")


def frozen():
    model = nn.Linear(4, 4).requires_grad_(False)
    return model, lambda: model(torch.ones(2, 4)).sum()
'''


@pytest.mark.parametrize(("name", "text"), [
    ("raising", "broken.py:raising: KeyError: 'weights'"),
    ("frozen", "broken.py:frozen: a step: the loss is a Tensor of 1 without a gradient"),
])
def test_error_in_a_user_model_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text(BROKEN)
    with pytest.raises(ValueError) as caught:
        job_named(f"broken.py:{name}", None)
    assert str(caught.value).startswith(text)
    assert str(caught.value).endswith("[E-USER-CODE]")
    assert "\n" not in str(caught.value)


def progress_of(losses: Mapping[str, Mapping[int, float]], seconds: int = 20) -> Progress:
    """A demo whose runs have these losses after so many seconds."""
    progress = Progress(DemoSettings(3, 20e6, 100e6, seconds))
    for name, by_second in losses.items():
        for step, (second, loss) in enumerate(by_second.items(), 1):
            for home in range(3):
                validation = loss if home == 0 else None
                progress.add_report(WorkerReport(name, home, step=step, at_s=second, loss=validation, late=0.1 * home))
    return progress


FALLING = {second: 4 - second / 10 for second in range(20)}
FASTER = {second: 4 - second / 5 for second in range(20)}


def test_target_is_the_final_loss_of_one_machine() -> None:
    progress = progress_of({"alone": FALLING, "DDP fp16": {3: 4.0, 19: 3.9}, "commlayer": FASTER})
    assert progress.target() == pytest.approx(4 - 18.5 / 10), "the mean of a tenth of twenty seconds"
    rows = progress.rows({"commlayer": 5_000_000})
    assert [(row.run, row.steps, row.target_s, row.sent_nbytes) for row in rows] == [
        ("alone", 20, 19, 0), ("DDP fp16", 2, None, 0), ("commlayer", 20, 10, 5_000_000)]
    assert rows[1].loss == pytest.approx(3.9)
    assert "alone 19, DDP fp16 not reached, commlayer 10 (1.9x)" in report.verdict(progress, rows)
    assert "20%" in report.notes(progress), "the slowest home's late passes"


def test_run_that_misses_the_target_is_not_compared() -> None:
    progress = progress_of({"alone": FALLING, "DDP fp16": {}, "commlayer": {0: 4.0, 19: 3.0}})
    rows = progress.rows({})
    assert report.verdict(progress, rows).endswith("DDP fp16 not reached, commlayer not reached")
    assert (rows[1].loss, rows[1].steps) == (None, 0)


def test_no_target_without_a_single_machine_loss() -> None:
    progress = progress_of({"commlayer": FASTER})
    assert progress.target() is None
    assert [row.target_s for row in progress.rows({})] == [None] * 3
