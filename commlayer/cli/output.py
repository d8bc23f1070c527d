"""A command's report: printed at the terminal's width, and written as JSON to the file of --json."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from commlayer.doctor.findings import Finding
from commlayer.errors import InvalidInput
from commlayer.files import write_whole

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

PIPE_WIDTH = 120
"""Page width in characters if output is not a terminal. Only tables use more than WIDEST."""
WIDE = 110
"""Page width in characters from which a table has space for all columns."""
LONGEST = 24
"""Length of the longest word that a column keeps on one line."""
LABEL, WIDEST = 15, 100
"""Width of a finding's verdict and check, and maximum width of lines of text, in characters."""
STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


class Table(NamedTuple):
    """`columns`: the names. ">" before a name: right-aligned, for numbers. "+" before that: on wide pages only."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


class Notes(NamedTuple):
    """Indented lines under a title."""

    title: str
    lines: Sequence[str]


class Commands(NamedTuple):
    """Lines to copy: none is wrapped."""

    lines: Sequence[str]


Part = str | Table | Notes | Commands | Finding


class Report(NamedTuple):
    """A command's result. `verdict`: its first line; "": there is none. `data`: what --json writes."""

    data: Any
    verdict: str
    parts: Iterable[Part]


def publish(report: Report, json: Path | None) -> None:
    """Writes the report's data to the file of --json, if that option is set, and prints the report."""
    write_json(json, report.data)
    show(*([report.verdict] if report.verdict else []), *report.parts)


def show(*parts: Part) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False)  # brackets in names are not markup
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=PIPE_WIDTH)
    for part in parts:
        render(console, part)


def render(console: Console, part: Part) -> None:
    width = min(console.width, WIDEST)
    match part:
        case str():
            console.print(part, width=width)
        case Table():
            console.print(_grid(part, wide=console.width >= WIDE))
        case Notes():
            console.print(part.title, width=width)
            for line in part.lines:
                console.print(_hanging(line, width, "  ", "    "))
        case Finding():
            console.print(_styled(part, width), soft_wrap=True)
        case Commands():
            console.print("\n".join(part.lines), soft_wrap=True)


def _grid(table: Table, *, wide: bool) -> RenderableType:
    from rich import box
    from rich.table import Table as Grid

    grid = Grid(title=table.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    shown = [i for i, name in enumerate(table.columns) if wide or not name.startswith("+")]
    for i in shown:
        name = table.columns[i].removeprefix("+")
        number = name.startswith(">")
        words = [word for row in table.rows for word in row[i].split()]
        grid.add_column(name.removeprefix(">"), justify="right" if number else "left", overflow="fold", no_wrap=number,
                        min_width=min(LONGEST, max(map(len, words), default=0)))
    for row in table.rows:
        grid.add_row(*(row[i] for i in shown))
    return grid


def _hanging(text: str, width: int, first: str, others: str) -> str:
    return textwrap.fill(text, width, initial_indent=first, subsequent_indent=others, break_on_hyphens=False)


def finding_lines(finding: Finding, width: int) -> str:
    """
    >>> print(finding_lines(Finding("dns", "fail", "node-7 does not resolve", "check its spelling"), 60))
    fail dns       node-7 does not resolve
                   -> check its spelling
    """
    width, indent = max(20 + LABEL, width), " " * LABEL
    seen = _hanging(finding.seen, width, f"{finding.verdict:5}{finding.check:10}", indent)
    return f"{seen}\n{_hanging(finding.remedy, width, indent + '-> ', indent + '   ')}" if finding.remedy else seen


def _styled(finding: Finding, width: int) -> RenderableType:
    from rich.text import Text

    text = Text(finding_lines(finding, width))
    text.stylize(STYLES[finding.verdict], 0, len(finding.verdict))
    return text


def ms(seconds: float) -> str:
    """The milliseconds, as a number without a unit."""
    return f"{seconds * 1e3:,.1f}" if seconds < 100 else f"{seconds * 1e3:,.0f}"


def check_json(path: Path | None) -> Path | None:
    """Checks the file of --json before the command starts its work."""
    if path is not None:
        check_out(path, "--json ")
    return path


def write_json(path: Path | None, data: Any) -> None:
    """Writes the file of --json. None: the user did not give the option, and nothing is written."""
    if path is not None:
        write({path: msgspec.json.encode(data, order="deterministic").decode() + "\n"})


def check_out(path: Path, option: str = "") -> None:
    """Checks that an output file can be written, before the command starts its work."""
    folder = path.absolute().parent
    if path.is_dir():
        raise InvalidInput("E-CLI-OPTION", f"{option}{path}: is a folder, allowed: the name of a file")
    if not folder.is_dir():
        raise InvalidInput("E-CLI-OPTION", f"{option}{path}: the folder {folder} does not exist")
    if not os.access(folder, os.W_OK):
        raise InvalidInput("E-CLI-OPTION", f"{option}{path}: the folder {folder} cannot be written to")


def write(texts: Mapping[Path, str]) -> None:
    """Writes all files completely, or none."""
    for path in texts:
        check_out(path)
    try:
        write_whole({path: text.encode() for path, text in texts.items()})
    except OSError as error:
        raise InvalidInput("E-CLI-OPTION", f"{error.filename}: {error.strerror}") from None
