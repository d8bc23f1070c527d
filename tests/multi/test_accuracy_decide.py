"""What the accuracy guard decides, by tables of rows: when to look and compare, at how much, which plan, and what is said."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from commlayer.autotune.quality import policy
from commlayer.autotune.quality.driver import OwnMeasurements
from commlayer.autotune.quality.policy import (
    DRAINING,
    FEWEST,
    MOST,
    SETTLE,
    AccuracyLimits,
    AccuracyState,
    BoundPlanner,
    ChangeCodecs,
    CodecChange,
    GradientError,
    LogLine,
    LossRise,
    PlanLevels,
)
from commlayer.engine import plan_choice
from commlayer.observe.fidelity import Dots, Fidelity

GOOD = Dots(1.0, 0.6, 1.0, 1.0)
"""Cosine 0.6, norm 1, a residual of one gradient: well within 5 %."""
BAD = Dots(1.0, 0.05, 1.0, 1.0)
SPARSE = PlanLevels(0.01, 0.01, compared=True)


def row(summed: Dots = GOOD, sent: Dots = GOOD, loss: LossRise = LossRise(), **seconds: float) -> GradientError:
    """Of a rank to which comparing costs nothing."""
    times = {"own_check_s": 0.0, "comparison_s": 0.0, "step_s": 0.1, "elapsed_s": 1.0} | seconds
    return GradientError(sent, summed, loss, **times)


def begun(plan: PlanLevels = SPARSE, **fields: Any) -> AccuracyState:
    return structs.replace(policy.begin(AccuracyLimits(), plan), **fields)


def decided(state: AccuracyState, *rows: GradientError, now: int = 4, acts: bool = True) -> Any:
    return policy.decide(state, rows, now, acts=acts)


def test_decisions_load_no_torch() -> None:
    look = "import sys, commlayer.autotune.quality.policy; print(sorted({'torch', 'grpc'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True).stdout.strip() == "[]"


# ---- when, and how much


@pytest.mark.parametrize(("plan", "first"), [
    (SPARSE, SETTLE), (PlanLevels(0.5, 0.01, True, finer=True), SETTLE), (PlanLevels(0.2, 0.01, True, finer=True), 5),
    (PlanLevels(0.02, 0.01, True, finer=True), DRAINING), (PlanLevels(1.0, 0.01, False, finer=True), SETTLE),
])
def test_a_plan_is_compared_once_it_has_settled(plan: PlanLevels, first: int) -> None:
    for since in (0, 7):
        state = begun(plan, since=since)
        assert [policy.due(state, now) for now in (since + first - 1, since + first)] == [False, True]


def test_what_is_exact_of_itself_is_never_compared() -> None:
    state = begun(PlanLevels(1.0, 1.0, compared=False))
    assert not any(policy.due(state, now) or policy.next_sample(state, now)[1] for now in range(100))


def test_no_comparison_before_it_is_paid_for() -> None:
    state = begun(compare_at=20)
    assert [policy.due(state, now) for now in (19, 20)] == [False, True]


@pytest.mark.parametrize(("rows", "steps"), [
    ([row()], SETTLE),
    # 0.08 s spent and 0.08 s to come are 0.8 % of 20 s, of which one has passed, in steps of 0.1 s.
    ([row(comparison_s=0.08)], 190),
    ([row(comparison_s=0.08), row(comparison_s=9.0)], 190),
    ([row(comparison_s=0.08, elapsed_s=19.7)], SETTLE),
    ([row(comparison_s=0.08, elapsed_s=19.5)], 5),
    ([row(comparison_s=0.08, step_s=0.2), row(comparison_s=0.08, step_s=0.2), row(comparison_s=0.08, step_s=9.0)], 95),
])
def test_the_next_comparison_waits_until_it_is_paid_for(rows: list[GradientError], steps: int) -> None:
    state, _ = decided(begun(), *rows, now=11)
    assert state.compare_at == 11 + steps


def test_what_comparisons_have_cost_adds_up() -> None:
    state, _ = decided(begun(), row(comparison_s=0.08))
    state, _ = decided(state, row(comparison_s=0.04, elapsed_s=20.0), now=200)
    assert state.spent_s == pytest.approx(0.12)
    assert state.compare_at == 200 + SETTLE


@pytest.mark.parametrize(("own_check_s", "every"), [(0.0, 1), (0.0002, 1), (0.0003, 2), (0.002, 10)])
def test_the_dearest_look_decides_how_often_all_look(own_check_s: float, every: int) -> None:
    """A fifth of one per cent of steps of 0.1 s is 0.2 ms."""
    state, _ = decided(begun(), row(), row(own_check_s=own_check_s))
    assert state.sample_every == every
    looks = [now for now in range(40) if policy.next_sample(structs.replace(state, compare_at=1000), now)[1]]
    assert looks == list(range(SETTLE, 40, every))


def test_where_a_look_holds_its_step_up_there_is_none_but_with_a_comparison() -> None:
    """Results that come in during the next forward pass: a look has the step wait for all of them."""
    state, _ = decided(begun(structs.replace(SPARSE, overlapped=True)), row())
    assert state.sample_every == 1
    state = structs.replace(state, compare_at=30)
    assert [now for now in range(32) if policy.next_sample(state, now)[1]] == [30, 31]


def test_comparisons_that_are_dear_for_what_they_wait_for_look_at_no_less() -> None:
    for overlapped in (False, True):
        begin = begun(structs.replace(SPARSE, overlapped=overlapped), elements=4 * FEWEST)
        state, _ = decided(begin, row(comparison_s=0.08))
        assert state.elements == (4 if overlapped else 2) * FEWEST


def test_a_look_goes_with_every_comparison_and_pieces_take_turns() -> None:
    state = begun(sample_every=10, compare_at=7)
    numbers = []
    for now in range(20):
        state, sample = policy.next_sample(state, now)
        if sample is not None:
            numbers.append((now, sample.number))
        if now == 7:
            state = structs.replace(state, compare_at=1000)
    assert numbers == [(4, 0), (7, 1), (14, 2)]


@pytest.mark.parametrize(("comparison_s", "before", "after"), [
    # One comparison in n steps of 0.1 s may take n x 0.8 ms.
    (0.0064, FEWEST, 2 * FEWEST), (0.0065, FEWEST, FEWEST), (0.0, MOST, MOST), (0.0256, 2 * FEWEST, 2 * FEWEST),
    (0.0257, 2 * FEWEST, FEWEST), (1.0, FEWEST, FEWEST),
])
def test_where_comparing_is_cheap_more_is_compared(comparison_s: float, before: int, after: int) -> None:
    state, _ = decided(begun(elements=before), row(comparison_s=comparison_s))
    assert state.elements == after


# ---- which plan


@pytest.mark.parametrize("rows", [
    [row(BAD)], [row(), row(sent=BAD)], [row(BAD), row(GOOD)], [row(sent=Dots(1.0, 0.6, 1.0, 17.0))],
    [row(loss=LossRise(0.12)), row()],
])
def test_a_complaint_of_any_rank_makes_codecs_finer_behind_the_step(rows: list[GradientError]) -> None:
    state, actions = decided(begun(), *rows)
    assert actions == (BoundPlanner(0.02),)
    state, changes = policy.after_step(state, 5, acts=True)
    (change,) = (action.change for action in changes)
    assert (change.before, change.after) == (0.01, 0.02)
    assert policy.after_step(state, 6, acts=True) == (state, ()), "once"


@pytest.mark.parametrize("rows", [[row(), row()], [row(loss=LossRise(0.09)), row()], [row(loss=LossRise(0.12, 0.03)), row()]])
def test_what_is_within_the_budget_changes_nothing(rows: list[GradientError]) -> None:
    state, actions = decided(begun(), *rows)
    assert actions == (BoundPlanner(0.0),)
    assert policy.after_step(state, 5, acts=True) == (state, ())


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_step_that_is_not_finite_tells_nothing_but_what_it_cost(number: float) -> None:
    rows = [row(BAD, comparison_s=0.08), row(Dots(1.0, number, 1.0, 0.0), comparison_s=0.08)]
    assert not policy.is_usable(rows)
    state, actions = decided(begun(), *rows)
    assert actions == ()
    assert (state.spent_s, state.summed, state.pending) == (0.08, Dots(), None)


def test_earlier_comparisons_fade() -> None:
    state, _ = decided(begun(), row(GOOD))
    state, _ = decided(state, row(Dots(1.0, 1.0, 1.0, 0.0)))
    assert state.summed == Dots(1.5, 1.3, 1.5, 0.5)


def test_codecs_come_back_towards_the_plan_that_was_asked_for() -> None:
    """Five calm comparisons under a plan that the guard has made finer."""
    state, changes = begun(), ()
    state, _ = decided(state, row(BAD))
    state, (action,) = policy.after_step(state, 5, acts=True)
    finer = PlanLevels(0.02, 0.01, compared=True, finer=True)
    state, _ = policy.change_done(state, action.change, 5, entered=finer, nbytes_factor=2.0)
    for now in range(5):
        assert changes == ()
        state, _ = decided(state, row(), now=40 + now)
        state, changes = policy.after_step(state, 41 + now, acts=True)
    (change,) = (action.change for action in changes)
    assert (change.before, change.after) == (0.02, 0.016)
    assert change.reason == "accuracy has borne 0.02 without complaint"


def change(before: float = 0.01, after: float = 0.02, seen: Fidelity | None = BAD.fidelity()) -> CodecChange:
    return CodecChange(before, after, "cosine 0.05 is too low", seen, 0.1)


@pytest.mark.parametrize(("made", "way", "warning"), [(change(), "finer", True), (change(0.02, 0.016), "coarser", False)])
def test_a_change_is_told_with_what_is_expected_of_it(made: CodecChange, way: str, warning: bool) -> None:
    _, (said,) = policy.change_done(begun(), made, 5, entered=SPARSE, nbytes_factor=1.96)
    assert said.warning is warning
    assert said.text.startswith(f"cosine 0.05 is too low: codecs are {way} from here on, {made.before} -> {made.after} of the")
    assert said.text.endswith("expected: 2.0 times the bytes, cosine 0.18 or more")


@pytest.mark.parametrize(("seen", "text"), [
    (BAD.fidelity(), "brought: cosine 0.05 -> 0.60, residual 1 -> 1 gradients, 100.0 -> 300.0 ms a step"),
    (None, "brought: cosine ? -> 0.60, residual ? -> 1 gradients, 100.0 -> 300.0 ms a step"),
])
def test_what_came_of_a_change_is_told_once(seen: Fidelity | None, text: str) -> None:
    state, _ = policy.change_done(begun(), change(seen=seen), 5, entered=SPARSE, nbytes_factor=2.0)
    state, actions = decided(state, row(step_s=0.3), now=9)
    assert actions[0] == LogLine(f"the last change of codecs {text}")
    assert not any(isinstance(action, LogLine) for action in decided(state, row(), now=13)[1])


def test_a_residual_of_the_plan_before_is_not_held_against_the_new_one() -> None:
    owing, less = Dots(1.0, 0.6, 1.0, 64.0), Dots(1.0, 0.6, 1.0, 3.9**2)
    state, _ = decided(begun(), row(sent=owing))
    assert state.pending is not None
    entered = PlanLevels(0.02, 0.01, compared=True, finer=True)
    state, _ = policy.change_done(state, change(), 5, entered=entered, nbytes_factor=2.0)
    for now in (40, 44, 48):
        state, _ = decided(state, row(sent=less), now=now)
        assert state.level.floor == 0.02


def test_a_refused_change_is_told() -> None:
    assert policy.change_refused(change(), ValueError("no room")) == LogLine(
        "cosine 0.05 is too low, but the plan in force stays: no room", warning=True)


def test_under_another_plan_what_was_seen_of_the_last_counts_no_more() -> None:
    state = begun(summed=BAD, samples=9, warned=frozenset({"cosine"}))
    for made in (policy.change_done(state, change(), 5, entered=SPARSE, nbytes_factor=1.0)[0],
                 policy.after_step(state, 5, acts=True, entered=SPARSE)[0]):
        assert (made.since, made.samples, made.summed, made.warned) == (5, 0, Dots(), frozenset())


# ---- where no budget is named

USUAL = PlanLevels(0.01, 0.01, compared=True, cosine=0.1, residual=20.0)


@pytest.mark.parametrize(("seen", "complains"), [
    (Dots(1.0, 0.11, 1.0, 1.0), False), (Dots(1.0, 0.09, 1.0, 1.0), True),
    (Dots(1.0, 0.6, 1.0, 20.0**2), False), (Dots(1.0, 0.6, 1.0, 21.0**2), True),
])
def test_without_a_budget_what_is_usual_is_borne_and_many_pieces_must_speak_against_a_plan(seen: Dots, complains: bool) -> None:
    state, now, actions = begun(USUAL), 4, ()
    for _ in range(policy.FEWEST_SEEN):
        assert actions == ()
        state, actions = decided(state, row(seen, seen), now=now)
        now += 4
    assert actions == (BoundPlanner(0.02 if complains else 0.0),)
    assert (state.pending is not None) is complains


def test_another_plan_has_bounds_of_its_own() -> None:
    entered = PlanLevels(0.1, 0.1, compared=True, cosine=0.4, residual=3.0)
    state, _ = policy.after_step(begun(USUAL), 5, acts=True, entered=entered)
    assert (state.level.limits.least_cosine, state.level.limits.most_residual) == (0.4, 3.0)
    finer = PlanLevels(0.2, 0.01, compared=True, finer=True, cosine=0.45, residual=2.0)
    state, _ = policy.change_done(state, change(), 9, entered=finer, nbytes_factor=2.0)
    assert (state.level.limits.least_cosine, state.level.limits.most_residual) == (0.45, 2.0)


# ---- plans that somebody else goes over to


@pytest.mark.parametrize(("level", "acts", "lifted"), [
    (0.01, True, True), (0.0197, True, True), (0.0198, True, False), (0.02, True, False), (0.5, True, False),
    (0.01, False, False),
])
def test_another_plan_is_lifted_to_what_training_has_shown(level: float, acts: bool, lifted: bool) -> None:
    state, _ = decided(begun(), row(BAD))
    entered = PlanLevels(level, level, compared=True)
    state, changes = policy.after_step(state, 5, acts=acts, entered=entered)
    assert [action.change.after for action in changes] == [0.02] * lifted
    assert state.pending is None, "what was decided of the plan before is dropped"
    assert lifted or state.level.level == level


def test_another_plan_is_left_alone_where_nothing_was_complained_of() -> None:
    entered = PlanLevels(0.0002, 0.0002, compared=True)
    state, changes = policy.after_step(begun(), 5, acts=True, entered=entered)
    assert (changes, state.level.level, state.level.floor) == ((), 0.0002, 0.0002)


def test_spelled_ratios_are_told_apart_alike_here_and_where_plans_are_made_finer() -> None:
    assert policy.EQUAL == plan_choice.EQUAL


# ---- plans that are only watched, and the planner


def test_each_kind_of_complaint_is_told_once_for_each_plan() -> None:
    state, (said,) = decided(begun(), row(BAD), acts=False)
    assert said.warning
    assert said.text.startswith("cosine 0.05 of sent and exact gradient is below 0.18; the plan stays as it was asked for")
    state, again = decided(state, row(BAD), acts=False)
    assert again == ()
    state, (other,) = decided(state, row(loss=LossRise(0.2), summed=Dots(100.0, 100.0, 100.0)), acts=False)
    assert "the loss has risen by 20.0%" in other.text
    state, changes = policy.after_step(state, 5, acts=False, entered=SPARSE)
    assert changes == ()
    assert decided(state, row(BAD), acts=False)[1] == (said,)


@pytest.mark.parametrize(("rows", "bound"), [([row()], 0.0), ([row(BAD)], 0.02)])
def test_the_planner_hears_what_training_showed(rows: list[GradientError], bound: float) -> None:
    """What was measured beforehand goes before what a job happened to begin with, not before what it showed."""
    state = policy.begin(AccuracyLimits(), SPARSE)
    assert decided(state, *rows)[1] == (BoundPlanner(bound),)


# ---- ranks decide alike


positive = st.floats(0, 10)
finite_rows = st.builds(
    GradientError, st.builds(Dots, positive, positive, positive, positive),
    st.builds(Dots, positive, positive, positive, st.just(0.0)) | st.just(Dots(*[math.nan] * 4)),
    st.builds(LossRise, positive, positive), positive, st.floats(0, 0.01), positive, st.floats(0, 100),
)
happens = st.sampled_from(["nothing", "another plan", "refused"])
events = st.lists(st.tuples(happens, st.lists(finite_rows, min_size=3, max_size=3)), min_size=10, max_size=60)


class Rank:
    """A driver without network and clock: its own measurements differ from others', what it hears does not."""

    def __init__(self, rank: int) -> None:
        self.rank, self.now, self.done = rank, 0, list[Any]()
        self.own = OwnMeasurements(float(rank))
        self.state = policy.begin(AccuracyLimits(), SPARSE)

    def step(self, event: str, rows: list[GradientError]) -> None:
        self.own.set_check_time(0.1 * self.rank)
        if policy.due(self.state, self.now):
            self.done.append(("compared", self.now))
            numbers = [each.numbers() for each in rows]
            self.state, actions = policy.decide(self.state, [GradientError.of(n) for n in numbers], self.now, acts=True)
            self.done.append(actions)
        self.now += 1
        self.own.step_over(self.now * (1.0 + self.rank))
        entered = PlanLevels(0.005, 0.005, compared=True) if event == "another plan" else None
        self.state, changes = policy.after_step(self.state, self.now, acts=True, entered=entered)
        for action in changes:
            assert isinstance(action, ChangeCodecs)
            if event != "refused":
                finer = PlanLevels(action.change.after, 0.01, compared=action.change.after < 1, finer=True)
                self.state, said = policy.change_done(self.state, action.change, self.now, entered=finer, nbytes_factor=1.0)
                self.done.append(said)
        self.done.append(changes)
        self.state, sample = policy.next_sample(self.state, self.now)
        self.done.append(sample)


@settings(max_examples=60, deadline=None)
@given(events)
def test_ranks_that_hear_the_same_rows_do_the_same_at_the_same_steps(told: list[tuple[str, list[GradientError]]]) -> None:
    ranks = [Rank(0), Rank(1)]
    for event, rows in told:
        for rank in ranks:
            rank.step(event, rows)
        assert ranks[0].done == ranks[1].done
        assert 0.001 <= ranks[0].state.level.floor <= 1
    assert ranks[0].state == ranks[1].state


def test_a_rank_tells_what_it_measured() -> None:
    own = OwnMeasurements(10.0)
    for loss in (3.0, 2.0):
        own.report(loss)
    own.add_check(Dots(1.0, 0.5, 1.0, 2.0), 0.2)
    own.add_check(Dots(math.nan, 0.5, 1.0, 2.0), 0.2)
    own.prepared(0.1)
    for at in (11.0, 12.0):
        own.step_over(at)
    own.set_check_time(0.5)
    own.step_over(14.0)
    own.compared(0.3)
    told = own.row(GOOD, 9.0, 15.0)
    assert told == GradientError(Dots(1.0, 0.5, 1.0, 2.0), GOOD, LossRise(), 0.25, 0.3, 1.25, 5.0)
    assert GradientError.of(told.numbers()) == told
    own.fade(0.5)
    assert own.row(GOOD, 9.0, 15.0).sent == Dots(0.5, 0.25, 0.5, 1.0)
