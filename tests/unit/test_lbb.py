"""LBB as published: the paper's numbers, its thresholds and window, and the defects that are kept on purpose."""

from __future__ import annotations

import pytest
from support.balance import PAPER

from commlayer.balance import Cubic, Joined, Measurement, SharePolicy
from commlayer.balance.balancer import Balancer, straggler_effect
from commlayer.balance.lbb import Lbb, LbbBalancer, adjusted_to_total, spread_s, spread_shares

CURVES = [Cubic(0.0, 0.0, line.slope_s, line.intercept_s) for line in PAPER]
PROFILE_A0_S = (0.01215, 0.01320, 0.01567, 0.04084)
"""Intercepts of the authors' cubic fits, with which their table 3 was made."""
MEASURED_S = (0.08181, 0.08149, 0.08539, 0.39292)
"""Table 2: the four workers at batch 128."""


def test_the_static_optimum_of_the_paper() -> None:
    assert spread_shares(CURVES, 512, [None] * 4) == pytest.approx([165.8, 167.1, 159.2, 19.9], abs=0.1)


def test_one_rapid_tuning_gives_the_papers_third_table() -> None:
    lbb = Lbb([Cubic(0.0, 0.0, 6e-4, a0) for a0 in PROFILE_A0_S], 512)
    lbb.take([128] * 4)
    lbb.observe(0, MEASURED_S)
    assert lbb.rapid_steps == [0]
    assert lbb.shares(1) == pytest.approx([165, 166, 158, 22], abs=1)


def test_the_straggler_effect_is_spread_over_mean() -> None:
    assert straggler_effect([1.0, 2.0, 3.0]) == 1.0
    assert straggler_effect(MEASURED_S) == pytest.approx(1.94, abs=0.01)


@pytest.mark.parametrize(
    ("times", "does"), [((1.0, 1.0, 1.0, 1.04), "nothing"), ((1.0, 1.02, 1.03, 1.2), "fine"), ((1.0, 1.0, 1.0, 1.5), "rapid")]
)
def test_the_thresholds(times: tuple[float, ...], does: str) -> None:
    lbb = Lbb(CURVES, 512)
    before = list(lbb.shares(0))
    lbb.observe(0, times)
    after = list(lbb.shares(1))
    assert bool(lbb.rapid_steps) == (does == "rapid")
    if does == "nothing":
        assert after == before
    if does == "fine":
        assert after == [before[0] + 1, *before[1:]], "floor(1/2) is taken, ceil(1/2) is given: the sum has grown"


def test_within_the_window_a_spike_is_only_fine_tuned() -> None:
    lbb = Lbb(CURVES, 512)
    for step in range(40):
        lbb.observe(step, (1.0, 1.0, 1.0, 1.5))
    assert lbb.rapid_steps == [0, 30]


def test_max_minus_min_is_not_the_makespan() -> None:
    """A worker without a share counts with its launch of 100 s and one with little memory with 5 s, so the objective does not
    depend on how the other two share the rest."""
    curves = [Cubic(0.0, 0.0, slope, launch) for slope, launch in ((1.0, 0.0), (2.0, 0.0), (1.0, 0.0), (1.0, 100.0))]
    poor, good = [10, 45, 5, 0], [37, 18, 5, 0]
    assert spread_s(curves, poor) == spread_s(curves, good) == 95
    assert [max(curve.time_s(n) for curve, n in zip(curves, split, strict=True) if n) for split in (poor, good)] == [90, 37]


@pytest.mark.parametrize(("wanted", "minimum", "order", "given"), [
    ([166, 168, 159, 20], 1, [3, 0, 1, 2], [166, 168, 159, 19]), ([100, 100], 1, [0, 1], [100, 156]),
    ([200, 56, 1], 2, [0, 1, 2], [198, 56, 2]), ([200, 56, 1], 4, [0, 1, 2], [200, 56, 0]), ([0, 0], 1, [0, 1], [0, 256]),
])
def test_shares_are_adjusted_to_the_total(wanted: list[int], minimum: int, order: list[int], given: list[int]) -> None:
    total = 512 if len(wanted) == 4 else 256
    assert adjusted_to_total(wanted, total, minimum, order) == given


def test_in_a_job_it_keeps_the_sum_and_waits_for_all_times() -> None:
    first = Balancer([Joined(worker) for worker in range(4)], 512).latest
    balancer = LbbBalancer(CURVES, 512, [None] * 4, first, SharePolicy(lead=2))
    times = [Measurement(worker, 128, time_s) for worker, time_s in enumerate(MEASURED_S)]
    assert balancer.decide(0, times[:3]) is None
    assert balancer.copy().decide(1, times) == (decision := balancer.decide(1, times))
    assert decision is not None
    assert (decision.reason, decision.from_step, sum(decision.shares)) == ("LBB, rapid tuning", 3, 512)
    assert decision.shares[3] < 30
