"""Plot of the balance benchmark: shares, times and straggler effect over iterations, one column per mode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.reference.balance_cluster import PlayedStep

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
"""Distinguishable with colour blindness."""
MARKS = ((0.05, "0.05: LBB tunes finely", ":"), (0.3, "0.3: LBB tunes rapidly", "--"))


class Timeline(NamedTuple):
    """One mode's steps."""

    name: str
    steps: tuple[PlayedStep, ...]


class Band(NamedTuple):
    """A worker is disturbed in the steps [start, stop)."""

    worker: int
    start: int
    stop: int


def write_png(path: Path, title: str, workers: Sequence[str], courses: Sequence[Timeline], bands: Sequence[Band]) -> None:
    """Panels of a row share their scale, so that modes can be compared. Raises ModuleNotFoundError if matplotlib is missing."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # With a width of ten inches, ten-point text is still readable when the picture is displayed 800 pixels wide.
    figure: Any = Figure(figsize=(10, 7.5), dpi=160, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12)
    axes = figure.subplots(3, len(courses), sharex=True, sharey="row", height_ratios=(3, 3, 2))
    for column, course in zip(axes.T, courses, strict=True):
        _column(column, course, workers, bands)
    shares, compute, effect = axes[:, 0]
    shares.set_ylim(bottom=0)
    shares.set_ylabel("share, samples")
    _ticks(compute, "compute, ms", (50, 100, 200, 400))
    _ticks(effect, "straggler effect", (0.01, 0.1, 1))
    lines = {name: line for ax in (shares, compute, effect) for line, name in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path)


def _column(axes: Sequence[Any], course: Timeline, workers: Sequence[str], bands: Sequence[Band]) -> None:
    at = [step.step for step in course.steps]
    shares, compute, effect = axes
    ideal = {"color": "#bbbbbb", "linewidth": 5, "drawstyle": "steps-post", "label": "oracle's iteration"}
    compute.plot(at, [step.oracle_s * 1e3 for step in course.steps], **ideal)
    for worker, (name, colour) in enumerate(zip(workers, COLOURS, strict=True)):
        look = {"color": colour, "linewidth": 1.5, "drawstyle": "steps-post", "label": name}
        shares.plot(at, [step.shares[worker] for step in course.steps], **look)
        # A worker without a share takes zero time, which a logarithmic axis cannot show: draw a gap.
        compute.plot(at, [step.times_s[worker] * 1e3 or math.nan for step in course.steps], **look)
    effect.plot(at, [step.effect for step in course.steps], color="black", linewidth=1.1, label="(max - min) / mean")
    for height, name, dashes in MARKS:
        effect.axhline(height, color="#666666", linewidth=1.1, linestyle=dashes, label=name)
    for ax in axes:
        for band in bands:
            ax.axvspan(band.start, band.stop, color=COLOURS[band.worker], alpha=0.12, linewidth=0)
        ax.grid(axis="y", color="#dddddd", linewidth=0.6)
        ax.margins(x=0)
        ax.spines[["top", "right"]].set_visible(False)
    mean_ms = sum(step.iteration_s for step in course.steps) / len(course.steps) * 1e3
    shares.set_title(f"{course.name}: {mean_ms:.0f} ms per iteration", fontsize=11)
    effect.set_xlabel("iteration")


def _ticks(ax: Any, label: str, values: Sequence[float]) -> None:
    """Uses a logarithmic scale: on a linear one a mode four times slower would flatten all others."""
    ax.set_yscale("log")
    ax.set_yticks(values, [f"{value:g}" for value in values])
    ax.minorticks_off()
    ax.set_ylabel(f"{label} (log)")
