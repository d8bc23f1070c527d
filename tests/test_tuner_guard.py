"""The guard: accuracy bounds the ratio, bandwidth moves it above that; its measurements on the real codecs."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from fidelity_kit import compare, measure
from hypothesis import given, settings
from hypothesis import strategies as st

from commlayer.balance.guard import Fidelity, Guard, Limits, Slope, comparisons_every
from commlayer.compressors import parse, wrap
from commlayer.records import Spec
from commlayer.runtime.gradient_comparison import Dots, dots, worst

GOOD = Fidelity(0.6, 1.0, 2.0)


def flat() -> Slope:
    slope = Slope()
    for _ in range(200):
        slope.add(1.0)
    return slope


@pytest.mark.parametrize(("seen", "text"), [
    (Fidelity(0.05, 1.0, 2.0), "cosine 0.05 of sent and exact gradient is below 0.18"),
    (Fidelity(0.6, 9.0, 2.0), "what is sent has 9.0 times the gradient's norm"),
    (Fidelity(0.6, 1.0, 60.0), "the residual has grown to 60.0 gradients, above 4"),
    (Fidelity(math.nan, 1.0, 2.0), "a comparison with the exact gradient was not finite"),
])
def test_backs_off_at_once_with_a_reason(seen: Fidelity, text: str) -> None:
    guard = Guard(0.01)
    decision = guard.observe(seen, flat(), needed=0.001)
    assert (decision.ratio, decision.changed) == (0.02, True)
    assert decision.reason == text
    assert guard.observe(GOOD, flat(), needed=0.001).ratio == 0.02, "it does not come back at the first calm step"


def test_a_residual_gets_time_to_drain() -> None:
    guard = Guard(0.01)
    ratios = [guard.observe(Fidelity(0.6, 1.0, 60.0 * 0.8**i), flat(), needed=0.01).ratio for i in range(12)]
    assert set(ratios[:8]) == {0.02}
    stuck = [guard.observe(Fidelity(0.6, 1.0, 60.0), flat(), needed=0.01).ratio for _ in range(4)]
    assert stuck[-1] > 0.1


def test_allows_more_after_calm_but_not_below_the_lowest() -> None:
    guard = Guard(0.1, Limits(lowest=0.01))
    ratios = [guard.observe(GOOD, flat(), needed=0.001).ratio for _ in range(80)]
    assert ratios[0] == 0.1
    assert 0.01 <= ratios[-1] < 0.0125, "what is left is too little to announce"
    assert all(a >= b for a, b in itertools.pairwise(ratios))


def test_follows_the_links_above_the_floor() -> None:
    guard = Guard(0.01)
    up = guard.observe(GOOD, flat(), needed=0.2)
    assert (up.ratio, up.reason) == (0.2, "the links carry a ratio of 0.2")
    down = guard.observe(GOOD, flat(), needed=0.03)
    assert (down.ratio, down.reason) == (0.03, "the links carry no more than a ratio of 0.03")
    assert not guard.observe(GOOD, flat(), needed=0.033).changed, "small moves are not announced"
    assert guard.observe(GOOD, flat(), needed=1e-9).ratio == pytest.approx(0.01), "accuracy goes before speed"


@pytest.mark.parametrize("level", [0.25, 0.01, 0.0002])
def test_another_plan_is_left_alone_until_something_is_complained_of(level: float) -> None:
    guard = Guard(1.0)
    guard.follow(level)
    for _ in range(20):
        assert not guard.observe(GOOD, flat(), needed=level).changed
    assert guard.observe(Fidelity(0.01, 1.0, 2.0), flat(), needed=level).ratio == 2 * level
    guard.follow(level)
    assert guard.observe(GOOD, flat(), needed=level).ratio == 2 * level, "what training showed stays"


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.floats(-1, 1), st.floats(0, 50), st.floats(0, 100), st.floats(0, 2)), max_size=40),
       st.floats(0.001, 1))
def test_the_ratio_keeps_its_range_and_never_falls_on_a_complaint(seen: list[tuple[float, ...]], ratio: float) -> None:
    guard = Guard(ratio)
    for cosine, norm, residual, needed in seen:
        before = guard.ratio
        decision = guard.observe(Fidelity(cosine, norm, residual), flat(), needed)
        assert 0.001 <= decision.ratio <= 1.0
        assert decision.changed == (decision.ratio != before)
        if cosine < guard.limits.least_cosine:
            assert decision.ratio >= min(before, 1.0)


def test_a_loss_that_rises_over_the_budget_is_seen_and_noise_is_not() -> None:
    rng = random.Random(0)
    slope = Slope()
    false_alarms = 0
    for step in range(600):
        slope.add(2.0 * math.exp(-step / 300) + 0.3 + 0.1 * rng.gauss(0, 1))
        false_alarms += slope.risen(0.005)
    assert false_alarms == 0
    slope.add(math.nan)
    after = next(step for step in range(200) if slope.add(1.2 + 0.1 * rng.gauss(0, 1)) or slope.risen(0.005))
    assert after < 60
    assert "the loss has risen by" in Guard(0.01).observe(GOOD, slope, needed=0.01).reason


def test_a_looser_budget_asks_less() -> None:
    tight, loose = Limits(budget=0.001).least_cosine, Limits(budget=0.1).least_cosine
    assert 0.05 <= loose < Limits().least_cosine < tight <= 0.95
    assert Limits(budget=0.001).most_residual < Limits().most_residual


def test_one_step_with_a_large_residual_is_not_a_trend() -> None:
    guard = Guard(0.01)
    for residual in (3.0, 3.0, 6.0, 2.0):
        assert not guard.observe(Fidelity(0.6, 1.0, residual), flat(), needed=0.01).changed
    seen = [guard.observe(Fidelity(0.6, 1.0, 6.0), flat(), needed=0.01).changed for _ in range(5)]
    assert any(seen)


@pytest.mark.parametrize(("compare_s", "step_s", "every"), [(0.05, 0.2, 25), (0.0, 0.2, 1), (0.001, 1.0, 1), (1.0, 0.1, 1000)])
def test_comparisons_take_one_per_cent_at_most(compare_s: float, step_s: float, every: int) -> None:
    assert comparisons_every(compare_s, step_s) == every
    assert compare_s / every <= 0.01 * step_s + 1e-12


def test_misuse_is_one_line() -> None:
    with pytest.raises(ValueError, match="ratio 2: allowed is 0.001 to 1, within 0 to 1"):
        Guard(2.0)
    with pytest.raises(ValueError, match="comparing takes 1 s, a step 0 s"):
        comparisons_every(1.0, 0.0)


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
    assert not Guard(0.2).observe(seen[0], flat(), needed=0.2).changed
    assert Guard(0.002).observe(seen[3], flat(), needed=0.002).changed
    assert Guard(0.2, Limits(budget=0.005)).observe(seen[0], flat(), needed=0.2).changed, "half a per cent asks for more"


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
