"""The balance measurement: its summary holds what is promised of it, and the drawing is made or says why not."""

from __future__ import annotations

import importlib.util
import re
import struct
import sys
from pathlib import Path

import pytest

from bench import balance


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


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib, of the extra plot, is missing")
def test_the_drawing_is_a_picture_of_three_modes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    seen: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: (seen.append(figure), save(figure, path)))
    assert balance.draw(tmp_path / "out.json") == f"drawn: {tmp_path / 'out.png'}"
    width, height = struct.unpack(">II", (tmp_path / "out.png").read_bytes()[16:24])
    assert width >= 800
    assert height < width
    panels = seen[0].axes
    assert [len(panel.lines) for panel in panels] == [4] * 3 + [4 + 1] * 3 + [1 + 2] * 3
    shown = [line.get_ydata() for line in panels[2].lines]
    assert {sum(step) for step in zip(*shown, strict=True)} == {balance.BATCH}
    assert all(low <= value <= high for panel in panels[:6] for low, high in [panel.get_ylim()]
               for line in panel.lines for value in line.get_ydata()), "nothing is cut off"


def test_without_matplotlib_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    text = balance.draw(tmp_path / "out.json")
    assert re.fullmatch(r'no plot: .*\bmatplotlib\b.*: pip install "commlayer\[plot\]"', text)
    assert list(tmp_path.iterdir()) == []
