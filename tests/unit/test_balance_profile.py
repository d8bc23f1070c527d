"""Profiles end at the end of memory or time, keep headroom, and give first shares whatever one worker's times are."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from support.balance import PAPER

from commlayer.balance import LinearTime
from commlayer.balance.profile import WorkerProfile, initial_shares, ladder, profile


def runs_to(memory: int, line: LinearTime = PAPER[0]) -> tuple[Callable[[int], float], list[int]]:
    batches: list[int] = []

    def run(batch: int) -> float:
        batches.append(batch)
        if batch > memory:
            raise MemoryError
        return line.time_s(batch)

    return run, batches


@pytest.mark.parametrize("memory", [0, 1, 2, 3, 5, 40, 63, 64, 100, 127, 130, 511])
def test_the_cap_lies_below_memorys_end_but_near(memory: int) -> None:
    run, batches = runs_to(memory)
    result = profile(run, 512)
    assert result.ended
    assert result.cap <= memory
    assert result.cap >= 0.8 * memory - 2, "a power of two alone could miss half"
    assert [batch for batch, _ in result.points] == [2**p for p in range(1, 9) if 2**p <= memory]
    assert max(batches) <= 512


@pytest.mark.parametrize("total", [512, 500])
def test_without_an_end_the_cap_is_the_total(total: int) -> None:
    run, batches = runs_to(10_000)
    result = profile(run, total)
    assert (result.cap, result.ended) == (total, False)
    assert result.points[-1][0] == max(batches) == total


def test_slow_first_runs_and_outliers_do_not_count() -> None:
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


def test_the_papers_four_gpus_begin_at_the_optimum() -> None:
    result = initial_shares(profiles(), TOTAL, EVEN, step=7)
    assert result.decision.shares == (166, 167, 159, 20)
    assert (result.decision.step, result.decision.from_step) == (7, 7)
    assert result.decision.before_s == pytest.approx(PAPER[3].time_s(128))
    assert result.decision.after_s == pytest.approx(0.10441, abs=1e-5)
    assert result.decision.effect == pytest.approx(1.94, abs=0.01)
    for line, truth in zip(result.lines, PAPER, strict=True):
        assert (line.slope_s, line.intercept_s) == pytest.approx((truth.slope_s, truth.intercept_s))


@pytest.mark.parametrize("memory", [100, 40, 3])
def test_a_cap_binds(memory: int) -> None:
    """What is computed at once: beyond it there are micro-batches, each with a launch, where that is faster still."""
    measured = profiles(memory)
    result = initial_shares(measured, TOTAL, EVEN, step=0).decision
    assert measured[0].cap <= memory
    assert result.micro_batches[0] == -(-result.shares[0] // measured[0].cap) > 1


@pytest.mark.parametrize("odd", [math.nan, -1.0, math.inf, 0.0])
def test_times_that_are_none_are_said_and_left_out(odd: float) -> None:
    measured = profiles()
    points = tuple((batch, odd if batch == 64 else time_s) for batch, time_s in measured[2].points)
    measured[2] = WorkerProfile(points, TOTAL, False)
    result = initial_shares(measured, TOTAL, EVEN, step=0)
    (note,) = result.notes
    assert f"worker 2: measured time {odd} s" in note.text
    assert note.text.endswith("[E-TIME-MODEL]")
    assert result.decision.shares == (166, 167, 159, 20)


@pytest.mark.parametrize(("caps", "worker"), [((0, 0, 0, 0), 0), ((64, 64, 2, 64), 2)])
def test_a_worker_without_room_is_named(caps: tuple[int, ...], worker: int) -> None:
    with pytest.raises(ValueError, match=rf"^worker {worker}\b.*\b{caps[worker]}\b.*\b3\b.*E-SHARES-ARGUMENT"):
        initial_shares([WorkerProfile(((2, 0.1),), cap, True) for cap in caps], TOTAL, EVEN, step=0, minimum=2)


def test_time_ends_a_profile_and_says_nothing_of_memory() -> None:
    spent = [0.0]

    def run(batch: int) -> float:
        spent[0] += 0.01 * batch
        return 0.01 * batch

    result = profile(run, TOTAL, left_s=lambda: 2.0 - spent[0])
    assert not result.ended
    assert result.cap == TOTAL
    assert 2 <= len(result.points) < len(ladder(TOTAL))
    assert spent[0] < 2.0 + 2 * result.points[-1][1], "one more batch at most"
