"""What is made of curves of trainings: factors where they are known, rows, what is foretold, the shipped table."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import pytest
from msgspec import structs

from bench import Unmeasurable, learning_table
from bench.convergence import alone_rows
from bench.learning_factors import (
    LEAST_TASKS,
    MOST,
    Cost,
    alone,
    by_phase,
    cost,
    costs,
    held_out,
    rows,
    with_batches,
    with_outer,
)
from bench.learning_run import LOOKS, STEPS, Variant
from bench.learning_store import Run, Store
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


def test_who_learns_faster_than_dense_counts_as_dense_in_the_table_alone() -> None:
    faster = cost(curve(lambda step: falling(1.2 * step)), DENSE)
    assert faster.steps < 0.95
    assert faster.loss < 0
    (row,) = [r for r in rows({Variant(task, "adam", "int4()"): faster for task in TASKS}) if r.workers == 0]
    assert (row.steps, row.steps_high, row.loss, row.loss_high) == (1.0, 1.0, 0.0, 0.0)


@pytest.mark.parametrize("lost", [curve(lambda step: 9.0), (*DENSE[:-1], math.nan), curve(lambda step: math.inf)])
def test_who_learns_nothing_has_the_most(lost: tuple[float, ...]) -> None:
    assert cost(lost, DENSE).steps == MOST


def test_noise_of_a_look_does_not_make_a_factor() -> None:
    plateau = random.Random(0)
    shaken = [tuple(max(loss, 0.5) + plateau.gauss(0, 0.02) for loss in DENSE) for _ in range(40)]
    assert cost(shaken[0], shaken[0]) == pytest.approx(Cost(1.0, 0.0))
    of_pairs = [cost(one, other) for one, other in itertools.pairwise(shaken)]
    assert fmean(each.steps for each in of_pairs) == pytest.approx(1.0, abs=0.06)
    assert fmean(each.loss for each in of_pairs) == pytest.approx(0.0, abs=0.02)


def test_each_run_is_against_the_dense_one_of_its_own_task_workers_and_seed() -> None:
    way = Variant("a", "adam", "int4()", seed=1)
    slow = curve(lambda step: falling(step / 2))
    curves = {way: slow, way.dense: DENSE, Variant("a", "adam"): slow, structs.replace(way, seed=2): slow}
    assert costs(curves) == {way: cost(slow, DENSE)}


def test_a_dense_training_that_fails_is_said() -> None:
    way = Variant("a", "adam", "int4()")
    with pytest.raises(Unmeasurable, match=r"task a: .*adam .*\bnan\b.*E-USER-CODE"):
        costs({way: DENSE, way.dense: (*DENSE[:-1], math.nan)})


def test_one_worker_is_no_way() -> None:
    one = Variant("a", "sgd", workers=1)
    curves = {one: curve(lambda step: falling(step / 3)), structs.replace(one, workers=4): DENSE}
    assert costs(curves) == {}
    assert [result.steps for _, result in alone(curves)] == pytest.approx([3.0], rel=0.03)
    assert alone_rows(curves, least_tasks=2) == ()
    row, = alone_rows(curves)
    assert (row.optimizer, row.codec, row.workers, row.tasks, row.runs) == ("sgd", "identity()", ALONE, 1, 1)
    assert row.steps == pytest.approx(3.0, rel=0.03)


def measured(codec: str, factor: float, *, tasks: tuple[str, ...] = TASKS, **fields: object) -> dict[Variant, Cost]:
    return {Variant(task, "adam", codec, **fields): Cost(factor + 0.1 * i, 0.01 * i)  # type: ignore[arg-type]
            for i, task in enumerate(tasks)}


def test_a_row_is_the_median_task_and_a_cautious_one() -> None:
    row, = rows(measured("int4()", 1.0))
    assert (row.codec, row.codes, row.workers, row.tasks, row.runs) == ("int4()", "gradients", 0, 4, 4)
    assert (row.steps, row.steps_high, row.loss, row.loss_high) == pytest.approx((1.15, 1.24, 0.015, 0.024))


def test_a_task_counts_once_however_many_seeds_it_has() -> None:
    more = {Variant("d", "adam", "int4()", seed=seed): Cost(1.3, 0.03) for seed in range(1, 5)}
    row, = rows(measured("int4()", 1.0) | more)
    assert (row.steps, row.tasks, row.runs) == (pytest.approx(1.15), 4, 8)


def test_on_too_few_tasks_nothing_is_measured() -> None:
    assert rows(measured("int4()", 1.0, tasks=TASKS[: LEAST_TASKS - 1])) == ()


def test_local_steps_are_rows_of_updates() -> None:
    result = measured("int4()", 1.0, every=4) | measured("int4()", 1.0, overlap="round")
    assert [row.codes for row in rows(result)] == ["updates"] * 2


def test_of_several_numbers_of_workers_there_is_the_worst_too() -> None:
    result = rows(measured("int4()", 1.0) | measured("int4()", 1.5, workers=8))
    assert [(row.workers, row.steps, row.runs) for row in result] == [(0, 1.65, 8), (4, 1.15, 4), (8, 1.65, 4)]


def test_what_rows_cannot_say_is_in_none() -> None:
    assert rows(measured("topk(ratio=0.01)", 1.0, ratio_over="plan") | measured("int4()", 1.0, fragments=2, every=4)) == ()
    outer = measured("int4()", 1.5, every=32, outer="diloco")
    assert rows(outer) == ()
    shown = with_outer(outer | measured("int4()", 1.0, every=32))
    assert [(row.every, row.steps, row.runs) for row in shown] == [(32, 1.65, 4)]


def test_what_is_early_is_told_apart_from_what_a_row_says() -> None:
    """One that learns half as fast in the first steps, and from then on is 42 steps behind dense training."""
    slow = curve(lambda step: falling(step / 2 if step <= 84 else step - 42))
    curves = {way: slow if way.codec == "int4()" else DENSE
              for task in TASKS for way in (Variant(task, "adam", "int4()"), Variant(task, "adam"))}
    curves |= {structs.replace(way, workers=8): DENSE for way in curves}  # it covers other numbers of workers only
    curves |= {Variant(task, "adam", "int4()", every=32, overlap="round"): slow for task in TASKS}  # nothing is merged by then
    (report,) = by_phase(curves)
    assert report.row.codec == "int4()"
    assert report.early == pytest.approx(2.0, rel=0.05)
    assert report.row.steps == pytest.approx(fmean(n / (n - 42) for n in range(STEPS // 2 + 8, STEPS + 8, 8)), rel=0.03)


def test_larger_batches_are_rows_of_their_own() -> None:
    result = measured("int4()", 1.0) | measured("int4()", 1.5, batches=16) | measured("int4()", 2.0, batches=16, workers=8)
    assert [row.steps for row in rows(result)] == [1.15]
    result |= measured("int4()", 3.0, seed=1)  # which larger batches were not measured with
    value = with_batches(result)
    assert {times: [row.steps for row in value[times]] for times in value} == {1: [1.15], 16: [1.65]}


def test_the_page_compares_batches_where_all_sizes_were_measured() -> None:
    result = measured("int4()", 1.0) | measured("int4()", 1.5, batches=16) | measured("int8()", 1.0, batches=16)
    assert learning_table._by_batch(result)[-2:] == ["| AdamW | `int4()` | 1.15 | 1.65 |", ""]
    assert learning_table._by_batch(measured("int4()", 1.0)) == []


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


def test_what_no_other_task_was_measured_with_is_not_judged() -> None:
    result = measured("int4()", 1.0) | measured("int8()", 1.0) | measured("onebit()", 1.4)
    result |= measured("qsgd()", 2.0, tasks=("a",))
    assert {one.ways for one in held_out(result)} == {3}


def test_a_table_is_written_and_read_again(tmp_path: Path) -> None:
    result = tables.LearningTable(tables.Provenance("2026-01-02", "c", 9, ("a",), "2.6", "hash"), rows(measured("int4()", 1.0)))
    (tmp_path / "t.json").write_bytes(learning_table.written(result))
    assert tables.read(tmp_path / "t.json") == result


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


def test_an_empty_store_makes_no_table(tmp_path: Path) -> None:
    with pytest.raises(Unmeasurable, match="run python -m bench learning first"):
        learning_table.table(Store(tmp_path / "none.jsonl"), "2026-01-02")
    store = Store(tmp_path / "one.jsonl")
    store.add(Variant("mlp", "sgd", "int4()"), Run("outdated", DENSE))
    with pytest.raises(Unmeasurable, match="run python -m bench learning first"):
        learning_table.table(store, "2026-01-02")


def test_the_page_shows_each_row_between_its_marks(tmp_path: Path) -> None:
    store = Store(tmp_path / "none.jsonl")
    result = tables.LearningTable(tables.Provenance("2026-01-02", "c", 9, ("a",), "2.6", "hash"),
                                rows(measured("int4()", 1.0, every=4) | measured("int4()", 1.0)))
    text = learning_table.page(f"above\n{learning_table.BEGIN}\nold\n{learning_table.END}\nbelow\n", result, store)
    assert text.startswith("above\n")
    assert text.endswith("\nbelow\n")
    assert "old" not in text
    assert "| `int4()`, `every=4` | 1.15 | 1.24 | +1.5% | +2.4% | 4 | 4 |" in text
    assert learning_table.page(text, result, store) == text
    with pytest.raises(Unmeasurable, match="<!-- learning: begin -->.*E-ARGUMENT"):
        learning_table.page("nothing", result, store)


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
