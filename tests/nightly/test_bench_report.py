"""What every measurement prints and writes, and how `python -m bench` refuses."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console

import bench.__main__ as front
from bench import Unmeasurable, report

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
    asked = []
    measurement(monkeypatch, lambda quick: asked.append(quick) or RESULT)
    file = tmp_path / "out.json"
    assert front.main(["trial", "--quick", "--json", str(file)]) == 0
    assert asked == [True]
    written = json.loads(file.read_text())
    assert list(written) == ["name", "machine", "rows", "summary"]
    assert written["name"] == "trial"
    assert written["rows"] == RESULT["rows"]
    assert written["summary"] == RESULT["summary"]
    assert set(written["machine"]) == {"cpu", "cores", "memory_gb", "kernel", "python", "torch", "commit"}
    assert all(written["machine"][key] for key in ("cpu", "cores", "memory_gb", "kernel", "python", "torch"))
    assert list(tmp_path.iterdir()) == [file]


def test_the_table_shows_every_column_and_value() -> None:
    out = io.StringIO()
    report.show("trial", RESULT, Console(file=out, width=40))
    for word in ("what", "gain", "steps", "extra", "first", "second", "1.5", "3", "yes", "best: 1.5", "note: [none]"):
        assert word in out.getvalue()


def test_what_a_process_said_is_shown_as_it_is() -> None:
    said, out = "[/a/pair.h:311] Connect timeout [none]", io.StringIO()
    report.show("trial", {"rows": [{"lines": [said]}], "summary": {}}, Console(file=out))
    assert said in out.getvalue()


def test_an_unknown_name_is_one_line_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert front.main(["speed"]) == 2
    said = capsys.readouterr().err
    assert said == f"bench: no measurement is called 'speed'; there are: {', '.join(front.MEASUREMENTS)}\n"


def test_what_cannot_be_measured_is_one_line_and_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def run(quick: bool) -> report.Result:
        raise Unmeasurable(f"needs root (quick: {quick})")

    measurement(monkeypatch, run)
    assert front.main(["trial", "--json", str(tmp_path / "out.json")]) == 2
    assert capsys.readouterr().err == "bench: trial cannot be measured here: needs root (quick: False)\n"
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_is_refused_before_measuring(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    measurement(monkeypatch, lambda _quick: pytest.fail("measured for nothing"))
    assert front.main(["trial", "--json", str(tmp_path / "missing" / "out.json")]) == 2
    assert "does not exist" in capsys.readouterr().err
