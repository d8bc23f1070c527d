"""Writes the package's table of convergence factors from the results of `bench learning`.

`python -m bench.learning_table` writes the table and updates the tables of docs/benchmarks.md between their marks.
"""

from __future__ import annotations

import datetime
import hashlib
import sys
from collections.abc import Mapping, Sequence
from statistics import fmean, median

import torch

from bench import Unmeasurable, convergence, learning, learning_factors, report
from bench.learning_factors import Cost, Foretold
from bench.learning_run import Variant
from bench.learning_store import Store
from bench.learning_tasks import TASKS
from commlayer.files import between, write_whole
from commlayer.planner.convergence import ALONE, LearningRow
from commlayer.planner.tables import SHIPPED, LearningTable, Provenance, written

PAGE = report.ROOT / "docs" / "benchmarks.md"
BEGIN, END = "<!-- learning: begin -->", "<!-- learning: end -->"
NAMES = {"adam": "AdamW", "sgd": "SGD with momentum"}


def table(store: Store, date: str) -> LearningTable:
    """The table, from the results that are valid for the current code."""
    curves = learning.current(store)
    costs = learning_factors.costs(curves)
    rows = learning_factors.rows(costs)
    rows += convergence.alone_rows(curves, least_tasks=learning_factors.LEAST_TASKS)
    if not rows:
        raise Unmeasurable(f"{store.path} has no combination that was measured on {learning_factors.LEAST_TASKS} tasks: "
                           "run python -m bench learning first")
    marks = sorted({store.runs[way].mark for way in curves})
    return LearningTable(Provenance(
        date=date, command="python -m bench learning; python -m bench.learning_table", runs=len(curves),
        tasks=tuple(sorted({way.task for way in curves})), torch=str(torch.__version__),
        code=hashlib.sha256(" ".join(marks).encode()).hexdigest()[:16], errors=errors(learning_factors.held_out(costs)),
        numel=max(sum(p.numel() for p in task(0).model.parameters()) for task in TASKS.values()),
    ), rows)


def errors(predictions: Sequence[Foretold]) -> dict[str, float]:
    """Median prediction error of the factors over held-out tasks, by optimizer."""
    return {optimizer: round(median(one.error for one in predictions if one.optimizer == optimizer), 3)
            for optimizer in sorted({one.optimizer for one in predictions})}


def page(text: str, table: LearningTable, store: Store) -> str:
    """The page's text with its tables updated."""
    try:
        return between(text, BEGIN, END, _tables(table, learning.current(store)))
    except ValueError as error:
        raise Unmeasurable(f"{PAGE}: {error}") from None


def _tables(table: LearningTable, curves: dict[Variant, tuple[float, ...]]) -> str:
    lines = [f"Of {table.provenance.runs} trainings, {table.provenance.date}, torch {table.provenance.torch}.", ""]
    for optimizer, name in NAMES.items():
        lines += [f"**{name}**", "", "| way | steps | cautious | loss | cautious | tasks | runs |",
                  "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"]
        mine = [row for row in table.rows if row.optimizer == optimizer and row.workers == 0]
        mine.sort(key=lambda row: (row.late, row.overlap, row.every, row.codes, row.steps))
        lines += [*map(_figures, mine), ""]
    for row in (row for row in table.rows if row.workers == ALONE):
        lines += [f"One worker alone, with {NAMES[row.optimizer]}: {row.steps:.2f} times as many steps, cautiously "
                  f"{row.steps_high:.2f}; the median of {row.tasks} tasks in {row.runs} trainings.", ""]
    cost_by_variant = learning_factors.costs(curves)
    for name, outer in (("With an outer optimizer", "diloco"), ("With plain averages of changes", "plain")):
        if others := [row for row in learning_factors.with_outer(cost_by_variant, outer) if row.codec == "int4()"]:
            lines += [f"**{name}**", "", "| optimizer | way | steps | cautious | loss | cautious | tasks | runs |",
                      "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
                      *(f"| {NAMES[row.optimizer]} {_figures(row)}" for row in others), ""]
    lines += _by_batch(cost_by_variant)
    tasks = learning_factors.held_out(cost_by_variant)
    lines += ["**Tasks held out**"]
    if tasks:
        lines += ["", f"The mean rank correlation is {fmean(one.rank_correlation for one in tasks):.2f}, that of the cautious "
                  f"figures {fmean(one.cautious_rank for one in tasks):.2f}; the median error of the factor is "
                  f"{median(one.error for one in tasks):.0%}."]
    return "\n".join(lines)


def _by_batch(costs: Mapping[Variant, Cost]) -> list[str]:
    larger = {times: {(row.optimizer, _way(row)): row.steps for row in rows}
              for times, rows in learning_factors.with_batches(costs).items()}
    everywhere = [way for way in larger.get(1, {}) if all(way in steps for steps in larger.values())]
    if not everywhere:
        return []
    return ["**With larger batches of a worker**", "",
            f"| optimizer | way | {' | '.join(f'steps, {times} times' if times > 1 else 'steps' for times in larger)} |",
            f"| --- | --- |{' ---: |' * len(larger)}",
            *(f"| {NAMES[optimizer]} | {way} | {' | '.join(f'{steps[optimizer, way]:.2f}' for steps in larger.values())} |"
              for optimizer, way in everywhere), ""]


def _figures(row: LearningRow) -> str:
    return (f"| {_way(row)} | {row.steps:.2f} | {row.steps_high:.2f} | {row.loss:+.1%} | {row.loss_high:+.1%} "
            f"| {row.tasks} | {row.runs} |")


def _way(row: LearningRow) -> str:
    words = [f"`{row.codec}`", "updates" if row.codes == "updates" and row.every == 1 else "",
             f"`every={row.every}`" if row.every > 1 else "", f'`overlap="{row.overlap}"`' if row.overlap else "",
             "one step late" if row.late else "", f"{row.workers} workers" if row.workers else ""]
    return ", ".join(filter(None, words))


def main() -> int:
    torch.set_num_threads(1)
    try:
        store = Store(learning.STORE)
        shipped = table(store, datetime.date.today().isoformat())
        text = page(PAGE.read_text("utf-8"), shipped, store)
    except Unmeasurable as reason:
        print(f"bench.learning_table: {reason}", file=sys.stderr)
        return 2
    write_whole({SHIPPED: written(shipped), PAGE: text.encode()})
    print(f"{SHIPPED.relative_to(report.ROOT)}: {len(shipped.rows)} rows of {shipped.provenance.runs} trainings")
    return 0


if __name__ == "__main__":
    sys.exit(main())
