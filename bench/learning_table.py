"""Writes the table of what ways of training cost in steps into the package, from what `bench learning` has measured.

`python -m bench.learning_table` does that and renews the tables of docs/learning.md between its marks.
"""

from __future__ import annotations

import datetime
import hashlib
import sys

import msgspec
import torch

from bench import Unmeasurable, learning, learning_factors, report
from bench.learning_store import Store
from commlayer.files import write_whole
from commlayer.planner.tables.learning import SHIPPED, LearningTable, Provenance


def table(store: Store, date: str) -> LearningTable:
    """Of the trainings that the code as it is would repeat."""
    curves = learning.current(store)
    rows = learning_factors.rows(learning_factors.costs(curves))
    if not rows:
        raise Unmeasurable(f"{store.path} has no combination that was measured on {learning_factors.LEAST_TASKS} tasks: "
                           "run python -m bench learning first")
    marks = sorted({store.runs[way].mark for way in curves})
    return LearningTable(Provenance(
        date=date, command="python -m bench learning; python -m bench.learning_table", runs=len(curves),
        tasks=tuple(sorted({way.task for way in curves})), torch=str(torch.__version__),
        code=hashlib.sha256(" ".join(marks).encode()).hexdigest()[:16],
    ), rows)


def written(made: LearningTable) -> bytes:
    """A line for each row, so that a change can be read."""
    head = msgspec.json.encode(made.provenance).decode()
    lines = ",\n".join(msgspec.json.encode(row).decode() for row in made.rows)
    return f'{{"version": {made.version}, "provenance": {head}, "rows": [\n{lines}\n]}}\n'.encode()


def main() -> int:
    torch.set_num_threads(1)
    try:
        made = table(Store(learning.STORE), datetime.date.today().isoformat())
    except Unmeasurable as reason:
        print(f"bench.learning_table: {reason}", file=sys.stderr)
        return 2
    write_whole({SHIPPED: written(made)})
    print(f"{SHIPPED.relative_to(report.ROOT)}: {len(made.rows)} rows of {made.provenance.runs} trainings")
    return 0


if __name__ == "__main__":
    sys.exit(main())
