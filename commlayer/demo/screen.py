"""The demo's losses in a terminal: curves in Braille, and the table of the runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from commlayer.demo.report import COLORS, Curve, Progress, RunRow, reached, run_label
from commlayer.demo.settings import RUNS

BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of the dots in a character of Braille, by row and column."""


def screen(progress: Progress, rows: Sequence[RunRow], note: str, *, width: int, height: int) -> RenderableType:
    plot = canvas({run: progress.shown(run) for run in RUNS}, progress.settings.seconds, width - 8, max(6, height))
    return Group(*plot, table(progress, rows), Text(note, style="dim"))


def canvas(curves: Mapping[str, Curve], seconds: int, width: int, height: int) -> Iterator[Text]:
    """The curves as lines of text: 2 x 4 dots of Braille in each character."""
    shown = [loss for curve in curves.values() for _, loss in curve] or [0.0]
    low, high = min(shown), max(*shown, min(shown) + 0.1)
    dots: dict[tuple[int, int], int] = {}
    styles: dict[tuple[int, int], str] = {}
    for run, curve in curves.items():
        points = [(int(2 * width * at_s / seconds), round((4 * height - 1) * (high - loss) / (high - low)))
                  for at_s, loss in curve]
        for (x0, y0), (x1, y1) in zip(points, points[1:] or points, strict=False):
            for i in range(reach := max(abs(x1 - x0), abs(y1 - y0), 1)):
                x, y = x0 + (x1 - x0) * i // reach, y0 + (y1 - y0) * i // reach
                cell = x // 2, y // 4
                dots[cell] = dots.get(cell, 0) | BRAILLE[y % 4][x % 2]
                styles[cell] = COLORS[run]
    for y in range(height):
        label = f"{high - (high - low) * y / (height - 1):.2f}" if dots else ""
        line = Text(f"{label:>5} │", no_wrap=True)
        for x in range(width):
            line.append(chr(0x2800 + dots[x, y]) if (x, y) in dots else " ", styles.get((x, y), ""))
        yield line
    yield Text(f" loss └{'─' * width}", no_wrap=True)
    marks = "".join(f"{seconds * part // 4:<{width // 4}}" for part in range(4))
    yield Text(f"{'':7}{marks[: width - 6]:<{width - 6}}{f'{seconds} s':>7}", no_wrap=True)


def table(progress: Progress, rows: Sequence[RunRow]) -> Table:
    target = progress.target()
    grid = Table(box=SIMPLE_HEAD, pad_edge=False)
    grid.add_column("run", min_width=44)
    for name in ("steps", "loss", "GB sent\nby a home", f"seconds to\n{f'loss {target:.2f}' if target else 'the target'}"):
        grid.add_column(name, justify="right")
    for row in rows:
        grid.add_row(f"[{COLORS[row.run]}]━━[/] {run_label(progress, row.run)}", f"{row.steps:,}",
                     "-" if row.loss is None else f"{row.loss:.2f}", f"{row.sent_nbytes / 1e9:.3f}", reached(row, target))
    return grid


def line(rows: Sequence[RunRow], elapsed_s: float) -> str:
    """The progress in one line, for output that is not a terminal."""
    parts = [f"{row.run} {'-' if row.loss is None else f'{row.loss:.2f}'} ({row.steps} steps)" for row in rows]
    return f"{elapsed_s:4.0f} s  loss: {', '.join(parts)}"
