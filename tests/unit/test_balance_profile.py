"""Profiles end at the end of memory or time, keep headroom, and give first shares whatever one worker's times are."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from support.balance import PAPER

from commlayer.balance import LinearTime
from commlayer.balance.lbb import LbbBalancer
from commlayer.balance.profile import WorkerProfile, initial_shares, ladder, profile
from commlayer.balance.time_models import in_pieces_s


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


def test_lbb_begins_near_it_and_the_sum_is_kept() -> None:
    result = initial_shares(profiles(), TOTAL, EVEN, step=0, shares_of=LbbBalancer.begin).decision
    assert sum(result.shares) == TOTAL
    assert result.shares == pytest.approx((166, 168, 159, 19), abs=1)


@pytest.mark.parametrize("memory", [100, 40, 3])
def test_a_cap_binds(memory: int) -> None:
    """What is computed at once: beyond it there are micro-batches, each with a launch, where that is faster still."""
    measured = profiles(memory)
    result = initial_shares(measured, TOTAL, EVEN, step=0).decision
    assert measured[0].cap <= memory
    assert result.micro_batches[0] == -(-result.shares[0] // measured[0].cap) > 1


def test_lines_are_those_near_the_share() -> None:
    """Beyond 64 samples this worker swaps: what is followed is right there, not in the mean over all."""
    bent = WorkerProfile(tuple((batch, 0.001 * batch + 0.01 * max(0, batch - 64)) for batch in ladder(TOTAL)), TOTAL, False)
    slow = WorkerProfile(tuple((batch, 0.012 * batch) for batch in ladder(TOTAL)), TOTAL, False)
    result = initial_shares([bent, slow], TOTAL, {0: 256, 1: 256}, step=0)
    share = result.decision.shares[0]
    assert share > 128
    assert result.lines[0].time_s(share) == pytest.approx(0.001 * share + 0.01 * (share - 64))


def test_micro_batches_pay_their_launch_again() -> None:
    measured = [profile(lambda batch: 0.001 * batch + 0.01 if batch <= 40 else _ends(), 128)] * 2
    result = initial_shares(measured, 128, {0: 64, 1: 64}, step=0).decision
    assert result.micro_batches == (2, 2)
    assert result.after_s == pytest.approx(in_pieces_s(LinearTime(0.001, 0.01), 64, measured[0].cap))


def _ends() -> float:
    raise MemoryError


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


def test_a_worker_whose_times_are_all_nonsense_begins_with_little() -> None:
    measured = profiles()
    measured[1] = WorkerProfile(tuple((batch, math.nan) for batch, _ in measured[1].points), TOTAL, False)
    shares = initial_shares(measured, TOTAL, EVEN, step=0).decision.shares
    assert sum(shares) == TOTAL
    assert shares[1] <= 1


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


def test_time_ends_the_search_for_memorys_end() -> None:
    spent = [0.0]

    def run(batch: int) -> float:
        spent[0] += 1.0
        if batch > 300:
            raise MemoryError
        return 1e-3 * batch

    result = profile(run, TOTAL, repeats=1, left_s=lambda: 18.0 - spent[0])
    assert result.ended
    assert result.cap == int(256 * 0.9)
