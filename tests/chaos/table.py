"""Prints a campaign: a row for each fault, the details of failed runs, and the summary."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from tests.chaos.campaign import Row, p95, quantile
from tests.chaos.faults import FAULTS

NONE = "-"
PIPE_WIDTH = 118


def screen() -> Console:
    """Standard output, with a fixed width if it is a pipe."""
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=PIPE_WIDTH)


def table(rows: Sequence[Row]) -> Table:
    grid = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    grid.add_column("fault")
    grid.add_column("what it is")
    for name in ("runs", "went on", "stopped,\nnamed", "wrong", "again at work\nor stopped, p50", "p95", "run,\np95"):
        grid.add_column(name, justify="right")
    for name in [name for name in FAULTS if any(row.trial.fault == name for row in rows)]:
        mine = [row for row in rows if row.trial.fault == name]
        wrong = sum(not row.right for row in mine)
        on = sum(row.right and row.verdict.outcome.startswith("goes on") for row in mine)
        stopped = len(mine) - wrong - on
        times = [row.verdict.recovery_s for row in mine if not math.isnan(row.verdict.recovery_s)]
        grid.add_row(name, FAULTS[name].what, str(len(mine)), *(str(n) if n else NONE for n in (on, stopped, wrong)),
                     seconds(quantile(times, 0.5)), seconds(p95(times)), seconds(p95([row.evidence.wall_s for row in mine])),
                     style="red" if wrong else "")
    return grid


def seconds(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f} s"


def problems(rows: Sequence[Row]) -> str:
    """Each failed run: the violations, the last log lines of its processes, and the command that repeats it."""
    lines = []
    for row in rows:
        if not row.right:
            lines.append(f"{row.trial.fault}, seed {row.trial.seed} ({row.trial.setting}; struck: {row.trial.victim}):")
            lines += [f"  {line}" for line in row.verdict.wrong]
            lines += [f"    {line}" for line in row.tail]
            lines.append(f"  again: {row.trial.again}")
    return "\n".join(lines)


def closing(summary: Mapping[str, Any]) -> str:
    runs, wrong = summary["runs"], summary["violations"]
    of = f" of {summary['asked']}" if runs < summary["asked"] else ""
    head = f"{runs}{of} runs, " + ("all as they must be" if not wrong else f"{wrong} wrong")
    return (f"{head}.\n{summary['went_on']} went on with the bits of the undisturbed run (homes: of a replay), "
            f"{summary['went_on_without']} without a home and {summary['went_on_with']} with one that came again, with those "
            f"of a replay, {summary['stopped_named']} stopped and named who was lost; "
            f"{summary['over_tls']} were over TLS. {summary['contributions']:,} contributions in sums of the "
            f"{summary['watched_runs']} runs whose frames were seen, {summary['lost_or_doubled']} of them with lost or doubled "
            f"ones; {summary['lost_samples']} samples lost or used twice; {summary['digest_mismatches']} runs with other "
            "weights.")
