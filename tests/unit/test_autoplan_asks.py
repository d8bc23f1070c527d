"""What rank 0 asks of all ranks, and when: to measure again, to probe links, or nothing."""

from __future__ import annotations

import pytest
from support.autotuning import (
    LINKS,
    Rank,
    candidate,
    over,
    pick,
    plan_of,
    planning,
    row,
    trying,
)

from commlayer.autotune.plan.policy import SHARES_WORTH, TO_WIN, TRIED, to_win
from commlayer.autotune.plan.state import Events, MeasuringDone, PlanningDone, PlanRequest, SharesMoved, StartPlanning
from commlayer.observe.link_monitor import COST_MOST, EXPECTED_S, FIRST_S, SETTLED
from commlayer.observe.prediction_check import PATIENCE

DOUBTED_S = EXPECTED_S / COST_MOST
BY_PACE = TRIED + 1
"""Steps from a change of plans to the word on it."""


@pytest.mark.parametrize(("part", "word"), [(SHARES_WORTH, PlanRequest.MEASURE), (SHARES_WORTH - 1e-9, PlanRequest.NOTHING)])
def test_work_is_measured_again_where_enough_of_it_has_moved(part: float, word: PlanRequest) -> None:
    rank = trying(candidate(plan_of(0.5)))
    rank.step(0.5, SharesMoved(part))
    assert rank.word() == word
    assert rank.word() == PlanRequest.NOTHING, "it asks once"


def test_it_asks_for_one_thing_at_a_time() -> None:
    rank, order = planning()
    rank.step(1.0, SharesMoved(1.0))
    rank.now = 1e6
    assert rank.word() == PlanRequest.NOTHING, "a thread plans"
    rank.step(1.0, PlanningDone(order, candidate(plan_of(0.5))))
    assert [rank.word() for _ in range(2)] == [PlanRequest.SWITCH] * 2, "until all have heard it"
    over(rank)
    assert [rank.word() for _ in range(2)] == [PlanRequest.MEASURE, PlanRequest.NOTHING]


def told(rank: Rank, step_s: float, waited_s: float, times: int = SETTLED) -> None:
    """All have told of so many such steps."""
    for _ in range(times):
        assert rank.hear(*[row(step_s, waited_s=waited_s)] * 2) == []


@pytest.mark.parametrize(("after_s", "slower", "waited_s", "word"), [
    (FIRST_S, True, 0.2, PlanRequest.PROBE), (FIRST_S - 1e-9, True, 0.2, PlanRequest.NOTHING),
    (DOUBTED_S, False, 0.2, PlanRequest.PROBE),
    (DOUBTED_S - 1e-9, False, 0.2, PlanRequest.NOTHING),
    (1e6, True, 0.4 * TO_WIN, PlanRequest.NOTHING),  # whatever a probe found, too little would follow from it
])
def test_links_are_probed_now_and_then_and_sooner_if_they_were_faster_once(
    after_s: float, slower: bool, waited_s: float, word: PlanRequest,
) -> None:
    rank = trying(candidate(plan_of(0.5)))
    told(rank, 0.5, waited_s)
    if slower:
        (order,) = pick(rank.feed(MeasuringDone(tuple(type(link)(1e7, 1e7) for link in LINKS), 1.0)), StartPlanning)
        rank.feed(Events(rank.in_force, (PlanningDone(order, None, "no reason"),)))
    rank.now = after_s
    assert rank.word() == word


def test_a_hint_is_followed_by_a_probe_when_faster_links_could_have_won_what_it_costs() -> None:
    rank = trying(candidate(plan_of(0.5)))
    told(rank, 1.0, 0.8)
    told(rank, 0.5, 0.3)
    watch = rank.state.links.watch
    assert watch.faster
    rank.now = EXPECTED_S / to_win(rank.state.lead, watch) - 1e-6
    assert rank.word() == PlanRequest.NOTHING
    rank.now += 2e-6
    assert rank.word() == PlanRequest.PROBE


@pytest.mark.parametrize(("step_s", "waited_s", "steps", "win"), [
    (0.5, 0.1, 1.0, 0.2), (0.5, 0.1, 1.25, 0.36), (0.5, 0.0, 1.0, 0.0), (0.5, 0.5, 1.0, 1.0),
])
def test_links_can_win_what_steps_wait_and_what_compressing_loses(
    step_s: float, waited_s: float, steps: float, win: float,
) -> None:
    rank = trying(candidate(plan_of(0.5), steps=steps))
    lead = rank.state.lead
    told(rank, step_s, waited_s, SETTLED - 1)
    assert to_win(lead, rank.state.links.watch) is None, "nobody knows yet what is usual"
    told(rank, step_s, waited_s, 1)
    assert to_win(lead, rank.state.links.watch) == pytest.approx(win)


@pytest.mark.parametrize(("waited_s", "word"), [(0.5 * TO_WIN, PlanRequest.NOTHING), (2 * TO_WIN, PlanRequest.MEASURE)])
def test_slow_steps_are_measured_again_only_where_a_plan_could_win_something(waited_s: float, word: PlanRequest) -> None:
    rank = trying(candidate(plan_of(0.5)))
    rank.step(0.5, times=BY_PACE)
    told(rank, 1.0, waited_s)
    rank.step(1.0, times=PATIENCE + 1)
    assert rank.word() == word
    assert rank.word() == PlanRequest.NOTHING


def test_other_ranks_look_for_nothing() -> None:
    rank = Rank(1)
    rank.step(1.0, times=8)
    assert not pick(rank.feed(MeasuringDone(LINKS, 1.0)), StartPlanning)
    rank.step(9.0, SharesMoved(1.0), times=50)
    rank.now = 1e6
    assert rank.word() == PlanRequest.NOTHING
