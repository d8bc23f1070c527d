"""Rank 0's decisions: which plan is tried, whether it is kept, and what rank 0 requests of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import structs
from support.autotuning import (
    JOB,
    LEAVING,
    LINKS,
    START,
    Rank0,
    basis_of,
    candidate,
    local,
    plan_of,
    proposing,
    searching,
    seen,
    texts,
    trying,
    warnings,
)

from commlayer.autotune import plan_policy
from commlayer.autotune.plan_policy import CLEARLY, PLAIN, SLOWER, STALE, TO_WIN, TRIED, WORTH, largest_gain
from commlayer.autotune.planning.candidate import LEAVES, MOST_STEPS
from commlayer.autotune.reprobe import COST_MOST, EXPECTED_TRIPS, FIRST_S
from commlayer.autotune.state import TuningRequest
from commlayer.observe.interface_counters import Direction, Throughput
from commlayer.observe.link_monitor import PAYLOAD, SETTLED, Rates
from commlayer.observe.prediction_check import PATIENCE, StalePlan
from commlayer.planner.convergence import LearningRow
from commlayer.planner.data.tables import profile_from_tables
from commlayer.planner.inputs import cluster_from_line
from commlayer.planner.model import Basis, Link, Policy, Question

JUDGED = TRIED + 1
"""Steps from a switch to its judgement."""


@pytest.mark.parametrize(("found_s", "steps", "current_steps", "proposed"), [
    (0.9, 1.0, 1.0, True), (0.9, 1.09, 1.0, False), (0.3, 2.9, 1.0, True), (0.3, 3.5, 1.0, False), (1.1, 1.0, 1.2, True),
    (1.0 - WORTH, 1.0, 1.0, True), (1.0 - WORTH + 1e-9, 1.0, 1.0, False), (2.0, 1.0, 1.0, False),
    # However short steps are, a convergence factor of 3 or more loses.
    (0.01, MOST_STEPS - 0.01, 1.0, True), (0.01, MOST_STEPS, 1.0, False), (0.01, MOST_STEPS, MOST_STEPS + 1, True),
])
def test_plan_must_reach_the_loss_sooner(found_s: float, steps: float, current_steps: float, proposed: bool) -> None:
    rank, result = searching(1.2), candidate(plan_of(found_s), steps=steps, current_steps=current_steps)
    lines = texts(rank.found(result))
    assert rank.request() == (TuningRequest.SWITCH if proposed else TuningRequest.NOTHING)
    assert lines.startswith("found a plan" if proposed else "kept the current plan: found a plan")
    # The inputs of the kept plan are known now. Before all have switched, nothing of the found plan is active.
    assert (rank.state.basis, rank.state.price) == (None if proposed else result.back.basis, result.current_price)


@pytest.mark.parametrize("found_s", [0.5, 2.0])
@pytest.mark.parametrize("hint", ["", "allow it"])
def test_benefit_of_local_steps_is_suggested(found_s: float, hint: str) -> None:
    rank = searching()
    assert warnings(rank.found(candidate(plan_of(found_s), hint=hint))) == ([hint] if hint else [])
    assert rank.state.suggested is bool(hint)


@pytest.mark.parametrize("current_s", [0.099, 10.1])
def test_prices_off_by_ten_are_discarded_and_steps_measured_again_once(current_s: float) -> None:
    rank, bad = searching(), candidate(plan_of(0.1 * current_s), current_s=current_s)
    rank.found(bad)
    assert rank.request() == TuningRequest.MEASURE
    rank.search()
    rank.found(bad)
    assert rank.request() == TuningRequest.NOTHING, "once"
    rank.search()
    rank.found(candidate(plan_of(0.5)))
    assert rank.request() == TuningRequest.SWITCH
    rank.search(checks=False)
    rank.found(bad)
    assert not rank.state.discarded, "after a change of links the price may differ from the measured time"


def test_failed_or_outdated_search_has_no_effect() -> None:
    rank = searching()
    assert texts(rank.found(None, "KeyError: 3")) == "no plan: KeyError: 3"
    assert rank.request() == TuningRequest.NOTHING
    rank.search()
    order = rank.state.order
    rank.enter(plan_of(0.0, "int8()"))
    assert rank.set(*plan_policy.end_search(rank.state, order, candidate(plan_of(0.1)), "")) == []
    assert rank.request() == TuningRequest.MEASURE, "measurements were made under another plan"


@pytest.mark.parametrize(("takes_s", "steps", "before_steps", "back"), [
    (0.8, 1.0, 1.0, False), (1.0, 1.0, 1.0, False), (1.001 + SLOWER, 1.0, 1.0, True), (1 + CLEARLY, 1.0, 1.0, True),
    # Faster steps that do not make up for a higher convergence factor; slower ones with a lower factor.
    (0.8, 1.25, 1.0, False), (0.8, 1.28, 1.0, True), (1.2, 1.0, 1.2, False), (1.2, 1.0, 1.17, True),
])
def test_plan_that_reaches_the_loss_later_is_rolled_back(
    takes_s: float, steps: float, before_steps: float, back: bool,
) -> None:
    rank = trying(candidate(plan_of(0.2), steps=steps, current_steps=before_steps))
    rank.step(30.0)  # warms up
    rank.step(takes_s, times=TRIED - 1)
    assert rank.state.trial is not None, "too few to judge"
    assert ("rolling back" in texts(rank.step(takes_s))) is back
    assert rank.request() == (TuningRequest.SWITCH if back else TuningRequest.NOTHING)
    if back:
        assert rank.switch().runnable == START
        assert rank.state.idle, "the plan before is not on trial"


@pytest.mark.parametrize(("takes_s", "back"), [((1.3, 1.3), True), ((1.3, 1.2), False), ((1.2, 9.0), False)])
def test_trial_of_a_clearly_slower_plan_ends_after_two_steps(takes_s: Sequence[float], back: bool) -> None:
    rank = trying(candidate(plan_of(0.2)))
    rank.step(30.0)  # warms up
    for step_s in takes_s:
        rank.step(step_s)
    assert rank.request() == (TuningRequest.SWITCH if back else TuningRequest.NOTHING)
    if back:
        assert rank.switch().runnable == START


def test_search_receives_the_active_plan_in_planner_form() -> None:
    planned, run = plan_of(0.5), plan_of(0.5, "int8()")
    rank = trying(candidate(planned)._replace(runnable=run))
    rank.search()
    assert rank.state.order[:2] == (run, planned)
    rank.enter(START)
    rank.search()
    assert rank.state.order[:2] == (START, None)


def test_result_of_a_replaced_search_is_ignored() -> None:
    rank = searching()
    old = rank.state.order
    rank.search(2.0)
    before = rank.state
    assert plan_policy.end_search(before, old, candidate(plan_of(0.1)), "") == (before, [])


def test_refused_plan_is_dropped() -> None:
    rank = proposing(candidate(plan_of(0.5)))
    rank.state = plan_policy.drop_refused(rank.state)
    assert rank.request() == TuningRequest.NOTHING
    rank.step(1.0, times=JUDGED)
    assert rank.state.check.predicted_s == 1.0


def test_quality_guard_plan_ends_searches_and_trials() -> None:
    rank = trying(candidate(plan_of(0.5)))
    rank.enter(START)
    assert (rank.state.idle, rank.state.basis) == (True, None)
    assert rank.request() == TuningRequest.NOTHING
    rank = searching()
    rank.enter(START)
    assert rank.request() == TuningRequest.MEASURE


@pytest.mark.parametrize(("predicted_s", "worth"), [(0.8, False), (0.4, True)])
def test_plan_slower_than_predicted_raises_the_next_prediction(predicted_s: float, worth: bool) -> None:
    rank = trying(candidate(plan_of(0.5)))
    rank.step(0.9, times=JUDGED)
    rank.search(0.9)
    rank.found(candidate(plan_of(predicted_s), current_s=1.0))
    assert (rank.state.proposal is not None) is worth, "0.9 instead of 0.5 turns 0.8 into 1.44, and 0.4 into 0.72"


@pytest.mark.parametrize("back", [True, False])
def test_plan_is_priced_in_the_mode_it_runs_in(back: bool) -> None:
    """After local steps a plan of gradients continues with deltas, which have other convergence factors."""
    cluster = cluster_from_line("2xrtx3060@100/20Mb")
    costly = tuple(LearningRow("adam", codes, "int4()", 1, "", False, 0, steps, steps, 0.0, 0.0, 5, 5)
                   for codes, steps in (("gradients", 1.0), ("updates", 1.5)))
    inputs = Question(JOB, cluster, structs.replace(profile_from_tables(cluster), learning=costly), Policy(optimizer="adam"))
    result = candidate(plan_of(0.5, "int4()"))
    rank = proposing(result._replace(basis=Basis(result.plan, inputs)))
    if back:
        rank.switch()
        rank.step(1.5, times=JUDGED)
    runs = structs.replace(rank.state.proposal.candidate.runnable, codes="updates", step_s=0.0)
    proposed = rank.switch(runs)
    state = rank.state
    assert state.steps == pytest.approx(1.5)
    assert state.known == (runs, structs.replace(proposed.plan, codes="updates", step_s=0.0))
    assert state.basis.plan == state.known[1]
    assert state.check is None, "the plan that runs has no prediction"


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(("other", "takes_s", "tried"), [
    (plan_of(0.7, "identity()"), 0.7, True), (plan_of(0.7 * (1 + PLAIN), "identity()"), 0.7, True),
    (plan_of(0.7 * (1 + PLAIN) + 1e-9, "identity()"), 0.7, False),
    # Averaged gradients are given up for local steps if they turn out slower than predicted.
    (local(0.8 * LEAVES), 0.8 - 1e-9, False), (local(0.8 * LEAVES), 0.8 + 1e-9, True),
])
def test_alternatives_with_a_similar_price_are_tried(kept: bool, other: Any, takes_s: float, tried: bool) -> None:
    name = "local" if other.local_steps > 1 else "plain"
    rank = proposing(candidate(plan_of(2.0 if kept else 0.5), **{name: other}))
    if not kept:
        rank.switch()
    rank.step(takes_s, times=JUDGED)
    basis = rank.state.basis
    assert rank.request() == (TuningRequest.SWITCH if tried else TuningRequest.NOTHING)
    if tried:
        assert rank.state.proposal.candidate.current == basis.plan, "a roll-back leads to the active plan"
        assert rank.switch().plan == other
        assert warnings(rank.lines) == ([LEAVING] if name == "local" else [])


@pytest.mark.parametrize(("takes_s", "stays"), [(0.7, True), (0.701 + 0.7 * SLOWER, False)])
def test_uncompressed_plan_must_be_no_slower(takes_s: float, stays: bool) -> None:
    first = plan_of(0.5)
    rank = trying(candidate(first, plain=plan_of(0.8, "identity()")))
    rank.step(0.7, times=JUDGED)
    rank.switch()
    rank.step(takes_s, times=JUDGED)
    assert rank.request() == (TuningRequest.NOTHING if stays else TuningRequest.SWITCH)
    if stays:
        assert rank.state.check.predicted_s == takes_s, "whatever was predicted"
    else:
        assert rank.switch().runnable == first
        rank.step(0.7, times=JUDGED)
        assert rank.request() == TuningRequest.NOTHING, "it is tried once"


def test_no_gradient_averaging_plan_is_tried_after_local_steps() -> None:
    rank = trying(candidate(plan_of(0.5), local=local(0.55), plain=plan_of(0.5, "identity()")))
    rank.step(0.8, times=JUDGED)
    rank.switch()
    rank.step(0.6, times=JUDGED)
    assert rank.request() == TuningRequest.NOTHING


@pytest.mark.parametrize(("seconds", "stale"), [(0.5 * (1 + STALE), False), (0.5 * (1 + STALE) + 1e-9, True), (0.37, False)])
def test_steps_slower_than_predicted_make_a_plan_stale(seconds: float, stale: bool) -> None:
    rank = trying(candidate(plan_of(0.5)))
    events = [line for line in rank.step(seconds, times=PATIENCE) if isinstance(line, StalePlan)]
    assert [(event.predicted_s, event.measured_s) for event in events] == [(0.5, seconds)] * stale
    expected = TuningRequest.MEASURE if stale else TuningRequest.NOTHING
    assert rank.request() == expected, "faster steps are no reason to measure"
    assert rank.request() == TuningRequest.NOTHING, "once"


@pytest.mark.parametrize(("waited_s", "request_"), [(0.5 * TO_WIN, TuningRequest.NOTHING), (2 * TO_WIN, TuningRequest.MEASURE)])
def test_slow_steps_are_measured_again_if_a_plan_could_help(waited_s: float, request_: TuningRequest) -> None:
    rank = trying(candidate(plan_of(0.5)))
    rank.step(0.5, times=JUDGED)
    rank.observe(seen(1.0, waited_s), SETTLED)
    rank.step(1.0, times=PATIENCE + 1)
    assert [rank.request() for _ in range(2)] == [request_, TuningRequest.NOTHING]


def test_one_request_at_a_time() -> None:
    rank = searching()
    rank.state = structs.replace(rank.state, moved=True)
    rank.now = 1e6
    assert rank.request() == TuningRequest.NOTHING, "a search is in progress"
    rank.found(candidate(plan_of(0.5)))
    assert [rank.request() for _ in range(2)] == [TuningRequest.SWITCH] * 2, "until all have received it"
    rank.switch()
    assert [rank.request() for _ in range(2)] == [TuningRequest.MEASURE, TuningRequest.NOTHING]


PROBE_S = EXPECTED_TRIPS * 4 * max(link.alpha_s for link in LINKS)
"""Assumed duration of the first probe."""


@pytest.mark.parametrize(("after_s", "slower", "waited_s", "request_"), [
    (FIRST_S, True, 0.2, TuningRequest.PROBE), (FIRST_S - 1e-9, True, 0.2, TuningRequest.NOTHING),
    (PROBE_S / COST_MOST, False, 0.2, TuningRequest.PROBE),
    (PROBE_S / COST_MOST - 1e-9, False, 0.2, TuningRequest.NOTHING),
    (1e6, True, 0.4 * TO_WIN, TuningRequest.NOTHING),  # no probe could lead to enough gain
])
def test_links_are_probed_regularly_and_more_often_if_once_faster(
    after_s: float, slower: bool, waited_s: float, request_: TuningRequest,
) -> None:
    rank = trying(candidate(plan_of(0.5)))
    rank.observe(seen(0.5, waited_s), SETTLED)
    if slower:
        rank.links = rank.links.measured((Link(1e7, 1e7),) * 2, 0.0)
    rank.now = after_s
    assert rank.request() == request_


@pytest.mark.parametrize(("carried", "was", "step_s", "request_"), [
    (0.9, 1.0, 0.5, TuningRequest.NOTHING),
    (0.5, 1.0, 0.5, TuningRequest.PROBE), (1.4, 1.0, 0.5, TuningRequest.PROBE),
    (0.9, 10.0, 0.5, TuningRequest.PROBE),  # the links were faster once
    (0.9, 1.0, 0.3, TuningRequest.PROBE),  # steps have become faster
])
def test_links_at_their_planned_rates_are_not_probed(
    carried: float, was: float, step_s: float, request_: TuningRequest,
) -> None:
    rank = trying(candidate(plan_of(0.5)))
    planned = rank.links.watch.planned
    full = tuple(Throughput(*(Direction(carried * bps / PAYLOAD, 0.5) for bps in rates)) for rates in planned)
    rank.links = structs.replace(rank.links, best=tuple(Rates(*(was * bps for bps in rates)) for rates in planned))
    rank.observe(seen(0.5, 0.3)._replace(nodes=full), SETTLED)
    rank.observe(seen(step_s, step_s - 0.2)._replace(nodes=full), SETTLED)
    rank.now = 1e6
    assert rank.request() == request_


def test_probe_follows_a_hint_once_faster_links_would_repay_its_cost() -> None:
    rank = trying(candidate(plan_of(0.5)))
    rank.observe(seen(1.0, 0.8), SETTLED)
    rank.observe(seen(0.5, 0.3), SETTLED)
    assert rank.links.watch.faster
    rank.now = PROBE_S / largest_gain(rank.state) - 1e-6
    assert rank.request() == TuningRequest.NOTHING
    rank.now += 2e-6
    assert rank.request() == TuningRequest.PROBE


@pytest.mark.parametrize(("waited_s", "steps", "win"), [(0.1, 1.0, 0.2), (0.1, 1.25, 0.36), (0.0, 1.0, 0.0), (0.5, 1.0, 1.0)])
def test_links_can_save_the_wait_and_the_cost_of_compression(waited_s: float, steps: float, win: float) -> None:
    rank = trying(candidate(plan_of(0.5), steps=steps))
    rank.observe(seen(0.5, waited_s), SETTLED - 1)
    assert largest_gain(rank.state) is None, "usual times are not known yet"
    rank.observe(seen(0.5, waited_s))
    assert largest_gain(rank.state) == pytest.approx(win)


@pytest.mark.parametrize(("down_bps", "searches"), [(1.4e8, False), (1.6e8, True)])
def test_observed_faster_links_are_planned_for_while_idle(down_bps: float, searches: bool) -> None:
    rank = searching()
    rank.observe(seen(0.5, 0.3), SETTLED)
    rank.links = rank.links.measured(tuple(Link(1e8, down_bps) for _ in LINKS), 0.0)
    assert plan_policy.on_faster_links(rank.state) == rank.state, "a search is in progress"
    rank.found(None)
    rank.step(0.5, times=JUDGED)
    assert (plan_policy.on_faster_links(rank.state).order is not None) is searches


@pytest.mark.parametrize(("slow_steps", "pace_s"), [(0, 0.0), (1, 2.0), (TRIED, 2.0)])
def test_step_time_after_a_slowdown_uses_only_later_steps(slow_steps: int, pace_s: float) -> None:
    rank = Rank0()
    rank.step(0.4, times=4)
    if slow_steps:
        rank.step(2.0, times=slow_steps)
    assert plan_policy.pace_since(rank.state, 0.5) == pace_s


@pytest.mark.parametrize(("auto_times", "words"), [(2.5, "sync='auto' would be 2.5x as fast"), (0.0, "train alone")])
def test_single_machine_speed_is_known_once_a_plan_is_judged(auto_times: float, words: str) -> None:
    rank = proposing(candidate(plan_of(0.5), steps=1.25, alone_s=0.4)._replace(auto_times=auto_times))
    rank.switch()
    rank.step(0.8, times=JUDGED - 1)
    assert plan_policy.over_alone(rank.state) == (0.0, 0.0, 0.0), "the plan is on trial"
    rank.step(0.8)
    alone = plan_policy.over_alone(rank.state)
    assert alone == pytest.approx((0.4 / (0.8 * 1.25), 0.4 / (0.5 * 1.25), auto_times))
    assert words in plan_policy.slower_line(*alone)
    rank.search()
    assert plan_policy.over_alone(rank.state) == (0.0, 0.0, 0.0), "another plan may follow"


def test_basis_belongs_to_its_plan() -> None:
    assert candidate(plan_of(0.5)).back.basis == basis_of(plan_of(0.5))._replace(plan=START)
