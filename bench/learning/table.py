"""Writes the package's table of convergence factors from the results of `bench learning`, and its table in docs/benchmarks.md.

`python -m bench.learning.table` takes the results that are valid for the current code; with --page, it writes only the page.
"""

from __future__ import annotations

import datetime
import hashlib
import sys
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from bench import Unmeasurable, learning, report
from bench.learning import factors
from bench.learning.factors import HeldOutPrediction, label
from bench.learning.tasks import TASKS
from commlayer.files import write_whole
from commlayer.planner.convergence import ALONE, LearningRow
from commlayer.planner.data.tables import SHIPPED, LearningTable, Provenance, encoded_table, read_table

OPTIMIZERS = {"adam": "AdamW", "sgd": "SGD with momentum"}


def table(store: report.Store, date: str) -> LearningTable:
    """The table, from the results that are valid for the current code."""
    curves = learning.valid_curves(store)
    costs = factors.costs(curves)
    rows = factors.shared_rows(costs)
    rows += factors.alone_rows(curves, least_tasks=factors.LEAST_TASKS)
    if not rows:
        raise Unmeasurable(f"{learning.STORE} has no combination that was measured on {factors.LEAST_TASKS} tasks: "
                           "run python -m bench learning first")
    marks = sorted({store.rows[variant]["mark"] for variant in curves})
    return LearningTable(Provenance(
        date=date, command="python -m bench learning; python -m bench.learning.table", runs=len(curves),
        tasks=tuple(sorted({variant.task for variant in curves})), torch=str(torch.__version__),
        code=hashlib.sha256(" ".join(marks).encode()).hexdigest()[:16], errors=errors(factors.held_out(costs)),
        numel=max(sum(p.numel() for p in task(0).model.parameters()) for task in TASKS.values()),
    ), rows, 1)


def errors(predictions: Sequence[HeldOutPrediction]) -> dict[str, float]:
    """Median prediction error of the factors over held-out tasks, by optimizer."""
    return {optimizer: round(median(one.error for one in predictions if one.optimizer == optimizer), 3)
            for optimizer in sorted({one.optimizer for one in predictions})}


def page(text: str, table: LearningTable) -> str:
    """The page's text with the table: the modes that were measured with several seeds, with the factors of both optimizers."""
    rows = {(row.optimizer, mode(row)): row for row in table.rows if row.workers in (0, ALONE) and row.runs > row.tasks}
    order = sorted(rows.values(), key=_place)
    cells = [[name, *(cell for optimizer in OPTIMIZERS for cell in _factors(rows.get((optimizer, name))))]
             for name in dict.fromkeys(map(mode, order))]
    source = table.provenance
    left_out = ", ".join(f"{error:.0%} with {OPTIMIZERS[optimizer]}" for optimizer, error in source.errors.items())
    lines = [f"Of {source.runs} trainings of {len(source.tasks)} tasks, {source.date}, torch {source.torch}. Median error on a "
             f"task that was left out: {left_out}.", "",
             *report.markdown("mode|AdamW:|cautious:|loss:|SGD with momentum:|cautious:|loss:", cells)]
    return report.renewed(text, "learning", "\n".join(lines))


def _place(row: LearningRow) -> tuple[Any, ...]:
    return row.workers == ALONE, row.late, row.overlap, row.every, row.codes, row.steps


def _factors(row: LearningRow | None) -> tuple[str, str, str]:
    return ("", "", "") if row is None else (f"{row.steps:.2f}", f"{row.steps_high:.2f}", f"{row.loss:+.0%}")


def mode(row: LearningRow) -> str:
    return label(row).replace(row.codec, f"`{row.codec}`")


def main(argv: Sequence[str]) -> int:
    torch.set_num_threads(1)
    if "--page" not in argv:
        measured = table(learning.trainings(learning.STORE), datetime.date.today().isoformat())
        write_whole({SHIPPED: encoded_table(measured)})
    shipped = read_table(SHIPPED)
    write_whole({report.PAGE: page(report.PAGE.read_text("utf-8"), shipped).encode()})
    print(f"{SHIPPED.relative_to(report.ROOT)}: {len(shipped.rows)} rows of {shipped.provenance.runs} trainings")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
