"""`commlayer trace`: compares predicted and measured times of a trace file, for each operation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from commlayer.cli.options import Json

if TYPE_CHECKING:
    from commlayer.observe.step_trace import Comparison


def trace(
    file: Annotated[Path, typer.Argument(help="A file from the setting `trace` or session.inspect.trace(FILE).")],
    json: Json = None,
) -> None:
    """Compare predicted and measured times of a recorded step. Open FILE in ui.perfetto.dev to see the timeline."""
    from commlayer import records
    from commlayer.cli.arguments import check_json, write_json
    from commlayer.observe.step_trace import read_comparison

    check_json(json)
    comparison = read_comparison(file)
    write_json(json, records.encode(comparison).decode())
    _show(comparison)


def _show(comparison: Comparison) -> None:
    from commlayer.cli.plan_output import console_of, ms, table

    console = console_of()
    console.print(f"{comparison.steps} steps from step {comparison.first_step} on, {comparison.ranks} ranks on "
                  f"{comparison.nodes} nodes, plan {comparison.plan}", markup=False)
    if comparison.note:
        console.print(comparison.note, markup=False)
    grid = table("", "op", ">buckets", ">predicted ms", ">measured ms", ">error", ">worst bucket")
    for row in comparison.rows:
        predicted = "" if row.predicted_s is None else ms(row.predicted_s)
        error = "" if row.error is None else f"{100 * row.error:+.0f} %"
        grid.add_row(row.op, str(row.buckets or ""), predicted, ms(row.measured_s), error,
                     "" if row.worst is None else str(row.worst))
    console.print(grid)
    console.print("milliseconds per step, summed over all buckets, which may overlap; mean over nodes", markup=False)
