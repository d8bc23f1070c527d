"""Modules stay small enough to be read in one sitting: none above 400 lines, half of them at most 150."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST, MEDIAN = 400, 150
SOURCES = {
    "package": [("commlayer", "*.py")],
    "bench": [("bench", "*.py")],
    "tests": [("tests", "*.py")],
    "native": [("native", "*.h"), ("native", "*.cc"), ("cuda", "*.cu"), ("cuda", "*.cuh")],
}


@pytest.mark.parametrize("kind", SOURCES)
def test_modules_are_small(kind: str) -> None:
    for folder, pattern in SOURCES[kind]:
        assert list((ROOT / folder).rglob(pattern)), f"no {pattern} in {folder}: the suffix has changed"
    files = [file for folder, pattern in SOURCES[kind] for file in (ROOT / folder).rglob(pattern)]
    lines = {str(file.relative_to(ROOT)): len(file.read_text("utf-8").splitlines()) for file in files}
    assert lines, f"no source found for {kind}"
    assert {name: n for name, n in lines.items() if n > MOST} == {}
    assert statistics.median(lines.values()) <= MEDIAN
