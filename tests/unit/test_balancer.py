"""The balancer in emulated clusters: how fast it recovers, that it is stable otherwise, and invalid measurements."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.balance import PAPER

from bench.reference.balance_cluster import Disturbance, PlayedCluster, PlayedStep, moves, run, slow_after
from bench.reference.balance_default import Ours
from commlayer.balance.balancer import Balancer, Joined, Measurement, Note, SharePolicy
from commlayer.balance.time_models import LinearTime


def cluster(*disturbances: Disturbance, noise: float = 0.01, seed: int = 0) -> PlayedCluster:
    return PlayedCluster(tuple(PAPER), 512, disturbances=disturbances, noise=noise, seed=seed)


def played(
    played_cluster: PlayedCluster, steps: int, *args: SharePolicy, profiled: bool = True,
) -> tuple[Ours, list[PlayedStep]]:
    mode = Ours(played_cluster, *args, profiled=profiled)
    done = run(mode, played_cluster, steps)
    assert {sum(step.shares) for step in done} == {512}
    return mode, done


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("worker", range(4))
def test_added_50_ms_costs_at_most_three_slow_iterations(worker: int, seed: int) -> None:
    _, steps = played(cluster(Disturbance(worker, 25, 65, added_s=0.05), seed=seed), 105)
    assert slow_after(steps, 0, 25) == 0
    assert 1 <= slow_after(steps, 25, 65) <= 3 + (worker == 3), "the small worker may take one more correction"
    assert slow_after(steps, 65, 105) <= 3
    assert not any(step.slow for step in steps[31:65] + steps[71:]), "once recovered it stays"
    assert moves(steps) <= 8


@pytest.mark.parametrize(("disturbances", "most"), [
    *[((Disturbance(worker, 20, 120, factor=factor),), 4) for worker in (0, 3) for factor in (1.5, 3.0, 10.0)],
    ((Disturbance(0, 20, 150, factor=2.0, ramp=60), Disturbance(1, 40, 150, factor=1.5, ramp=20)), 3),
])
def test_factors_and_heat_are_followed(disturbances: tuple[Disturbance, ...], most: int) -> None:
    assert slow_after(played(cluster(*disturbances), 120)[1], 20, 120) <= most


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.02])
def test_shares_are_stable_while_speeds_are(noise: float) -> None:
    assert moves(played(cluster(noise=noise), 200)[1]) <= 1


def test_single_spikes_move_nothing() -> None:
    spikes = (Disturbance(step % 4, step, step + 1, factor=3.0) for step in range(10, 200, 10))
    mode, steps = played(cluster(*spikes), 210)
    assert moves(steps) == 0
    assert len([event for event in mode.balancer.events if isinstance(event, Note)]) == 19


def test_without_a_profile_it_finds_the_balance() -> None:
    _, steps = played(cluster(), 40, profiled=False)
    assert steps[0].shares == (128, 128, 128, 128)
    assert slow_after(steps, 0, 40) <= 3


@pytest.mark.parametrize("bad_s", [math.nan, math.inf, 0.0, -1.0, 1e300, 1e-300])
def test_an_invalid_time_is_noted_and_dropped(bad_s: float) -> None:
    balancer = Balancer([Joined(worker, line=line) for worker, line in enumerate(PAPER)], 512)
    before = dict(balancer.shares)
    assert balancer.decide(0, [Measurement(2, 159, bad_s)]) is None
    assert balancer.shares == before
    (note,) = balancer.events
    assert isinstance(note, Note)
    assert note.text.startswith("worker 2: measured time")


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_the_sum_is_kept_under_any_times(data: st.DataObject) -> None:
    total, minimum = data.draw(st.integers(8, 60)), data.draw(st.integers(1, 2))
    balancer = Balancer([Joined(worker, line=LinearTime(1e-3, 1e-3)) for worker in range(3)], total, SharePolicy(minimum))
    times = st.one_of(st.floats(1e-9, 1e9), st.sampled_from([math.nan, -1.0, math.inf, 1e-320]))
    for step in range(25):
        balancer.copy().decide(step, [Measurement(0, balancer.shares[0], 1e3)])
        balancer.decide(step, [Measurement(worker, share, data.draw(times)) for worker, share in balancer.shares.items()])
        assert sum(balancer.shares.values()) == total
        assert min(balancer.shares.values()) >= minimum


@pytest.mark.parametrize("call", [
    lambda: SharePolicy(minimum=0), lambda: SharePolicy(gain_least=math.nan), lambda: Balancer([Joined(0)], 5, shares={0: 4}),
    lambda: Balancer([Joined(0)], 5, shares={0: 4, 7: 1}), lambda: Balancer([Joined(0, cap=1)], 8, SharePolicy(minimum=2)),
])
def test_invalid_arguments(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"\[E-SHARES-ARGUMENT\]$"):
        call()
