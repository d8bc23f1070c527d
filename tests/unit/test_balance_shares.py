"""Shares against exhaustive search, the paper's fixture, and what is refused."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.balancing import PAPER, PAPER_MS, best_by_search

from commlayer import balance
from commlayer.balance import Communication, Cubic, Line, Piecewise, shares, solve
from commlayer.balance.time_models import Accumulated, TimeModel, as_model, rising

numbers = st.floats(0.01, 10, allow_nan=False)
lines = st.builds(Line, numbers, st.floats(0, 40))


@st.composite
def curves(draw: st.DrawFn) -> Piecewise:
    """Rising, convex or not, with flat pieces."""
    steps = draw(st.lists(st.tuples(st.integers(1, 5), st.sampled_from([0.0, 0.5, 1.0, 7.0])), min_size=1, max_size=4))
    batches, times = [1.0], [draw(numbers)]
    for wide, high in steps:
        batches.append(batches[-1] + wide)
        times.append(times[-1] + high)
    return Piecewise(tuple(batches), tuple(times))


def test_the_papers_four_gpus_stand_at_their_integer_optimum() -> None:
    found = solve(PAPER, 512)
    assert found.shares == (166, 167, 159, 20)
    assert found.makespan_s == pytest.approx(0.104408)
    assert shares(PAPER_MS, 512) == [166, 167, 159, 20], "the unit of time does not matter, pairs are lines"
    without = solve(PAPER, 512, [None, None, None, 0])
    assert without.makespan_s == pytest.approx(0.10813, rel=2e-3)
    assert without.shares[3] == 0


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(lines, curves()), min_size=1, max_size=4), st.integers(1, 14), st.integers(1, 3), st.data())
def test_no_vector_is_faster(models: list[TimeModel], total: int, minimum: int, data: st.DataObject) -> None:
    caps = data.draw(st.lists(st.integers(0, 14), min_size=len(models), max_size=len(models)))
    room = [min(cap, total) for cap in caps]
    able = [cap for cap in room if cap >= minimum]
    if not able or total < minimum * len(able) or sum(able) < total:
        return
    found = solve(models, total, caps, minimum=minimum, accumulate="never")
    assert sum(found.shares) == total
    assert all(share == 0 or minimum <= share <= cap for share, cap in zip(found.shares, caps, strict=True))
    assert found.makespan_s == pytest.approx(best_by_search(models, total, [(minimum, cap) for cap in room]), rel=1e-9)


@settings(max_examples=100, deadline=None)
@given(st.lists(lines, min_size=1, max_size=4), st.integers(4, 10), numbers, st.floats(0, 1), st.data())
def test_no_set_is_cheaper_with_communication(
    models: list[Line], total: int, per_worker_s: float, overlap: float, data: st.DataObject
) -> None:
    slow = data.draw(st.integers(0, len(models) - 1))

    def seconds(active: tuple[int, ...]) -> float:
        return per_worker_s * (len(active) - 1) + (20.0 if slow in active else 0.0)

    communication = Communication(seconds, overlap)
    found = solve(models, total, communication=communication)

    def cost(active: tuple[int, ...], makespan: float) -> float:
        return makespan + communication.exposed_s(active, makespan)

    assert sum(found.shares) == total
    assert found.iteration_s == pytest.approx(best_by_search(models, total, [(1, total)] * len(models), cost), rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.lists(lines, min_size=1, max_size=3), st.integers(3, 12), st.data())
def test_micro_batches_are_exact_too(models: list[Line], total: int, data: st.DataObject) -> None:
    caps = data.draw(st.lists(st.integers(1, 4), min_size=len(models), max_size=len(models)))
    found = solve(models, total, caps, accumulate="always")
    made = [Accumulated(model, cap) for model, cap in zip(models, caps, strict=True)]
    assert found.makespan_s == pytest.approx(best_by_search(made, total, [(1, total)] * len(models)), rel=1e-9)
    assert all(pieces == -(-share // cap) for pieces, share, cap in zip(found.micro_batches, found.shares, caps, strict=True))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([24, 25, 60, 300]))
def test_many_workers_as_few(seed: int, workers: int) -> None:
    """The vectorised way and the plain one give the same makespan; and no single move of a sample improves it."""
    draw = random.Random(seed)
    models = [Line(draw.choice([0.3, 1, 3, 9]) * draw.uniform(0.9, 1.1), draw.uniform(0, 60)) for _ in range(workers)]
    caps = [draw.choice([None, 40, 200]) for _ in models]
    total = 30 * workers
    found = solve(models, total, caps)
    plain = solve([Piecewise((1.0, 2.0), (model.time_s(1), model.time_s(2))) for model in models], total, caps)
    assert sum(found.shares) == sum(plain.shares) == total
    assert found.makespan_s == pytest.approx(plain.makespan_s, rel=1e-9)
    for model, share, cap in zip(models, found.shares, caps, strict=True):
        if share < (cap or total):
            assert model.time_s(share + 1 if share else 1) >= found.makespan_s * (1 - 1e-9) or share == 0
    if seed % 3 == 0:
        late = solve([*models, Line(1.0, 1e5)], total, [*caps, None])
        assert late.shares == (*found.shares, 0)


def test_many_sets_with_communication_are_searched_by_moves() -> None:
    """Twelve workers, three behind a slow link: those are left out, one at a time, whoever they are."""
    models = [Line(1.0 + i / 50, 5.0) for i in range(12)]
    slow = {2, 5, 11}
    found = solve(models, 600, communication=Communication(lambda active: 100.0 * len(slow & set(active))))
    assert {i for i, share in enumerate(found.shares) if not share} == slow
    hidden = solve(models, 600, communication=Communication(lambda active: 20.0 if slow & set(active) else 0.0, overlap=0.9))
    assert all(hidden.shares), "what the compute hides costs nothing"


def test_a_worker_that_starts_late_is_left_out_unless_kept() -> None:
    models = [Line(1.0), Line(1.0), Line(1.0, 100.0)]
    assert shares(models, 20) == [10, 10, 0]
    assert solve(models, 20, keep=[2]).shares == (10, 9, 1)
    assert solve(models, 20, exclude=False, minimum=2).shares == (9, 9, 2)


def test_batch_norm_never_sees_one_sample() -> None:
    models = [Line(1.0), Line(6.0, 1.0)]
    assert shares(models, 8) == [7, 1]
    assert shares(models, 8, minimum=2) == [8, 0], "two would hold the first up longer than its own six"


def test_caps_below_the_total_become_micro_batches() -> None:
    found = solve(PAPER, 512, [64, 64, 64, 8])
    assert sum(found.shares) == 512
    assert found.micro_batches == tuple(-(-share // cap) for share, cap in zip(found.shares, [64, 64, 64, 8], strict=True))
    with pytest.raises(ValueError, match=r"caps\b.*\b200\b.*total 512\b.*E-SHARES-ARGUMENT"):
        solve(PAPER, 512, [64, 64, 64, 8], accumulate="never")


def test_curves_that_dip_are_made_rising() -> None:
    dip = rising(lambda batch: 5.0 if batch == 3 else 1.0 + batch / 10, 8)
    assert [dip.time_s(b) for b in (2, 3, 4, 8)] == pytest.approx([1.2, 5.0, 5.0, 5.0])
    assert dip.within(4.9) < 3
    assert shares([Cubic(0, 0, 1, 0), lambda batch: 2.0 * batch], 9) == [6, 3]
    wide = as_model(lambda batch: batch * 1.0, 100_000)
    assert wide.time_s(77_777.5) == pytest.approx(77_777.5)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: shares([], 4), "shares: .*no model.*E-SHARES"),
        (lambda: shares(PAPER, 0), r"total 0\b.*E-SHARES"),
        (lambda: shares(PAPER, 8, [1, 2]), r"\b2 caps for 4 models.*E-SHARES"),
        (lambda: shares(PAPER, 8, [0, 0, 0, 0]), r"cap is 0\b.*E-SHARES"),
        (lambda: shares(PAPER, 8, [1, 1, 1, 1], minimum=2), r"cap is 1\b.*minimum batch 2\b.*E-SHARES"),
        (lambda: shares(PAPER, 3), r"total 3\b.*\b4 workers\b.*minimum batch 1\b.*E-SHARES"),
        (lambda: shares(PAPER, 8, [4, -1, 4, 4]), "cap of worker 1: .*-1.*E-SHARES"),
        (lambda: shares([*PAPER, 3.0], 8), r"model of worker 4: .*3\.0.*E-TIME-MODEL"),  # type: ignore[list-item]
        (lambda: Line(float("nan"), 1.0), "slope nan.*E-TIME-MODEL"),
        (lambda: Line(-1.0, 1.0), r"slope -1\.0.*E-TIME-MODEL"),
        (lambda: Piecewise((1.0, 2.0), (3.0, 1.0)), "times must not fall.*E-TIME-MODEL"),
        (lambda: Piecewise((1.0,), (3.0,)), "at least 2.*E-TIME-MODEL"),
        (lambda: Piecewise((2.0, 1.0), (1.0, 3.0)), "batches must rise.*E-TIME-MODEL"),
        (lambda: Piecewise((1.0, 2.0), (1.0, float("inf"))), "not finite.*E-TIME-MODEL"),
    ],
)
def test_mistakes_are_one_line(call: object, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        call()  # type: ignore[operator]
    assert "\n" not in str(caught.value)


def test_names_are_what_they_say_whatever_was_loaded_before() -> None:
    """A module of a public name's name would stand in its place as soon as it is loaded."""
    modules = {path.stem for path in Path(balance.__file__).parent.glob("*.py")}
    assert modules & set(balance.__all__) == set()
