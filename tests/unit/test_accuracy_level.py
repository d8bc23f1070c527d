"""Which codec level holds: accuracy bounds it, the plan moves it above that; and what is measured of the real codecs."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fidelity import compare, measure

from commlayer.autotune.quality import policy
from commlayer.autotune.quality.policy import AccuracyLimits, LevelDecision, LevelState, LossRise, LossTrend
from commlayer.compressors import parse, wrap
from commlayer.engine.gradient_comparison import dots
from commlayer.engine.spacing import steps_between, steps_until_paid
from commlayer.observe.fidelity import Dots, Fidelity, worst
from commlayer.records import Spec

GOOD = Fidelity(0.6, 1.0, 2.0)


FLAT = LossRise(0.0, 0.01)


def observed(
    state: LevelState, *seen: Fidelity, needed: float, loss: LossRise = FLAT,
) -> tuple[LevelState, list[LevelDecision]]:
    """The state after these observations, and what each decided."""
    decisions = []
    for one in seen:
        state, decision = policy.observe_level(state, one, loss, needed)
        decisions.append(decision)
    return state, decisions


@pytest.mark.parametrize(("seen", "text"), [
    (Fidelity(0.05, 1.0, 2.0), "cosine 0.05 of sent and exact gradient is below 0.18"),
    (Fidelity(0.6, 9.0, 2.0), "what is sent has 9.0 times the gradient's norm"),
    (Fidelity(0.6, 1.0, 60.0), "the residual has grown to 60.0 gradients, above 4"),
    (Fidelity(math.nan, 1.0, 2.0), "a comparison with the exact gradient was not finite"),
])
def test_backs_off_at_once_with_a_reason(seen: Fidelity, text: str) -> None:
    state, (decision,) = observed(policy.begin_level(0.01), seen, needed=0.001)
    assert decision == LevelDecision(0.02, text, True)
    assert observed(state, GOOD, needed=0.001)[1][0].level == 0.02, "it does not come back at the first calm step"


@pytest.mark.parametrize(("seen", "complains"), [
    (Fidelity(0.183, 1.0, 2.0), False), (Fidelity(0.1829, 1.0, 2.0), True),
    (Fidelity(0.6, 1 / 0.183, 2.0), False), (Fidelity(0.6, 1 / 0.183 + 1e-6, 2.0), True),
    (Fidelity(0.6, 1.0, 4.0), False), (Fidelity(0.6, 1.0, 4.0001), True), (Fidelity(0.6, math.inf, 2.0), True),
])
def test_a_bound_itself_is_borne(seen: Fidelity, complains: bool) -> None:
    assert observed(policy.begin_level(0.01), seen, needed=0.01)[1][0].changed is complains


@pytest.mark.parametrize(("rise", "complains"), [
    (LossRise(0.06, 0.01), False), (LossRise(0.0601, 0.01), True), (LossRise(0.05, 0.0), False), (LossRise(0.051, 0.0), True),
])
def test_a_loss_may_rise_by_the_budget_and_its_noise(rise: LossRise, complains: bool) -> None:
    assert (policy.complaint_of(policy.begin_level(0.01), GOOD, rise)[1] is not None) is complains


def test_complaints_in_a_row_go_further_each_time_and_end_at_dense() -> None:
    bad = Fidelity(0.01, 1.0, 2.0)
    _, decisions = observed(policy.begin_level(0.001), *[bad] * 5, needed=0.001)
    assert [d.level for d in decisions] == pytest.approx([0.002, 0.008, 0.064, 1.0, 1.0])
    assert [d.changed for d in decisions] == [True] * 4 + [False]
    state, _ = observed(policy.begin_level(0.001), bad, GOOD, needed=0.001)
    assert observed(state, bad, needed=0.001)[1][0].level == pytest.approx(0.004), "calm between them begins again at twofold"


def test_less_that_was_too_little_waits_twice_as_long_the_next_time() -> None:
    state, _ = observed(policy.begin_level(0.1, AccuracyLimits(lowest=0.01)), *[GOOD] * 5, needed=0.01)
    assert state.level == pytest.approx(0.08)
    state, _ = observed(state, Fidelity(0.01, 1.0, 2.0), needed=0.01)
    state, waiting = observed(state, *[GOOD] * 9, needed=0.01)
    assert not any(d.changed for d in waiting)
    assert observed(state, GOOD, needed=0.01)[1][0].level == pytest.approx(0.128)


def test_a_residual_gets_time_to_drain() -> None:
    draining = [Fidelity(0.6, 1.0, 60.0 * 0.8**i) for i in range(12)]
    state, decisions = observed(policy.begin_level(0.01), *draining, needed=0.01)
    assert {d.level for d in decisions[:8]} == {0.02}
    _, stuck = observed(state, *[Fidelity(0.6, 1.0, 60.0)] * 4, needed=0.01)
    assert stuck[-1].level > 0.1


def test_allows_more_after_calm_but_not_below_the_lowest() -> None:
    _, decisions = observed(policy.begin_level(0.1, AccuracyLimits(lowest=0.01)), *[GOOD] * 80, needed=0.001)
    levels = [d.level for d in decisions]
    assert levels[0] == 0.1
    assert 0.01 <= levels[-1] < 0.0125, "what is left is too little to announce"
    assert all(a >= b for a, b in itertools.pairwise(levels))


def test_follows_what_the_plan_needs_above_the_floor() -> None:
    state, (up,) = observed(policy.begin_level(0.01), GOOD, needed=0.2)
    assert (up.level, up.reason) == (0.2, "the plan needs a level of 0.2")
    state, (down,) = observed(state, GOOD, needed=0.03)
    assert (down.level, down.reason) == (0.03, "the plan needs no more than a level of 0.03")
    state, (small,) = observed(state, GOOD, needed=0.033)
    assert not small.changed, "small moves are not announced"
    assert observed(state, GOOD, needed=1e-9)[1][0].level == pytest.approx(0.01), "accuracy goes before speed"


@pytest.mark.parametrize("level", [0.25, 0.01, 0.0002])
def test_another_plan_is_left_alone_until_something_is_complained_of(level: float) -> None:
    state, decisions = observed(policy.follow_level(policy.begin_level(1.0), level), *[GOOD] * 20, needed=level)
    assert not any(d.changed for d in decisions)
    state, (decision,) = observed(state, Fidelity(0.01, 1.0, 2.0), needed=level)
    assert decision.level == 2 * level
    state = policy.follow_level(state, level)
    assert observed(state, GOOD, needed=level)[1][0].level == 2 * level, "what training showed stays"


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.floats(-1, 1), st.floats(0, 50), st.floats(0, 100), st.floats(0, 2)), max_size=40),
       st.floats(0.001, 1))
def test_the_level_keeps_its_range_and_never_falls_on_a_complaint(seen: list[tuple[float, ...]], level: float) -> None:
    state = policy.begin_level(level)
    for cosine, norm, residual, needed in seen:
        before = state.level
        state, decision = policy.observe_level(state, Fidelity(cosine, norm, residual), FLAT, needed)
        assert 0.001 <= decision.level == state.level <= 1.0
        assert decision.changed == (decision.level != before)
        if cosine < state.limits.least_cosine:
            assert decision.level >= min(before, 1.0)


def test_a_loss_that_rises_over_the_budget_is_seen_and_noise_is_not() -> None:
    rng = random.Random(0)
    trend = LossTrend()
    false_alarms = 0
    for step in range(600):
        trend = trend.add(2.0 * math.exp(-step / 300) + 0.3 + 0.1 * rng.gauss(0, 1))
        false_alarms += trend.seen().exceeds(0.005)
    assert false_alarms == 0
    assert trend.add(math.nan) == trend
    after = 0
    while not trend.seen().exceeds(0.005):
        trend, after = trend.add(1.2 + 0.1 * rng.gauss(0, 1)), after + 1
        assert after < 60
    while not trend.seen().exceeds(0.05):
        trend = trend.add(1.2 + 0.1 * rng.gauss(0, 1))
    _, (decision,) = observed(policy.begin_level(0.01), GOOD, needed=0.01, loss=trend.seen())
    assert "the loss has risen by" in decision.reason


def test_nothing_is_said_of_a_loss_before_fifty_are_known() -> None:
    trend = LossTrend()
    for step in range(49):
        trend = trend.add(1.0 + step)
    assert trend.seen() == LossRise()
    assert trend.add(50.0).seen().rise > 1


def test_a_looser_budget_asks_less() -> None:
    tight, loose = AccuracyLimits(budget=0.001).least_cosine, AccuracyLimits(budget=0.1).least_cosine
    assert 0.05 <= loose < AccuracyLimits().least_cosine < tight <= 0.95
    assert AccuracyLimits(budget=0.001).most_residual < AccuracyLimits().most_residual


def test_one_step_with_a_large_residual_is_not_a_trend() -> None:
    swinging = [Fidelity(0.6, 1.0, residual) for residual in (3.0, 3.0, 6.0, 2.0)]
    state, decisions = observed(policy.begin_level(0.01), *swinging, needed=0.01)
    assert not any(d.changed for d in decisions)
    assert any(d.changed for d in observed(state, *[Fidelity(0.6, 1.0, 6.0)] * 5, needed=0.01)[1])


@pytest.mark.parametrize(("compare_s", "step_s", "every"), [(0.05, 0.2, 25), (0.0, 0.2, 1), (0.001, 1.0, 1), (1.0, 0.1, 1000)])
def test_comparisons_take_one_per_cent_at_most(compare_s: float, step_s: float, every: int) -> None:
    assert steps_between(compare_s, step_s) == every
    assert compare_s / every <= 0.01 * step_s + 1e-12


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(1e-4, 2.0), st.floats(1e-3, 1.0)), min_size=1, max_size=30))
def test_the_account_is_never_overdrawn_but_for_what_nobody_could_know(prices: list[tuple[float, float]]) -> None:
    spent_s = elapsed_s = 0.0
    expected_s, step_s = prices[0]
    for cost_s, _ in prices:
        steps = steps_until_paid(spent_s, expected_s, elapsed_s, step_s)
        elapsed_s += steps * step_s
        assert spent_s + expected_s <= 0.01 * elapsed_s * (1 + 1e-6)
        spent_s += cost_s
        expected_s = cost_s


def test_misuse_is_one_line() -> None:
    with pytest.raises(ValueError, match=r"level 2\b.*0\.001 to 1\b.*E-ARGUMENT"):
        policy.begin_level(2.0)
    with pytest.raises(ValueError, match=r"\b1 s, a step 0 s\b.*E-ARGUMENT"):
        steps_between(1.0, 0.0)
    with pytest.raises(ValueError, match="spent -1 s.*E-ARGUMENT"):
        steps_until_paid(-1.0, 1.0, 1.0, 1.0)


# ---- measured on the codecs


def sent_and_exact(text: str, steps: int = 100) -> Fidelity:
    codec, spec = wrap(parse(text)), Spec((20_000,))
    state, out = codec.init(spec), memoryview(bytearray(codec.bound(spec)))
    generator = torch.Generator().manual_seed(0)
    steady = torch.randn(20_000, generator=generator) ** 3
    for _ in range(steps):
        x = steady + torch.randn(20_000, generator=generator)
        nbytes = codec.start(x, state, out)
    return measure(codec, x, out[:nbytes], state)


def test_fidelity_orders_codecs_by_what_they_keep() -> None:
    exact, fine = sent_and_exact("identity()"), sent_and_exact("int8()")
    assert exact == pytest.approx((1.0, 1.0, 0.0))
    assert fine.cosine > 0.99
    assert fine.residual_ratio < 0.1
    seen = [sent_and_exact(f"topk(ratio={ratio}, values='int8')") for ratio in (0.2, 0.05, 0.01, 0.002)]
    for more, less in itertools.pairwise(seen):
        assert more.cosine > less.cosine
        assert more.residual_ratio < less.residual_ratio

    def changed(level: float, fidelity: Fidelity, limits: AccuracyLimits | None = None) -> bool:
        return observed(policy.begin_level(level, limits), fidelity, needed=level)[1][0].changed

    assert not changed(0.2, seen[0])
    assert changed(0.002, seen[3])
    assert changed(0.2, seen[0], AccuracyLimits(budget=0.005)), "half a per cent asks for more"


def test_what_was_sent_is_what_is_not_kept_back() -> None:
    """Against the residual, which the codec computes by itself: sent = input - residual after the first step."""
    codec, spec = wrap(parse("topk(ratio=0.05)")), Spec((5000,))
    state, out = codec.init(spec), memoryview(bytearray(codec.bound(spec)))
    x = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    nbytes = codec.start(x, state, out)
    expected = compare(x, x - state["residual"], state["residual"])
    assert measure(codec, x, out[:nbytes], state) == pytest.approx(expected, rel=1e-5)


def test_the_worst_of_several_buckets() -> None:
    assert worst([Fidelity(0.9, 1.1, 3.0), Fidelity(0.5, 0.4, 1.0)]) == (0.5, 0.4, 3.0)
    assert Dots().fidelity() == (1.0, 1.0, 0.0), "nothing to send is sent perfectly"


def test_sums_over_pieces_tell_what_the_whole_does() -> None:
    x, y, kept = torch.randn(3, 999, generator=torch.Generator().manual_seed(2))
    pieces = [dots(*(t[start : start + 333] for t in (x, y, kept))) for start in (0, 333, 666)]
    assert pieces[0].plus(pieces[1]).plus(pieces[2]).fidelity() == pytest.approx(compare(x, y, kept), rel=1e-4)
