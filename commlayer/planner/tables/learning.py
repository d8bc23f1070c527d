"""The shipped table of what ways of training cost in steps, and reading others like it. Knows a file's form; looks nothing up.

`python -m bench learning` makes it; docs/learning.md says what is in it.
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
    """Where a table comes from."""

    date: str
    command: str
    runs: int
    """Trainings, the dense ones too."""
    tasks: tuple[str, ...]
    torch: str
    code: str
    """Hash of the sources that decide what a training learns."""
    errors: dict[str, float] = msgspec.field(default_factory=dict)
    """By optimizer family, the median of how far factors were off on tasks held out, as a part of them; of an empty one nobody
    looked."""


class LearningTable(Record, frozen=True):
    provenance: Provenance
    rows: tuple[LearningRow, ...]
    version: int = VERSION


class _Version(Record, frozen=True, forbid_unknown_fields=False):
    version: int


def read(path: Path) -> LearningTable:
    """The table in that file, or one line that says what is wrong with it."""
    what, data = f"learning table {path}", path.read_bytes()
    remedy = "python -m bench.learning_table" if path == SHIPPED else f"commlayer tune TASK --learning {path}"
    try:
        found = decode(data, _Version, what).version
        if found != VERSION:
            raise RecordError(f"{what}: version {found}, this commlayer reads version {VERSION}", "E-LEARNING-TABLE")
        table = decode(data, LearningTable, what)
    except RecordError as error:
        raise RecordError(f"{error.what}; make it anew with {remedy}", "E-LEARNING-TABLE") from None
    for row in table.rows:
        if wrong := row_problem(row):
            raise RecordError(f"{what}: {wrong}", "E-LEARNING-TABLE")
    return table


def written(made: LearningTable) -> bytes:
    """As a file: a line for each row, so that a change can be read."""
    head, lines = encode(made.provenance).decode(), ",\n".join(encode(row).decode() for row in made.rows)
    return f'{{"version": {made.version}, "provenance": {head}, "rows": [\n{lines}\n]}}\n'.encode()


def rows_in(path: Path) -> tuple[LearningRow, ...]:
    """Those of a table that `commlayer tune --learning` wrote: always the same object."""
    return table_in(path).rows


@functools.cache
def table_in(path: Path) -> LearningTable:
    """The same with where it comes from."""
    try:
        table = read(path)
    except OSError as error:
        said = f"{error.strerror}; `commlayer tune TASK --learning {path}` writes one"
        raise InvalidInput("E-LEARNING-TABLE", f"learning table {path}: {said}") from None
    if not table.rows:
        raise InvalidInput("E-LEARNING-TABLE",
                           f"learning table {path}: has no rows; `commlayer tune TASK --learning {path}` measures some")
    return table


@functools.cache
def shipped() -> LearningTable:
    return read(SHIPPED)


def rows() -> tuple[LearningRow, ...]:
    """Those of the shipped table, always the same object."""
    return shipped().rows
