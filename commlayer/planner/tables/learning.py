"""Reads the shipped table of convergence factors, and others of the same format.

`python -m bench learning` makes the shipped table; docs/benchmarks.md describes it.
"""

from __future__ import annotations

import functools
from pathlib import Path

import msgspec

from commlayer.errors import InvalidInput, RecordError
from commlayer.planner.model.learning import LearningRow, row_problem
from commlayer.records import Record, decode, encode

VERSION = 1
SHIPPED = Path(__file__).with_name("learning.json")


class Provenance(Record, frozen=True):
    date: str
    command: str
    runs: int
    """Number of trainings, including dense ones."""
    tasks: tuple[str, ...]
    torch: str
    code: str
    """Hash of the sources that affect what a training learns."""
    errors: dict[str, float] = msgspec.field(default_factory=dict)
    """By optimizer family: the median relative error of factors on held-out tasks. Empty: not determined."""


class LearningTable(Record, frozen=True):
    provenance: Provenance
    rows: tuple[LearningRow, ...]
    version: int = VERSION


class _Version(Record, frozen=True, forbid_unknown_fields=False):
    version: int


def read(path: Path) -> LearningTable:
    """Reads a table; a one-line error for an invalid one."""
    what, data = f"learning table {path}", path.read_bytes()
    remedy = "python -m bench.learning_table" if path == SHIPPED else f"commlayer tune TASK --learning {path}"
    try:
        version = decode(data, _Version, what).version
        if version != VERSION:
            raise RecordError("E-LEARNING-TABLE", f"{what}: version {version}, this commlayer reads version {VERSION}")
        table = decode(data, LearningTable, what)
    except RecordError as error:
        raise RecordError("E-LEARNING-TABLE", f"{error.what}; make it anew with {remedy}") from None
    for row in table.rows:
        if wrong := row_problem(row):
            raise RecordError("E-LEARNING-TABLE", f"{what}: {wrong}")
    return table


def written(made: LearningTable) -> bytes:
    """The table's file: a line per row, so that changes are readable in a diff."""
    head, lines = encode(made.provenance).decode(), ",\n".join(encode(row).decode() for row in made.rows)
    return f'{{"version": {made.version}, "provenance": {head}, "rows": [\n{lines}\n]}}\n'.encode()


def rows_in(path: Path) -> tuple[LearningRow, ...]:
    """Rows of a table that `commlayer tune --learning` wrote: always the same object."""
    return table_in(path).rows


@functools.cache
def table_in(path: Path) -> LearningTable:
    """The table with its provenance."""
    try:
        table = read(path)
    except OSError as error:
        problem = f"{error.strerror}; `commlayer tune TASK --learning {path}` writes one"
        raise InvalidInput("E-LEARNING-TABLE", f"learning table {path}: {problem}") from None
    if not table.rows:
        raise InvalidInput("E-LEARNING-TABLE",
                           f"learning table {path}: has no rows; `commlayer tune TASK --learning {path}` measures some")
    return table


@functools.cache
def shipped() -> LearningTable:
    return read(SHIPPED)


def rows() -> tuple[LearningRow, ...]:
    """Rows of the shipped table: always the same object."""
    return shipped().rows
