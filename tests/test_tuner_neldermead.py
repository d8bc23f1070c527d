"""Nelder-Mead over splits of a batch: sums and caps always, better where there is something to gain, harmless where not."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.reference.neldermead import Simplex

LINES_MS = [(0.5931, 5.90), (0.5808, 7.15), (0.6023, 8.29), (2.6714, 50.98)]
"""The four GPUs of the LBB paper: slope per sample, intercept. The integer optimum at 512 is 104.41 ms."""


def slowest(split: tuple[int, ...], lines: list[tuple[float, float]]) -> float:
    return max((a * b + c) / 1e3 for (a, c), b in zip(lines, split, strict=True) if b)


def drive(simplex: Simplex, lines: list[tuple[float, float]], *, noise: float = 0.0, seed: int = 0, most: int = 400) -> int:
    """Steps until it is done."""
    rng = random.Random(seed)
    for step in range(most):
        if simplex.done:
            return step
        simplex.tell(slowest(simplex.ask(), lines) * (1 + noise * rng.gauss(0, 1)))
    return most


def test_finds_most_of_what_there_is_in_the_papers_fixture() -> None:
    simplex = Simplex([128, 128, 128, 128])
    steps = drive(simplex, LINES_MS)
    assert simplex.done
    assert steps < 200
    assert slowest(simplex.ask(), LINES_MS) < 0.130  # equal batches: 0.393


@pytest.mark.parametrize("seed", range(5))
def test_harmless_from_the_optimum_under_noise(seed: int) -> None:
    start = (166, 167, 159, 20)
    simplex = Simplex(start)
    drive(simplex, LINES_MS, noise=0.02, seed=seed)
    assert simplex.done
    assert slowest(simplex.ask(), LINES_MS) <= 1.05 * slowest(start, LINES_MS)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_split_has_the_sum_and_keeps_the_caps(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 6))
    least = data.draw(st.integers(1, 2))
    start = data.draw(st.lists(st.one_of(st.just(0), st.integers(least, 60)), min_size=n, max_size=n).filter(any))
    caps = [share + data.draw(st.integers(0, 40)) for share in start]
    lines = [(data.draw(st.floats(0.1, 5)), data.draw(st.floats(0, 50))) for _ in start]
    simplex = Simplex(start, caps=caps, least=least)
    for _ in range(60):
        split = simplex.ask()
        assert sum(split) == sum(start)
        assert all((s == 0) == (b == 0) and (b == 0 or least <= b <= cap) for s, b, cap in zip(start, split, caps, strict=True))
        if simplex.done:
            break
        simplex.tell(slowest(split, lines) * (1 + 0.05 * data.draw(st.floats(-1, 1))))
    assert simplex.ask() == simplex.ask()


def test_no_gain_means_the_start() -> None:
    simplex = Simplex([30, 30, 30])
    rng = random.Random(1)
    while not simplex.done:
        simplex.tell(1.0 + 0.001 * rng.random())
    assert simplex.ask() == (30, 30, 30)
    assert simplex.reason


@pytest.mark.parametrize(("make", "text"), [
    (lambda: Simplex([3, 1], least=2), r"shares \[3, 1\]: allowed is 0, or 2 up to the caps"),
    (lambda: Simplex([9, 3], caps=[8, 8]), r"shares \[9, 3\]: allowed is 0, or 1 up to the caps \[8, 8\]"),
    (lambda: Simplex([9, 3]).tell(float("nan")), "seconds nan: allowed is a finite number above 0"),
])
def test_misuse_is_one_line(make: object, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()  # type: ignore[operator]
