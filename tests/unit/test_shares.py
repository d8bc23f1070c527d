"""Shares of a batch: time models, solver, profiles, the balancer and LBB in emulated clusters."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.balance import PAPER

from bench.balance_cluster import Disturbance, Ours, PlayedCluster, PlayedStep, moves, run, slow_after
from bench.lbb import Cubic, Lbb, fit_cubic
from commlayer.balance import shares, solve
from commlayer.balance.balancer import Balancer, Joined, Measurement, Note, SharePolicy, straggler_effect
from commlayer.balance.profile import WorkerProfile, initial_shares, ladder, profile
from commlayer.balance.time_models import (
    LinearTime,
    OnlineLine,
    Piecewise,
    TimeModel,
    checked_time,
    fit_line,
    fit_piecewise,
    times_of_shares,
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
def test_accurate_line_is_kept(slope_s: float, intercept_s: float, batch: int) -> None:
    line = LinearTime(slope_s, intercept_s)
    online = OnlineLine(line)
    assert [online.observe(batch, line.time_s(batch)) for _ in range(5)] == ["follows"] * 5
    assert online.line.time_s(2 * batch) == pytest.approx(line.time_s(2 * batch), rel=1e-6)


@settings(max_examples=60, deadline=None)
@example([(1, 1e-05), (1, 1.0), (1, 26.0), (1, 1.0)])
@given(st.lists(st.tuples(st.integers(1, 400), st.floats(1e-6, 1e3)), min_size=1, max_size=40))
def test_line_stays_valid_for_any_measurements(points: list[tuple[int, float]]) -> None:
    online = OnlineLine()
    for batch, time_s in points:
        online.observe(batch, time_s)
    assert math.isfinite(online.line.time_s(100))
    assert online.line.slope_s > 0


def test_one_outlier_does_not_change_the_trend() -> None:
    online, _ = settled(FAST, 166)
    before = online.line
    assert online.observe(166, 3 * FAST.time_s(166)) == "suspect"
    assert online.line == before
    assert online.observe(166, FAST.time_s(166)) == "follows"
    assert online.observe(166, 3 * FAST.time_s(166)) == "suspect", "an ordinary time in between clears the suspicion"
    assert online.observe(166, FAST.time_s(166) / 3) == "suspect", "two outliers in opposite directions are no trend"


@pytest.mark.parametrize(("line", "batch", "moved"), [(FAST, 166, 110), (SLOW, 20, 8)])
@pytest.mark.parametrize("truth", ["added", "factor"])
def test_offset_and_slope_are_separated_once_the_share_changes(line: LinearTime, batch: int, moved: int, truth: str) -> None:
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
        assert online.observe(moved, measured(moved)) == "follows", "an open measurement is no outlier"
    middle = (batch + moved) // 2
    assert online.line.time_s(middle) == pytest.approx(now.time_s(middle), rel=0.03)
    assert online.line.slope_s == pytest.approx(now.slope_s, rel=0.25)


def test_thermal_ramp_is_tracked_smoothly() -> None:
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
def test_time_grows_with_micro_batches(curve: Any) -> None:
    for cap in (1, 3, 40, 100):
        times = times_of_shares([curve] * 259, range(1, 260), [cap] * 259)
        assert times == sorted(times)


@pytest.mark.parametrize("call", [
    lambda: LinearTime(float("nan"), 1.0), lambda: LinearTime(-1.0, 1.0), lambda: Piecewise((1.0, 2.0), (3.0, 1.0)),
    lambda: Piecewise((1.0,), (3.0,)), lambda: Piecewise((2.0, 1.0), (1.0, 3.0)),
    lambda: Piecewise((1.0, 2.0), (1.0, math.inf)),
])
def test_invalid_models(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="E-TIME-MODEL"):
        call()


numbers = st.floats(0.01, 10, allow_nan=False)
lines = st.builds(LinearTime, numbers, st.floats(0, 40))


@st.composite
def curves(draw: st.DrawFn) -> Piecewise:
    """Rising, convex or not, with flat pieces."""
    steps = draw(st.lists(st.tuples(st.integers(1, 5), st.sampled_from([0.0, 0.5, 1.0, 7.0])), min_size=1, max_size=4))
    batches, times = [1.0], [draw(numbers)]
    for wide, high in steps:
        batches.append(batches[-1] + wide)
        times.append(times[-1] + high)
    return Piecewise(tuple(batches), tuple(times))


@settings(max_examples=80, deadline=None)
@given(st.lists(st.one_of(lines, curves()), min_size=1, max_size=4), st.integers(4, 14), st.integers(1, 2), st.data())
def test_solver_finds_the_fastest_split(models: list[TimeModel], total: int, minimum: int, data: st.DataObject) -> None:
    """Also with micro-batches, each of which pays its launch."""
    minimum = min(minimum, total // len(models))
    caps = data.draw(st.lists(st.integers(minimum, 14), min_size=len(models), max_size=len(models)))
    solution = solve(models, total, caps, minimum=minimum)
    assert sum(solution.shares) == total
    assert min(solution.shares) >= minimum
    vectors = (head for head in itertools.product(range(minimum, total + 1), repeat=len(models)) if sum(head) == total)
    times_s = [times_of_shares([model] * total, range(1, total + 1), [min(cap, total)] * total)
               for model, cap in zip(models, caps, strict=True)]
    best_s = min(max(own_s[share - 1] for own_s, share in zip(times_s, vector, strict=True)) for vector in vectors)
    assert solution.makespan_s == pytest.approx(best_s, rel=1e-9)


def test_integer_optimum_of_the_paper_example() -> None:
    solution = solve(PAPER, 512)
    assert solution.shares == (166, 167, 159, 20)
    assert solution.makespan_s == pytest.approx(0.104408)
    little = solve(PAPER, 512, [512, 96, 96, 16])
    assert little.makespan_s == pytest.approx(0.1102856), "micro-batches are faster than the largest batch in memory"


@pytest.mark.parametrize("call", [
    lambda: shares([], 4), lambda: shares(PAPER, 0), lambda: shares(PAPER, 3), lambda: shares(PAPER, 8, [1, 2]),
    lambda: shares(PAPER, 8, [1, 1, 1, 1], minimum=2), lambda: shares(PAPER, 8, [4, -1, 4, 4]),
])
def test_invalid_profile_arguments_are_one_line(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"\[E-SHARES-ARGUMENT\]$") as caught:
        call()
    assert "\n" not in str(caught.value)


def runs_to(memory: int, line: LinearTime = PAPER[0]) -> tuple[Callable[[int], float], list[int]]:
    batches: list[int] = []

    def run(batch: int) -> float:
        batches.append(batch)
        if batch > memory:
            raise MemoryError
        return line.time_s(batch)

    return run, batches


@pytest.mark.parametrize("memory", [0, 1, 2, 3, 5, 40, 63, 64, 100, 127, 130, 511])
def test_cap_is_just_below_the_memory_limit(memory: int) -> None:
    run, batches = runs_to(memory)
    result = profile(run, 512)
    assert result.ended
    assert result.cap <= memory
    assert result.cap >= 0.8 * memory - 2, "a power of two alone could miss half"
    assert [batch for batch, _ in result.points] == [2**p for p in range(1, 9) if 2**p <= memory]
    assert max(batches) <= 512


@pytest.mark.parametrize("total", [512, 500])
def test_cap_is_the_total_without_a_memory_limit(total: int) -> None:
    run, batches = runs_to(10_000)
    result = profile(run, total)
    assert (result.cap, result.ended) == (total, False)
    assert result.points[-1][0] == max(batches) == total


def test_slow_first_runs_and_outliers_are_ignored() -> None:
    seen: dict[int, int] = {}

    def run(batch: int) -> float:
        seen[batch] = seen.get(batch, 0) + 1
        return PAPER[1].time_s(batch) * (20 if seen[batch] == 1 else 5 if seen[batch] == 4 else 1)

    assert all(time_s == pytest.approx(PAPER[1].time_s(batch)) for batch, time_s in profile(run, 256).points)


TOTAL = 512
EVEN = dict.fromkeys(range(4), 128)


def profiles(memory: int = TOTAL, worker: int = 0) -> list[WorkerProfile]:
    def run(place: int, batch: int) -> float:
        if place == worker and batch > memory:
            raise MemoryError
        return PAPER[place].time_s(batch)

    return [profile(lambda batch, place=place: run(place, batch), TOTAL) for place in range(4)]  # type: ignore[misc]


def test_paper_example_starts_at_the_optimum() -> None:
    result = initial_shares(profiles(), TOTAL, EVEN, step=7)
    assert result.decision.shares == (166, 167, 159, 20)
    assert (result.decision.step, result.decision.from_step) == (7, 7)
    assert result.decision.before_s == pytest.approx(PAPER[3].time_s(128))
    assert result.decision.after_s == pytest.approx(0.10441, abs=1e-5)
    assert result.decision.effect == pytest.approx(1.94, abs=0.01)
    for line, truth in zip(result.lines, PAPER, strict=True):
        assert (line.slope_s, line.intercept_s) == pytest.approx((truth.slope_s, truth.intercept_s))


@pytest.mark.parametrize("odd", [math.nan, -1.0, math.inf, 0.0])
def test_invalid_times_are_reported_and_ignored(odd: float) -> None:
    measured = profiles()
    points = tuple((batch, odd if batch == 64 else time_s) for batch, time_s in measured[2].points)
    measured[2] = WorkerProfile(points, TOTAL, False)
    result = initial_shares(measured, TOTAL, EVEN, step=0)
    (note,) = result.notes
    assert f"worker 2: measured time {odd} s" in note.text
    assert note.text.endswith("[E-TIME-MODEL]")
    assert result.decision.shares == (166, 167, 159, 20)


@pytest.mark.parametrize(("caps", "worker"), [((0, 0, 0, 0), 0), ((64, 64, 2, 64), 2)])
def test_worker_without_memory_is_named(caps: tuple[int, ...], worker: int) -> None:
    with pytest.raises(ValueError, match=rf"^worker {worker}\b.*\b{caps[worker]}\b.*\b3\b.*E-SHARES-ARGUMENT"):
        initial_shares([WorkerProfile(((2, 0.1),), cap, True) for cap in caps], TOTAL, EVEN, step=0, minimum=2)


def test_time_limit_ends_a_profile_without_a_memory_limit() -> None:
    spent = [0.0]

    def run(batch: int) -> float:
        spent[0] += 0.01 * batch
        return 0.01 * batch

    result = profile(run, TOTAL, left_s=lambda: 2.0 - spent[0])
    assert not result.ended
    assert result.cap == TOTAL
    assert 2 <= len(result.points) < len(ladder(TOTAL))
    assert spent[0] < 2.0 + 2 * result.points[-1][1], "one more batch at most"


def cluster(*disturbances: Disturbance, noise: float = 0.01, seed: int = 0) -> PlayedCluster:
    return PlayedCluster(tuple(PAPER), 512, disturbances=disturbances, noise=noise, seed=seed)


def played(
    played_cluster: PlayedCluster, steps: int, *args: SharePolicy, profiled: bool = True,
) -> tuple[Ours, list[PlayedStep]]:
    mode = Ours(played_cluster, *args, profiled=profiled)
    done = run(mode, played_cluster, steps)
    assert {sum(step.shares) for step in done} == {512}
    return mode, done


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("worker", range(4))
def test_added_delay_costs_at_most_three_slow_iterations(worker: int, seed: int) -> None:
    _, steps = played(cluster(Disturbance(worker, 25, 65, added_s=0.05), seed=seed), 105)
    assert slow_after(steps, 0, 25) == 0
    assert 1 <= slow_after(steps, 25, 65) <= 3 + (worker == 3), "the small worker may take one more correction"
    assert slow_after(steps, 65, 105) <= 3
    assert not any(step.slow for step in steps[31:65] + steps[71:]), "once recovered it stays"
    assert moves(steps) <= 8


@pytest.mark.parametrize(("disturbances", "most"), [
    *[((Disturbance(worker, 20, 120, factor=factor),), 4) for worker in (0, 3) for factor in (1.5, 3.0, 10.0)],
    ((Disturbance(0, 20, 150, factor=2.0, ramp=60), Disturbance(1, 40, 150, factor=1.5, ramp=20)), 3),
])
def test_speed_factors_and_heat_are_tracked(disturbances: tuple[Disturbance, ...], most: int) -> None:
    assert slow_after(played(cluster(*disturbances), 120)[1], 20, 120) <= most


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.02])
def test_shares_are_stable_at_constant_speeds(noise: float) -> None:
    assert moves(played(cluster(noise=noise), 200)[1]) <= 1


def test_single_spikes_change_no_share() -> None:
    spikes = (Disturbance(step % 4, step, step + 1, factor=3.0) for step in range(10, 200, 10))
    mode, steps = played(cluster(*spikes), 210)
    assert moves(steps) == 0
    assert len([event for event in mode.balancer.events if isinstance(event, Note)]) == 19


def test_change_of_shares_must_gain_enough() -> None:
    slower = cluster(Disturbance(1, 25, 200, added_s=0.02))
    assert moves(played(slower, 60)[1]) >= 1
    assert moves(played(slower, 60, SharePolicy(gain_least=0.5))[1]) == 0


def test_balance_is_found_without_a_profile() -> None:
    _, steps = played(cluster(), 40, profiled=False)
    assert steps[0].shares == (128, 128, 128, 128)
    assert slow_after(steps, 0, 40) <= 3


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_sum_of_shares_is_constant_for_any_times(data: st.DataObject) -> None:
    total, minimum = data.draw(st.integers(8, 60)), data.draw(st.integers(1, 2))
    balancer = Balancer([Joined(worker, line=LinearTime(1e-3, 1e-3)) for worker in range(3)], total, SharePolicy(minimum))
    times = st.one_of(st.floats(1e-9, 1e9), st.sampled_from([math.nan, -1.0, math.inf, 1e-320]))
    for step in range(25):
        balancer.copy().decide(step, [Measurement(0, balancer.shares[0], 1e3)])
        balancer.decide(step, [Measurement(worker, share, data.draw(times)) for worker, share in balancer.shares.items()])
        assert sum(balancer.shares.values()) == total
        assert min(balancer.shares.values()) >= minimum


@pytest.mark.parametrize("call", [
    lambda: SharePolicy(minimum=0), lambda: SharePolicy(gain_least=math.nan), lambda: Balancer([Joined(0)], 5, shares={0: 4}),
    lambda: Balancer([Joined(0)], 5, shares={0: 4, 7: 1}), lambda: Balancer([Joined(0, cap=1)], 8, SharePolicy(minimum=2)),
])
def test_invalid_arguments(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"\[E-SHARES-ARGUMENT\]$"):
        call()


CURVES = [Cubic(0.0, 0.0, line.slope_s, line.intercept_s) for line in PAPER]
PROFILE_A0_S = (0.01215, 0.01320, 0.01567, 0.04084)
"""Intercepts of the authors' cubic fits, with which their table 3 was made."""
MEASURED_S = (0.08181, 0.08149, 0.08539, 0.39292)
"""Table 2: the four workers at batch 128."""


def test_rapid_tuning_reproduces_the_third_table_of_the_paper() -> None:
    lbb = Lbb([Cubic(0.0, 0.0, 6e-4, a0) for a0 in PROFILE_A0_S], 512)
    lbb.current = [128] * 4
    lbb.observe(0, MEASURED_S)
    assert lbb.rapid_steps == [0]
    assert lbb.shares(1) == pytest.approx([165, 166, 158, 22], abs=1)


def test_straggler_effect_is_spread_over_mean() -> None:
    assert straggler_effect([1.0, 2.0, 3.0]) == 1.0
    assert straggler_effect(MEASURED_S) == pytest.approx(1.94, abs=0.01)


@pytest.mark.parametrize(
    ("times", "does"), [((1.0, 1.0, 1.0, 1.04), "nothing"), ((1.0, 1.02, 1.03, 1.2), "fine"), ((1.0, 1.0, 1.0, 1.5), "rapid")]
)
def test_lbb_thresholds(times: tuple[float, ...], does: str) -> None:
    lbb = Lbb(CURVES, 512)
    before = list(lbb.shares(0))
    lbb.observe(0, times)
    after = list(lbb.shares(1))
    assert bool(lbb.rapid_steps) == (does == "rapid")
    if does == "nothing":
        assert after == before
    if does == "fine":
        assert after == [before[0] + 1, *before[1:]], "floor(1/2) is taken, ceil(1/2) is given: the sum has grown"
