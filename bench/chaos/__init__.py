"""What becomes of jobs that are broken on purpose: real runs, simulated schedules by the million, and a long one with churn.

`python -m bench chaos` makes real runs as `commlayer chaos` does, then some schedules. `--schedules N` makes those alone,
`--soak STEPS` the long run. Knows no mechanism.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bench import Unmeasurable
from bench.chaos import hosts, schedules, soak
from bench.lab import LabUnavailable
from bench.report import Result
from commlayer.chaos.campaign import Campaign, summary
from commlayer.chaos.dealing import dealt

RUNS, QUICK_RUNS = 300, 21
SCHEDULES, QUICK_SCHEDULES = 100_000, 2_000


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=0, help=f"real runs, else {RUNS}")
    parser.add_argument("--faults", default="", help="only these, as for commlayer chaos")
    parser.add_argument("--hosts", action="store_true", help="on hosts of the lab, with root; and nothing else")
    parser.add_argument("--schedules", type=int, default=0, help="simulated schedules, and nothing else")
    parser.add_argument("--soak", type=int, default=0, metavar="STEPS", help="steps of one long run, and nothing else")
    parser.add_argument("--seed", type=int, default=0, help="where to begin")
    parser.add_argument("--seconds", type=float, default=0.0, help="stop schedules or soak then; with --resume schedules go on")
    parser.add_argument("--resume", type=Path, default=None, metavar="FILE", help="where the schedules that were made are kept")


def run(quick: bool, args: argparse.Namespace) -> Result:
    asked = schedules.Asked(args.schedules or (QUICK_SCHEDULES if quick else SCHEDULES), args.seed, args.seconds, args.resume)
    if args.soak:
        return soak.run(args.soak, args.seed, args.seconds)
    if args.schedules:
        return schedules.run(asked)
    names = tuple(args.faults.split(",")) if args.faults else hosts.FAULTS if args.hosts else dealt()
    allowed = hosts.FAULTS if args.hosts else dealt()
    if unknown := [name for name in names if name not in allowed]:
        raise Unmeasurable(f"--faults: got {unknown[0]!r}, allowed: {', '.join(allowed)}")
    seeds = range(args.seed, args.seed + (args.runs or (QUICK_RUNS if quick else RUNS)))
    try:
        with hosts.campaign() if args.hosts else Campaign() as campaign:
            rows = list(campaign.run(seeds, names))
    except LabUnavailable as reason:
        raise Unmeasurable(str(reason)) from None
    if args.hosts:
        return {"rows": [row.told() for row in rows], "summary": summary(rows)}
    simulated = schedules.run(asked)
    figures = {f"schedules.{name}": value for name, value in simulated["summary"].items()}
    return {"rows": [row.told() for row in rows] + simulated["rows"], "summary": summary(rows) | figures}
