"""`commlayer chaos`: breaks small jobs on this machine, run after run, and says what became of each. Loads no torch itself."""

from __future__ import annotations

import math
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from commlayer.errors import CommError, InvalidInput

if TYPE_CHECKING:
    from rich.console import Console

    from commlayer.chaos.campaign import Row

TOLD_EVERY_S = 20.0
"""A line into a pipe, so that nobody takes it for stuck."""


def chaos(
    runs: Annotated[int | None, typer.Option(
        help="How many runs, each with the next seed; they deal out the faults in turn. Else as for all faults twice.",
        min=1)] = None,
    seed: Annotated[int, typer.Option(help="Of the first run.", min=0)] = 0,
    faults: Annotated[str | None, typer.Option(help="Only these, with commas between; `list` tells which there are.",
                                               metavar="NAMES")] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write every run there, too.", metavar="FILE")] = None,
    resume: Annotated[Path | None, typer.Option(help="Keep runs there, and make only those that are not.",
                                                metavar="FILE")] = None,
    seconds: Annotated[float, typer.Option(help="Begin no run after so long; with --resume the rest is for the next time. "
                                           "0: no limit.", min=0.0)] = 0.0,
) -> None:
    """Kill, stop, cut and corrupt small jobs on this machine, and check what they keep.

    Exit code 1 if a run is wrong, 2 if runs cannot be made, 130 if it was broken off.
    """
    from commlayer.chaos.dealing import dealt
    from commlayer.chaos.faults import FAULTS
    from commlayer.cli.plan_inputs import check_json

    if faults == "list":
        width = max(map(len, dealt())) + 2
        typer.echo("\n".join(f"{name:{width}}{FAULTS[name].what}" for name in dealt()))
        return
    names = tuple(name.strip() for name in faults.split(",")) if faults is not None else dealt()
    if unknown := [name for name in names if name not in dealt()]:
        raise InvalidInput("E-CLI-OPTION", f"--faults: got {unknown[0]!r}, allowed: {', '.join(dealt())}")
    check_json(json)
    check_json(resume)
    if sys.platform != "linux":
        raise InvalidInput("E-CLI-OPTION", "chaos: it needs Linux, whose loopback has an address for each link")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        wrong = _run(range(seed, seed + (runs or 2 * len(dealt()))), names, json, resume, seconds or math.inf)
    except CommError as error:
        typer.echo(f"commlayer chaos: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("commlayer chaos: stopped", err=True)
        raise typer.Exit(130) from None
    if wrong:
        raise typer.Exit(1)


def _run(seeds: range, faults: tuple[str, ...], path: Path | None, resume: Path | None, limit_s: float) -> bool:
    """Whether one is wrong. What there is is shown and written however it ends."""
    from commlayer.chaos.campaign import Campaign
    from commlayer.chaos.kept import Kept
    from commlayer.chaos.table import screen

    console = screen()
    begin = told_s = time.monotonic()
    kept = Kept(resume, seeds, faults)
    rows = kept.rows
    try:
        with Campaign() as campaign:
            for row in campaign.run(kept.left, faults):
                kept.add(row)
                if time.monotonic() > begin + limit_s:
                    break
                if console.is_terminal or time.monotonic() > told_s + TOLD_EVERY_S:
                    told_s = time.monotonic()
                    console.print(f"{len(rows)} of {len(seeds)} runs, {sum(not r.right for r in rows)} wrong ",
                                  end="\r" if console.is_terminal else "\n")
    finally:
        if rows:
            _show(console, rows, len(seeds), path)
            console.print(f"It took {time.monotonic() - begin:.0f} s.")
    return not all(row.right for row in rows)


def _show(console: Console, rows: list[Row], asked: int, path: Path | None) -> None:
    from commlayer.chaos import table
    from commlayer.chaos.campaign import summary

    if said := table.problems(rows):
        console.print(said)
    console.print(table.table(rows))
    told = summary(rows, asked)
    console.print(table.closing(told))
    if path is not None:
        table.write_json(path, rows, told)
