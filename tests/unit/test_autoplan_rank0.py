"""Rank 0's rules, through `decide`: which plan is worth a change, whether it is kept, and when everything is looked at anew."""

from __future__ import annotations

import threading

import pytest
import torch
from msgspec import structs
from support.autotuning import (
    FIRST_PLANNING,
    JOB,
    LEAVING,
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

from commlayer.autotune.measure.calibration import CollectiveCosts
from commlayer.autotune.plan.driver import AutoPlan
from commlayer.autotune.plan.measuring import Measurements
from commlayer.autotune.plan.policy import PLAIN, SLOWER, STALE, TRIED, WORTH, begin, decide
from commlayer.autotune.plan.state import (
    LEAVES,
    MOST_STEPS,
    ActivePlan,
    LogLine,
    Measure,
    MeasuringDone,
    Planning,
    PlanningDone,
    PlanRequest,
    ProbeDone,
    Proposing,
    ReplanVerdict,
    ReportStale,
    SetActivePlan,
    Settling,
    ShareStepTime,
    StartPlanning,
    Steady,
    StepTimes,
    SuggestSetting,
    Switch,
    Trying,
)
from commlayer.engine.connection import JobContext
from commlayer.engine.plan_choice import WAYS
from commlayer.observe import StalePlan
from commlayer.observe.link_monitor import IN_A_ROW
from commlayer.observe.prediction_check import PATIENCE
from commlayer.planner.convergence import LearningRow
from commlayer.planner.inputs import cluster_from_line
from commlayer.planner.model import Basis, Line, PlanInputs, Policy
from commlayer.planner.tables import profile_from_tables
from commlayer.records import Plan

BY_PACE = TRIED + 1
"""Steps from a change of plans to the word on it."""

# ---- what was found


@pytest.mark.parametrize(("found_s", "steps", "current_steps", "proposed"), [
    (0.9, 1.0, 1.0, True), (0.9, 1.09, 1.0, False), (0.3, 2.9, 1.0, True), (0.3, 3.5, 1.0, False),
    (1.1, 1.0, 1.2, True), (1.1, 1.0, 1.1, True),  # longer steps, of which fewer are needed
    (1.02, 1.0, 1.02, True), (1.06, 1.0, 1.02, False), (0.99, 1.0, 1.005, False), (1.0, 1.02, 1.02, False),
])
def test_a_plan_must_bring_the_loss_sooner(found_s: float, steps: float, current_steps: float, proposed: bool) -> None:
    rank, order = planning(1.0)
    actions = rank.step(1.0, PlanningDone(order, candidate(plan_of(found_s), steps=steps, current_steps=current_steps)))
    assert isinstance(rank.state.lead.phase, Proposing if proposed else Settling)
    assert (f" ms ({steps:.2f} times as many to the loss); " in said(actions)) is (steps > 1)
    assert (f" ms by the same prices ({current_steps:.2f} times as many to the loss)" in said(actions)) is (current_steps > 1)


@pytest.mark.parametrize(("found_s", "keep", "proposed"), [
    (1.0 - WORTH, False, True),
    (1.0 - WORTH + 1e-9, False, False),
    (2.0, False, False),
    (0.1, True, False),  # looks for plans and changes none
])
def test_a_plan_must_be_worth_a_change(found_s: float, keep: bool, proposed: bool) -> None:
    rank, order = planning(1.2, keep=keep)
    found = candidate(plan_of(found_s), current_s=1.0)
    actions = rank.step(1.2, PlanningDone(order, found))
    assert isinstance(rank.state.lead.phase, Proposing if proposed else Settling)
    assert said(actions).startswith("found a plan" if proposed else "kept the plan in force: found a plan")
    # What the kept plan was made from is known now; before all have gone over, nothing of the found one is in force.
    kept = basis_of(found.plan)._replace(plan=START)
    assert pick(actions, SetActivePlan) == [SetActivePlan(None if proposed else kept, found.current_price)]
    assert rank.state.lead.verdicts == (ReplanVerdict(1.2, found.uncontended_s, found_s),)


@pytest.mark.parametrize(("found_s", "current_s", "line"), [
    (0.5, 1.0, "expected to reach a loss 0.80 times as fast as one machine alone"),
    (2.0, 1.0, "expected to reach a loss 0.50 times as fast as one machine alone"),  # the plan that is kept
])
def test_the_log_says_what_is_expected_beside_one_machine_alone(found_s: float, current_s: float, line: str) -> None:
    rank, order = planning(1.0)
    found = candidate(plan_of(found_s), current_s=current_s, steps=1.25, current_steps=1.0, alone_s=0.5)
    assert line in said(rank.step(1.0, PlanningDone(order, found)))


@pytest.mark.parametrize(("steps", "current_steps", "proposed"), [
    (MOST_STEPS - 0.01, 1.0, True), (MOST_STEPS, 1.0, False), (MOST_STEPS, MOST_STEPS + 1, True),
])
def test_a_plan_that_needs_so_many_steps_loses_however_short_they_are(
    steps: float, current_steps: float, proposed: bool,
) -> None:
    rank, order = planning(1.0)
    rank.step(1.0, PlanningDone(order, candidate(plan_of(0.01), steps=steps, current_steps=current_steps)))
    assert isinstance(rank.state.lead.phase, Proposing) is proposed


def test_what_local_steps_would_bring_is_suggested_with_whatever_becomes_of_the_plan() -> None:
    for found_s in (0.5, 2.0):
        rank, order = planning(1.0)
        actions = rank.step(1.0, PlanningDone(order, candidate(plan_of(found_s), hint="allow it")))
        assert pick(actions, SuggestSetting) == [SuggestSetting("allow it")]
    rank, order = planning(1.0)
    assert not pick(rank.step(1.0, PlanningDone(order, candidate(plan_of(0.5)))), SuggestSetting)


def test_what_was_suggested_is_in_the_jobs_terms_so_that_no_search_looks_for_it_again() -> None:
    connection = JobContext()
    connection.plan = START
    AutoPlan(connection, JOB).carry_out(SuggestSetting("allow it"))
    assert connection.terms.suggested
    assert connection.decisions == ["step 0: allow it"]


@pytest.mark.parametrize("current_s", [0.099, 10.1])
def test_prices_that_are_off_by_ten_times_change_nothing_and_steps_are_measured_again_once(current_s: float) -> None:
    rank, order = planning(1.0)
    bad = candidate(plan_of(0.1 * current_s), current_s=current_s)
    actions = rank.step(1.0, PlanningDone(order, bad))
    assert len(pick(actions, LogLine)) == 1
    assert rank.state.lead.verdicts == ()
    assert rank.word() == PlanRequest.MEASURE
    rank.hear(row(word=PlanRequest.MEASURE), row())
    rank.step(1.0, times=FIRST_PLANNING)
    (order,) = pick(rank.feed(MeasuringDone(LINKS, 1.0)), StartPlanning)
    rank.step(1.0, PlanningDone(order, bad))
    assert rank.word() == PlanRequest.NOTHING, "once"
    assert isinstance(rank.state.lead.phase, Settling)
    (order,) = pick(rank.feed(MeasuringDone(LINKS, 1.0)), StartPlanning)
    rank.step(1.0, PlanningDone(order, candidate(plan_of(0.5))))
    assert rank.word() == PlanRequest.SWITCH, "prices that are right count"


def test_who_keeps_the_plan_measures_nothing_again() -> None:
    rank, order = planning(1.0, keep=True)
    rank.step(1.0, PlanningDone(order, candidate(plan_of(0.1), current_s=20.0)))
    assert not rank.state.lead.stale


def test_for_links_that_have_changed_steps_may_be_priced_otherwise_than_they_were() -> None:
    rank, order = planning(1.0)
    rank.step(1.0, PlanningDone(order, candidate(plan_of(2.0))))
    faster = tuple(type(link)(50 * link.up_bps, 50 * link.down_bps, link.alpha_s) for link in LINKS)
    (order,) = pick(rank.feed(ProbeDone(faster, 0.1, 0.0, 1.0)), StartPlanning)
    rank.step(1.0, PlanningDone(order, candidate(plan_of(0.01), current_s=0.05)))
    assert isinstance(rank.state.lead.phase, Proposing)


def test_planning_that_fails_keeps_the_plan() -> None:
    rank, order = planning()
    assert said(rank.step(1.0, PlanningDone(order, None, "KeyError: 3"))) == "no plan: KeyError: 3"
    assert isinstance(rank.state.lead.phase, Settling)


def test_what_was_found_for_another_plan_than_the_one_in_force_is_dropped() -> None:
    rank, order = planning()
    rank.in_force = ActivePlan(plan_of(0.0, "int8()"))
    rank.step(1.0, PlanningDone(order, candidate(plan_of(0.1))))
    assert rank.state.lead.phase == Steady()
    assert rank.word() == PlanRequest.MEASURE, "what was measured is that plan's"


def test_what_was_found_for_links_that_have_changed_since_is_dropped() -> None:
    rank, old = planning()
    (order,) = pick(rank.feed(MeasuringDone(LINKS, 2.0)), StartPlanning)
    rank.step(1.0, PlanningDone(old, candidate(plan_of(0.1))))
    assert rank.state.lead.phase == Planning(order, checks=True)


def test_a_plan_of_its_own_is_known_as_the_planner_has_it() -> None:
    as_planned, as_run = plan_of(0.5), plan_of(0.5, "int8()")
    rank = trying(candidate(as_planned)._replace(runnable=as_run))
    (order,) = pick(rank.feed(MeasuringDone(LINKS, 1.0)), StartPlanning)
    assert order == StartPlanning(as_run, as_planned, LINKS, 1.0)
    rank.in_force = ActivePlan(START)  # somebody else has changed it
    rank.step(0.5)
    (order,) = pick(rank.feed(MeasuringDone(LINKS, 1.0)), StartPlanning)
    assert order == StartPlanning(START, None, LINKS, 1.0)


# ---- what came of it


def test_going_over_begins_a_trial_and_says_what_is_in_force() -> None:
    found = candidate(plan_of(0.5))
    rank = proposing(found, 1.0)
    (switch,) = rank.hear(row(word=PlanRequest.SWITCH), row())
    assert switch == Switch(found)
    actions = rank.switched(found.runnable)
    assert pick(actions, SetActivePlan) == [SetActivePlan(found.basis, found.price)]
    assert "went over to plan" in said(actions)
    phase = rank.state.lead.phase
    assert isinstance(phase, Trying)
    assert (phase.before.runnable, phase.before.plan, phase.before_s) == (START, START, 1.0)


@pytest.mark.parametrize(("takes_s", "steps", "before_steps", "back"), [
    (0.8, 1.0, 1.0, False), (1.0, 1.0, 1.0, False), (1.001 + SLOWER, 1.0, 1.0, True), (1.09, 1.0, 1.0, True),
    (3.0, 1.0, 1.0, True),
    # Quicker steps that do not make up for how many more are needed; slower ones of which fewer are.
    (0.8, 1.25, 1.0, False), (0.8, 1.28, 1.0, True), (1.2, 1.0, 1.2, False), (1.2, 1.0, 1.17, True), (0.5, 2.4, 1.1, True),
])
def test_a_plan_under_which_the_loss_comes_later_is_left_again(
    takes_s: float, steps: float, before_steps: float, back: bool,
) -> None:
    rank = trying(candidate(plan_of(0.2), steps=steps, current_steps=before_steps), 1.0)
    rank.step(30.0)  # warms up
    rank.step(takes_s, times=TRIED - 1)
    assert isinstance(rank.state.lead.phase, Trying), "too few to tell"
    actions = rank.step(takes_s)
    assert ("back to that" in said(actions)) is back
    assert rank.word() == (PlanRequest.SWITCH if back else PlanRequest.NOTHING)
    if back:
        assert over(rank).runnable == START
        assert isinstance(rank.state.lead.phase, Settling), "the plan before is not on trial"


def test_what_a_trial_came_to_is_told_in_steps_and_how_many_are_needed() -> None:
    rank = trying(candidate(plan_of(0.038), steps=1.08, current_steps=1.02, current_s=0.052), 0.052)
    text = said(rank.step(0.040, times=BY_PACE))
    assert text.endswith("steps take 40.0 ms (1.08 times as many to the loss): 38.0 ms were predicted, 52.0 ms (1.02 times as "
                         "many to the loss) were taken before")


def test_plans_are_compared_by_the_clock_of_the_steps_and_not_by_what_was_recorded_of_them() -> None:
    """What is recorded leaves out what goes on between two steps."""
    rank = Rank()
    rank.step(1.0, times=FIRST_PLANNING)
    (order,) = pick(rank.feed(MeasuringDone(LINKS, 0.7)), StartPlanning)
    assert order.step_s == 0.7
    rank.step(5.0, PlanningDone(order, candidate(plan_of(0.5))))  # planning goes on beside it
    over(rank)
    rank.step(0.9, times=BY_PACE)
    assert rank.state.lead.phase == Steady(), "0.9 instead of 1.0"


def test_a_few_slow_steps_are_no_reason_to_go_back() -> None:
    rank = trying(candidate(plan_of(0.5)))
    for seconds in (9.0, 0.9, 9.0, 0.9, 9.0, 0.9):
        rank.step(seconds)
    assert rank.state.lead.phase == Steady()


def test_all_keep_their_plan_where_the_new_one_fits_some_rank_ill() -> None:
    rank = proposing(candidate(plan_of(0.5)))
    assert said(rank.refused("for 3 servers")) == "kept the plan in force: for 3 servers"
    assert rank.word() == PlanRequest.NOTHING
    rank.step(1.0, times=BY_PACE)
    assert rank.state.lead.check.predicted_s == 1.0


@pytest.mark.parametrize(("predicted_s", "worth"), [(0.8, False), (0.4, True)])
def test_a_plan_that_took_longer_than_predicted_makes_the_next_prediction_count_longer(predicted_s: float, worth: bool) -> None:
    rank = trying(candidate(plan_of(0.5)), 1.0)
    rank.step(0.9, times=BY_PACE)
    (order,) = pick(rank.feed(MeasuringDone(LINKS, 0.9)), StartPlanning)
    rank.step(0.9, PlanningDone(order, candidate(plan_of(predicted_s), current_s=1.0)))
    assert isinstance(rank.state.lead.phase, Proposing) is worth, "0.9 for 0.5 makes 1.44 of 0.8, and 0.72 of 0.4"


# ---- the plan without compression


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(("plain_s", "tried"), [(0.7, True), (0.7 * (1 + PLAIN), True), (0.7 * (1 + PLAIN) + 1e-9, False)])
def test_what_is_near_without_compression_is_tried(kept: bool, plain_s: float, tried: bool) -> None:
    found = candidate(plan_of(2.0 if kept else 0.5), plain=plan_of(plain_s, "identity()"))
    rank = proposing(found)
    if kept:
        rank.in_force = ActivePlan(START, basis_of(START))
    else:
        over(rank)
    rank.step(0.7, times=BY_PACE)
    assert rank.word() == (PlanRequest.SWITCH if tried else PlanRequest.NOTHING)
    if tried:
        assert rank.state.lead.phase.candidate.current == rank.in_force.basis.plan, "what all go back to is what is in force"
        assert over(rank).plan == found.beside[0].plan


@pytest.mark.parametrize(("takes_s", "stays"), [(0.7, True), (0.701 + 0.7 * SLOWER, False)])
def test_without_compression_steps_must_be_no_slower_and_are_expected_at_their_pace(takes_s: float, stays: bool) -> None:
    first = plan_of(0.5)
    rank = trying(candidate(first, plain=plan_of(0.8, "identity()")))
    rank.step(0.7, times=BY_PACE)
    over(rank)
    rank.step(takes_s, times=BY_PACE)
    assert rank.word() == (PlanRequest.NOTHING if stays else PlanRequest.SWITCH)
    if stays:
        assert rank.state.lead.check.predicted_s == takes_s, "whatever was predicted"
    else:
        assert over(rank).runnable == first
        rank.step(0.7, times=BY_PACE)
        assert rank.word() == PlanRequest.NOTHING, "it is tried once"


@pytest.mark.parametrize(("plain_s", "steps", "tried"), [(0.8, 1.0, True), (1.12, 1.0, False), (1.12, 1.4, True)])
def test_without_compression_fewer_steps_are_needed(plain_s: float, steps: float, tried: bool) -> None:
    rank = trying(candidate(plan_of(0.5), plain=plan_of(plain_s, "identity()"), steps=steps, current_steps=2.0))
    rank.step(0.7, times=BY_PACE)
    assert rank.word() == (PlanRequest.SWITCH if tried else PlanRequest.NOTHING)
    if tried:
        over(rank)
        rank.step(0.7 * steps, times=BY_PACE)
        assert rank.word() == PlanRequest.NOTHING, "no later than under the plan before"


# ---- local steps that were found beside averaged gradients


def local(step_s: float) -> Plan:
    return structs.replace(plan_of(step_s, "identity()"), codes="updates", local_steps=8)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(("takes_s", "tried"), [(0.6, False), (0.8 - 1e-9, False), (0.8 + 1e-9, True), (0.9, True)])
def test_averaged_gradients_that_are_slower_than_predicted_are_left_for_local_steps(
    kept: bool, takes_s: float, tried: bool,
) -> None:
    """0.8 s of averaged gradients are what they would have been left for, had it been predicted."""
    rank = proposing(candidate(plan_of(2.0 if kept else 0.5), local=local(0.8 * LEAVES)))
    if kept:
        rank.in_force = ActivePlan(START, basis_of(START))
    else:
        over(rank)
    actions = [action for _ in range(BY_PACE) for action in rank.step(takes_s)]
    assert rank.word() == (PlanRequest.SWITCH if tried else PlanRequest.NOTHING)
    if tried:
        assert f"tries local steps, too, {800 * LEAVES:.1f} ms by the same prices" in said(actions)
        (switch,) = rank.hear(row(word=PlanRequest.SWITCH), row())
        warned = rank.switched(switch.candidate.runnable)
        assert [action.text for action in pick(warned, LogLine) if action.warning] == [LEAVING]


def test_what_was_found_beside_a_plan_is_tried_one_after_the_other() -> None:
    first, other, dense = plan_of(0.5), local(0.55), plan_of(0.9, "identity()")
    rank = trying(candidate(first, local=other, plain=dense))
    rank.step(0.8, times=BY_PACE)
    assert over(rank).plan == other
    rank.step(1.0, times=BY_PACE)
    assert over(rank).runnable == first, "slower than the plan before"
    rank.step(0.8, times=BY_PACE)
    assert over(rank).plan == dense
    rank.step(0.7, times=BY_PACE)
    assert rank.word() == PlanRequest.NOTHING, "each is tried once"


def test_behind_local_steps_that_are_kept_no_plan_of_averaged_gradients_is_tried() -> None:
    rank = trying(candidate(plan_of(0.5), local=local(0.55), plain=plan_of(0.5, "identity()")))
    rank.step(0.8, times=BY_PACE)
    over(rank)
    rank.step(0.6, times=BY_PACE)
    assert rank.word() == PlanRequest.NOTHING


def test_who_keeps_the_plan_tries_none() -> None:
    rank, order = planning(1.0, keep=True)
    rank.in_force = ActivePlan(START, basis_of(START))
    rank.step(1.0, PlanningDone(order, candidate(plan_of(2.0), plain=plan_of(0.5, "identity()"))))
    assert rank.step(1.0, times=BY_PACE) == []
    assert rank.state.lead.phase == Steady()


def test_nothing_is_tried_where_nobody_knows_what_the_plan_in_force_was_made_from() -> None:
    rank = trying(candidate(plan_of(0.5), plain=plan_of(0.5, "identity()")))
    rank.in_force = rank.in_force._replace(basis=None)
    rank.step(0.7, times=BY_PACE)
    assert rank.word() == PlanRequest.NOTHING


# ---- whether it still holds


@pytest.mark.parametrize(("seconds", "stale"), [(0.5 * (1 + STALE), False), (0.5 * (1 + STALE) + 1e-9, True), (0.37, False)])
def test_steps_slower_than_predicted_make_a_plan_stale(seconds: float, stale: bool) -> None:
    rank = trying(candidate(plan_of(0.5)))
    actions = rank.step(seconds, times=PATIENCE)
    assert bool(pick(actions, ReportStale)) is stale
    assert rank.word() == (PlanRequest.MEASURE if stale else PlanRequest.NOTHING), "quicker steps are no reason to measure"
    assert ("stale" in said(actions)) is stale
    if stale:
        (report,) = pick(actions, ReportStale)
        assert said(actions) == report.event.reason
        assert (report.event.predicted_s, report.event.measured_s) == (0.5, seconds)
        assert rank.word() == PlanRequest.NOTHING, "it asks once"


def test_what_was_seen_of_a_plan_says_nothing_of_the_next_one() -> None:
    """Steps turn out slow, and with the next row all go over to a plan that was found beside."""
    rank = trying(candidate(plan_of(0.5), plain=plan_of(0.8, "identity()")))
    assert any(pick(rank.step(0.9), ReportStale) for _ in range(PATIENCE + 1))
    assert rank.word() == PlanRequest.SWITCH
    (switch,) = rank.hear(row(word=PlanRequest.SWITCH), row())
    rank.switched(switch.candidate.runnable)
    assert rank.word() == PlanRequest.NOTHING


def test_that_a_plan_is_stale_is_among_a_sessions_events_and_decisions() -> None:
    connection = JobContext()
    connection.plan = START
    auto = AutoPlan(connection, JOB)
    event = StalePlan(9, 0.5, 1.0, PATIENCE)
    for action in (ReportStale(event), LogLine(event.reason), SetActivePlan(basis_of(START), (0.3, 0.1))):
        auto.carry_out(action)
    assert (connection.events, connection.decisions) == ([event], [f"step 0: {event.reason}"])
    assert (connection.terms.basis, connection.terms.price) == (basis_of(START), (0.3, 0.1))


@pytest.mark.parametrize(("others", "soon"), [
    ([(0.9, 0.5), (1.2, 0.4)], True),
    ([(0.9, 0.5), (1.2, 0.1)], False),  # the slowest computes, and the others wait for it
    ([(0.5, 0.4), (0.5, 0.4)], False),
])
def test_the_pace_of_all_is_the_median_and_what_all_have_waited(others: list[tuple[float, float]], soon: bool) -> None:
    class Groups:
        device, ranks_per_node = torch.device("cpu"), 1

        def gather_all(self, mine: torch.Tensor) -> torch.Tensor:
            return torch.tensor([mine.tolist(), *others], dtype=torch.float64)

    connection, fed = JobContext(), []
    connection.plan, connection.groups = START, Groups()
    auto = AutoPlan(connection, JOB)
    auto._feed = fed.append
    auto.carry_out(ShareStepTime(1.0, 0.6))
    (told,) = fed
    assert told == StepTimes(sorted([1.0, *(step_s for step_s, _ in others)])[1], min(0.6, *(waited for _, waited in others)))
    _, actions = decide(begin(0), told, 0.0)
    assert (actions == [Measure()]) is soon


def test_what_the_script_allows_is_asked_on_its_own_thread() -> None:
    """It tries the optimizer, and the generator that a trial puts back is that of dropout, too."""
    connection, asked = JobContext(), []
    connection.plan = START
    connection.terms.forbids = lambda way: asked.append((way, threading.current_thread())) or ""
    auto = AutoPlan(connection, JOB)
    auto._replanner.measured(Measurements(JOB, [], [], CollectiveCosts(Line(0.0), Line(0.0))))
    auto.carry_out(StartPlanning(START, None, LINKS, 1.0))
    assert auto._thread is not None
    auto._thread.join()
    assert asked == [(way, threading.current_thread()) for way in WAYS]


def test_a_plan_that_was_kept_is_expected_at_the_pace_it_has() -> None:
    rank, order = planning(1.0)
    rank.step(1.0, PlanningDone(order, candidate(plan_of(2.0))))
    rank.step(0.7, times=TRIED)
    assert rank.state.lead.check.predicted_s == 0.7
    actions = rank.step(1.4, times=PATIENCE + 1)  # the median follows one step later
    assert pick(actions, ReportStale)[0].event.usual


def test_nothing_is_expected_while_a_new_plan_is_looked_for() -> None:
    rank = trying(candidate(plan_of(0.5)))
    rank.feed(MeasuringDone(LINKS, 1.0))
    assert not pick(rank.step(9.0, times=PATIENCE), ReportStale)


# ---- What plan="auto" leaves behind the end of a session: no thread of it

def test_nobody_plans_on_behind_the_end_of_a_session() -> None:
    """A thread inside a codec's native code when the interpreter ends takes the process down."""
    connection = JobContext()
    connection.plan = START
    auto = AutoPlan(connection, JOB)
    auto._replanner.measured(Measurements(JOB, [], [], CollectiveCosts(Line(0.0), Line(0.0))))
    auto.carry_out(StartPlanning(START, None, LINKS, 1.0))
    assert auto._thread is not None
    assert auto._thread.is_alive(), "it measures what codecs cost here"
    connection.close()
    assert not auto._thread.is_alive()
    (found,) = auto._news
    assert "the session is over" in getattr(found, "why", "")


# ---- What rank 0 takes the plan in force for: how it really steps, and how fast it is since links have changed

@pytest.mark.parametrize("back", [True, False])
def test_what_runs_in_place_of_a_plan_is_what_is_known_and_counted(back: bool) -> None:
    """Behind local steps a plan of gradients goes on in updates, which need other numbers of steps."""
    cluster = cluster_from_line("2xrtx3060@100/20Mb")
    costly = tuple(LearningRow("adam", codes, "int4()", 1, "", False, 0, steps, steps, 0.0, 0.0, 5, 5)
                   for codes, steps in (("gradients", 1.0), ("updates", 1.5)))
    profile = structs.replace(profile_from_tables(cluster), learning=costly)
    made_from = PlanInputs(JOB, cluster, profile, Policy(optimizer="adam"))
    found = candidate(plan_of(0.5, "int4()"))
    rank = proposing(found._replace(basis=Basis(found.plan, made_from)))
    (switch,) = rank.hear(row(word=PlanRequest.SWITCH), row())
    if back:
        rank.switched(found.runnable)
        rank.step(1.5, times=TRIED + 1)
        (switch,) = rank.hear(row(word=PlanRequest.SWITCH), row())
        assert switch.candidate.runnable == START
    runs = structs.replace(switch.candidate.runnable, codes="updates", step_s=0.0)
    actions = rank.switched(runs)
    lead = rank.state.lead
    assert lead.steps == pytest.approx(1.5)
    assert lead.known == (runs, structs.replace(switch.candidate.plan, codes="updates", step_s=0.0))
    (described,) = pick(actions, SetActivePlan)
    assert described.basis.plan == lead.known[1]
    assert lead.check is None, "of what runs nothing was predicted"


@pytest.mark.parametrize(("slow_steps", "pace_s"), [(0, 1.0), (1, 2.0), (2, 2.0), (TRIED, 2.0)])
def test_after_a_link_has_dropped_the_plan_in_force_is_as_fast_as_its_steps_since(slow_steps: int, pace_s: float) -> None:
    """A row is the mean of steps, some of which may have been before the drop."""
    rank = Rank()
    rank.step(1.0, times=FIRST_PLANNING)
    (order,) = pick(rank.feed(MeasuringDone(LINKS, 1.0)), StartPlanning)
    rank.step(0.4, PlanningDone(order, None, "no reason"))
    for _ in range(4):
        rank.step(0.4)
        rank.hear(*[row(0.4, bps=6e7, share=0.1)] * 2)
    if slow_steps:
        rank.step(2.0, times=slow_steps)
    slow = [row(1.0, bps=5e6, share=0.9)] * 2
    (order,) = pick([action for _ in range(IN_A_ROW) for action in rank.hear(*slow)], StartPlanning)
    assert order.step_s == 1.0, "as all ranks know it"
    assert isinstance(rank.state.lead.phase, Planning)
    assert rank.state.lead.pace_s == pace_s
