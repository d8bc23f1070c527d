"""Lines of decisions: columns stay under their headings, whoever takes part."""

from __future__ import annotations

import math

import pytest

from commlayer.balance.balancer import Decision, Note, Outcome, heading, line


@pytest.mark.parametrize("workers", [1, 2, 4, 9])
def test_columns_stand_under_their_headings(workers: int) -> None:
    ids = tuple(range(workers))
    decision = Decision(120, 122, ids, (100,) * workers, (1,) * workers, "why not", math.inf, 0.1234, 1.25)
    outcome = Outcome(125, 120, 0.1234, 0.15, "why not", 0.04, 0.2)
    top, first, second = heading(workers), line(decision, workers), line(outcome, workers)
    assert first.index("why not") == top.index("why") == second.index("measured")
    assert first[: top.index("SE") + 2].endswith(" 1.25")
    assert second[: top.index("SE") + 2].endswith(" 0.04")
    assert first[: top.index("from") + 4].split() == ["120", "122"]
    assert first.count(" 100") == workers
    assert "? -> 123.4" in first
    assert second.endswith("150.0  measured, +22% against expected; 200.0 ms with communication")


def test_what_changed_nothing_has_no_line() -> None:
    assert line(Note(3, "a spike"), 4) == ""
