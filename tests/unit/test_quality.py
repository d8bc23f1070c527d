"""The quality policy: when ranks compare, which error is too large, and which codecs follow; the fidelity of real codecs."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from support.fidelity import compare, measure

from commlayer.autotune.quality import policy
from commlayer.autotune.quality.loss_trend import LossRise, LossTrend
from commlayer.autotune.quality.policy import (
    CALM,
    DRAINING,
    EQUAL,
    FEWEST,
    FEWEST_SEEN,
    MOST,
    SETTLE,
    Bounds,
    CodecChange,
    GradientError,
    PlanLevels,
    QualityState,
)
from commlayer.compressors import parse, wrap
from commlayer.engine.observers.spacing import steps_until_paid
from commlayer.observe.fidelity import Dots, Fidelity
from commlayer.records import Spec

GOOD = Dots(1.0, 0.6, 1.0, 1.0)
"""Cosine 0.6, norm 1, a residual of one gradient: well within 5 %."""
BAD = Dots(1.0, 0.05, 1.0, 1.0)
SPARSE = PlanLevels(0.01, 0.01, compared=True)


def dots_of(cosine: float, norm: float = 1.0, residual: float = 2.0) -> Dots:
    return Dots(1.0, cosine * norm, norm**2, residual**2)


def row(summed: Dots = GOOD, sent: Dots = GOOD, loss: LossRise = LossRise(), *, cost_s: float = 0.0,
        elapsed_s: float = 1.0) -> GradientError:
    return GradientError(sent, summed, loss, cost_s, elapsed_s)


def begun(plan: PlanLevels = SPARSE, bounds: Bounds = Bounds(), **fields: Any) -> QualityState:
    return structs.replace(policy.begin(bounds, plan), **fields)


def decided(
    state: QualityState, *rows: GradientError, step_s: float = 0.1, acts: bool = True,
) -> tuple[QualityState, CodecChange | None]:
    """After a comparison that only the present rows count for. A change is carried out."""
    state, change, _ = policy.decide(structs.replace(state, summed=Dots()), rows, step_s, acts=acts)
    if change is not None:
        plan = PlanLevels(change.after, state.plan.base_level, compared=True, finer=change.after > state.plan.base_level,
                          cosine=state.plan.cosine, residual=state.plan.residual)
        state = policy.adapt_to_plan(state, plan, 5, by_guard=True)[0]
    return state, change


def levels(state: QualityState, *seen: Dots) -> list[float]:
    """The levels after each of these comparisons, equal on all ranks."""
    results = []
    for one in seen:
        state, _ = decided(state, row(one, one))
        results.append(state.level)
    return results


@pytest.mark.parametrize(("plan", "first"), [
    (SPARSE, SETTLE), (PlanLevels(0.5, 0.01, True, finer=True), SETTLE), (PlanLevels(0.2, 0.01, True, finer=True), 5),
    (PlanLevels(0.02, 0.01, True, finer=True), DRAINING), (PlanLevels(1.0, 0.01, False, finer=True), SETTLE),
])
def test_plan_is_compared_after_it_has_settled(plan: PlanLevels, first: int) -> None:
    for since in (0, 7):
        state = begun(plan, since=since)
        assert [policy.is_comparison_due(state, now) for now in (since + first - 1, since + first)] == [False, True]
    exact = begun(PlanLevels(1.0, 1.0, compared=False))
    assert not any(policy.is_comparison_due(exact, now) for now in range(100))


@pytest.mark.parametrize(("rows", "step_s", "steps"), [
    ([row()], 0.1, SETTLE),
    # 0.08 s spent and 0.08 s to come are 1 % of 16 s, of which one has passed, in steps of 0.1 s.
    ([row(cost_s=0.08)], 0.1, 150), ([row(cost_s=0.08), row(cost_s=9.0)], 0.1, 150),
    ([row(cost_s=0.08, elapsed_s=15.7)], 0.1, SETTLE), ([row(cost_s=0.08, elapsed_s=15.5)], 0.1, 5),
    ([row(cost_s=0.08)], 0.2, 75),
])
def test_next_comparison_waits_until_its_cost_is_within_the_limit(rows: list[GradientError], step_s: float, steps: int) -> None:
    state = policy.record_comparison(begun(), 11)
    assert state.compare_at == 11 + SETTLE, "before the rows are known"
    state, _ = decided(state, *rows, step_s=step_s)
    assert (state.compare_at, state.samples) == (11 + steps, 1)


@pytest.mark.parametrize(("cost_s", "before", "after"), [
    # One comparison in n steps of 0.1 s may take n x 1 ms.
    (0.008, FEWEST, 2 * FEWEST), (0.0081, FEWEST, FEWEST), (0.0, MOST, MOST), (0.032, 2 * FEWEST, 2 * FEWEST),
    (0.0321, 2 * FEWEST, FEWEST), (1.0, FEWEST, FEWEST),
])
def test_cheap_comparisons_examine_more(cost_s: float, before: int, after: int) -> None:
    assert decided(begun(elements=before), row(cost_s=cost_s))[0].elements == after
    overlapped = begun(structs.replace(SPARSE, overlapped=True), elements=before)
    assert decided(overlapped, row(cost_s=cost_s))[0].elements >= before, "there the cost is the wait"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(1e-4, 2.0), st.floats(1e-3, 1.0)), min_size=1, max_size=30))
def test_comparisons_never_cost_more_than_allowed(prices: list[tuple[float, float]]) -> None:
    spent_s = elapsed_s = 0.0
    expected_s, step_s = prices[0]
    for cost_s, _ in prices:
        elapsed_s += steps_until_paid(spent_s, expected_s, elapsed_s, step_s) * step_s
        assert spent_s + expected_s <= 0.01 * elapsed_s * (1 + 1e-6)
        spent_s, expected_s = spent_s + cost_s, cost_s


@pytest.mark.parametrize(("seen", "loss", "complaint"), [
    (dots_of(0.183), LossRise(), ""), (dots_of(0.1829), LossRise(), "cosine"),
    (dots_of(1.0, 1 / 0.184), LossRise(), ""), (dots_of(1.0, 1 / 0.183 + 1e-6), LossRise(), "norm"),
    (dots_of(0.6, residual=4.0), LossRise(), ""), (dots_of(0.6, residual=4.0001), LossRise(), "residual"),
    (GOOD, LossRise(0.06, 0.01), ""), (GOOD, LossRise(0.0601, 0.01), "loss"), (GOOD, LossRise(0.051), "loss"),
])
def test_error_equal_to_the_bound_is_allowed(seen: Dots, loss: LossRise, complaint: str) -> None:
    result = policy.find_complaint(begun(), seen.fidelity(), loss)[1]
    assert (result.kind if result else "") == complaint
    _, change = decided(begun(), row(seen, GOOD, loss), row(GOOD, seen, loss))
    assert (change is not None) is bool(complaint), "a complaint of any rank counts"


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_non_finite_step_only_costs_time(number: float) -> None:
    state, change = decided(begun(), row(BAD, cost_s=0.08), row(Dots(1.0, number, 1.0, 0.0), cost_s=0.08))
    assert (change, state.spent_s, state.compared) == (None, 0.08, 0)


def test_residual_is_judged_by_its_mean_after_time_to_drain() -> None:
    swinging = [dots_of(0.6, residual=residual) for residual in (3.0, 3.0, 6.0, 2.0)]
    assert set(levels(begun(), *swinging)) == {0.01}
    assert levels(begun(), *swinging, *[dots_of(0.6, residual=6.0)] * 5)[-1] > 0.01
    draining = [dots_of(0.6, residual=60.0 * 0.8**i) for i in range(8)]
    assert len(set(levels(begun(), *draining))) == 1, "one change, and then it drains"
    assert levels(begun(), *[dots_of(0.6, residual=60.0)] * 6)[-1] > 0.1


def test_older_comparisons_have_less_weight() -> None:
    state = policy.decide(begun(), [row(GOOD)], 0.1, acts=True)[0]
    state = policy.decide(state, [row(Dots(1.0, 1.0, 1.0, 0.0))], 0.1, acts=True)[0]
    assert state.summed == Dots(1.5, 1.3, 1.5, 0.5)


@pytest.mark.parametrize(("seen", "complains"), [
    (dots_of(0.11), False), (dots_of(0.09), True), (dots_of(0.6, residual=20.0), False), (dots_of(0.6, residual=21.0), True),
])
def test_default_bounds_need_agreement_of_many_buckets(seen: Dots, complains: bool) -> None:
    state = begun(PlanLevels(0.01, 0.01, compared=True, cosine=0.1, residual=20.0))
    for number in range(FEWEST_SEEN):
        state, change, _ = policy.decide(state, [row(seen, seen)], 0.1, acts=True)
        assert (change is not None) is (complains and number == FEWEST_SEEN - 1)


def test_user_plans_are_only_reported_once_per_complaint() -> None:
    state = begun()
    for rows, kind in ((row(BAD), "cosine"), (row(BAD), ""), (row(loss=LossRise(0.2), summed=Dots(9.0, 9.0, 9.0)), "loss")):
        state, change, complaint = policy.decide(structs.replace(state, summed=Dots()), [rows], 0.1, acts=False)
        assert (change, complaint.kind if complaint else "") == (None, kind)
    state, _ = policy.adapt_to_plan(state, SPARSE, 5)
    assert policy.decide(state, [row(BAD)], 0.1, acts=False)[2] is not None, "for each plan"


def test_consecutive_complaints_escalate_to_dense() -> None:
    bad = dots_of(0.01)
    sparse = begun(PlanLevels(0.001, 0.001, compared=True))
    assert levels(sparse, *[bad] * 5) == pytest.approx([0.002, 0.008, 0.064, 1.0, 1.0])
    assert levels(sparse, bad, GOOD, bad)[-1] == pytest.approx(0.004), "calm between complaints starts again at twofold"


def test_codecs_become_coarser_after_a_quiet_period_longer_after_a_failure() -> None:
    state, _ = decided(begun(), row(BAD))
    assert (state.level, state.planner_floor) == (0.02, 0.02)
    for number in range(CALM):
        state, change = decided(state, row())
        assert (change is not None) is (number == CALM - 1)
    assert change.after == 0.016
    assert "0.02" in change.reason
    state, _ = decided(state, row(BAD))
    assert levels(state, *[GOOD] * (2 * CALM - 1))[-1] == state.level
    assert levels(state, *[GOOD] * 2 * CALM)[-1] < state.level
    lowest = levels(state, *[GOOD] * 300)[-1]
    assert 0.01 <= lowest < 0.0125, "no coarser than the plan; the rest is too little for a change"


@pytest.mark.parametrize(("level", "acts", "lifted"), [
    (0.01, True, True), (0.02 * EQUAL - 1e-6, True, True), (0.02 * EQUAL, True, False), (0.5, True, False),
    (0.01, False, False),
])
def test_new_plan_is_refined_if_its_level_failed_before(level: float, acts: bool, lifted: bool) -> None:
    state, _ = decided(begun(), row(BAD))
    state, change = policy.adapt_to_plan(state, PlanLevels(level, level, compared=True), 9, acts=acts)
    assert (change is not None and change.after == 0.02) is lifted
    assert (state.since, state.samples, state.summed, state.level) == (9, 0, Dots(), level)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.floats(-1, 1), st.floats(0, 50), st.floats(0, 100)), max_size=40), st.floats(0.001, 1))
def test_level_stays_in_range_and_never_falls_after_a_complaint(seen: list[tuple[float, ...]], level: float) -> None:
    state = begun(PlanLevels(level, level, compared=True))
    for cosine, norm, residual in seen:
        before = state.level
        one = dots_of(cosine, norm, residual)
        state, change = decided(state, row(one, one))
        assert 0.001 <= state.level <= 1.0
        assert (change is not None) == (state.level != before)
        if one.fidelity().cosine < state.bounds.least_cosine - 1e-6:
            assert state.level >= before


def test_rising_loss_is_detected_and_noise_is_not() -> None:
    rng = random.Random(0)
    trend = LossTrend()

    def exceeds(budget: float) -> bool:
        return trend.measure_rise().rise > budget + trend.measure_rise().noise

    for step in range(600):
        trend = trend.add(2.0 * math.exp(-step / 300) + 0.3 + 0.1 * rng.gauss(0, 1))
        assert not exceeds(0.005)
    assert trend.add(math.nan) == trend
    after = 0
    while not exceeds(0.005):
        trend, after = trend.add(1.2 + 0.1 * rng.gauss(0, 1)), after + 1
        assert after < 60


def sent_and_exact(text: str, steps: int = 100) -> Fidelity:
    codec, spec = wrap(parse(text)), Spec((20_000,))
    state, out = codec.init(spec), memoryview(bytearray(codec.bound(spec)))
    generator = torch.Generator().manual_seed(0)
    steady = torch.randn(20_000, generator=generator) ** 3
    for _ in range(steps):
        x = steady + torch.randn(20_000, generator=generator)
        nbytes = codec.start(x, state, out)
    return measure(codec, x, out[:nbytes], state)


def test_fidelity_orders_codecs_by_precision() -> None:
    exact, fine = sent_and_exact("identity()"), sent_and_exact("int8()")
    assert exact == pytest.approx((1.0, 1.0, 0.0))
    assert fine.cosine > 0.99
    assert fine.residual_ratio < 0.1
    seen = [sent_and_exact(f"topk(ratio={ratio}, values='int8')") for ratio in (0.2, 0.05, 0.01, 0.002)]
    for more, less in itertools.pairwise(seen):
        assert more.cosine > less.cosine
        assert more.residual_ratio < less.residual_ratio

    def complains(fidelity: Fidelity, budget: float = 0.05) -> bool:
        return policy.find_complaint(begun(bounds=Bounds(budget=budget)), fidelity, LossRise())[1] is not None

    assert [complains(seen[0]), complains(seen[3]), complains(seen[0], 0.005)] == [False, True, True]


def test_residual_is_the_unsent_part() -> None:
    codec, spec = wrap(parse("topk(ratio=0.05)")), Spec((5000,))
    state, out = codec.init(spec), memoryview(bytearray(codec.bound(spec)))
    x = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    nbytes = codec.start(x, state, out)
    residual = torch.from_numpy(state["residual"])
    expected = compare(x, x - residual, residual)
    assert measure(codec, x, out[:nbytes], state) == pytest.approx(expected, rel=1e-5)
