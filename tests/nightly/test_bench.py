"""What measurements print, write and refuse; what `make bench-check` compares; and what the balance measurement promises."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

import bench.__main__ as front
from bench import Unmeasurable, balance, check, report
from bench.learning import table
from commlayer.planner.data.tables import SHIPPED, read_table

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


STORED = json.loads(check.EXPECTED.read_text())


def test_what_is_stored_passes() -> None:
    results = {name: each["ratio"] for name, each in STORED.items()}
    assert check.compare(results, STORED)["code"] == 0


def test_one_that_is_worse_fails_and_is_named() -> None:
    for name, each in STORED.items():
        limit = each["ratio"] * (1 + each["tolerance"])
        result = check.compare({name: limit * 1.01}, STORED)
        assert result["code"] == 1
        assert result["summary"]["worse"] == [name]
        assert check.compare({name: limit * 0.99}, STORED)["code"] == 0


def test_the_summary_holds_and_the_rows_are_there() -> None:
    result = balance.emulation(quick=True)
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


def test_the_page_shows_the_shipped_convergence_factors() -> None:
    page = report.PAGE.read_text("utf-8")
    assert page == table.page(page, read_table(SHIPPED)), "run `python -m bench.learning.table --page`"
