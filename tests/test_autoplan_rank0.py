"""Rank 0's rules, through `decide`: which plan is worth a change, whether it is kept, and when everything is looked at anew."""

from __future__ import annotations

import pytest
from autoplan_kit import (
    JOB,
    LINKS,
    START,
    Rank,
    basis_of,
    candidate,
    over,
    pick,
    plan_of,
    planning,
    proposing,
    row,
    said,
    trying,
)

from commlayer.job.autoplan.actions import Describe, Report, Say, StartPlanning, Switch, Word
from commlayer.job.autoplan.candidate import ReplanVerdict
from commlayer.job.autoplan.decide_rank0 import PLAIN, SHARES_WORTH, STALE, TRIED, WORSE, WORTH
from commlayer.job.autoplan.driver import AutoPlan
from commlayer.job.autoplan.facts import InForce, Meanwhile, Measured, Planned, SharesMoved
from commlayer.job.autoplan.state import Planning, Proposing, Settling, Steady, Trial
from commlayer.job.connection import Connection
from commlayer.observe import StalePlan
from commlayer.observe.prediction_check import PATIENCE
from commlayer.observe.reprobe_schedule import FIRST_S

BY_PACE = TRIED + 1
"""Steps from a change of plans to the word on it."""

# ---- what was found


@pytest.mark.parametrize(("found_s", "keep", "proposed"), [
    (1.0 - WORTH, False, True),
    (1.0 - WORTH + 1e-9, False, False),
    (2.0, False, False),
    (0.1, True, False),  # looks for plans and changes none
])
def test_a_plan_must_be_worth_a_change(found_s: float, keep: bool, proposed: bool) -> None:
    rank, order = planning(1.2, keep=keep)
    found = candidate(plan_of(found_s), current_s=1.0)
    actions = rank.step(1.2, Planned(order, found))
    assert isinstance(rank.state.lead.phase, Proposing if proposed else Settling)
    assert said(actions).startswith("found a plan" if proposed else "kept the plan in force: found a plan")
    # What the kept plan was made from is known now; before all have gone over, nothing of the found one is in force.
    kept = basis_of(found.plan)._replace(plan=START)
    assert pick(actions, Describe) == [Describe(None if proposed else kept, found.current_price)]
    assert rank.state.lead.verdicts == (ReplanVerdict(1.2, found.uncontended_s, found_s),)


def test_planning_that_fails_keeps_the_plan() -> None:
    rank, order = planning()
    assert said(rank.step(1.0, Planned(order, None, "KeyError: 3"))) == "no plan: KeyError: 3"
    assert isinstance(rank.state.lead.phase, Settling)


def test_what_was_found_for_another_plan_than_the_one_in_force_is_dropped() -> None:
    rank, order = planning()
    rank.in_force = InForce(plan_of(0.0, "int8()"))
    rank.step(1.0, Planned(order, candidate(plan_of(0.1))))
    assert rank.state.lead.phase == Steady()
    assert rank.word() == Word.MEASURE, "what was measured is that plan's"


def test_what_was_found_for_links_that_have_changed_since_is_dropped() -> None:
    rank, old = planning()
    (order,) = pick(rank.feed(Measured(LINKS, 2.0)), StartPlanning)
    rank.step(1.0, Planned(old, candidate(plan_of(0.1))))
    assert rank.state.lead.phase == Planning(order)


def test_a_plan_of_its_own_is_known_as_the_planner_has_it() -> None:
    as_planned, as_run = plan_of(0.5), plan_of(0.5, "int8()")
    rank = trying(candidate(as_planned)._replace(runnable=as_run))
    (order,) = pick(rank.feed(Measured(LINKS, 1.0)), StartPlanning)
    assert order == StartPlanning(as_run, as_planned, LINKS, 1.0)
    rank.in_force = InForce(START)  # somebody else has changed it
    rank.step(0.5)
    (order,) = pick(rank.feed(Measured(LINKS, 1.0)), StartPlanning)
    assert order == StartPlanning(START, None, LINKS, 1.0)


# ---- what came of it


def test_going_over_begins_a_trial_and_says_what_is_in_force() -> None:
    found = candidate(plan_of(0.5))
    rank = proposing(found, 1.0)
    (switch,) = rank.hear(row(word=Word.SWITCH), row())
    assert switch == Switch(found)
    actions = rank.switched(found.runnable)
    assert pick(actions, Describe) == [Describe(found.basis, found.price)]
    assert "went over to plan" in said(actions)
    phase = rank.state.lead.phase
    assert isinstance(phase, Trial)
    assert (phase.before.runnable, phase.before.plan, phase.before_s) == (START, START, 1.0)


@pytest.mark.parametrize(("takes_s", "back"), [(0.8, False), (1.0 + WORSE, False), (1.0 + WORSE + 1e-9, True), (3.0, True)])
def test_a_plan_under_which_steps_take_longer_is_left_again(takes_s: float, back: bool) -> None:
    rank = trying(candidate(plan_of(0.5)), 1.0)
    rank.step(30.0)  # warms up
    rank.step(takes_s, times=TRIED - 1)
    assert isinstance(rank.state.lead.phase, Trial), "too few to tell"
    actions = rank.step(takes_s)
    assert ("back to that" in said(actions)) is back
    assert rank.word() == (Word.SWITCH if back else Word.NOTHING)
    if back:
        assert over(rank).runnable == START
        assert isinstance(rank.state.lead.phase, Settling), "the plan before is not on trial"


def test_a_few_slow_steps_are_no_reason_to_go_back() -> None:
    rank = trying(candidate(plan_of(0.5)))
    for seconds in (9.0, 0.9, 9.0, 0.9, 9.0, 0.9):
        rank.step(seconds)
    assert rank.state.lead.phase == Steady()


def test_all_keep_their_plan_where_the_new_one_fits_some_rank_ill() -> None:
    rank = proposing(candidate(plan_of(0.5)))
    assert said(rank.refused("for 3 servers")) == "kept the plan in force: for 3 servers"
    assert rank.word() == Word.NOTHING
    rank.step(1.0, times=BY_PACE)
    assert rank.state.lead.check.predicted_s == 1.0


@pytest.mark.parametrize(("predicted_s", "worth"), [(0.8, False), (0.4, True)])
def test_a_plan_that_took_longer_than_predicted_makes_the_next_prediction_count_longer(predicted_s: float, worth: bool) -> None:
    rank = trying(candidate(plan_of(0.5)), 1.0)
    rank.step(0.9, times=BY_PACE)
    (order,) = pick(rank.feed(Measured(LINKS, 0.9)), StartPlanning)
    rank.step(0.9, Planned(order, candidate(plan_of(predicted_s), current_s=1.0)))
    assert isinstance(rank.state.lead.phase, Proposing) is worth, "0.9 for 0.5 makes 1.44 of 0.8, and 0.72 of 0.4"


# ---- the plan without compression


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(("plain_s", "tried"), [(0.7, True), (0.7 * (1 + PLAIN), True), (0.7 * (1 + PLAIN) + 1e-9, False)])
def test_what_is_near_without_compression_is_tried(kept: bool, plain_s: float, tried: bool) -> None:
    found = candidate(plan_of(2.0 if kept else 0.5), plain=plan_of(plain_s, "identity()"))
    rank = proposing(found)
    if kept:
        rank.in_force = InForce(START, basis_of(START))
    else:
        over(rank)
    rank.step(0.7, times=BY_PACE)
    assert rank.word() == (Word.SWITCH if tried else Word.NOTHING)
    if tried:
        assert rank.state.lead.phase.candidate.current == rank.in_force.basis.plan, "what all go back to is what is in force"
        assert over(rank).plan == found.plain.plan


@pytest.mark.parametrize(("takes_s", "stays"), [(0.7, True), (0.7 + 1e-9, False)])
def test_without_compression_steps_must_be_no_slower_and_are_expected_at_their_pace(takes_s: float, stays: bool) -> None:
    first = plan_of(0.5)
    rank = trying(candidate(first, plain=plan_of(0.9, "identity()")))
    rank.step(0.7, times=BY_PACE)
    over(rank)
    rank.step(takes_s, times=BY_PACE)
    assert rank.word() == (Word.NOTHING if stays else Word.SWITCH)
    if stays:
        assert rank.state.lead.check.predicted_s == takes_s, "whatever was predicted"
    else:
        assert over(rank).runnable == first
        rank.step(0.7, times=BY_PACE)
        assert rank.word() == Word.NOTHING, "it is tried once"


def test_who_keeps_the_plan_tries_none() -> None:
    rank, order = planning(1.0, keep=True)
    rank.in_force = InForce(START, basis_of(START))
    rank.step(1.0, Planned(order, candidate(plan_of(2.0), plain=plan_of(0.5, "identity()"))))
    assert rank.step(1.0, times=BY_PACE) == []
    assert rank.state.lead.phase == Steady()


def test_nothing_is_tried_where_nobody_knows_what_the_plan_in_force_was_made_from() -> None:
    rank = trying(candidate(plan_of(0.5), plain=plan_of(0.5, "identity()")))
    rank.in_force = rank.in_force._replace(basis=None)
    rank.step(0.7, times=BY_PACE)
    assert rank.word() == Word.NOTHING


# ---- whether it still holds


@pytest.mark.parametrize(("seconds", "stale"), [(0.5 * (1 + STALE), False), (0.5 * (1 + STALE) + 1e-9, True), (0.37, True)])
def test_steps_other_than_predicted_make_a_plan_stale(seconds: float, stale: bool) -> None:
    rank = trying(candidate(plan_of(0.5)))
    actions = rank.step(seconds, times=PATIENCE)
    assert bool(pick(actions, Report)) is stale
    assert rank.word() == (Word.MEASURE if stale else Word.NOTHING)
    if stale:
        (report,) = pick(actions, Report)
        assert said(actions) == report.event.reason
        assert (report.event.predicted_s, report.event.measured_s) == (0.5, seconds)
        assert rank.word() == Word.NOTHING, "it asks once"


def test_that_a_plan_is_stale_is_among_a_sessions_events_and_decisions() -> None:
    connection = Connection()
    connection.plan = START
    auto = AutoPlan(connection, JOB)
    event = StalePlan(9, 0.5, 1.0, PATIENCE)
    for action in (Report(event), Say(event.reason), Describe(basis_of(START), (0.3, 0.1))):
        auto.carry_out(action)
    assert (connection.events, connection.decisions) == ([event], [f"step 0: {event.reason}"])
    assert (connection.basis, connection.price) == (basis_of(START), (0.3, 0.1))


def test_a_plan_that_was_kept_is_expected_at_the_pace_it_has() -> None:
    rank, order = planning(1.0)
    rank.step(1.0, Planned(order, candidate(plan_of(2.0))))
    rank.step(0.7, times=TRIED)
    assert rank.state.lead.check.predicted_s == 0.7
    actions = rank.step(1.4, times=PATIENCE + 1)  # the median follows one step later
    assert pick(actions, Report)[0].event.usual


def test_nothing_is_expected_while_a_new_plan_is_looked_for() -> None:
    rank = trying(candidate(plan_of(0.5)))
    rank.feed(Measured(LINKS, 1.0))
    assert not pick(rank.step(9.0, times=PATIENCE), Report)


# ---- what it asks of all ranks


@pytest.mark.parametrize(("part", "word"), [(SHARES_WORTH, Word.MEASURE), (SHARES_WORTH - 1e-9, Word.NOTHING)])
def test_work_is_measured_again_where_enough_of_it_has_moved(part: float, word: Word) -> None:
    rank = trying(candidate(plan_of(0.5)))
    rank.step(0.5, SharesMoved(part))
    assert rank.word() == word
    assert rank.word() == Word.NOTHING, "it asks once"


def test_it_asks_for_one_thing_at_a_time() -> None:
    rank, order = planning()
    rank.step(1.0, SharesMoved(1.0))
    rank.now = 1e6
    assert rank.word() == Word.NOTHING, "a thread plans"
    rank.step(1.0, Planned(order, candidate(plan_of(0.5))))
    assert [rank.word() for _ in range(2)] == [Word.SWITCH] * 2, "until all have heard it"
    over(rank)
    assert [rank.word() for _ in range(2)] == [Word.MEASURE, Word.NOTHING]


@pytest.mark.parametrize(("after_s", "slower", "word"), [
    (FIRST_S, True, Word.PROBE), (FIRST_S - 1e-9, True, Word.NOTHING), (1e6, False, Word.NOTHING),
])
def test_links_that_were_faster_once_are_probed_now_and_then(after_s: float, slower: bool, word: Word) -> None:
    rank = trying(candidate(plan_of(0.5)))
    if slower:
        (order,) = pick(rank.feed(Measured(tuple(type(link)(1e7, 1e7) for link in LINKS), 1.0)), StartPlanning)
        rank.feed(Meanwhile(rank.in_force, (Planned(order, None, "no reason"),)))
    rank.now = after_s
    assert rank.word() == word


def test_a_hint_is_followed_by_a_probe() -> None:
    rank = trying(candidate(plan_of(0.5)))
    for step_s in (0.5, 0.5, 0.5, 0.5, 0.3):
        assert not rank.state.links.watch.faster
        rank.hear(row(step_s), row(step_s))
    rank.now = 2.0
    assert rank.word() == Word.PROBE


def test_other_ranks_look_for_nothing() -> None:
    rank = Rank(1)
    rank.step(1.0, times=8)
    assert not pick(rank.feed(Measured(LINKS, 1.0)), StartPlanning)
    rank.step(9.0, SharesMoved(1.0), times=50)
    rank.now = 1e6
    assert rank.word() == Word.NOTHING
