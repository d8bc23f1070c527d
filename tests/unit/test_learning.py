"""Convergence factors: the lookup, the curves behind them, and a user's own table."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import commlayer
from bench import own_learning
from bench.learning.factors import (
    LEAST_TASKS,
    MOST,
    Cost,
    cost,
    costs,
    shared_rows,
)
from bench.virtual_training import LOOKS, STEPS, Variant
from commlayer.cli.main import run
from commlayer.codec_spec import parse_spec
from commlayer.config import Config
from commlayer.engine.start.plan_choice import resolve_plan
from commlayer.errors import InvalidInput, RecordError, find_error_code
from commlayer.plan_file import read_plan_inputs
from commlayer.planner import builtin
from commlayer.planner.convergence import (
    ALONE,
    LONG_NUMEL,
    MUON,
    NONE,
    Excess,
    LearningRow,
    Recipe,
    excess,
    late_allowed,
    local_step_excess,
    one_worker_factor,
    steps_alone,
)
from commlayer.planner.data import tables
from commlayer.planner.data.tables import LearningTable, Provenance, encoded_table, read_table
from commlayer.planner.data.tables import learning_rows as shipped_rows


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
MODEL_SIZES = (0, 200_000, 20_000_000, 5_000_000_000)
"""Parameters: as few as the measured models have, between them and the published ones, published, and beyond."""
RECIPES = st.builds(
    Recipe, st.sampled_from(["sgd", "adam", "muon", "lion", "other", ""]), st.sampled_from(["gradients", "updates"]),
    st.integers(1, 64), st.sampled_from(["", "round", "forward"]), st.booleans(), st.sampled_from([2, 3, 4, 8]),
    st.sampled_from([1, 4]), st.sampled_from(MODEL_SIZES))
ROWS = st.lists(st.builds(
    lambda codec, ratio, steps, more, loss, **fields: row(codec.format(ratio), steps, high=steps + more, loss=loss, **fields),
    st.sampled_from(CODECS), st.sampled_from([0.3, 0.1, 0.01, 0.001]), st.floats(0, 3), st.floats(0, 1), st.floats(0, 1),
    optimizer=st.sampled_from(["sgd", "adam"]), codes=st.sampled_from(["gradients", "updates"]),
    every=st.sampled_from([1, 2, 4, 16]), overlap=st.sampled_from(["", "round"]), late=st.booleans(),
    workers=st.sampled_from([0, 2, 4, 8]),
), min_size=1, max_size=25).map(tuple)


def test_measured_factors_are_returned_unchanged() -> None:
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
    (TABLE, "topk(ratio=0.01)", Recipe("muon"), 0.7),
    # Lion has that of Adam, until it is measured.
    (TABLE, "topk(ratio=0.01)", Recipe("lion"), 0.5),
    ((*TABLE, row("int4()", 0.3, optimizer="lion")), "int4()", Recipe("lion"), 0.3),
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
def test_factors_are_interpolated_and_extrapolated(
    rows: tuple[LearningRow, ...], codec: str, recipe: Recipe, steps: float,
) -> None:
    result = excess(rows, codec, recipe)
    assert result.steps == pytest.approx(steps, abs=1e-12)
    assert steps or result == NONE == Excess(0.0, 0.0, 0.0, 0.0)


def test_single_machine_has_its_own_rows_and_loses_more_to_more_workers() -> None:
    table = (*TABLE, row("identity()", 0.9, workers=ALONE), row("identity()", 2.0, workers=ALONE, optimizer="sgd"))
    for codec, recipe in (("int4()", Recipe(workers=1)), ("identity()", Recipe(workers=1)), ("identity()", Recipe("sgd"))):
        assert excess(table, codec, recipe) == excess(TABLE, codec, recipe)
    # An unknown optimizer: the smallest, which plans have to beat. Without rows: unknown.
    for known, optimizer, workers, factor in ((table, "adam", 4, 1.9), (table, "sgd", 4, 3.0), (table, "", 4, 1.9),
                                              (table, "lion", 4, 1.9), (table, "muon", 4, 1.9),
                                              (table, "adam", 16, 2.452), (table, "adam", 1, 1.0), (TABLE, "adam", 4, 0.0)):
        assert one_worker_factor(known, optimizer, workers) == pytest.approx(factor, abs=1e-3)
    # A noise scale of as many batches as workers halves what they save; a large one leaves them all.
    for noise, workers, factor in ((4.0, 4, 2.5), (1.0, 2, 4 / 3), (1e9, 8, 8.0)):
        own = one_worker_factor(table, "adam", workers, noise)
        assert own == one_worker_factor(TABLE, "", workers, noise) == pytest.approx(factor)


@pytest.mark.parametrize(("numel", "workers", "every", "low", "high"), [
    # 2503.09799 at 30 local steps: 1.15, 1.51, 2.2 at 35 M; 1.25 at 180 M; 1.06 at 2.4 B.
    (35e6, 2, 30, 1.05, 1.2), (35e6, 4, 30, 1.25, 1.6), (35e6, 8, 30, 1.7, 2.4), (180e6, 4, 30, 1.15, 1.4),
    (2.4e9, 4, 30, 1.03, 1.25), (124e6, 3, 64, 1.1, 1.45), (350e3, 4, 128, 1.5, 2.4), (7e9, 4, 1, 1.0, 1.1),
])
def test_local_steps_of_large_models_have_the_published_cost(
    numel: float, workers: int, every: int, low: float, high: float,
) -> None:
    result = excess(shipped_rows(), "int4()", Recipe("adam", "updates", every, workers=workers, numel=int(numel)))
    assert low <= 1 + result.steps <= 1 + result.high <= high
    assert 0 <= result.loss <= result.loss_high < 0.1


def test_larger_models_lose_less_and_measured_sizes_match() -> None:
    recipe = Recipe("adam", "updates", 16, "round", workers=4, fragments=4)
    by_size = [excess(shipped_rows(), "int8()", recipe._replace(numel=numel))
               for numel in (LONG_NUMEL, 8_000_000, 10_000_000, 35_000_000, 124_000_000, 10**9, 10**10)]
    assert [each.steps for each in by_size] == sorted((each.steps for each in by_size), reverse=True)
    highs = [each.high for each in by_size[2:]]  # from 2.3 to 5 M, the cautious factor rises from 1.715 to 1.731
    assert highs == sorted(highs, reverse=True)
    assert excess(shipped_rows(), "int8()", recipe._replace(numel=40_000)) == excess(shipped_rows(), "int8()", recipe)
    muon, adam, lion = (excess(shipped_rows(), "int8()", Recipe(name, "updates", 30, workers=16, numel=10**9)).steps
                        for name in ("muon", "adam", "lion"))
    assert math.log1p(muon) == pytest.approx(MUON * math.log1p(adam))
    assert lion == adam


def test_one_overlapped_step_costs_less_than_two() -> None:
    for numel in (0, 350_000, 1_000_000, 10**9):
        one, two = (Recipe(codes="updates", overlap="round", every=n, fragments=n, numel=numel) for n in (1, 2))
        adam, sgd = (excess(shipped_rows(), "int4()", one._replace(optimizer=name)) for name in ("adam", "sgd"))
        assert 0 < adam.high < 0.2
        assert 0 < sgd.high < 0.02, "SGD is linear in gradients, so the average of the steps is the step of the average"
        if numel:
            assert adam.high < excess(shipped_rows(), "int4()", two).high


@given(ROWS, st.sampled_from(CODECS), RATIOS, RATIOS, RECIPES, st.integers(1, 64))
def test_factor_is_monotone_in_ratio_and_local_steps(
    rows: tuple[LearningRow, ...], codec: str, a: float, b: float, recipe: Recipe, every: int,
) -> None:
    easy = excess(rows, codec.format(max(a, b)), recipe._replace(every=min(every, recipe.every)))
    hard = excess(rows, codec.format(min(a, b)), recipe._replace(every=max(every, recipe.every)))
    if min(every, recipe.every) == 1 < max(every, recipe.every):  # one step may code gradients, which is another thing
        easy = excess(rows, codec.format(max(a, b)), recipe._replace(every=1, codes="updates"))
    assert all(0 <= e <= h + 1e-9 for e, h in zip(easy, hard, strict=True))
    assert easy.high >= easy.steps
    assert easy.loss_high >= easy.loss


@pytest.mark.parametrize(("codec", "optimizer", "allowed"), [
    ("int4()", "adam", True), ("onebit()", "other", True), ("topk(ratio=0.011)", "adam", True),
    ("topk(ratio=0.01)", "adam", True), ("error_feedback(topk(ratio=0.01))", "lion", True),
    ("topk(ratio=0.009)", "adam", False), ("randomk(ratio=0.01)", "adam", False),
    ("topk(ratio=0.01)", "sgd", False), ("topk(ratio=0.01)", "muon", False), ("topk(ratio=0.01)", "", False),
])
def test_stale_sparse_averages_are_allowed_only_if_measured(
    codec: str, optimizer: str, allowed: bool,
) -> None:
    rows = (*TABLE, row("topk(ratio=0.01)", 1.8, late=True))
    assert late_allowed(rows, codec, optimizer) is allowed
    unmeasured = (parse_spec(codec).core.ratio or 1.0) > 0.01
    assert late_allowed((), codec, optimizer) is late_allowed(TABLE, codec, optimizer) is unmeasured


SPARSE_RATIOS, STEPS_APART = (1.0, 0.1, 0.03, 0.01, 1e-4), (1, 2, 4, 16)


@pytest.mark.parametrize("numel", MODEL_SIZES)
@pytest.mark.parametrize("codec", ["topk(ratio={})", "randomk(ratio={})", "int4()", "onebit()"])
def test_shipped_table_is_monotone(codec: str, numel: int) -> None:
    for optimizer in ("sgd", "adam", ""):
        for where in ({}, {"overlap": "round"}, {"late": True}):
            assert_monotone(shipped_rows(), codec, Recipe(optimizer, "updates", numel=numel, **where))


def assert_monotone(rows: tuple[LearningRow, ...], codec: str, recipe: Recipe) -> None:
    """From each point to the next more compressed one in either direction."""
    results = {(r, every): excess(rows, codec.format(r), recipe._replace(every=every))
               for r in SPARSE_RATIOS for every in STEPS_APART}
    for (r, every), hard in results.items():
        easier = [*[results[e, every] for e in SPARSE_RATIOS if e > r][-1:],
                  *[results[r, e] for e in STEPS_APART if e < every][-1:]]
        for other in easier:
            assert all(o <= h + 1e-9 for o, h in zip(other, hard, strict=True)), (r, every, other, hard, rows)


@settings(max_examples=40)
@given(ROWS)
def test_no_factor_is_below_its_measurement(rows: tuple[LearningRow, ...]) -> None:
    for one in rows:
        recipe = Recipe(one.optimizer, one.codes, one.every, one.overlap, one.late, one.workers)
        result = excess(rows, one.codec, recipe)
        if excess((one,), one.codec, recipe) != NONE and (one.workers or all(r.workers == 0 for r in rows)):
            assert result.steps >= one.steps - 1 - 1e-9
            assert result.high >= one.steps_high - 1 - 1e-9
            assert result.loss >= one.loss - 1e-9


@settings(max_examples=25)
@given(ROWS, RECIPES.map(lambda r: r._replace(codes="gradients", every=1, overlap="", late=False)))
def test_identity_has_zero_loss_in_every_table(rows: tuple[LearningRow, ...], recipe: Recipe) -> None:
    assert excess(rows, "identity()", recipe) == NONE == excess(rows, "fp16()", recipe)


TASKS = ("a", "b", "c", "d")


def falling(step: float) -> float:
    return 2.0 * math.exp(-step / 100) + 0.5


def curve(of_step: Callable[[float], float]) -> tuple[float, ...]:
    return tuple(of_step(STEPS / LOOKS * (look + 1)) for look in range(LOOKS))


DENSE = curve(falling)


@pytest.mark.parametrize("factor", [1.0, 1.25, 2.0, 5.0])
def test_slowdown_of_a_curve_is_its_factor(factor: float) -> None:
    slow = cost(curve(lambda step: falling(step / factor)), DENSE)
    assert slow.steps == pytest.approx(factor, rel=0.03)
    assert 1 + slow.loss == pytest.approx(falling(STEPS / factor) / falling(STEPS), rel=0.02)


@pytest.mark.parametrize("lost", [curve(lambda step: 9.0), (*DENSE[:-1], math.nan), curve(lambda step: math.inf)])
def test_curve_without_progress_has_the_largest_factor(lost: tuple[float, ...]) -> None:
    assert cost(lost, DENSE).steps == MOST


def test_failed_dense_training_is_reported() -> None:
    variant = Variant("a", "adam", "int4()")
    with pytest.raises(InvalidInput, match=r"task a: .*adam .*\bnan\b.*E-USER-CODE"):
        costs({variant: DENSE, variant.dense: (*DENSE[:-1], math.nan)})


def measured(codec: str, factor: float, *, tasks: tuple[str, ...] = TASKS, **fields: object) -> dict[Variant, Cost]:
    return {Variant(task, "adam", codec, **fields): Cost(factor + 0.1 * i, 0.01 * i)  # type: ignore[arg-type]
            for i, task in enumerate(tasks)}


def test_row_holds_the_median_task_and_a_cautious_one() -> None:
    row, = shared_rows(measured("int4()", 1.0))
    assert (row.codec, row.codes, row.workers, row.tasks, row.runs) == ("int4()", "gradients", 0, 4, 4)
    assert (row.steps, row.steps_high, row.loss, row.loss_high) == pytest.approx((1.15, 1.24, 0.015, 0.024))


@pytest.mark.parametrize(("change", "text"), [
    ((b'"version": 1', b'"version": 2'), r" 2 - at `\$\.version`.*own_learning.*E-LEARNING-TABLE"),
    ((b'"every":1', b'"every":0'), "every=0.*E-LEARNING-TABLE"),
    ((b'"optimizer":"adam"', b'"optimizer":"prodigy"'), "prodigy int4.*E-LEARNING-TABLE"),
    ((b'"late":false', b'"late":"no"'), "`bool`.*E-LEARNING-TABLE"),
    ((b'int4()', b'int4('), r"int4\(.*E-CODEC-NAME"),
    ((b'"version": 1', b'"version": 1, "more": 2'), "`more`.*E-LEARNING-TABLE"),
    ((b'"version": 1,', b''), "`version`.*E-LEARNING-TABLE"),
    ((b']}', b''), "truncated; create the table again.*E-LEARNING-TABLE"),
])
def test_unusable_table_is_reported_in_one_line(change: tuple[bytes, bytes], text: str, tmp_path: Path) -> None:
    source = tables.Provenance("2026-01-02", "c", 9, ("a",), "2.6", "hash")
    result = tables.LearningTable(source, shared_rows(measured("int4()", 1.0)), 1)
    data = tables.encoded_table(result)
    assert change[0] in data
    (tmp_path / "t.json").write_bytes(data.replace(*change))
    with pytest.raises(RecordError, match=text) as caught:
        tables.read_table(tmp_path / "t.json")
    assert str(tmp_path / "t.json") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_shipped_table() -> None:
    table = tables.shipped_table()
    assert {row.optimizer for row in table.rows if row.workers == ALONE} == {"adam", "sgd"}
    assert tables.learning_rows() is tables.learning_rows() is table.rows
    assert table.provenance.runs >= sum(row.runs for row in table.rows if row.workers == 0)
    places = [(r.optimizer, r.codes, r.codec, r.every, r.overlap, r.late, r.workers) for r in table.rows]
    assert len(set(places)) == len(places)
    for row in table.rows:
        assert str(parse_spec(row.codec).bare) == str(parse_spec(row.codec))
        assert 1 <= row.steps <= row.steps_high <= MOST
        assert 0 <= row.loss <= row.loss_high
        assert row.tasks >= LEAST_TASKS
        recipe = Recipe(row.optimizer, row.codes, row.every, row.overlap, row.late, row.workers)
        assert row.workers == ALONE or excess(table.rows, row.codec, recipe).high >= row.steps_high - 1 - 1e-9


TASK = """
import torch
from torch import nn


def task(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 16), {extra}nn.Tanh(), nn.Linear(16, 2))
    truth = torch.randn(6, 2, generator=torch.Generator().manual_seed(9))
    held = torch.randn(64, 6, generator=torch.Generator().manual_seed(8))

    def batches(rank, world):
        drawn = torch.Generator().manual_seed(1000 * seed + rank)
        while True:
            x = torch.randn(8, 6, generator=drawn)
            yield x, x @ truth
            {ends}

    def loss(model, batch):
        return {loss}

    def validation(model):
        with torch.no_grad():
            return {held}

    return {made}
"""
WHOLE = "dict(model=model, optimizer=lambda m: torch.optim.{optimizer}(m.parameters(), lr=0.02), batches=batches, loss=loss, " \
        "validation=validation)"
HELD = "float(nn.functional.mse_loss(model(held), held @ truth))"
LOSS = "nn.functional.mse_loss(model(batch[0]), batch[1])"


def task_file(folder: Path, optimizer: str = "AdamW", *, extra: str = "", loss: str = LOSS, returned: str = WHOLE,
              held: str = HELD, ends: str = "") -> Path:
    path = folder / "mine.py"
    task = returned.format(optimizer=optimizer)
    path.write_text(TASK.format(extra=extra, loss=loss, made=task, held=held, ends=ends), "utf-8")
    return path


def told(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["commlayer", *arguments])
    code: object = 0
    try:
        run()
    except SystemExit as end:
        code = end.code
    output = capsys.readouterr()
    return int(str(code or 0)), output.out, output.err


def test_rows_measured_on_the_users_task_are_used_for_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    out, plan = tmp_path / "rows.json", tmp_path / "plan.json"
    options = ["--steps", "24", "--codec", "int4()", "--local-steps", "2"]
    assert own_learning.main([str(task_file(tmp_path)), str(out), *options]) == 0
    output = capsys.readouterr().out
    result = read_table(out)
    assert [(row.optimizer, row.codes, row.codec, row.every, row.overlap) for row in result.rows] == [
        ("adam", "gradients", "int4()", 1, ""), ("adam", "updates", "int4()", 1, ""), ("adam", "updates", "int4()", 1, "round"),
        ("adam", "updates", "int4()", 2, ""), ("adam", "updates", "int4()", 2, "round"),
        ("adam", "gradients", "identity()", 1, "")]
    assert [row.workers for row in result.rows] == [0, 0, 0, 0, 0, 1]
    assert "one worker alone" in output
    assert result.provenance.tasks[0].startswith("your proxy: ")
    assert result.provenance.runs == 7
    assert f"6 rows in {out}" in output
    code, output, errors = told(["plan", "create", "lstm", "--nodes", "4xrtx3060@20/20Mb", "--learning", str(out), "--out",
                                 str(plan)], monkeypatch, capsys)
    assert (code, errors) == (0, "")
    assert read_plan_inputs(plan).learning == result.rows, "explain, whatif and diff go by them, too"
    assert "x steps: from one seed of your own task" in output
    code, _, errors = told(["plan", "whatif", "--plan", str(plan), "--bandwidth", "20Mb"], monkeypatch, capsys)
    assert (code, errors) == (0, "")


def table(path: Path, **costs: float) -> Path:
    """Of the first steps' codecs alone, by their loss."""
    rows = tuple(LearningRow("adam", "gradients", codec, 1, "", False, 0, 1 + cost, 1 + cost, cost, cost, 1, 1)
                 for codec, cost in (("int4()", costs["int4"]), ("int8()", costs["int8"])))
    provenance = Provenance("2026-01-02", "commlayer tune", 2, ("your proxy",), "2.6", "x")
    path.write_bytes(encoded_table(LearningTable(provenance, rows, 1)))
    return path


def test_job_starts_with_its_own_table(tmp_path: Path) -> None:
    bad, good = table(tmp_path / "bad.json", int4=0.5, int8=0.001), table(tmp_path / "good.json", int4=0.001, int8=0.001)
    first = [resolve_plan("auto", builtin("lstm"), Config(learning=str(path), max_loss=0.05), 4, 1,
                          optimizer="adam").buckets[0].codec
             for path in (bad, good)]
    assert ["int8" in first[0], "int4" in first[1]] == [True, True]
    assert tables.learning_rows(str(bad)) is tables.learning_rows(str(bad)), "one object, since looks are kept by it"
    model = torch.nn.Linear(2, 2)
    session = commlayer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), config={"learning": str(bad)})
    assert session.inspect.context.terms.learning == str(bad), "where planning of a running job looks it up"
    session.close()


@pytest.mark.parametrize(("task", "more", "line"), [
    ({"extra": "nn.BatchNorm1d(16), "}, [], "1.running_mean"),
    ({"held": "None"}, [], "mine.py: validation returned NoneType"),
    ({"ends": "return"}, [], "mine.py: the batches of rank 0 ended after 1"),
    ({"loss": "None"}, [], "returned NoneType as its loss"),
    ({"held": "0.0"}, [], "mine.py: validation returned 0, "),
    ({"held": "model(batch)"}, [], "mine.py: validation: NameError: name 'batch' is not defined"),
    ({"optimizer": "AdamV"}, [], "mine.py: optimizer: AttributeError: module 'torch.optim' has no attribute 'AdamV'"),
    ({"returned": "None"}, [], "mine.py: task(0) returned NoneType"),
    ({"returned": "dict(model=model)"}, [], "mine.py: task(0) returned a dict without optimizer, batches, loss, validation"),
    ({"returned": "dict(model=model, optimizer=1, batches=batches, loss=loss, validation=validation)"}, [],
     "mine.py: task(0): its optimizer is of type int"),
    ({"optimizer": "Rprop"}, [], "its optimizer is of no family"),
    ({}, ["--codec", "int5()"], "int5"),
])
def test_unmeasurable_task_is_one_line(
    task: dict[str, str], more: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "rows.json"
    assert own_learning.main([str(task_file(tmp_path, **task)), str(out), *more]) == 2
    errors = capsys.readouterr().err
    assert line in errors
    assert find_error_code(errors) == ("E-CODEC-NAME" if more else "E-USER-CODE"), errors
    assert len(errors.strip().splitlines()) == 1
    assert not out.exists()


def test_missing_table_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:
    absent = tmp_path / "none.json"
    with pytest.raises(ValueError, match=f"{absent}: No such file.*E-LEARNING-TABLE"):
        resolve_plan("auto", builtin("lstm"), Config(learning=str(absent)), 4, 1)
    words = ["plan", "create", "lstm", "--nodes", "2xrtx3060@1Gb", "--learning", str(absent)]
    code, _, errors = told(words, monkeypatch, capsys)
    assert code == 2
    assert str(absent) in errors
    assert errors.endswith("[E-LEARNING-TABLE]\n")


@pytest.mark.parametrize("workers", [2, 4, 16])
@pytest.mark.parametrize("every", [8, 128])
@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_local_steps_cost_less_near_the_noise_scale(workers: int, every: int, optimizer: str) -> None:
    recipe = Recipe(optimizer, "updates", every, workers=workers, numel=2_000_000)
    unknown = local_step_excess(recipe)
    each = [local_step_excess(recipe._replace(noise=noise)) for noise in (0.01, 1.0, 10.0, 100.0, 1e6)]
    assert all(a.steps < b.steps and a.high <= b.high for a, b in pairwise(each))
    assert each[0].steps < 0.05 * unknown.steps
    assert each[-1].steps == pytest.approx(unknown.steps, rel=1e-3)
    for noise, found in zip((0.01, 1.0, 10.0, 100.0), each, strict=False):
        assert 1 + found.steps <= steps_alone(noise, workers) + 1e-9, "no more steps than one worker alone"


@given(st.floats(4.5, 10.5), st.integers(2, 32), st.integers(2, 10**6), st.sampled_from([0.0, 0.5, 4.0, 90.0]),
       st.sampled_from(["adam", "muon", "sgd"]))
def test_local_steps_never_lose_more_than_the_extra_data_gains(
    log10: float, workers: int, every: int, noise: float, optimizer: str,
) -> None:
    numel = round(10**log10)
    recipe = Recipe(optimizer, "updates", every, workers=workers, numel=numel, noise=noise)
    cost = local_step_excess(recipe)
    most = steps_alone(noise or math.inf, workers, numel if numel <= LONG_NUMEL else 0)
    assert 0 <= cost.steps <= cost.high <= most * (1 + 1e-9) - 1
    nearby = local_step_excess(recipe._replace(numel=round(numel * 1.01))).steps
    assert 1 + nearby == pytest.approx(1 + cost.steps, rel=0.02), "no jump between two sizes"
    assert local_step_excess(recipe._replace(every=2 * every)).steps >= cost.steps
    more = recipe._replace(workers=2 * workers)
    assert (1 + local_step_excess(more).steps) / (1 + cost.steps) <= 2 + 1e-9, "twice the machines never take longer"


@pytest.mark.parametrize("recipe", [Recipe(workers=1, every=8, numel=10**6), Recipe(workers=0, every=8, numel=10**6),
                                    Recipe(workers=4, every=1, numel=10**6)])
def test_one_worker_or_one_step_loses_nothing(recipe: Recipe) -> None:
    assert local_step_excess(recipe) == NONE


def test_small_models_gain_less_from_data_than_the_noise_scale_predicts() -> None:
    by_size = [steps_alone(16.0, 4, numel) for numel in (10_000, 400_000, 2_000_000, 10**8)]
    assert by_size == sorted(by_size)
    assert 1 < by_size[0] < by_size[-1] == steps_alone(16.0, 4)
