"""A campaign of chaos in pieces: what is made stays, is made once, and belongs to what is asked for. No run is real here."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.__main__ import main
from bench.chaos.campaign import Campaign, Row
from bench.chaos.cluster import Evidence
from bench.chaos.dealing import trial
from bench.chaos.kept import Kept
from bench.chaos.reports import Ended, Finding
from bench.chaos.verdict import Verdict


def test_a_campaign_in_pieces_makes_each_run_once_and_shows_all(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    results: list[int] = []

    def run(self: Campaign, seeds: Any, faults: Any) -> Iterator[Row]:
        for seed in seeds:
            results.append(seed)
            wanted = trial(seed, faults)
            verdict = Verdict("goes on", (Finding("left", "a file"),) * (seed % 2), 0.5 if seed % 2 else math.nan, 40, 0)
            ended = [Ended(40, 1.0), None]
            yield Row(wanted, verdict, Evidence([[], []], ended, 1, 0.0, 1.5, (), None, 3, (), (), math.nan, "a line"))

    monkeypatch.setattr(Campaign, "run", run)
    monkeypatch.setattr(Campaign, "__enter__", lambda self: self)
    monkeypatch.setattr(Campaign, "__exit__", lambda self, *_: None)
    file, report = tmp_path / "runs", tmp_path / "runs.json"

    def piece(runs: int, *more: str) -> int:
        chosen = ["--faults", "cut,slow-link", "--seed", "4", "--runs", str(runs), "--resume", str(file), *more]
        return main(["chaos", *chosen, "--json", str(report)])

    for _ in range(3):
        piece(5, "--seconds", "1e-9")
    assert results == [4, 5, 6]
    assert piece(5) == 1
    assert results == [4, 5, 6, 7, 8]
    pieces = json.loads(report.read_text())
    file.unlink()
    piece(5)
    assert results[5:] == results[:5]
    assert json.loads(report.read_text()) == pieces
    assert [row["seed"] for row in pieces["rows"]] == [4, 5, 6, 7, 8]
    assert (pieces["summary"]["asked"], pieces["summary"]["violations"]) == (5, 2)
    with pytest.raises(ValueError, match=r"cut of seed 8\b.*E-CLI-OPTION"):
        Kept(file, range(4, 8), ("cut", "slow-link"))
    with pytest.raises(ValueError, match=r"cut of seed 4\b.*E-CLI-OPTION"):
        Kept(file, range(4, 9), ("slow-link", "cut"))
    with pytest.raises(ValueError, match="without hosts.*E-CLI-OPTION"):
        Kept(file, range(4, 9), ("cut", "slow-link"), hosts=True)
    file.write_bytes(b"{}")
    with pytest.raises(ValueError, match="runs: .*Expected .*E-CLI-OPTION"):
        Kept(file, range(4, 9), ("cut", "slow-link"))
