"""`commlayer report`: writes one HTML file about a finished run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from commlayer.cli.options import Out
from commlayer.cli.output import check_out, write


def report(
    run: Annotated[Path, typer.Argument(help="Folder or file of the run's events.", metavar="RUN")],
    out: Out = Path("report.html"),
) -> None:
    """Write one HTML file about a finished run: members, curves, plan changes and failures. A browser opens it from disk."""
    from commlayer.observe.event_files import read_run
    from commlayer.observe.pages.page import report as page_of

    check_out(out, "--out ")
    events = read_run(run)
    write({out: page_of(events).decode()})
    typer.echo(f"{out}: {len(events):,} events; open it in a browser")
