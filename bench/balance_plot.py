"""A grid of line charts as one SVG file, without a plotting library. Knows numbers and names, not what they mean."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

WIDE, HIGH, LEFT, TOP, GAP_X, GAP_Y = 520, 170, 56, 30, 70, 46
COLOURS = ("#0b6fb8", "#d1601f", "#2d8a4e", "#8e44ad", "#7f8c8d", "#c0392b")


class Panel(NamedTuple):
    """One chart: named lines over 0, 1, 2, ..., and heights to mark."""

    title: str
    lines: Mapping[str, Sequence[float]]
    marks: tuple[float, ...] = ()


def write_svg(path: Path, columns: Sequence[Sequence[Panel]], below: str) -> None:
    """Columns of panels side by side; panels of a row share their scale, so that columns compare."""
    rows = max(len(column) for column in columns)
    width = LEFT + len(columns) * (WIDE + GAP_X)
    height = TOP + rows * (HIGH + GAP_Y) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for row in range(rows):
        top = max(max(line) for column in columns for line in column[row].lines.values())
        tick = _tick(top)
        ceiling = math.ceil(top / tick) * tick
        for at, column in enumerate(columns):
            parts += _panel(column[row], LEFT + at * (WIDE + GAP_X), TOP + row * (HIGH + GAP_Y), ceiling, tick, below)
    path.write_text("\n".join([*parts, "</svg>", ""]))


def _panel(panel: Panel, x0: float, y0: float, ceiling: float, tick: float, below: str) -> list[str]:
    count = max(len(line) for line in panel.lines.values())
    step = WIDE / max(count - 1, 1)

    def y(value: float) -> float:
        return y0 + HIGH * (1 - value / ceiling)

    parts = [f'<text x="{x0}" y="{y0 - 8}" font-weight="bold">{escape(panel.title)}</text>']
    grid = [i * tick for i in range(round(ceiling / tick) + 1)]
    parts += [f'<line x1="{x0}" x2="{x0 + WIDE}" y1="{y(v):.1f}" y2="{y(v):.1f}" stroke="#ddd"/>' for v in grid]
    parts += [f'<text x="{x0 - 6}" y="{y(v) + 4:.1f}" text-anchor="end">{v:g}</text>' for v in grid]
    dashed = 'stroke="#c0392b" stroke-dasharray="4 3"'
    parts += [f'<line x1="{x0}" x2="{x0 + WIDE}" y1="{y(v):.1f}" y2="{y(v):.1f}" {dashed}/>' for v in panel.marks]
    places = range(0, count, max(1, round(_tick(count))))
    parts += [f'<text x="{x0 + i * step:.1f}" y="{y0 + HIGH + 14}" text-anchor="middle">{i}</text>' for i in places]
    parts.append(f'<text x="{x0 + WIDE}" y="{y0 + HIGH + 27}" text-anchor="end">{escape(below)}</text>')
    for at, ((name, line), colour) in enumerate(zip(panel.lines.items(), COLOURS, strict=False)):
        points = " ".join(f"{x0 + i * step:.1f},{y(value):.1f}" for i, value in enumerate(line))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.3"/>')
        parts.append(f'<text x="{x0 + WIDE - 75 * (len(panel.lines) - at)}" y="{y0 - 8}" fill="{colour}">{escape(name)}</text>')
    return parts


def _tick(top: float) -> float:
    """A round distance that cuts the height into four to eight."""
    rough = top / 5
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
