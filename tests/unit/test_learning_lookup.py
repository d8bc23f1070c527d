"""The lookup of convergence factors: monotone, exact where they were measured, cautious elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commlayer.planner.convergence import ALONE, NONE, Excess, LearningRow, Recipe, alone, excess
from commlayer.planner.tables import rows as shipped_rows


def row(codec: str, steps: float = 0.0, *, high: float | None = None, loss: float = 0.0, **fields: Any) -> LearningRow:
    """A row with that excess: by default of Adam with an exchange after every step."""
    recipe = {"optimizer": "adam", "codes": "gradients", "every": 1, "overlap": "", "late": False, "workers": 0} | fields
    return LearningRow(codec=codec, steps=1 + steps, steps_high=1 + (steps if high is None else high), loss=loss,
                       loss_high=loss, tasks=5, runs=5, **recipe)


TABLE = (
    row("int4()", 0.02), row("onebit()", 0.2), row("topk(ratio=0.1)", 0.1), row("topk(ratio=0.01)", 0.5),
    row("topk(ratio=0.001)", 2.0), row("powersgd(rank=4)", 0.3),
    row("identity()", 0.05, codes="updates", every=4), row("int4()", 0.1, codes="updates"),
    row("int4()", 0.2, codes="updates", every=4), row("int4()", 0.8, codes="updates", every=16),
    row("topk(ratio=0.01)", 0.3, codes="updates"), row("topk(ratio=0.01)", 0.4, codes="updates", every=4),
    row("int4()", 0.5, codes="updates", every=4, overlap="round"), row("int4()", 0.1, late=True),
    row("int4()", 0.01, optimizer="sgd"), row("topk(ratio=0.01)", 0.7, optimizer="sgd"),
)
CODECS = ("identity()", "fp16()", "bf16()", "int8()", "int4()", "onebit()", "qsgd()",
          "topk(ratio={})", "randomk(ratio={})", "block_threshold(ratio={})", "powersgd(rank=2)",
          "powersgd(rank=32)", "error_feedback(topk(ratio={}, values='int4'))")
RATIOS = st.floats(1e-5, 1.0)
RECIPES = st.builds(Recipe, st.sampled_from(["sgd", "adam", "other", ""]), st.sampled_from(["gradients", "updates"]),
                    st.integers(1, 64), st.sampled_from(["", "round", "forward"]), st.booleans(), st.sampled_from([2, 3, 4, 8]))
ROWS = st.lists(st.builds(
    lambda codec, ratio, steps, more, loss, **fields: row(codec.format(ratio), steps, high=steps + more, loss=loss, **fields),
    st.sampled_from(CODECS), st.sampled_from([0.3, 0.1, 0.01, 0.001]), st.floats(0, 3), st.floats(0, 1), st.floats(0, 1),
    optimizer=st.sampled_from(["sgd", "adam"]), codes=st.sampled_from(["gradients", "updates"]),
    every=st.sampled_from([1, 2, 4, 16]), overlap=st.sampled_from(["", "round"]), late=st.booleans(),
    workers=st.sampled_from([0, 2, 4, 8]),
), min_size=1, max_size=25).map(tuple)


def test_measured_factors_are_returned_as_measured() -> None:
    for one in TABLE:
        result = excess(TABLE, one.codec, Recipe(one.optimizer, one.codes, one.every, one.overlap, one.late))
        assert result == pytest.approx((one.steps - 1, one.steps_high - 1, one.loss, one.loss_high)), one


EIGHT = (*TABLE, row("int4()", 0.01, workers=8))
NOISY = (row("topk(ratio=0.1)", 0.4), row("topk(ratio=0.01)", 0.3))


@pytest.mark.parametrize(("rows", "codec", "recipe", "steps"), [
    (TABLE, "identity()", Recipe(), 0.0), (TABLE, "fp16()", Recipe(), 0.0), (TABLE, "error_feedback(fp16())", Recipe(), 0.0),
    ((), "topk(ratio=0.001)", Recipe(every=16), 0.0),
    # On a line over the logarithm of the ratio; a ratio of 1 is dense, and factors rise below the smallest ratio.
    (TABLE, "topk(ratio=0.001)", Recipe(), 2.0), (TABLE, f"topk(ratio={10 ** -2.5})", Recipe(), (0.5 + 2.0) / 2),
    (TABLE, "topk(ratio=1.0)", Recipe(), 0.0), (TABLE, f"topk(ratio={10 ** -0.5})", Recipe(), 0.05),
    (TABLE, "topk(ratio=0.0001)", Recipe(), 3.5),
    # On a line over the logarithm of local steps.
    (TABLE, "int4()", Recipe(every=8), 0.5), (TABLE, "int4()", Recipe(every=64), 1.4),
    # Kinds of values and error feedback do not matter.
    (TABLE, "error_feedback(topk(ratio=0.01, values='int4'))", Recipe(), 0.5),
    (TABLE, "topk(ratio=0.01, exact=True)", Recipe(), 0.5),
    # Local steps and overlapped outer steps always exchange updates; the forward overlap costs nothing.
    (TABLE, "int4()", Recipe(every=4), 0.2), (TABLE, "int4()", Recipe(codes="updates", every=4), 0.2),
    (TABLE, "int4()", Recipe(every=4, overlap="round"), 0.5), (TABLE, "onebit()", Recipe(overlap="forward"), 0.2),
    # Another optimizer has the worse factor of both.
    (TABLE, "topk(ratio=0.01)", Recipe("other"), 0.7), (TABLE, "int4()", Recipe("other"), 0.02),
    # Without measurements: that of the worst related codec.
    (TABLE, "qsgd(levels=1)", Recipe(), 0.2),  # of dense codecs: onebit
    (TABLE, "int8()", Recipe(), 0.02),  # at most that of a coarser dense codec: int4
    (TABLE, "int8()", Recipe(every=4), 0.2),
    (TABLE, "randomk(ratio=0.001)", Recipe(), 2.0),  # of sparse ones at the same ratio
    (TABLE, "onebit()", Recipe(late=True), 1.2 * 1.1 / 1.02 - 1),  # as much worse as int4 is
    (TABLE, "topk(ratio=0.01)", Recipe(every=16), 1.4 * 1.8 / 1.2 - 1),  # as much worse than at 4 steps as int4 is
    # Rows of as many workers go before the worst.
    (EIGHT, "int4()", Recipe(workers=8), 0.01), (EIGHT, "int4()", Recipe(workers=4), 0.02),
    # Noise: a smaller ratio never has a smaller factor, and no factor is below one.
    (NOISY, "topk(ratio=0.01)", Recipe(), 0.4), ((row("int8()", -0.05, loss=-0.01),), "int8()", Recipe(), 0.0),
])
def test_factors_between_and_beyond_measurements(
    rows: tuple[LearningRow, ...], codec: str, recipe: Recipe, steps: float,
) -> None:
    result = excess(rows, codec, recipe)
    assert result.steps == pytest.approx(steps, abs=1e-12)
    assert steps or result == NONE == Excess(0.0, 0.0, 0.0, 0.0)


def test_one_machine_alone_has_rows_of_its_own_and_loses_more_against_more_workers() -> None:
    table = (*TABLE, row("identity()", 0.9, workers=ALONE), row("identity()", 2.0, workers=ALONE, optimizer="sgd"))
    for codec, recipe in (("int4()", Recipe(workers=1)), ("identity()", Recipe(workers=1)), ("identity()", Recipe("sgd"))):
        assert excess(table, codec, recipe) == excess(TABLE, codec, recipe)
    # An unknown optimizer: the smallest, which plans have to beat. Without rows: unknown.
    for rows, optimizer, workers, factor in ((table, "adam", 4, 1.9), (table, "sgd", 4, 3.0), (table, "", 4, 1.9),
                                             (table, "adam", 16, 1.9**2), (table, "adam", 1, 1.0), (TABLE, "adam", 4, 0.0)):
        assert alone(rows, optimizer, workers) == pytest.approx(factor)


@given(ROWS, st.sampled_from(CODECS), RATIOS, RATIOS, RECIPES, st.integers(1, 64))
def test_it_is_monotone_in_the_ratio_and_in_local_steps(
    rows: tuple[LearningRow, ...], codec: str, a: float, b: float, recipe: Recipe, every: int,
) -> None:
    easy = excess(rows, codec.format(max(a, b)), recipe._replace(every=min(every, recipe.every)))
    hard = excess(rows, codec.format(min(a, b)), recipe._replace(every=max(every, recipe.every)))
    if min(every, recipe.every) == 1 < max(every, recipe.every):  # one step may code gradients, which is another thing
        easy = excess(rows, codec.format(max(a, b)), recipe._replace(every=1, codes="updates"))
    assert all(0 <= e <= h + 1e-9 for e, h in zip(easy, hard, strict=True))
    assert easy.high >= easy.steps
    assert easy.loss_high >= easy.loss


SPARSE_RATIOS, STEPS_APART = (1.0, 0.1, 0.03, 0.01, 1e-4), (1, 2, 4, 16)


@pytest.mark.parametrize("codec", ["topk(ratio={})", "randomk(ratio={})", "int4()", "onebit()"])
def test_the_shipped_table_is_monotone(codec: str) -> None:
    for optimizer in ("sgd", "adam", ""):
        for where in ({}, {"overlap": "round"}, {"late": True}):
            assert_monotone(shipped_rows(), codec, Recipe(optimizer, "updates", **where))


def assert_monotone(rows: tuple[LearningRow, ...], codec: str, recipe: Recipe) -> None:
    """From each point to the next harder one in either way."""
    results = {(r, every): excess(rows, codec.format(r), recipe._replace(every=every))
             for r in SPARSE_RATIOS for every in STEPS_APART}
    for (r, every), hard in results.items():
        easier = [*[results[e, every] for e in SPARSE_RATIOS if e > r][-1:],
                  *[results[r, e] for e in STEPS_APART if e < every][-1:]]
        for other in easier:
            assert all(o <= h + 1e-9 for o, h in zip(other, hard, strict=True)), (r, every, other, hard, rows)


@given(ROWS)
def test_nothing_is_cheaper_than_it_was_measured(rows: tuple[LearningRow, ...]) -> None:
    for one in rows:
        recipe = Recipe(one.optimizer, one.codes, one.every, one.overlap, one.late, one.workers)
        result = excess(rows, one.codec, recipe)
        if excess((one,), one.codec, recipe) != NONE and (one.workers or all(r.workers == 0 for r in rows)):
            assert result.steps >= one.steps - 1 - 1e-9
            assert result.high >= one.steps_high - 1 - 1e-9
            assert result.loss >= one.loss - 1e-9


@given(ROWS, RECIPES.map(lambda r: r._replace(codes="gradients", every=1, overlap="", late=False)))
def test_identity_is_zero_in_every_table(rows: tuple[LearningRow, ...], recipe: Recipe) -> None:
    assert excess(rows, "identity()", recipe) == NONE == excess(rows, "fp16()", recipe)
