"""A campaign on the screen and in a file: a row for each fault, what was wrong in full, and the figures that sum it up."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from commlayer.chaos.campaign import Row, p95
from commlayer.chaos.faults import FAULTS
from commlayer.files import write_whole

NONE = "-"
TAIL_LINES = 12


def table(rows: Sequence[Row]) -> Table:
    made = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    made.add_column("fault")
    made.add_column("what it is")
    for name in ("runs", "went on", "stopped,\nnamed", "wrong", "again at work\nor stopped, p95", "run,\np95"):
        made.add_column(name, justify="right")
    for name in [name for name in FAULTS if any(row.trial.fault == name for row in rows)]:
        mine = [row for row in rows if row.trial.fault == name]
        wrong = sum(bool(row.verdict.wrong) for row in mine)
        on = sum(row.verdict.outcome == "goes on" for row in mine)
        stopped = sum(row.verdict.outcome.startswith("stops, naming") for row in mine)
        times = [row.verdict.recovery_s for row in mine if not math.isnan(row.verdict.recovery_s)]
        made.add_row(name, FAULTS[name].what, str(len(mine)), *(str(n) if n else NONE for n in (on, stopped, wrong)),
                     seconds(p95(times)), seconds(p95([row.evidence.wall_s for row in mine])), style="red" if wrong else "")
    return made


def seconds(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f} s"


def problems(rows: Sequence[Row]) -> str:
    """Each run that went wrong: how, what its processes said last, and how to repeat it."""
    said = []
    for row in rows:
        if row.verdict.wrong:
            said.append(f"{row.trial.fault}, seed {row.trial.seed} ({row.trial.setting}; struck: {row.trial.victim}):")
            said += [f"  {line}" for line in row.verdict.wrong]
            said += [f"    {line}" for line in row.evidence.lines.splitlines()[-TAIL_LINES:]]
            said.append(f"  again: {row.trial.again}")
    return "\n".join(said)


def closing(summary: Mapping[str, Any]) -> str:
    runs, wrong = summary["runs"], summary["violations"]
    head = f"{runs} runs, " + ("all as they must be" if not wrong else f"{wrong} wrong")
    return (f"{head}.\n{summary['went_on']} went on with the bits of the undisturbed run, {summary['stopped_named']} stopped "
            f"and named who was lost. {summary['contributions']:,} contributions in sums, {summary['lost_or_doubled']} runs "
            f"with lost or doubled ones; {summary['lost_samples']} samples lost or used twice; "
            f"{summary['digest_mismatches']} runs with other weights.")


def write_json(path: Path, rows: Sequence[Row], summary: Mapping[str, Any]) -> None:
    """{"name", "machine", "rows", "summary"}, whole or not at all."""
    machine = {"system": platform.platform(), "cores": os.cpu_count(), "python": platform.python_version(),
               "torch": version("torch")}
    told = {"name": "chaos", "machine": machine, "rows": [row.told() for row in rows], "summary": dict(summary)}
    write_whole({path: (json.dumps(told, indent=1) + "\n").encode()})
