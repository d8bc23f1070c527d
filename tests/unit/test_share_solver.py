"""Shares against exhaustive search, the paper's fixture, and invalid arguments."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.balance import PAPER

from commlayer.balance import LinearTime, Piecewise, shares, solve
from commlayer.balance.time_models import TimeModel, in_pieces_s

numbers = st.floats(0.01, 10, allow_nan=False)
lines = st.builds(LinearTime, numbers, st.floats(0, 40))


@st.composite
def curves(draw: st.DrawFn) -> Piecewise:
    """Rising, convex or not, with flat pieces."""
    steps = draw(st.lists(st.tuples(st.integers(1, 5), st.sampled_from([0.0, 0.5, 1.0, 7.0])), min_size=1, max_size=4))
    batches, times = [1.0], [draw(numbers)]
    for wide, high in steps:
        batches.append(batches[-1] + wide)
        times.append(times[-1] + high)
    return Piecewise(tuple(batches), tuple(times))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(lines, curves()), min_size=1, max_size=4), st.integers(4, 14), st.integers(1, 2), st.data())
def test_no_split_is_faster(models: list[TimeModel], total: int, minimum: int, data: st.DataObject) -> None:
    """Also in micro-batches, of which each pays its launch."""
    minimum = min(minimum, total // len(models))
    caps = data.draw(st.lists(st.integers(minimum, 14), min_size=len(models), max_size=len(models)))
    solution = solve(models, total, caps, minimum=minimum)
    assert sum(solution.shares) == total
    assert min(solution.shares) >= minimum
    pairs = zip(solution.shares, caps, strict=True)
    assert solution.micro_batches == tuple(-(-share // min(cap, total)) for share, cap in pairs)
    vectors = (head for head in itertools.product(range(minimum, total + 1), repeat=len(models)) if sum(head) == total)
    best_s = min(max(in_pieces_s(*one) for one in zip(models, vector, [min(cap, total) for cap in caps], strict=True))
                 for vector in vectors)
    assert solution.makespan_s == pytest.approx(best_s, rel=1e-9)


def test_the_papers_four_gpus_have_their_integer_optimum() -> None:
    solution = solve(PAPER, 512)
    assert solution.shares == (166, 167, 159, 20)
    assert solution.makespan_s == pytest.approx(0.104408)
    little = solve(PAPER, 512, [512, 96, 96, 16])
    assert little.makespan_s == pytest.approx(0.1102856), "micro-batches are faster than what the memories hold at once"


@pytest.mark.parametrize("call", [
    lambda: shares([], 4), lambda: shares(PAPER, 0), lambda: shares(PAPER, 3), lambda: shares(PAPER, 8, [1, 2]),
    lambda: shares(PAPER, 8, [1, 1, 1, 1], minimum=2), lambda: shares(PAPER, 8, [4, -1, 4, 4]),
])
def test_mistakes_are_one_line(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"\[E-SHARES-ARGUMENT\]$") as caught:
        call()
    assert "\n" not in str(caught.value)
