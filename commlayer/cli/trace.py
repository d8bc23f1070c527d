"""`commlayer trace`: compares predicted and measured times of a trace file, for each operation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from commlayer.cli.options import Json
from commlayer.cli.output import Part, Report, Table, publish

if TYPE_CHECKING:
    from commlayer.observe.trace_files import Comparison


def trace(
    file: Annotated[Path, typer.Argument(help="A file from the setting `trace` or session.inspect.trace(FILE).")],
    json: Json = None,
) -> None:
    """Compare predicted and measured times of a recorded step. Open FILE in ui.perfetto.dev to see the timeline."""
    from commlayer.observe.trace_files import read_comparison

    comparison = read_comparison(file)
    publish(Report(comparison, "", _parts(comparison)), json)


def _parts(comparison: Comparison) -> Iterator[Part]:
    from commlayer.cli.plan_report import ms

    yield (f"{comparison.steps} steps from step {comparison.first_step} on, {comparison.ranks} ranks on "
           f"{comparison.nodes} nodes, plan {comparison.plan}")
    if comparison.note:
        yield comparison.note
    yield Table("", ("op", ">buckets", ">predicted ms", ">measured ms", ">error", ">worst bucket"), [
        [row.op, str(row.buckets or ""), "" if row.predicted_s is None else ms(row.predicted_s), ms(row.measured_s),
         "" if row.error is None else f"{100 * row.error:+.0f} %", "" if row.worst is None else str(row.worst)]
        for row in comparison.rows])
    yield "milliseconds per step, summed over all buckets, which may overlap; mean over nodes"
