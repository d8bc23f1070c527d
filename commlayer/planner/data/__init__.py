"""The planner's tables: TOML files in this folder, checked when they are first used."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from commlayer.errors import RecordError, short_line
from commlayer.records import complete

T = TypeVar("T")
Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
FOLDER = Path(__file__).parent
MAX_ERROR_CHARS = 200
_tables: dict[str, Any] = {}


def load(name: str, kind: type[T]) -> T:
    """The table in the file `name`.toml. Repeated calls return the same object."""
    if name not in _tables:
        _tables[name] = _read(FOLDER / f"{name}.toml", kind)
    table: T = _tables[name]
    return table


def _read(file: Path, kind: type[T]) -> T:
    try:
        return msgspec.convert(tomllib.loads(file.read_text("utf-8")), complete(kind))
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        problem = short_line(error, MAX_ERROR_CHARS)
        raise RecordError("E-PLAN-DATA", f"table {file}: {problem}; install commlayer again") from None
