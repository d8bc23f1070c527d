"""`commlayer chaos`: breaks small jobs on this machine, run after run, and says what became of each. Loads no torch itself."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from commlayer.errors import CommError

if TYPE_CHECKING:
    from commlayer.chaos.campaign import Row

RUNS = 42
PIPE_WIDTH = 118


def chaos(
    runs: Annotated[int, typer.Option(help="How many runs, each with the next seed; they deal out the faults in turn.", min=1)]
    = RUNS,
    seed: Annotated[int, typer.Option(help="Of the first run.", min=0)] = 0,
    faults: Annotated[str, typer.Option(help="Only these, with commas between; `list` tells which there are.",
                                        metavar="NAMES")] = "",
    json: Annotated[Path | None, typer.Option("--json", help="Write every run there, too.", metavar="FILE")] = None,
) -> None:
    """Kill, stop, cut and corrupt small jobs on this machine, and check what they keep. Exit code 1 if one is wrong."""
    from commlayer.chaos.dealing import dealt
    from commlayer.chaos.faults import FAULTS
    from commlayer.cli.plan_inputs import check_json

    if faults == "list":
        typer.echo("\n".join(f"{name:18}{FAULTS[name].what}" for name in dealt()))
        return
    names = tuple(name.strip() for name in faults.split(",")) if faults else dealt()
    if unknown := [name for name in names if name not in dealt()]:
        raise ValueError(f"--faults: got {unknown[0]!r}, allowed: {', '.join(dealt())}")
    check_json(json)
    if sys.platform != "linux":
        raise ValueError("chaos: it needs Linux, whose loopback has an address for each link")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        wrong = _run(range(seed, seed + runs), names, json)
    except CommError as error:
        typer.echo(f"commlayer chaos: {error}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo("commlayer chaos: stopped", err=True)
        raise typer.Exit(130) from None
    if wrong:
        raise typer.Exit(1)


def _run(seeds: range, faults: tuple[str, ...], path: Path | None) -> bool:
    from rich.console import Console

    from commlayer.chaos import table
    from commlayer.chaos.campaign import Campaign, summary

    console = Console(highlight=False, markup=False)
    console = console if console.is_terminal else Console(highlight=False, markup=False, width=PIPE_WIDTH)
    begin = time.monotonic()
    rows: list[Row] = []
    with Campaign() as campaign:
        try:
            for row in campaign.run(seeds, faults):
                rows.append(row)
                if console.is_terminal:
                    wrong = sum(bool(r.verdict.wrong) for r in rows)
                    console.print(f"{len(rows)} of {len(seeds)} runs, {wrong} wrong ", end="\r")
        except KeyboardInterrupt:
            if not rows:
                raise
            console.print("stopped early; what there is:")
    if said := table.problems(rows):
        console.print(said)
    console.print(table.table(rows))
    told = summary(rows)
    console.print(table.closing(told))
    console.print(f"It took {time.monotonic() - begin:.0f} s.")
    if path is not None:
        table.write_json(path, rows, told)
    return bool(told["violations"])
