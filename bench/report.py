"""Reports of measurements: a table for people and JSON for programs, with a description of the machine."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from commlayer.files import replace_between_marks, write_whole

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "bench" / "data"
"""Stored rows of long measurements, published figures, and expected ratios."""
PAGE = ROOT / "docs" / "benchmarks.md"

Row = Mapping[str, Any]


class Result(TypedDict):
    """Result of a measurement's run(quick): one row per measured item, and the summary's figures.

    `code` is the command's exit code after the report is shown, for results that fail a check.
    """

    rows: list[dict[str, Any]]
    summary: dict[str, Any]
    code: NotRequired[int]


class Store:
    """Rows in a file, a line of JSON each, so that an interrupted run can resume. Of rows with equal keys the newest counts."""

    def __init__(self, path: Path | None, key: Callable[[dict[str, Any]], Any]) -> None:
        self._path, self._key = path, key
        self.rows: dict[Any, dict[str, Any]] = {}
        for number, line in enumerate(path.read_text("utf-8").splitlines() if path and path.exists() else (), 1):
            try:
                row = json.loads(line)
                self.rows[key(row)] = row
            except (ValueError, KeyError, TypeError):
                # The last line of a run that was killed during a write; the row is measured again.
                print(f"bench: {path}: line {number} is not a whole row and is left out", file=sys.stderr, flush=True)

    def add(self, row: dict[str, Any]) -> None:
        self.rows[self._key(row)] = row
        if self._path:
            complete = not self._path.exists() or not (text := self._path.read_bytes()) or text.endswith(b"\n")
            with self._path.open("a", encoding="utf-8") as file:
                file.write(("" if complete else "\n") + json.dumps(row) + "\n")


def machine() -> dict[str, Any]:
    """Hardware and software that figures depend on."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "commit": commit(),
    }


def write(path: Path, name: str, result: Result) -> None:
    """Writes {"name", "machine", "rows", "summary"} to `path` atomically."""
    text = json.dumps({"name": name, "machine": machine(), "rows": result["rows"], "summary": result["summary"]}, indent=1)
    write_whole({path: (text + "\n").encode()})


def show(name: str, result: Result, console: Console | None = None) -> None:
    """Prints the rows as an aligned table, and the summary below it.

    The columns are all keys of all rows, in order of first appearance, without those that begin with _.
    """
    console = console or Console()
    if not console.is_terminal:
        # A pipe has no width; rich's default of 80 columns would truncate figures.
        console = Console(file=console.file, width=400)
    console.print(table(name, result["rows"]))
    for key, value in result["summary"].items():
        console.print(f"{key}: {cell(value)}", highlight=False, markup=False)


def table(title: str, rows: Sequence[Row]) -> Table:
    columns = list(dict.fromkeys(key for row in rows for key in row if not key.startswith("_")))
    result = Table(title=title, title_justify="left")
    for key in columns:
        numeric = all(isinstance(row.get(key, 0), int | float) for row in rows)
        result.add_column(key, justify="right" if numeric else "left")
    for row in rows:
        result.add_row(*(escape(cell(row[key])) if key in row else "" for key in columns))  # rich reads brackets as markup
    return result


def markdown(columns: str, rows: Iterable[Iterable[str]]) -> list[str]:
    """The lines of a table for a page. `columns`: names between bars; those that end with ":" are aligned to the right."""
    names = columns.split("|")
    return ["| " + " | ".join(name.rstrip(":") for name in names) + " |",
            "| " + " | ".join("---:" if name.endswith(":") else "---" for name in names) + " |",
            *("| " + " | ".join(row) + " |" for row in rows)]


def renewed(page: str, part: str, text: str) -> str:
    """The page with that text between the two marks of a part."""
    return replace_between_marks(page, f"<!-- {part}: begin -->", f"<!-- {part}: end -->", text)


def cell(value: object) -> str:
    """Formats a value: floats with four significant digits, booleans as yes or no."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return str(value)


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def commit() -> str:
    """The current commit, with a trailing "+" if the tree has changes; empty outside a checkout."""
    answer = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"], cwd=ROOT, capture_output=True, text=True
    )
    return answer.stdout.strip()
