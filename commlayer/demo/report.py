"""The demo's report: the results as a table with notes, and as JSON."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from commlayer.demo.screen import link, size, span
from commlayer.demo.settings import Settings
from commlayer.errors import InvalidInput
from commlayer.files import write_whole

COLUMNS = ("steps", "sent in\nall", "sent a\nstep", "test\naccuracy", "step\ntime", "exposed\ncomm.", "speed-\nup")
NONE = "-"
RUN_WIDTH = 16
"""Width of the first column, in characters."""


def table(settings: Settings, results: Mapping[str, Any]) -> Table:
    grid = Table(box=SIMPLE_HEAD, padding=0, pad_edge=False)
    grid.add_column("run", min_width=RUN_WIDTH)
    for name in (f"time to\n{settings.target:.1%}", *COLUMNS):
        grid.add_column(name, justify="right")
    for row in results["rows"]:
        grid.add_row(*_cells(row), style="bold" if row["run"] == "compressed" else "")
    return grid


def _cells(row: Mapping[str, Any]) -> Iterator[str]:
    names = {"dense": f"dense {row['codec']}", "bound": "dense, at the ring's bound (*)"}
    yield names.get(row["run"], f"{row['run']}\n{row['codec']}")
    yield f"{row['train_s']:.1f} s" if row["reached"] else "not\nreached"
    yield str(row["steps"])
    if row["run"] == "bound":
        yield from (NONE, NONE, NONE, span(row["step_s"]), NONE)
    else:
        yield from (size(row["sent_nbytes"]), size(row["step_nbytes"]), f"{row['accuracy']:.1%}", span(row["step_s"]),
                    f"{row['exposed']:.0%}")
    yield NONE if row["speedup"] is None else f"{row['speedup']:.{2 if row['speedup'] < 100 else 0}f}x"


def notes(settings: Settings, results: Mapping[str, Any], *, native: bool) -> str:
    """Notes on the table: how the figures were measured, with every caveat."""
    n, summary = settings.workers, results["summary"]
    bound = results["rows"][1]
    text = [
        f"(*) Computed: on this link a ring all-reduce of the fp16 gradients takes at least {span(bound['step_s'])} a step, "
        f"2(n-1)/n x bytes x 8 / rate + 2(n-1) x one-way delay with n = {n}."
    ]
    if summary["speedup_over_bound"] is not None:
        text[0] += f" The compressed run is {summary['speedup_over_bound']:.2f}x as fast to the target as that."
    text += [
        f"Links are shaped inside the processes, without root: every worker is a host of its own ({link(settings)}), and its "
        "summation server shares its link. Underneath is this machine's loopback; what PyTorch's Gloo sends (at the start, and "
        "when to stop) is not shaped.",
        "Both runs start from the same weights and see the same batches; the clock stands still while the test set is looked "
        "at. Sent is what one worker pushes.",
    ]
    if not native:
        text.append("The native core is missing here: codecs ran on the reference backend, which is correct but slow.")
    return "\n".join(text)


def check_json(path: Path) -> None:
    """Called before the demo runs, so that it does not end without a place to write."""
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        problem = "is a folder" if path.is_dir() else f"folder {str(path.parent)!r} does not exist or cannot be written to"
        raise InvalidInput("E-CLI-OPTION", f"--json {str(path)!r}: {problem}; allowed is a file in a folder that exists")


def write_json(path: Path, results: Mapping[str, Any], *, native: bool) -> None:
    """Writes {"name", "machine", "rows", "summary"}, completely or not at all."""
    machine = {
        "system": platform.platform(), "cores": os.cpu_count(), "python": platform.python_version(), "torch": version("torch"),
        "backend": "native" if native else "reference",
    }
    write_whole({path: (json.dumps({"name": "demo", "machine": machine, **results}, indent=1) + "\n").encode()})
