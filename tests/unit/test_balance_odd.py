"""Odd input of balancing: refused in a line, or answered rightly; never a wrong sum, a crash while training or a hang."""

from __future__ import annotations

import math

import pytest

from bench.reference.balance_cluster import PlayedCluster
from bench.reference.balance_relaxed import local_steps, n_soft
from commlayer.balance import Balancer, Communication, Joined, Line, Measurement, Note, Piecewise, Policy, Sampler, shares
from commlayer.balance.assignment import split
from commlayer.balance.share_solver import solve
from commlayer.balance.time_models import InPieces

ONE = Line(1.0, 1.0)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: shares([ONE, ONE], 5.5), r"total 5\.5\b"),  # type: ignore[arg-type]
        (lambda: shares([ONE, ONE], math.nan), "total nan"),  # type: ignore[arg-type]
        (lambda: shares([ONE, ONE], 5, [2.5, None]), r"cap of worker 0\b.*2\.5"),  # type: ignore[list-item]
        (lambda: shares([ONE, ONE], 5, [None, math.nan]), r"cap of worker 1\b.*nan"),  # type: ignore[list-item]
        (lambda: shares([ONE, lambda batch: math.nan], 5), r"worker 1\b.*nan.*E-TIME-MODEL"),
        (lambda: shares([lambda batch: 0.0, ONE], 5), r"worker 0\b.*0\.0.*E-TIME-MODEL"),
        (lambda: solve([ONE, ONE], 5, keep=[7]), r"keep\b.*\b7\b.*0 to 1\b.*E-SHARES"),
        (lambda: solve([ONE, ONE], 5, [0, None], keep=[0]), r"keep\b.*worker 0\b.*cap 0\b"),
        (lambda: solve([ONE, ONE], 5, most={0: 2, 1: 2}), r"\b4\b.*total 5\b.*E-SHARES"),
        (lambda: solve([ONE, ONE], 5, most={0: 0}), r"\b0 for worker 0\b.*minimum"),
        (lambda: solve([ONE, ONE], 5, accumulate="often"), "accumulate.*'often'"),  # type: ignore[arg-type]
        (lambda: solve([ONE] * 3, 9, communication=Communication(lambda _: 1.0, 3.0)), r"overlap 3\.0"),
        (lambda: solve([ONE] * 3, 9, communication=Communication(lambda _: 1.0, math.nan)), "overlap nan"),
        (lambda: solve([ONE] * 3, 9, communication=Communication(lambda _: math.nan)), "workers 0, 1, 2: .*nan"),
        (lambda: Piecewise((math.nan, 2.0), (1.0, 2.0)), "batches.*E-TIME-MODEL"),
        (lambda: Policy(minimum=0), "minimum 0"),
        (lambda: Policy(horizon=0), "horizon 0"),
        (lambda: Policy(gain_least=math.nan), "gain_least nan"),
        (lambda: Balancer([Joined(0, None, ONE)], 5, shares={0: 4}), r"\b4\b.*total.*\b5\b.*E-SHARES"),
        (lambda: Balancer([Joined(0, None, ONE)], 5, shares={0: 4, 7: 1}), r"share of 1 for worker 7\b.*E-SHARES"),
        (lambda: Sampler(100, 8, rank=4, world=4), r"rank 4\b.*0 to 3\b.*E-SAMPLER-ARGUMENT"),
        (lambda: Sampler(100, 8, rank=-1, world=4), "rank -1.*E-SAMPLER-ARGUMENT"),
        (lambda: Sampler(100, 5, rank=0, world=4, least=2), r"batch 5\b.*\b8\b.*\b2\b.*E-SHARES"),
        (lambda: n_soft(PlayedCluster((ONE,) * 5, 3), 5, 1), "total 3 is less than 5 workers"),
        (lambda: n_soft(PlayedCluster((ONE,) * 2, 4), 5, 0), "n: got 0"),
        (lambda: local_steps(PlayedCluster((ONE,) * 2, 4), 5, 0), "every: got 0"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_line(call: object, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        call()  # type: ignore[operator]
    assert "\n" not in str(caught.value)


def test_one_worker_takes_all() -> None:
    assert shares([ONE], 7) == [7]
    found = solve([ONE], 7, [3], communication=Communication(lambda active: float(len(active))))
    assert (found.shares, found.micro_batches, found.iteration_s) == ((7,), (3,), 11.0)
    assert Balancer([Joined(4, None, None)], 7).shares == {4: 7}


@pytest.mark.parametrize("workers", [1, 2, 7, 23, 24, 40])
def test_equal_workers_share_equally(workers: int) -> None:
    for total in (workers, 2 * workers + 1, 10 * workers - 1):
        got = shares([ONE] * workers, total)
        assert sum(got) == total
        assert max(got) - min(got) <= 1


def test_a_batch_smaller_than_the_number_of_workers_leaves_workers_out() -> None:
    assert sorted(Balancer([Joined(worker, None, ONE) for worker in range(9)], 5).shares.values()) == [1] * 5


@pytest.mark.parametrize("minimum", [1, 2])
def test_caps_of_nothing_leave_out(minimum: int) -> None:
    assert shares([ONE] * 30, 58, [0, minimum - 1, *[None] * 28], minimum=minimum)[:2] == [0, 0]


def test_time_that_does_not_depend_on_the_share_is_no_endless_search() -> None:
    for workers in (2, 30):
        got = shares([Line(0.0, 1.0)] * workers, 10**15)
        assert sum(got) == 10**15
    assert shares([Line(0.0, 1.0), Line(1e-9, 1.0)], 10**9) == [10**9, 0]


def test_no_set_that_can_communicate_is_missed() -> None:
    """A set's price may be infinite: these cannot reach each other."""
    found = solve([ONE] * 9, 90, communication=Communication(lambda active: math.inf if {3, 5} & set(active) else 1.0))
    assert found.active == (0, 1, 2, 4, 6, 7, 8)
    assert solve([ONE] * 9, 90, communication=Communication(lambda _: math.inf)).iteration_s == math.inf


@pytest.mark.parametrize(("model", "batch", "time_s"), [
    (Piecewise((10.0, 20.0), (1.0, 7.0)), 8, 0.8),  # its first line begins below zero
    (Piecewise((10.0, 20.0), (1.0, 2.0)), 8, 0.8),
    (Piecewise((10.0, 20.0), (5.0, 7.0)), 8, 4.6),
    (Piecewise((8.0, 16.0), (1.0, 1.0)), 32, 2.0),  # nobody saw it compute more in no time
    (Piecewise((8.0, 16.0), (1.0, 1.5)), 32, 2.5),
])
def test_beyond_what_was_measured_nothing_takes_no_time(model: Piecewise, batch: int, time_s: float) -> None:
    assert model.time_s(batch) == pytest.approx(time_s)
    assert model.within(time_s) == pytest.approx(batch)


CURVES = [
    Piecewise((1.0, 50.0, 100.0), (50.0, 50.0, 100.0)),  # launches bound it up to 50 samples
    Piecewise((1.0, 60.0, 100.0), (2.0, 20.0, 200.0)),  # it swaps above 60
    Piecewise((1.0, 20.0, 100.0), (10.0, 90.0, 100.0)),
]


@pytest.mark.parametrize("curve", CURVES)
def test_a_curve_in_pieces_is_inverted_exactly(curve: Piecewise) -> None:
    for cap in (1, 3, 40, 100):
        made = InPieces(curve, cap)
        times = [made.time_s(batch) for batch in range(1, 260)]
        assert times == sorted(times)
        for batch, time_s in enumerate(times, 1):
            if batch < 259 and times[batch] > time_s * (1 + 1e-9):
                assert int(made.within(time_s * (1 + 1e-10))) == batch


@pytest.mark.parametrize("curve", CURVES)
def test_micro_batches_are_timed_as_they_are_cut(curve: Piecewise) -> None:
    """As equal as can be; of shares of which a larger one takes less time the time is that of the larger."""
    found = solve([curve], 137, [100])
    assert found.makespan_s >= sum(curve.time_s(part) for part in split(137, 100)) * (1 - 1e-12)
    two = solve([curve, Line(10.0)], 110, [100, None])
    best = min(max(sum(curve.time_s(part) for part in split(110 - rest, 100)), 10.0 * rest) for rest in range(1, 110))
    assert two.makespan_s <= max(best, curve.time_s(100), sum(curve.time_s(part) for part in split(110, 100))) * (1 + 1e-12)
    assert two.makespan_s >= best * (1 - 1e-12)


@pytest.mark.parametrize(("long_s", "short_s"), [(1e300, 1e-300), (1e200, 1e-12), (3.0, 1e-320), (1e9, 1e-12)])
def test_times_of_a_broken_clock_end_no_training(long_s: float, short_s: float) -> None:
    balancer = Balancer([Joined(0), Joined(1)], 10)
    for step in range(12):
        times = [long_s, short_s] if step % 5 < 3 else [0.01, 0.01]
        balancer.decide(step, [Measurement(w, share, times[w]) for w, share in balancer.shares.items() if share])
        assert sum(balancer.shares.values()) == 10
    if long_s > 1e9:
        assert any(isinstance(event, Note) and "worker 0: measured time" in event.text for event in balancer.events)
