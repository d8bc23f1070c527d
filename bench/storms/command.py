"""Storms in time-lapse: homes of one `commlayer serve` are killed, hang, are cut off, leave and return, and training goes on.

    python -m bench storms --quick
    python -m bench storms --homes 4 --mode sync --rate 85 --seconds 360

`--scale S`: a second of the bench stands for S seconds. Faults an hour, detection times, cuts and pauses are scaled; what the
protocol itself takes is not, so it weighs S times as much as in real life. A run without faults comes first and is compared.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from bench import Unmeasurable
from bench.report import Result
from bench.storms import figures, storm
from bench.storms.homes import Job
from bench.storms.reports import LEAST, LOCAL, SYNC, Work
from bench.storms.storm import Record
from bench.storms.torchft_job import TorchftJob
from bench.tta import systems as tta_systems
from commlayer.errors import CommError

RATES = 69.0, 85.0, 125.0
HOMES = 4, 8
SYSTEMS = "commlayer", "torchft"
TORCHFT = tta_systems.SYSTEMS["torchft DiLoCo H=20"]
MODES = {"local": LOCAL, "sync": SYNC}
SCALE = 5.0
STEP_S = 1.0
"""A step in real life."""
SETTINGS = {"heartbeat_s": 1.0, "dead_after_s": 10.0, "reconnect_s": 10.0, "deadline_s": 600.0}
"""The defaults, except reconnect_s."""
SECONDS, QUICK_SECONDS = 360.0, 60.0
TOGETHER = 16
"""Most homes at a time. Runs that are compared share the machine: so many storms at a time, and a run without faults."""
LEAST_PACE = 0.8
"""A row is void if the run without faults takes fewer steps than this share of what the pace allows."""


class Runs(NamedTuple):
    """Runs of one system, size and mode at the same time: without faults, and by faults an hour."""

    system: str
    homes: int
    mode: str
    calm: Record
    storms: dict[float, Record]


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", choices=SYSTEMS, action="append",
                        help="commlayer; without --quick also torchft, if `make rivals` has installed it")
    parser.add_argument("--homes", type=int, action="append", metavar="N", help="number of homes, 3 or more; 4 and 8")
    parser.add_argument("--mode", choices=MODES, action="append", help="both; local with --quick")
    parser.add_argument("--rate", type=float, action="append", metavar="N", help="faults an hour; 69, 85 and 125")
    parser.add_argument("--seconds", type=float, help=f"of each run ({SECONDS:g}; {QUICK_SECONDS:g} with --quick)")
    parser.add_argument("--scale", type=float, default=SCALE, metavar="S",
                        help=f"a second stands for S seconds ({SCALE:g}); choose a smaller one on a busy machine")
    parser.add_argument("--seed", type=int, default=0)


def run(quick: bool, args: argparse.Namespace) -> Result:
    seconds = args.seconds or (QUICK_SECONDS if quick else SECONDS)
    if "torchft" in (args.system or ()) and (reason := TORCHFT.missing()):
        raise Unmeasurable(reason)
    if min(args.homes or HOMES) <= LEAST or min(seconds, args.scale, *(args.rate or RATES)) <= 0:
        raise Unmeasurable(f"--homes: {LEAST + 1} or more; --seconds, --scale, --rate: above 0")
    rates = args.rate or (RATES[1:] if quick else RATES)
    measured = []
    for system in args.system or SYSTEMS[: 1 if quick or TORCHFT.missing() else 2]:
        for homes in args.homes or (HOMES[:1] if quick else HOMES):
            for mode in args.mode or (["local"] if quick else MODES):
                count = max(1, TOGETHER // homes - 1)
                for at in range(0, len(rates), count):
                    try:
                        measured.append(_runs(system, homes, mode, rates[at : at + count], seconds, args))
                    except CommError as reason:  # the other rows are worth showing
                        print(reason, file=sys.stderr)
    if not measured:
        raise Unmeasurable("no job has begun; the reasons are above")
    return result(measured, seconds, args.scale)


def _runs(system: str, homes: int, mode: str, rates: Sequence[float], seconds: float, args: argparse.Namespace) -> Runs:
    print(f"{system}, {homes} homes, {MODES[mode]}: {seconds:g} s, each of which stands for {args.scale:g}, without faults "
          f"and at the same time with {' and '.join(f'{rate:g}' for rate in rates)} an hour", file=sys.stderr, flush=True)
    settings = {name: value / args.scale for name, value in SETTINGS.items()}
    work = Work(MODES[mode], STEP_S / args.scale)
    with ExitStack() as stack:
        jobs = dict[float, storm.Job]()
        for rate in (0.0, *rates):
            torchft, ours = TorchftJob(homes, work, args.scale), Job(homes, work, settings)
            jobs[rate] = stack.enter_context(torchft) if system == "torchft" else stack.enter_context(ours)
        records = storm.run(jobs, seconds, args.scale, args.seed)
    return Runs(system, homes, mode, records.pop(0.0), records)


def result(measured: Sequence[Runs], seconds: float, scale: float) -> Result:
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {"scale": scale, "seconds": seconds}
    after_kills: list[float] = []
    for runs in measured:
        calm, target = figures.steps_per_s(runs.calm), figures.loss_at(runs.calm, seconds / 2)
        share = calm * STEP_S / scale
        void = "" if share >= LEAST_PACE else f"without faults {share:.0%} of the pace"
        for rate, record in ((0.0, runs.calm), *runs.storms.items()):
            recovered = figures.recoveries(record, figures.usual_s(runs.calm))
            kept = 0.0 if record.failed else figures.steps_per_s(record) / calm
            batches = figures.batches_per_s(record) / figures.batches_per_s(runs.calm)
            rows.append({
                "system": runs.system, "homes": runs.homes, "mode": MODES[runs.mode], "faults/h": rate,
                "faults": figures.faults(record), "kept": kept, "batches kept": batches,
                "s to loss": _known(figures.seconds_to(record, target)), "loss": target,
                "recovery p50 s": _known(figures.percentile(recovered, 0.5)),
                "p95 s": _known(figures.percentile(recovered, 0.95)), "errors": len(record.errors), "void": void})
            after_kills += recovered
            if rate:
                summary[_key(f"kept_{rate:g}", runs, measured[0])] = round(kept, 4)
                summary[_key(f"batches_kept_{rate:g}", runs, measured[0])] = round(batches, 4)
            for error in record.errors:
                print(f"{runs.system}, {runs.homes} homes, {MODES[runs.mode]}, {rate:g} an hour: {error}", file=sys.stderr)
    errors = sum(row["errors"] for row in rows)
    summary |= {"recovery_p50_s": _known(figures.percentile(after_kills, 0.5)),
                "recovery_p95_s": _known(figures.percentile(after_kills, 0.95)), "recoveries": len(after_kills),
                "errors": errors, "void_rows": sum(bool(row["void"]) for row in rows)}
    return {"rows": rows, "summary": summary, "code": int(errors > 0)}


def _key(name: str, runs: Runs, first: Runs) -> str:
    """The first system, size and mode have the plain name: kept_85, kept_85_sync, kept_85_8_homes, torchft_kept_85."""
    name = f"{runs.system}_{name}" if runs.system != first.system else name
    size = f"_{runs.homes}_homes" if runs.homes != first.homes else ""
    return name + size + (f"_{runs.mode}" if runs.mode != first.mode else "")


def _known(seconds: float) -> float | str:
    return round(seconds, 3) if math.isfinite(seconds) else "-"
