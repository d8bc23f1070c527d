"""What measurements print, write and refuse; that their tasks are learnable, their clocks keep their pace, and summaries
hold."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import bench.__main__ as front
from bench import Unmeasurable, balance, check, longrun, longrun_law, report
from bench.paced.pace import BACKWARD_S, FORWARD_S, Pace
from bench.tasks import TASKS
from bench.tta import shown
from bench.tta.links import NO_LINK, named
from bench.tta.page import KEPT, PARTS, ROOT, Part
from bench.tta.store import Store, key_of, usual
from bench.tta.summary import summary
from bench.tta.systems import SYSTEMS
from bench.virtual_training import Variant
from commlayer.cluster.calls import messages
from commlayer.compressors import parse, wrap
from commlayer.compressors.payload import CODEC_IDS
from commlayer.errors import CorruptFrame
from commlayer.planner.convergence import LONG_RUNS, LONG_RUNS_HIGH, LongRunLaw
from commlayer.records import Record
from tests.chaos import fuzz
from tests.chaos.fuzz_targets import CODECS, Target, targets

RESULT: report.Result = {
    "rows": [{"what": "first", "gain": 1.5, "steps": 3}, {"what": "second", "extra": True}],
    "summary": {"best": 1.5, "note": "[none]"},
}


def measurement(monkeypatch: pytest.MonkeyPatch, run: object) -> None:
    module = ModuleType("a_measurement")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_measurement", module)
    monkeypatch.setitem(front.MEASUREMENTS, "trial", "a_measurement")


def test_the_file_holds_name_machine_rows_and_summary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    results = []
    measurement(monkeypatch, lambda quick: results.append(quick) or RESULT)
    file = tmp_path / "out.json"
    assert front.main(["trial", "--quick", "--json", str(file)]) == 0
    assert results == [True]
    written = json.loads(file.read_text())
    assert list(written) == ["name", "machine", "rows", "summary"]
    assert written["name"] == "trial"
    assert written["rows"] == RESULT["rows"]
    assert written["summary"] == RESULT["summary"]
    assert set(written["machine"]) == {"cpu", "cores", "memory_gb", "kernel", "python", "torch", "commit"}
    assert all(written["machine"][key] for key in ("cpu", "cores", "memory_gb", "kernel", "python", "torch"))
    assert list(tmp_path.iterdir()) == [file]


def test_what_cannot_be_measured_is_one_line_and_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def run(quick: bool) -> report.Result:
        raise Unmeasurable(f"needs root (quick: {quick})")

    measurement(monkeypatch, run)
    assert front.main(["trial", "--json", str(tmp_path / "out.json")]) == 2
    assert capsys.readouterr().err == "bench: trial cannot be measured here: needs root (quick: False)\n"
    assert not list(tmp_path.iterdir())


# ---- `make bench-check` passes on what is stored, and fails where one ratio is beyond its limit

STORED = json.loads(check.EXPECTED.read_text())


def test_what_is_stored_passes() -> None:
    results = {name: each["ratio"] for name, each in STORED.items()}
    assert check.compared(results, STORED)["code"] == 0


def test_one_that_is_worse_fails_and_is_named() -> None:
    for name, each in STORED.items():
        limit = each["ratio"] * (1 + each["tolerance"])
        result = check.compared({name: limit * 1.01}, STORED)
        assert result["code"] == 1
        assert result["summary"]["worse"] == [name]
        assert check.compared({name: limit * 0.99}, STORED)["code"] == 0


# ---- Whatever reads bytes of others refuses damaged ones by its own error

def test_damage_is_refused_or_read_by_every_reader() -> None:
    results = targets()
    for target in results:
        for example in target.examples:
            try:
                target.read(example, random.Random(1))
            except target.refusals:
                assert "greeting" in target.name, f"{target.name}: a valid example is refused"
    result = fuzz.fuzz(targets(), 4000, seed=20261122)
    reply = result["rows"][: len(results)]
    assert result["rows"][len(results) :] == []
    assert all(row["refused"] for row in reply)


def test_every_codec_and_every_control_record_is_there() -> None:
    names = {target.name for target in targets()}
    assert {wrap(parse(text)).id for text in CODECS} == set(CODEC_IDS.values())
    own = [kind for kind in vars(messages).values() if isinstance(kind, type) and issubclass(kind, Record)]
    kinds = {kind.__name__ for kind in own if kind.__module__ == messages.__name__}
    assert {f"control {name}" for name in kinds} <= names


def test_what_a_reader_must_not_do_is_a_finding() -> None:
    def read(data: bytes, _: random.Random) -> None:
        if data[0] & 1:
            raise KeyError("a crash")
        raise CorruptFrame("as it should be")

    result = fuzz.fuzz([Target("careless", [bytes(20)], read)], 200)
    assert result["summary"]["findings"] > 0
    assert result["rows"][1]["finding"].startswith("KeyError")


@pytest.mark.parametrize(("text", "shown"), [(b"\xff", "invalid start byte"), (b"\n", r"unknown field `\\n`")])
def test_what_strangers_write_is_refused_in_one_line(text: bytes, shown: str) -> None:
    """Found so: bytes that are no text ended the reader's thread, and line breaks made lines of their own in logs."""
    with pytest.raises(CorruptFrame, match=f"{shown}.*E-FRAME") as caught:
        messages.unpack(b"\x81\xa1" + text + b"\xc0", messages.Heartbeat, "worker 1")
    assert "\n" not in str(caught.value)


# ---- the balance measurement: its summary holds what is promised of it

def test_the_summary_holds_and_the_rows_are_there() -> None:
    result = balance.emulated(quick=True)
    summary = result["summary"]
    assert round(summary["paper_fixture_makespan_ms"], 2) == 104.41
    assert summary["paper_fixture_shares"] == "166/167/159/20"
    assert summary["vs_ssgd"] >= 3.5
    assert summary["vs_lbb_emulated_compressed"] >= 1.6
    assert summary["recover_iterations_additive50"] <= 3
    assert summary["recover_iterations_additive50_small"] <= 4
    assert summary["share_sum_violations"] == 0
    assert summary["oracle_gap_pct"] < 10
    assert {"solve_us_4", "solve_us_1000", "solve_us_1000_caps"} <= set(summary)
    assert {row["mode"] for row in result["rows"]} >= {*balance.MODES}


# ---- training against the clock

def test_passes_take_their_time_and_waiting_is_not_made_up_for() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    pace = Pace(model, list(model), slow=0.5)
    waited_s = 0.0

    def late_weights(*_: object) -> None:
        time.sleep(waited_s)

    def step() -> tuple[float, float]:
        pace.forward()
        begin = time.perf_counter()
        loss = model(torch.ones(1, 4)).sum()
        middle = time.perf_counter()
        pace.backward()
        loss.backward()
        return middle - begin, time.perf_counter() - middle

    forward_s, backward_s = step()
    assert forward_s >= 0.5 * FORWARD_S
    assert backward_s >= 0.5 * BACKWARD_S
    # Like a system that is added last: its hook runs before all others.
    model[2].register_forward_pre_hook(late_weights, prepend=True)
    waited_s = 0.2
    assert step()[0] >= 0.5 * FORWARD_S + waited_s
    assert pace.passes == 4


# ---- what is trained against the clock

COMPARED = ("chars", "digits", "passages")


@pytest.mark.parametrize("name", COMPARED)
def test_a_batch_is_a_function_of_rank_step_and_seed(name: str) -> None:
    task, again = TASKS[name](), TASKS[name]()
    assert all(torch.equal(a, b) for a, b in zip(task.batch(1, 2, 3), again.batch(1, 2, 3), strict=True))
    others = [task.batch(*numbers)[0] for numbers in ((0, 2, 3), (1, 3, 3), (1, 2, 4))]
    assert not any(torch.equal(task.batch(1, 2, 3)[0], other) for other in others)
    assert task.digest() == again.digest()
    assert len({TASKS[other]().digest() for other in COMPARED}) == len(COMPARED)


def test_rivals_train_without_commlayer() -> None:
    code = "import sys, bench.paced.worker, bench.paced.rivals; sys.exit('commlayer' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


# ---- rows become the few ratios that decide

STEP_S = 0.3


def row(
    system: str, link: str, goal_s: float, *, task: str = "chars", seed: int = 0, end_s: float = 60.0, **others: Any
) -> dict[str, Any]:
    """A line from 4.0 down that reaches the middle target, 2.0, at goal_s; the easy one, 3.0, in half that time."""
    looks = [0.0, end_s / 2, end_s]
    curve = [(round(s / STEP_S), s, 4.0 - 2.0 * s / goal_s) for s in looks]
    return {
        "task": task, "link": link, "system": system, "seed": seed, "seconds": end_s, "data": "d",
        "group": SYSTEMS[system].group, "targets": (3.0, 2.0, 1.0), "curve": curve, "late_pct": 0.0, "void": "",
        "s_per_step": STEP_S, "up_kb": 1.0, "down_kb": 1.0, "cpu_s": 1.0, "peak_mb": 1.0, "commit": "c", "day": "2026-01-01",
    } | others


BOUNDS = [row("ideal", "none", 20.0), row("alone", "none", 50.0)]


def test_ratios_are_of_seconds_to_the_middle_target() -> None:
    rows = [
        *BOUNDS, row("auto", "100m-30ms", 24.0), row("auto", "10m-80ms", 30.0), row("auto", "1g-2ms", 21.0),
        row("DDP fp16", "100m-30ms", 48.0), row("DDP fp16", "1g-2ms", 20.0), row("DDP fp16", "10m-80ms", 600.0),
        row("torchft DiLoCo H=20", "10m-80ms", 45.0), row("int4", "100m-30ms", 30.0), row("int4 forward", "100m-30ms", 22.0),
    ]
    ratios = summary(rows)
    assert ratios["auto_vs_ideal_100m"] == pytest.approx(1.2)
    assert ratios["auto_vs_ideal_10m"] == pytest.approx(1.5)
    assert ratios["auto_vs_best_rival_100m"] == pytest.approx(2.0)
    assert ratios["auto_vs_best_rival_10m"] == pytest.approx(1.5)
    assert ratios["auto_vs_alone"] == pytest.approx(0.6)
    assert ratios["auto_vs_ddp_fp16_1g"] == pytest.approx(1.05)
    assert ratios["auto_vs_best_fixed_worst"] == pytest.approx(24 / 22)
    assert ratios["ideal_vs_alone_steps"] == pytest.approx(0.4)
    assert ratios["pace_kept"] is True
    assert (ratios["void_rows"], ratios["failed_rows"]) == (0, 0)


def test_who_does_not_get_there_is_never_there_or_counts_with_its_seconds() -> None:
    slow = row("auto", "10m-80ms", 100.0)
    assert summary([*BOUNDS, slow])["auto_vs_ideal_10m"] == "never"
    assert summary([*BOUNDS, slow, row("DDP fp16", "10m-80ms", 40.0)])["auto_vs_best_rival_10m"] == 0
    ratios = summary([*BOUNDS, row("auto", "10m-80ms", 30.0), row("DDP fp16", "10m-80ms", 600.0)])
    assert ratios["auto_vs_best_rival_10m"] == pytest.approx(2.0), "60 s had the rival: at least twice as long"


def test_losses_at_the_end_are_compared_at_equal_steps() -> None:
    bound = row("ideal", "none", 20.0, end_s=30.0)
    auto = row("auto", "100m-30ms", 20.0, end_s=30.0)
    assert summary([bound, auto])["final_loss_delta_pct"] == pytest.approx(0.0)
    # Half the speed: after 100 steps in 60 s it has the loss that the bound has after 100 steps in 30 s, and 1 % more.
    slower = [(n, 2 * s, loss * 1.01) for n, s, loss in auto["curve"]]
    assert summary([bound, auto | {"curve": slower}])["final_loss_delta_pct"] == pytest.approx(1.0)


def test_void_and_failed_rows_count_for_nothing_and_are_counted() -> None:
    void = row("auto", "100m-30ms", 10.0) | {"void": "9 % of passes late", "late_pct": 9.0}
    measured = ("curve", "void", "late_pct")
    failed = {key: value for key, value in row("hivemind", "100m-30ms", 1.0).items() if key not in measured}
    ratios = summary([*BOUNDS, void, failed | {"error": "boom"}])
    assert "auto_vs_ideal_100m" not in ratios
    assert (ratios["pace_kept"], ratios["void_rows"], ratios["failed_rows"]) == (False, 1, 1)
    assert shown(failed | {"error": "boom"})["void"] == "boom"


def test_a_store_goes_on_where_it_was(tmp_path: Path) -> None:
    path, one, two = tmp_path / "rows.jsonl", row("auto", "100m-30ms", 10.0), row("alone", "none", 50.0)
    store = Store(path)
    store.add(one)
    with path.open("a") as file:
        file.write(json.dumps(two)[:40])  # killed while it wrote
    again = Store(path)
    assert key_of(one) in again
    assert key_of(two) not in again
    again.add(two)
    assert {key_of(one), key_of(two)} == set(Store(path).rows)
    assert key_of(one | {"seconds": 45.0}) not in again, "another measurement"
    assert key_of(one | {"data": "other"}) not in again


# ---- pages show the stored rows of `bench tta`

@pytest.mark.parametrize("part", PARTS, ids=lambda part: f"{part.page.name}-{part.name}")
def test_pages_show_the_kept_rows(part: Part) -> None:
    page = part.page.read_text("utf-8")
    assert page == part.within(page, usual(Store(KEPT).rows.values())), "run `python -m bench.tta.page`"


# ---- numbers of hosts, and long trainings


def test_a_race_has_more_hosts_only_where_all_are_alike() -> None:
    assert named("10m-80ms", 8).hosts == 8
    assert named(NO_LINK, 8).stretched(3.0).slow == (3.0,) * 8
    assert named("trace").hosts == 4
    for link, hosts in (("trace", 8), ("one slow peer", 2), ("uneven compute", 8), ("10m-80ms", 0)):
        with pytest.raises(Unmeasurable, match=f"--hosts {hosts}: .*{link}"):
            named(link, hosts)
    plain = row("auto", "10m-80ms", 20.0)
    assert key_of(plain) == key_of(plain | {"hosts": 4, "stretch": 1.0}) != key_of(plain | {"hosts": 8})


def test_a_shorter_training_at_a_constant_rate_is_the_beginning_of_the_longest(tmp_path: Path) -> None:
    store, whole = longrun.Store(tmp_path / "runs.jsonl"), longrun.Case(Variant("gru", "adam"), schedule="constant")
    assert longrun.Case.read(whole.key) == whole
    store.add(whole, [5 - 0.1 * i for i in range(longrun.LOOKS)], 1.0)
    assert [store.final(each) for each in whole.synchronous()] == pytest.approx([4.6, 4.3, 3.9, 3.5, 3.1])
    assert store.final(longrun.Case(whole.way, steps=longrun.STEPS // 2)) is None, "a decayed rate has no such beginning"
    assert longrun.factor_of(whole, store) == pytest.approx(1.0)


def test_the_law_of_long_trainings_is_found_again() -> None:
    law = LongRunLaw(0.8, 0.1, 0.3, 0.5)
    known = [longrun_law.Training("t", workers, numel, noise, "", every, fragments, 1.0)
             for workers in (2, 8) for numel in (20_000, 2_000_000) for noise in (5.0, 60.0)
             for every, fragments in ((0, 0), (8, 0), (128, 0), (8, 1), (8, 4))]
    exact = [one._replace(factor=math.exp(longrun_law.log_factor(law, one))) for one in known]
    assert tuple(longrun_law.fitted(exact)) == pytest.approx(tuple(law), rel=0.02)


def test_the_shipped_laws_are_those_of_the_stored_trainings() -> None:
    known = longrun_law.trainings(longrun.Store(longrun.STORE))
    assert longrun_law.fitted(known) == LONG_RUNS
    assert longrun_law.fitted_high(known) == LONG_RUNS_HIGH
    kept = [longrun_law.covers(LONG_RUNS_HIGH, one) for one in known if one.every]
    assert sum(kept) >= 0.8 * len(kept)
