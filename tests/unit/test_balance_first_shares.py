"""First shares from profiles: the best by what was measured, within memory, whatever one worker's times are."""

from __future__ import annotations

import math

import pytest
from support.balancing import PAPER

from commlayer.balance import Line, solve
from commlayer.balance.lbb import LbbBalancer, adjusted_to_total
from commlayer.balance.profile import WorkerProfile, initial_shares, ladder, profile
from commlayer.balance.time_models import Accumulated

TOTAL = 512
EVEN = dict.fromkeys(range(4), 128)


def profiles(memory: int = TOTAL, worker: int = 0) -> list[WorkerProfile]:
    def run(place: int, batch: int) -> float:
        if place == worker and batch > memory:
            raise MemoryError
        return PAPER[place].time_s(batch)

    return [profile(lambda batch, place=place: run(place, batch), TOTAL) for place in range(4)]  # type: ignore[misc]


def test_the_papers_four_gpus_begin_at_the_optimum() -> None:
    found = initial_shares(profiles(), TOTAL, EVEN, step=7)
    assert found.decision.shares == (166, 167, 159, 20)
    assert (found.decision.step, found.decision.from_step) == (7, 7)
    assert found.decision.before_s == pytest.approx(PAPER[3].time_s(128))
    assert found.decision.after_s == pytest.approx(0.10441, abs=1e-5)
    assert found.decision.effect == pytest.approx(1.94, abs=0.01)
    for line, truth in zip(found.lines, PAPER, strict=True):
        assert (line.slope_s, line.intercept_s) == pytest.approx((truth.slope_s, truth.intercept_s))


def test_lbb_begins_near_it_and_the_sum_is_kept() -> None:
    found = initial_shares(profiles(), TOTAL, EVEN, step=0, shares_of=LbbBalancer.begin).decision
    assert sum(found.shares) == TOTAL
    assert found.shares == pytest.approx((166, 168, 159, 19), abs=1)


@pytest.mark.parametrize("memory", [100, 40, 3])
def test_a_cap_binds(memory: int) -> None:
    """What is computed at once: beyond it there are micro-batches, each with a launch, where that is faster still."""
    measured = profiles(memory)
    found = initial_shares(measured, TOTAL, EVEN, step=0).decision
    assert measured[0].cap <= memory
    assert found.micro_batches[0] == -(-found.shares[0] // measured[0].cap) > 1
    assert found.after_s < solve(PAPER, TOTAL, [measured[0].cap, None, None, None], accumulate="never").makespan_s


def test_lines_are_those_near_the_share() -> None:
    """Beyond 64 samples this worker swaps: what is followed is right there, not in the mean over all."""
    bent = WorkerProfile(tuple((batch, 0.001 * batch + 0.01 * max(0, batch - 64)) for batch in ladder(TOTAL)), TOTAL, False)
    slow = WorkerProfile(tuple((batch, 0.012 * batch) for batch in ladder(TOTAL)), TOTAL, False)
    found = initial_shares([bent, slow], TOTAL, {0: 256, 1: 256}, step=0)
    share = found.decision.shares[0]
    assert share > 128
    assert found.lines[0].time_s(share) == pytest.approx(0.001 * share + 0.01 * (share - 64))


def test_micro_batches_pay_their_launch_again() -> None:
    measured = [profile(lambda batch: 0.001 * batch + 0.01 if batch <= 40 else _ends(), 128)] * 2
    found = initial_shares(measured, 128, {0: 64, 1: 64}, step=0).decision
    assert found.micro_batches == (2, 2)
    assert found.after_s == pytest.approx(Accumulated(Line(0.001, 0.01), measured[0].cap).time_s(64))


def _ends() -> float:
    raise MemoryError


@pytest.mark.parametrize("odd", [math.nan, -1.0, math.inf, 0.0])
def test_times_that_are_none_are_said_and_left_out(odd: float) -> None:
    measured = profiles()
    points = tuple((batch, odd if batch == 64 else time_s) for batch, time_s in measured[2].points)
    measured[2] = WorkerProfile(points, TOTAL, False)
    found = initial_shares(measured, TOTAL, EVEN, step=0)
    (note,) = found.notes
    assert f"worker 2: measured time {odd} s" in note.text
    assert note.text.endswith("[E-TIME-MODEL]")
    assert found.decision.shares == (166, 167, 159, 20)


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


@pytest.mark.parametrize(("wanted", "minimum", "order", "given"), [
    ([166, 168, 159, 20], 1, [3, 0, 1, 2], [166, 168, 159, 19]), ([100, 100], 1, [0, 1], [100, 156]),
    ([200, 56, 1], 2, [0, 1, 2], [198, 56, 2]), ([200, 56, 1], 4, [0, 1, 2], [200, 56, 0]), ([0, 0], 1, [0, 1], [0, 256]),
])
def test_what_lbb_wants_is_made_to_fit(wanted: list[int], minimum: int, order: list[int], given: list[int]) -> None:
    total = 512 if len(wanted) == 4 else 256
    assert adjusted_to_total(wanted, total, minimum, order) == given


def test_time_ends_a_profile_and_says_nothing_of_memory() -> None:
    spent = [0.0]

    def run(batch: int) -> float:
        spent[0] += 0.01 * batch
        return 0.01 * batch

    found = profile(run, TOTAL, left_s=lambda: 2.0 - spent[0])
    assert not found.ended
    assert found.cap == TOTAL
    assert 2 <= len(found.points) < len(ladder(TOTAL))
    assert spent[0] < 2.0 + 2 * found.points[-1][1], "one more batch at most"


def test_time_ends_the_search_for_memorys_end() -> None:
    spent = [0.0]

    def run(batch: int) -> float:
        spent[0] += 1.0
        if batch > 300:
            raise MemoryError
        return 1e-3 * batch

    found = profile(run, TOTAL, repeats=1, left_s=lambda: 18.0 - spent[0])
    assert found.ended
    assert found.cap == int(256 * 0.9)
