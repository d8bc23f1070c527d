"""Arithmetic on lines, so that a price is derived once and then evaluated for every size."""

from __future__ import annotations

from commlayer.planner.model.cluster import Line

ZERO = Line(0.0)


def plus(*lines: Line) -> Line:
    floor_s = slope_s = 0.0
    for line in lines:
        floor_s += line.floor_s
        slope_s += line.slope_s
    return Line(floor_s, slope_s)


def times(line: Line, factor: float) -> Line:
    return Line(line.floor_s * factor, line.slope_s * factor)


def over(line: Line, fraction: float) -> Line:
    """The line for a size that is this fraction of the variable."""
    return Line(line.floor_s, line.slope_s * fraction)


def of(line: Line, size: Line) -> Line:
    """`line` over a size that is itself a line."""
    return Line(line.floor_s + line.slope_s * size.floor_s, line.slope_s * size.slope_s)
