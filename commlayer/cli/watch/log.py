"""`commlayer log`: prints the story of a run in sentences."""

from __future__ import annotations

import contextlib
import time
from typing import Annotated

import typer

from commlayer.cli.options import Insecure, Keys
from commlayer.cli.watch.top import LOOK_S, open_event_source, quiet_pipe


def log(
    job: Annotated[str, typer.Argument(help="Folder or file of events, host:port of `commlayer serve`, or NAME@HOST:PORT of a "
                                            "home.", metavar="JOB")],
    keys: Keys = "", insecure: Insecure = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run is over.")] = False,
) -> None:
    """Print the story of a run: who joined, left and was missing, plans, failures, and the end."""
    from commlayer.cli.watch.top_screen import clock
    from commlayer.observe.job.story import Story

    story = Story()
    with open_event_source(job, keys, insecure=insecure) as source, quiet_pipe(), contextlib.suppress(KeyboardInterrupt):
        while True:
            for event in source.read():
                for sentence in story.apply(event):
                    typer.echo(f"{clock(event.time)[:5]} {sentence}")
            if not follow or story.view.over:
                return
            time.sleep(LOOK_S)
