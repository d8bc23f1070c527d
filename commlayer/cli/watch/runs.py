"""`commlayer report` and `commlayer trace`: what a run has left in files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from commlayer.cli.options import Json, Out
from commlayer.cli.output import Part, Report, Table, check_out, ms, publish, write

if TYPE_CHECKING:
    from commlayer.observe.trace_files import Comparison


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


def trace(
    file: Annotated[Path, typer.Argument(help="A file from the setting `trace` or session.inspect.trace(FILE).")],
    json: Json = None,
) -> None:
    """Compare predicted and measured times of a recorded step. Open FILE in ui.perfetto.dev to see the timeline."""
    from commlayer.observe.trace_files import read_comparison

    comparison = read_comparison(file)
    publish(Report(comparison, "", _parts(comparison)), json)


def _parts(comparison: Comparison) -> Iterator[Part]:
    yield (f"{comparison.steps} steps from step {comparison.first_step} on, {comparison.ranks} ranks on "
           f"{comparison.nodes} nodes, plan {comparison.plan}")
    if comparison.note:
        yield comparison.note
    yield Table("", ("op", ">buckets", ">predicted ms", ">measured ms", ">error", ">worst bucket"), [
        [row.op, str(row.buckets or ""), "" if row.predicted_s is None else ms(row.predicted_s), ms(row.measured_s),
         "" if row.error is None else f"{100 * row.error:+.0f} %", "" if row.worst is None else str(row.worst)]
        for row in comparison.rows])
    yield "milliseconds per step, summed over all buckets, which may overlap; mean over nodes"
