"""Profiles end where memory ends, keep headroom and survive a worker that vanishes; fits state their error."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from support.balancing import PAPER

from commlayer.balance.profile import profile
from commlayer.balance.time_models import Line, fit_cubic, fit_line, fit_piecewise


def runs_to(memory: int, line: Line = PAPER[0]) -> tuple[Callable[[int], float], list[int]]:
    asked: list[int] = []

    def run(batch: int) -> float:
        asked.append(batch)
        if batch > memory:
            raise MemoryError
        return line.time_s(batch)

    return run, asked


@pytest.mark.parametrize("memory", [0, 1, 2, 3, 5, 40, 63, 64, 100, 127, 130, 511])
def test_the_cap_lies_below_memorys_end_but_near(memory: int) -> None:
    run, asked = runs_to(memory)
    found = profile(run, 512)
    assert found.ended
    assert found.cap <= memory
    assert found.cap >= 0.8 * memory - 2, "a power of two alone could miss half"
    assert [batch for batch, _ in found.points] == [2**p for p in range(1, 9) if 2**p <= memory]
    assert max(asked) <= 512


@pytest.mark.parametrize("total", [512, 500])
def test_without_an_end_the_cap_is_the_total(total: int) -> None:
    run, asked = runs_to(10_000)
    found = profile(run, total)
    assert (found.cap, found.ended) == (total, False)
    assert found.points[-1][0] == max(asked) == total


def test_slow_first_runs_and_outliers_do_not_count() -> None:
    seen: dict[int, int] = {}

    def run(batch: int) -> float:
        seen[batch] = seen.get(batch, 0) + 1
        return PAPER[1].time_s(batch) * (20 if seen[batch] == 1 else 5 if seen[batch] == 4 else 1)

    assert all(time_s == pytest.approx(PAPER[1].time_s(batch)) for batch, time_s in profile(run, 256).points)


def test_fits_find_what_made_the_points_and_say_how_far_off_they_are() -> None:
    line = PAPER[3]
    points = [(2**p, line.time_s(2**p)) for p in range(1, 9)]
    exact = fit_line(points)
    assert exact.model.slope_s == pytest.approx(line.slope_s)
    assert exact.model.intercept_s == pytest.approx(line.intercept_s)
    assert exact.worst < 1e-9
    assert fit_cubic(points).model.time_s(20) == pytest.approx(line.time_s(20))
    assert fit_piecewise(points).model.time_s(20) == pytest.approx(line.time_s(20))
    bent = [(batch, time_s * (1.3 if batch >= 64 else 1.0)) for batch, time_s in points]
    assert fit_line(bent).worst > 0.05 > fit_piecewise(bent).worst
    assert 0 < fit_cubic(bent).rms < fit_line(bent).rms


@pytest.mark.parametrize(
    ("points", "slope_s", "intercept_s"),
    [([(10, 1.0), (20, 3.0)], None, 0.0), ([(10, 2.0), (20, 1.0)], 0.0, None)],
)
def test_lines_never_start_or_fall_below_zero(
    points: list[tuple[int, float]], slope_s: float | None, intercept_s: float | None
) -> None:
    model = fit_line(points).model
    assert slope_s is None or model.slope_s == slope_s
    assert intercept_s is None or model.intercept_s == intercept_s


def test_piecewise_fits_rise() -> None:
    model = fit_piecewise([(2, 1.0), (4, 3.0), (8, 2.0), (8, 2.2), (16, 4.0)]).model
    assert list(model.times_s) == sorted(model.times_s)


@pytest.mark.parametrize("fit", [fit_line, fit_cubic, fit_piecewise])
@pytest.mark.parametrize(
    "points", [[(2, math.nan), (4, 1.0)], [(2, 1.0), (4, -1.0)], [(0, 1.0), (4, 1.0)], [(4, 1.0), (4, 1.1)]]
)
def test_points_that_say_nothing_are_refused(fit: Callable[[object], object], points: object) -> None:
    with pytest.raises(ValueError, match="^fit of a .*E-TIME-MODEL"):
        fit(points)
