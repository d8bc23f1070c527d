"""What is made of curves of trainings: factors where they are known, rows, what is foretold, the shipped table."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import Unmeasurable, learning_table
from bench.learning_factors import (
    LEAST_TASKS,
    MOST,
    Cost,
    cost,
    costs,
    held_out,
    rows,
)
from bench.learning_run import LOOKS, STEPS, Variant
from commlayer.codec_spec import parse_spec
from commlayer.errors import RecordError
from commlayer.planner import tables
from commlayer.planner.convergence import ALONE, Recipe, excess

TASKS = ("a", "b", "c", "d")


def falling(step: float) -> float:
    return 2.0 * math.exp(-step / 100) + 0.5


def curve(of_step: Callable[[float], float]) -> tuple[float, ...]:
    return tuple(of_step(STEPS / LOOKS * (look + 1)) for look in range(LOOKS))


DENSE = curve(falling)


@pytest.mark.parametrize("factor", [1.0, 1.25, 2.0, 5.0])
def test_who_learns_so_many_times_as_slowly_has_that_factor(factor: float) -> None:
    slow = cost(curve(lambda step: falling(step / factor)), DENSE)
    assert slow.steps == pytest.approx(factor, rel=0.03)
    assert 1 + slow.loss == pytest.approx(falling(STEPS / factor) / falling(STEPS), rel=0.02)


@pytest.mark.parametrize("lost", [curve(lambda step: 9.0), (*DENSE[:-1], math.nan), curve(lambda step: math.inf)])
def test_who_learns_nothing_has_the_most(lost: tuple[float, ...]) -> None:
    assert cost(lost, DENSE).steps == MOST


def test_a_dense_training_that_fails_is_said() -> None:
    way = Variant("a", "adam", "int4()")
    with pytest.raises(Unmeasurable, match=r"task a: .*adam .*\bnan\b.*E-USER-CODE"):
        costs({way: DENSE, way.dense: (*DENSE[:-1], math.nan)})


def measured(codec: str, factor: float, *, tasks: tuple[str, ...] = TASKS, **fields: object) -> dict[Variant, Cost]:
    return {Variant(task, "adam", codec, **fields): Cost(factor + 0.1 * i, 0.01 * i)  # type: ignore[arg-type]
            for i, task in enumerate(tasks)}


def test_a_row_is_the_median_task_and_a_cautious_one() -> None:
    row, = rows(measured("int4()", 1.0))
    assert (row.codec, row.codes, row.workers, row.tasks, row.runs) == ("int4()", "gradients", 0, 4, 4)
    assert (row.steps, row.steps_high, row.loss, row.loss_high) == pytest.approx((1.15, 1.24, 0.015, 0.024))


def test_tasks_of_one_order_foretell_each_other() -> None:
    results: dict[Variant, Cost] = {}
    for i, ratio in enumerate((0.1, 0.01, 0.001)):
        results |= measured(f"topk(ratio={ratio})", 1.0 + i)
    results |= measured("int4()", 1.05, every=4) | measured("int4()", 1.02)
    report = held_out(results)
    assert {one.task for one in report} == set(TASKS)
    assert all(one.rank_correlation == pytest.approx(1.0) for one in report)
    assert all(one.error < 0.2 for one in report)
    backwards = {way: Cost(4.0 - one.steps if way.task == "a" else one.steps, 0.0) for way, one in results.items()}
    assert next(one for one in held_out(backwards) if one.task == "a").rank_correlation < -0.9


@pytest.mark.parametrize(("change", "text"), [
    ((b'"version": 1', b'"version": 2'), r"version 2\b.*version 1\b.*own_learning.*E-LEARNING-TABLE"),
    ((b'"every":1', b'"every":0'), "every=0.*E-LEARNING-TABLE"),
    ((b'"optimizer":"adam"', b'"optimizer":"lion"'), "lion int4.*E-LEARNING-TABLE"),
    ((b'"late":false', b'"late":"no"'), "`bool`.*E-LEARNING-TABLE"),
    ((b'int4()', b'int4('), r"int4\(.*E-CODEC-NAME"),
    ((b']}', b''), "E-LEARNING-TABLE"),
])
def test_a_table_that_cannot_be_used_is_said_in_one_line(change: tuple[bytes, bytes], text: str, tmp_path: Path) -> None:
    result = tables.LearningTable(tables.Provenance("2026-01-02", "c", 9, ("a",), "2.6", "hash"), rows(measured("int4()", 1.0)))
    data = learning_table.written(result)
    assert change[0] in data
    (tmp_path / "t.json").write_bytes(data.replace(*change))
    with pytest.raises(RecordError, match=text) as caught:
        tables.read(tmp_path / "t.json")
    assert str(tmp_path / "t.json") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_shipped_table() -> None:
    table = tables.shipped()
    assert {row.optimizer for row in table.rows if row.workers == ALONE} == {"adam", "sgd"}
    assert tables.rows() is tables.rows() is table.rows
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
