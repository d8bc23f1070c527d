"""The balance measurement: its summary holds what is promised of it, and the drawing is a well-formed file."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

from bench import balance


def test_the_summary_holds_and_the_rows_are_there() -> None:
    result = balance.run(quick=True)
    summary = result["summary"]
    assert round(summary["paper_fixture_makespan_ms"], 2) == 104.41
    assert summary["paper_fixture_shares"] == "166/167/159/20"
    assert summary["vs_ssgd"] >= 3.5
    assert summary["vs_lbb_emulated_compressed"] >= 1.6
    assert summary["recover_iterations_additive50"] <= 3
    assert summary["recover_iterations_additive50_small"] <= 4
    assert summary["share_sum_violations"] == 0
    assert summary["oracle_gap_pct"] < 10
    assert {"solve_us_4", "solve_us_1000"} <= set(summary)
    assert {row["mode"] for row in result["rows"]} >= {*balance.MODES, *balance.RELAXED}


def test_the_drawing_has_every_line(tmp_path: Path) -> None:
    drawn = balance.draw(tmp_path / "out.json")
    assert drawn == tmp_path / "out.svg"
    lines = [found for found in ElementTree.parse(drawn).getroot() if found.tag.endswith("polyline")]
    assert len(lines) == 2 * (4 + 4 + 1)
