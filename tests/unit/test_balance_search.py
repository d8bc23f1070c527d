"""Uneven times and the search that is measured on them: exact sums, what it finds, and when the lines are given up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.balance_unmodelled import BATCH, KINDS, LINES, POLICY, gains
from bench.reference.balance_cluster import PlayedCluster, Unevenness, oracle_s, run
from bench.reference.balance_search import MOST, OursThenSearch, Simplex, Split
from commlayer.balance import solve


def slowest_s(split: Split) -> float:
    return max(line.time_s(share) for line, share in zip(LINES, split, strict=True))


def drive(simplex: Simplex, cost: Callable[[Split], float]) -> list[Split]:
    """The splits that it asked for."""
    results = []
    while not simplex.done:
        results.append(simplex.ask())
        simplex.tell(cost(results[-1]))
    return results


def test_a_batch_is_worth_whole_waves_and_more_beyond_its_room() -> None:
    assert [Unevenness(32).worth(batch) for batch in (1, 32, 33)] == [32, 32, 64]
    assert [Unevenness(1, 100, 6.0).worth(batch) for batch in (100, 101, 110)] == [100, 106, 160]


def test_the_oracle_knows_the_stairs() -> None:
    exact = PlayedCluster(LINES, BATCH, uneven=KINDS["stairs of 32 samples"])
    best_s = oracle_s(exact, 0)
    assert best_s > solve(LINES, BATCH).makespan_s
    assert best_s == pytest.approx(max(exact.compute_s(w, share, 0) for w, share in enumerate((160, 192, 96, 64))))


def test_the_search_finds_what_lines_would_and_ends_on_the_best() -> None:
    simplex = Simplex([128] * 4)
    request = drive(simplex, slowest_s)
    assert len(request) <= MOST
    assert len(set(request)) > 20
    assert simplex.ask() == min(request, key=slowest_s)
    assert slowest_s(simplex.ask()) < 1.02 * solve(LINES, BATCH).makespan_s
    simplex.tell(1e-9)
    assert simplex.ask() == min(request, key=slowest_s), "after its end nothing is learnt"


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=2, max_size=5), st.integers(0, 1000))
def test_every_split_has_the_sum_and_leaves_nobody_out(start: list[int], seed: int) -> None:
    simplex = Simplex(start)
    for turn in range(12):
        assert sum(simplex.ask()) == sum(start)
        assert min(simplex.ask()) >= 1
        simplex.tell(1.0 + (seed * (turn + 7)) % 13)


def test_missed_outcomes_begin_the_search_and_lines_that_hold_do_not() -> None:
    def turned(kind: str) -> bool:
        cluster = PlayedCluster(LINES, BATCH, noise=0.01, uneven=KINDS[kind])
        mode = OursThenSearch(cluster, POLICY)
        steps = run(mode, cluster, 600)
        assert all(sum(step.shares) == BATCH for step in steps)
        return mode.simplex is not None

    assert turned("stairs of 32 samples")
    assert not turned("lines, with heat"), "here without its heat"


def test_gains_are_those_over_ours_by_scenario() -> None:
    modes = ("ours", "ours, Nelder-Mead from step 40", "ours, Nelder-Mead after two missed outcomes")
    times = {"a": (100.0, 90.0, 101.0), "b": (50.0, 55.0, 50.0)}
    rows = [{"scenario": kind, "mode": mode, "iteration_ms": ms} for kind, each in times.items()
            for mode, ms in zip(modes, each, strict=True)]
    assert gains(rows) == pytest.approx({"search_gain_pct_min": -10, "search_gain_pct_max": 10,
                                         "search_if_missed_gain_pct_min": -1, "search_if_missed_gain_pct_max": 0})
