"""`commlayer profile`: measures the cost of codecs on this machine, and the time at which a model's step produces each
gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from commlayer import records
from commlayer.cli.arguments import import_model_function, timed_job
from commlayer.cli.options import Batch, Codecs, Out
from commlayer.cli.output import Table, check_out, show, write
from commlayer.errors import InvalidInput
from commlayer.planner.data.tables import BUCKET_S, DEFAULT_CODECS, PCIE_COPY, SERVER_BYTE_S
from commlayer.planner.model import CodecCost, LinearCost, Profile
from commlayer.records import Record

SHOWN = 1 << 20
"""Number of elements for which the printed table has times."""
GROUPS_S, GROUPS_DEADLINE_S = 2.0, 60.0


def profile(
    model: Annotated[str, typer.Argument(
        help="FILE.py[:FUNCTION] or MODULE:FUNCTION; the function (default: make) returns the model and a loss function.",
    )] = "",
    codec: Codecs = None, batch: Batch = None, out: Out = Path("profile.json"),
    job: Annotated[Path, typer.Option(metavar="FILE", help="Write the tensors and times of MODEL there.")] = Path("job.json"),
) -> None:
    """Measure codecs and a model's step on this machine, for plan create --profile."""
    if batch is not None and not model:
        raise InvalidInput("E-CLI-OPTION", "--batch applies to a model's loss function: give MODEL, too")
    for file in (out, job) if model else (out,):
        check_out(file)
    make = import_model_function(model) if model else None
    # Imported late: it loads torch, which --help does not need.
    from commlayer.autotune.measure import calibration
    from commlayer.compressors import kernels, parse

    # Always included: every codec is compared with no compression.
    names = [str(parse(text)) for text in dict.fromkeys(("identity()", *(codec or DEFAULT_CODECS)))]
    kernels.choose("auto")
    collectives = _measure_collectives()
    if collectives is None:
        return  # rank 0 does the rest
    # The model is timed first: the user's code may fail, and measuring codecs takes longest.
    timed = timed_job(make, model, batch) if make is not None else None
    costs = calibration.measure_codecs(names)
    profile = Profile(costs, LinearCost(0.0, SERVER_BYTE_S), BUCKET_S, PCIE_COPY, *collectives, source="measured")
    files: dict[Path, Record] = {out: profile} if timed is None else {out: profile, job: timed}
    write({file: records.encode(record).decode() for file, record in files.items()})
    show(_table(costs))
    for where, of in (("inside a node", profile.inside), ("between nodes", profile.across)):
        if of.slope_s:
            print(f"collectives {where}: {1e6 * of.floor_s:.0f} us a message and {1e9 * of.slope_s:.2f} ns a byte, fit error "
                  f"{100 * of.error:.0f} %")
    print(f"costs are in {out}")
    if timed is not None:
        times = timed.timed
        print(f"{len(timed.tensors)} tensors, {timed.numel / 1e6:.1f} M elements; forward "
              f"{1e3 * times.forward_s:.1f} ms, backward {1e3 * times.backward_s:.1f} ms; in {job}")


def _measure_collectives() -> tuple[LinearCost, LinearCost] | None:
    """Costs of collectives inside nodes and between nodes; zero for one process. Rank 0 returns the costs; all other ranks
    return None."""
    from commlayer.config import read_launch

    launch = read_launch()
    if launch.world == 1:
        return LinearCost(0.0), LinearCost(0.0)
    import torch
    import torch.distributed as dist

    from commlayer.autotune.measure import calibration
    from commlayer.cluster.processes.collectives import Groups

    dist.init_process_group("gloo")
    groups = Groups(launch.local_world, GROUPS_DEADLINE_S, torch.device("cpu"))
    try:
        inside, across = calibration.measure_collectives(groups, GROUPS_S)
    finally:
        groups.close()
        dist.destroy_process_group()
    return (inside, across) if launch.rank == 0 else None


def _table(costs: tuple[CodecCost, ...]) -> Table:
    rows = []
    for cost in costs:
        encode_s, error = cost.encode(SHOWN), max(cost.encode.error, cost.decode.error)
        rows.append([cost.codec, f"{1e3 * encode_s:.2f}", f"{1e3 * cost.decode(SHOWN):.2f}",
                     f"{4 * SHOWN / encode_s / 1e9:.1f}", f"{8 * cost.nbytes(SHOWN) / SHOWN:.2f}", f"{100 * error:.0f} %"])
    return Table("", ("codec", ">encode 4 MiB, ms", ">add, ms", ">GB/s", ">bits/element", ">fit error"), rows)
