"""The relatives in the harness: each does what its paper says it does, and the harness prices it."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.balancing import PAPER

from bench.reference.balance_barrier import Dlb, Equal, LbBsp, Proportional
from bench.reference.balance_cluster import Disturbance, Mode, PlayedCluster, oracle_s, run, slow_after
from bench.reference.balance_relaxed import local_steps, majority, n_soft, stale_synchronous
from commlayer.balance.schedule import apportion, scaled

FOUR = PlayedCluster(tuple(PAPER), 512)


def test_equal_batches_are_the_papers_baseline() -> None:
    steps = run(Equal(4, 512), FOUR, 3)
    assert steps[0].times_s == pytest.approx([0.0818, 0.0815, 0.0854, 0.3929], rel=1e-3)
    assert steps[0].effect == pytest.approx(1.94, abs=0.01)
    assert steps[0].iteration_s / steps[0].oracle_s > 3.5


@pytest.mark.parametrize("mode", [LbBsp(4, 512), Proportional(4, 512), Dlb(4, 512, epoch_steps=5)])
def test_they_come_near_the_oracle(mode: Mode) -> None:
    steps = run(mode, FOUR, 60)
    assert {sum(step.shares) for step in steps} == {512}
    assert not any(step.slow for step in steps[40:])


def test_dlb_waits_for_the_end_of_the_epoch() -> None:
    steps = run(Dlb(4, 512, epoch_steps=20), FOUR, 45)
    assert {step.shares for step in steps[:20]} == {(128,) * 4}
    assert len({step.shares for step in steps}) == 3


def test_the_dead_band_keeps_still_and_caps_hold() -> None:
    level = PlayedCluster((PAPER[0], PAPER[1]), 200)
    assert len({step.shares for step in run(Proportional(2, 200), level, 20)}) == 1
    capped = run(LbBsp(4, 512, (100, None, None, 40)), FOUR, 20)
    assert all(step.shares[0] <= 100 and step.shares[3] <= 40 for step in capped)


def test_local_steps_average_less_often() -> None:
    every, eighth, once = (local_steps(FOUR, 96, h, sync_s=0.1) for h in (1, 8, 96))
    assert (every.updates, eighth.updates, once.updates) == (96, 12, 1)
    assert every.samples_per_s < eighth.samples_per_s < once.samples_per_s
    assert 1 / once.samples_per_s == pytest.approx(0.3929 / 512, rel=0.01), "the straggler stays"


def test_n_soft_trades_staleness_for_throughput() -> None:
    soft = [n_soft(FOUR, 100, n) for n in (1, 2, 4)]
    assert [one.updates for one in soft] == [100, 200, 400]
    assert soft[0].staleness_mean < soft[1].staleness_mean < soft[2].staleness_mean
    assert soft[2].staleness_mean == pytest.approx(3, rel=0.05), "asynchronous: each other worker comes once in between"
    assert soft[2].rate_scale == pytest.approx(1 / 3, rel=0.05)
    level = n_soft(PlayedCluster((PAPER[0],) * 4, 512), 50, 1)
    assert (level.staleness_max, level.rate_scale) == (1, 1.0), "who pushed first pulls before the last has pushed"


def test_ssp_bounds_the_lead() -> None:
    for slack in (1, 2, 5):
        assert stale_synchronous(FOUR, 40, slack).staleness_max <= slack
    jitter = PlayedCluster((PAPER[0],) * 4, 512, noise=0.3)
    assert stale_synchronous(jitter, 60, 3).samples_per_s > stale_synchronous(jitter, 60, 1).samples_per_s


def test_a_majority_does_not_wait_for_the_last() -> None:
    eager, all_of_them = majority(FOUR, 60), majority(FOUR, 60, quorum=lambda n: n)
    assert eager.samples_per_s > 2 * all_of_them.samples_per_s
    assert eager.staleness_max >= 3
    assert (all_of_them.staleness_max, all_of_them.updates) == (0, 60)
    assert all_of_them.samples_per_s == pytest.approx(512 / 0.3929, rel=0.01)


def test_disturbances_ramps_lives_and_noise_are_exact() -> None:
    disturbed = PlayedCluster(
        tuple(PAPER), 512, disturbances=(Disturbance(0, 5, 8, added_s=0.05), Disturbance(1, 0, 9, factor=3.0, ramp=4)), seed=1
    )
    quiet_s = PAPER[0].time_s(100)
    assert [round(disturbed.compute_s(0, 100, step) - quiet_s, 9) for step in range(4, 9)] == [0, 0.05, 0.05, 0.05, 0]
    assert [disturbed.compute_s(1, 10, step) / PAPER[1].time_s(10) for step in range(5)] == pytest.approx([1.5, 2, 2.5, 3, 3])
    noisy = PlayedCluster(tuple(PAPER), 512, noise=0.1, seed=7)
    assert noisy.compute_s(2, 50, 3) == PlayedCluster(tuple(PAPER), 512, noise=0.1, seed=7).compute_s(2, 50, 3)
    assert noisy.compute_s(2, 50, 3) != noisy.compute_s(2, 50, 4)
    assert PlayedCluster((PAPER[0],), 100, caps=(30,)).compute_s(0, 100, 0) == pytest.approx(
        4 * PAPER[0].intercept_s + 100 * PAPER[0].slope_s
    )
    short = PlayedCluster(tuple(PAPER), 512, lives=((0, 2), (0, 9), (0, 9), (0, 9)))
    steps = run(Equal(4, 512), short, 3)
    assert steps[2].times_s[0] == math.inf
    assert oracle_s(short, 2) > oracle_s(short, 1)
    assert slow_after(steps, 0, 3) == 3


@pytest.mark.parametrize(("weights", "total", "shares"), [
    ([1, 1, 1], 2, [1, 1, 0]), ([6, 2, 0], 5, [4, 1, 0]), ([0.0, 0.0], 3, [2, 1]), ([0.1, 0.1, 0.1], 1, [1, 0, 0]),
    ([3, 2**60, 3], 2**60 + 6, [3, 2**60, 3]),
])
def test_the_largest_remainders_go_up_and_ties_go_to_whoever_comes_first(
    weights: list[float], total: int, shares: list[int],
) -> None:
    assert apportion(weights, total) == shares
    assert list(scaled(dict(enumerate(map(int, weights))), total).values()) == apportion([int(w) for w in weights], total)


def test_the_smallest_weight_takes_no_more_than_is_left() -> None:
    assert apportion([1.0, 5e-324], 2, [1, None]) == [1, 1]


@given(st.lists(st.floats(0, 100), min_size=1, max_size=8), st.integers(0, 200), st.data())
def test_apportioned_shares_keep_the_sum_and_the_caps(weights: list[float], total: int, data: st.DataObject) -> None:
    caps = data.draw(st.lists(st.one_of(st.none(), st.integers(0, 100)), min_size=len(weights), max_size=len(weights)))
    if sum(total if cap is None else min(cap, total) for cap in caps) < total:
        with pytest.raises(ValueError, match=rf"total {total}\b.*E-SHARES-ARGUMENT"):
            apportion(weights, total, caps)
        return
    taken = apportion(weights, total, caps)
    assert sum(taken) == total
    assert all(share <= (total if cap is None else cap) for share, cap in zip(taken, caps, strict=True))
