"""`commlayer demo`: trains on simulated homes, alone, with DDP, and with commlayer, and shows the losses over seconds."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Annotated

import typer

from commlayer.cli.options import Json
from commlayer.cli.output import check_out, write_json
from commlayer.demo.settings import COMMLAYER, DDP, DemoSettings
from commlayer.errors import CommError

MOST_HOMES, SHORTEST_S, LONGEST_S = 8, 10, 3600
FRAME_S, LINE_S = 0.5, 10.0
"""Seconds between two frames, and between two lines if output is not a terminal."""
PICTURE = Path("commlayer-demo.png")
PIPE_WIDTH, BELOW = 100, 12
"""Width without a terminal; lines below the plot."""


def demo(
    links: Annotated[str, typer.Option(help="The line of each home, down/up.", metavar="RATES")] = "100/20Mb",
    homes: Annotated[int, typer.Option(help="Number of homes.", min=2, max=MOST_HOMES)] = 3,
    seconds: Annotated[int, typer.Option(help="Seconds of training.", min=SHORTEST_S, max=LONGEST_S)] = 90,
    seed: Annotated[int, typer.Option(help="Seed of weights and batches.", min=0)] = 0,
    page: Annotated[bool, typer.Option("--page", help="Also show the running job in the browser.")] = False,
    png: Annotated[Path, typer.Option(help="File for the picture; needs matplotlib.", metavar="FILE")] = PICTURE,
    json: Json = None,
) -> None:
    """Race one machine alone, DDP, and commlayer on simulated homes to a loss; takes under two minutes."""
    from commlayer.planner.inputs import parse_link

    line = parse_link(links, "--links")
    settings = DemoSettings(homes, line.up_bps, line.down_bps, seconds, seed, page)
    check_out(png, "--png ")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _run(settings, png, json, links)
    except CommError as error:
        typer.echo(f"commlayer demo: {error}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo("commlayer demo: stopped", err=True)
        raise typer.Exit(130) from None


def _run(settings: DemoSettings, png: Path, json: Path | None, links: str) -> None:
    # Imported late: they load rich's parts and asyncio, which --help does not need.
    from rich.console import Console
    from rich.live import Live

    from commlayer.demo import report, screen
    from commlayer.demo.fleet import Fleet

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PIPE_WIDTH)
    progress, sent_nbytes = report.Progress(settings), dict[str, int]()
    workers = 2 * settings.homes + 1
    console.print(f"Starting {workers} workers and a server, which takes some 15 s: each worker loads PyTorch.")
    with Fleet(settings) as fleet:
        for worker_report in fleet.begin():
            progress.add_report(worker_report)
        console.print("Training begins: one machine alone, DDP, and commlayer at the same time.")
        if fleet.page:
            console.print(f"The job's page: {fleet.page}", soft_wrap=True)
        begin = last = time.monotonic()
        with Live(console=console, auto_refresh=False, transient=True) as live:
            while (elapsed := time.monotonic() - begin) < settings.seconds:
                for worker_report in fleet.reports(FRAME_S):
                    progress.add_report(worker_report)
                for run in (DDP, COMMLAYER):
                    sent_nbytes[run] = sum(line.up.nbytes for line in fleet.lines[run]) // settings.homes
                rows = progress.rows(sent_nbytes)
                if console.is_terminal:
                    note = f"{elapsed:.0f} of {settings.seconds} s; losses are smoothed; Ctrl-C stops"
                    live.update(screen.screen(progress, rows, note, width=console.width, height=console.height - BELOW),
                                refresh=True)
                elif time.monotonic() >= last + LINE_S:
                    last = time.monotonic()
                    console.print(screen.line(rows, elapsed))
    rows = progress.rows(sent_nbytes)
    console.print(screen.screen(progress, rows, "", width=console.width, height=min(16, console.height - BELOW))
                  if console.is_terminal else screen.table(progress, rows))
    console.print(report.notes(progress), markup=False)
    picture = report.draw(png, progress)
    write_json(json, report.results(progress, rows))
    console.print(report.verdict(progress, rows), style="bold")
    console.print(f"Your own model: commlayer estimate FILE.py:make --homes {settings.homes}xrtx3060@{links}", markup=False,
                  soft_wrap=True)
    console.print(picture, markup=False, soft_wrap=True)
