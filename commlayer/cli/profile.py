"""`commlayer profile`: what codecs cost on this machine, and when a model's step makes its gradients. Knows no network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from commlayer import records
from commlayer.cli.measuring import job_made_by, made_by
from commlayer.cli.planfiles import write
from commlayer.planner.model import CodecCost, Line, Profile
from commlayer.planner.tables import BUCKET_S, DEFAULT_CODECS, PCIE_COPY, SERVER_BYTE_S, codec_loss

SHOWN = 1 << 20
"""Elements that the table's times are for."""


def profile(
    model: Annotated[str, typer.Option(
        help="FILE.py[:FUNCTION] or MODULE:FUNCTION; the function (make) returns a model and one that computes a loss.",
    )] = "",
    codec: Annotated[list[str] | None, typer.Option(help="A codec to measure; may be repeated.")] = None,
    batch: Annotated[int, typer.Option(help="Samples that the loss is of, for the job file.")] = 0,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The costs, for plan make --profile.")] = Path("profile.json"),
    job: Annotated[Path, typer.Option(metavar="FILE", help="With --model, its tensors and times.")] = Path("job.json"),
) -> None:
    """Measure what planning needs on this machine: codecs, and a model's step."""
    made = made_by(model) if model else None
    # Here, since it loads torch, which the help does not need.
    from commlayer.compressors import kernels, parse
    from commlayer.runtime import calibrate

    names = [str(parse(text)) for text in codec or DEFAULT_CODECS]
    kernels.choose("auto")
    costs = tuple(_with_loss(cost) for cost in calibrate.measure(names))
    measured = Profile(costs, Line(0.0, SERVER_BYTE_S), BUCKET_S, PCIE_COPY, "measured")
    write(out, records.encode(measured).decode())
    _show(costs)
    print(f"costs are in {out}")
    if made is not None:
        timed = job_made_by(made, model, batch or None)
        write(job, records.encode(timed).decode())
        assert timed.timing is not None
        print(f"{len(timed.tensors)} tensors, {timed.numel / 1e6:.1f} M elements; forward "
              f"{1e3 * timed.timing.forward_s:.1f} ms, backward {1e3 * timed.timing.backward_s:.1f} ms; in {job}")


def _with_loss(cost: CodecCost) -> CodecCost:
    """Time can be measured here, what a codec costs in quality cannot: that is the tables'."""
    from msgspec import structs

    return structs.replace(cost, loss=codec_loss(cost.codec))


def _show(costs: tuple[CodecCost, ...]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE, pad_edge=False)
    for title in ("codec", "encode 4 MiB, ms", "add, ms", "GB/s", "bits/element", "fit error"):
        table.add_column(title, justify="left" if title == "codec" else "right")
    for cost in costs:
        encode_s, error = cost.encode(SHOWN), max(cost.encode.error, cost.decode.error)
        table.add_row(cost.codec, f"{1e3 * encode_s:.2f}", f"{1e3 * cost.decode(SHOWN):.2f}",
                      f"{4 * SHOWN / encode_s / 1e9:.1f}", f"{8 * cost.nbytes(SHOWN) / SHOWN:.2f}", f"{100 * error:.0f} %")
    Console(highlight=False).print(table)
