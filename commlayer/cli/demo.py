"""`commlayer demo`: trains one model over a slow link twice, uncompressed and compressed, and prints the speedup."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from commlayer.cli.arguments import check_json, write_json
from commlayer.cli.options import Json
from commlayer.demo.settings import CODEC, DemoSettings, read_settings
from commlayer.errors import CommError

if TYPE_CHECKING:
    from rich.console import Console

    from commlayer.demo.fleet import Event
    from commlayer.demo.report import DemoProgress

TICK_S = 0.25
LINE_S = 2.0
PIPE_WIDTH = 100


def demo(
    workers: Annotated[int, typer.Option(help="Worker processes, each with its own link.")] = 4,
    link: Annotated[str, typer.Option(help="Each host's link, up and down.", metavar="RATE")] = "100Mb",
    rtt: Annotated[float, typer.Option(help="Round-trip time between hosts, in milliseconds.", metavar="MS")] = 30.0,
    codec: Annotated[str, typer.Option(help="The compressed run's codec.")] = CODEC,
    json: Json = None,
    quick: Annotated[bool, typer.Option("--quick", help="Use a small model and at most 100 steps.")] = False,
) -> None:
    """Train a digit classifier over a simulated slow link, uncompressed and compressed; takes under two minutes."""
    settings = read_settings(workers=workers, link=link, rtt_ms=rtt, codec=codec, quick=quick)
    check_json(json)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _run(settings, json)
    except CommError as error:
        typer.echo(f"commlayer demo: {error}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo("commlayer demo: stopped", err=True)
        raise typer.Exit(130) from None


def _run(settings: DemoSettings, path: Path | None) -> None:
    from rich.console import Console

    from commlayer.demo import report
    from commlayer.demo.fleet import Fleet
    from commlayer.demo.report import DemoProgress, results

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PIPE_WIDTH)
    begin = time.monotonic()
    progress = DemoProgress(settings)
    with Fleet(settings) as fleet:
        stream = fleet.events(TICK_S)
        _watch(stream, progress, console, begin)
        if not progress.over:
            raise CommError("the workers ended without a result")
        numel, native = progress.began[0].numel, progress.began[0].native
        figures = results(settings, numel, progress.latest, progress.reached)
        console.print(report.table(settings, figures))
        console.print(report.notes(settings, figures, native=native), markup=False)
        if path is not None:
            write_json(path, dumps(figures, indent=1))
        for _ in stream:
            pass  # wait until all workers have ended
    console.print(f"The whole demo took {time.monotonic() - begin:.0f} s.")


def _watch(stream: Iterable[Event | None], progress: DemoProgress, console: Console, begin: float) -> None:
    """Prints a line of progress every LINE_S until both runs are over."""
    from commlayer.demo.report import line

    due, last_line = begin, ""
    for event in stream:
        now = time.monotonic()
        if event is not None:
            progress.take(event)
        if now >= due and last_line != (last_line := line(progress)):
            console.print(f"{now - begin:4.0f} s  {last_line}")
            due = now + LINE_S
        if progress.over:
            return
