"""Uneven times and the search that is measured on them: exact sums, what it finds, and when the lines are given up."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from bench.balance_unmodelled import BATCH, KINDS, LINES, POLICY
from bench.reference.balance_cluster import PlayedCluster, Unevenness, run
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
