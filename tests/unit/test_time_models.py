"""Time models: fits, and the online line, which smooths noise, ignores a spike, and follows a jump and a drift."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.balance import PAPER

from commlayer.balance.time_models import (
    LinearTime,
    OnlineLine,
    Piecewise,
    checked_time,
    fit_cubic,
    fit_line,
    fit_piecewise,
    in_pieces_s,
)

SLOW = PAPER[3]
FAST = PAPER[0]


def settled(line: LinearTime, batch: int, noise: float = 0.01) -> tuple[OnlineLine, random.Random]:
    online, draw = OnlineLine(line), random.Random(3)
    for _ in range(20):
        online.observe(batch, line.time_s(batch) * (1 + noise * draw.gauss(0, 1)))
    return online, draw


@settings(max_examples=60, deadline=None)
@given(st.floats(1e-4, 1e-2), st.floats(0, 0.1), st.integers(2, 300))
def test_a_line_that_holds_is_kept(slope_s: float, intercept_s: float, batch: int) -> None:
    line = LinearTime(slope_s, intercept_s)
    online = OnlineLine(line)
    assert [online.observe(batch, line.time_s(batch)) for _ in range(5)] == ["follows"] * 5
    assert online.line.time_s(2 * batch) == pytest.approx(line.time_s(2 * batch), rel=1e-6)


@settings(max_examples=60, deadline=None)
@example([(1, 1e-05), (1, 1.0), (1, 26.0), (1, 1.0)])
@given(st.lists(st.tuples(st.integers(1, 400), st.floats(1e-6, 1e3)), min_size=1, max_size=40))
def test_whatever_is_measured_the_line_stays_one(points: list[tuple[int, float]]) -> None:
    online = OnlineLine()
    for batch, time_s in points:
        online.observe(batch, time_s)
    assert math.isfinite(online.line.time_s(100))
    assert online.line.slope_s > 0


def test_one_outlier_is_no_trend() -> None:
    online, _ = settled(FAST, 166)
    before = online.line
    assert online.observe(166, 3 * FAST.time_s(166)) == "suspect"
    assert online.line == before
    assert online.observe(166, FAST.time_s(166)) == "follows"
    assert online.observe(166, 3 * FAST.time_s(166)) == "suspect", "an ordinary time in between clears the suspicion"
    assert online.observe(166, FAST.time_s(166) / 3) == "suspect", "two outliers in opposite directions are no trend"


@pytest.mark.parametrize(("line", "batch", "moved"), [(FAST, 166, 110), (SLOW, 20, 8)])
@pytest.mark.parametrize("truth", ["added", "factor"])
def test_offset_and_slope_are_told_apart_once_the_share_moved(line: LinearTime, batch: int, moved: int, truth: str) -> None:
    online, draw = settled(line, batch)
    factor, added_s = (1.0, 0.05) if truth == "added" else (1.5, 0.0)
    now = LinearTime(line.slope_s * factor, line.intercept_s * factor + added_s)

    def measured(at: int) -> float:
        return now.time_s(at) * (1 + 0.01 * draw.gauss(0, 1))

    assert online.observe(batch, measured(batch)) == "suspect"
    assert online.observe(batch, measured(batch)) == "jumped"
    assert online.line.time_s(batch) == pytest.approx(now.time_s(batch), rel=0.03)
    added_s = now.time_s(batch) - line.time_s(batch)
    assert online.line.intercept_s > line.intercept_s + 0.8 * added_s, "read as an offset first"
    for _ in range(2):
        assert online.observe(moved, measured(moved)) == "follows", "what was left open is no outlier"
    middle = (batch + moved) // 2
    assert online.line.time_s(middle) == pytest.approx(now.time_s(middle), rel=0.03)
    assert online.line.slope_s == pytest.approx(now.slope_s, rel=0.25)


def test_a_thermal_ramp_is_followed_without_a_jump() -> None:
    online, draw = settled(FAST, 166)
    late = []
    for step in range(60):
        now_s = FAST.time_s(166) * (1 + step / 60)
        assert online.observe(166, now_s * (1 + 0.01 * draw.gauss(0, 1))) == "follows"
        late.append(abs(online.line.time_s(166) / now_s - 1))
    assert max(late) < 0.06


@pytest.mark.parametrize("time_s", [math.nan, math.inf, -math.inf, 0.0, -0.1])
def test_bad_times_are_refused_by_name(time_s: float) -> None:
    with pytest.raises(ValueError, match=r"^worker 7\b.*E-TIME-MODEL"):
        checked_time(7, time_s)


@pytest.mark.parametrize("fit", [fit_line, fit_cubic, fit_piecewise])
def test_fits(fit: Callable[[Any], Any]) -> None:
    points = [(2**p, SLOW.time_s(2**p)) for p in range(1, 9)]
    assert fit(points).time_s(20) == pytest.approx(SLOW.time_s(20))
    for bad in ([(2, math.nan), (4, 1.0)], [(2, 1.0), (4, -1.0)], [(0, 1.0), (4, 1.0)], [(4, 1.0), (4, 1.1)]):
        with pytest.raises(ValueError, match="E-TIME-MODEL"):
            fit(bad)


@pytest.mark.parametrize("curve", [
    Piecewise((1.0, 50.0, 100.0), (50.0, 50.0, 100.0)),  # launches bound it up to 50 samples
    Piecewise((1.0, 60.0, 100.0), (2.0, 20.0, 200.0)),  # it swaps above 60
    LinearTime(1.0, 20.0),
])
def test_time_in_micro_batches_rises(curve: Any) -> None:
    for cap in (1, 3, 40, 100):
        times = [in_pieces_s(curve, batch, cap) for batch in range(1, 260)]
        assert times == sorted(times)


@pytest.mark.parametrize("call", [
    lambda: LinearTime(float("nan"), 1.0), lambda: LinearTime(-1.0, 1.0), lambda: Piecewise((1.0, 2.0), (3.0, 1.0)),
    lambda: Piecewise((1.0,), (3.0,)), lambda: Piecewise((2.0, 1.0), (1.0, 3.0)),
    lambda: Piecewise((1.0, 2.0), (1.0, math.inf)),
])
def test_invalid_models(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="E-TIME-MODEL"):
        call()
