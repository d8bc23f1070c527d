"""`python -m bench chaos`: injects faults into small jobs and checks what they keep.

Without options it makes real runs, then simulated schedules. `--runs`, `--faults` or `--resume` make real runs alone.
`--schedules` makes schedules alone, `--of` sums, members or epochs. `--soak` is one long run, with `--homes` of
homes that leave and join. `--outages` cuts homes' lines, restarts their servers, and measures heartbeats. `--fuzz` damages
frames and control messages.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path

from bench import Unmeasurable
from bench.lab import LabUnavailable
from bench.report import Result
from commlayer.errors import CommError
from tests.chaos import fuzzed, hosts, outages, soak, soak_homes
from tests.chaos.campaign import Campaign, summary
from tests.chaos.dealing import dealt
from tests.chaos.faults import FAULTS
from tests.chaos.kept import Kept
from tests.chaos.table import closing, problems, screen, table
from tests.sim import schedules

RUNS, QUICK_RUNS = 300, 21
SCHEDULES, QUICK_SCHEDULES = 100_000, 2_000


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=int, default=0, help=f"real runs, and nothing else; without it {RUNS}")
    parser.add_argument("--faults", default="", metavar="NAMES",
                        help="only these, with commas between, and nothing else; `list` prints which there are")
    parser.add_argument("--hosts", nargs="?", const="lan", default="", choices=["", *hosts.LINES], metavar="LINE",
                        help=f"on hosts of the lab, with root, and nothing else; with links {', '.join(hosts.LINES)}")
    parser.add_argument("--outages", type=int, default=0, metavar="N",
                        help="cuts and server restarts of 5 to 50 s, of jobs of homes, and nothing else; needs root")
    parser.add_argument("--schedules", type=int, default=0, help="simulated schedules, and nothing else")
    parser.add_argument("--of", default="sums", choices=schedules.KINDS, help="what the schedules simulate")
    parser.add_argument("--soak", type=int, default=0, metavar="STEPS", help="steps of one long run, and nothing else")
    parser.add_argument("--homes", action="store_true", help="this is of homes that come and go")
    parser.add_argument("--fuzz", type=int, default=0, help="damaged frames and control messages, and nothing else")
    parser.add_argument("--seed", type=int, default=0, help="where to begin")
    parser.add_argument("--seconds", type=float, default=0.0, help="stop then; with --resume runs and schedules go on")
    parser.add_argument("--resume", type=Path, default=None, metavar="FILE",
                        help="where schedules, or real runs and nothing else, are kept that were made")


def run(quick: bool, args: argparse.Namespace) -> Result:
    _check(args)
    request = schedules.Options(args.schedules or (QUICK_SCHEDULES if quick else SCHEDULES), args.seed, args.seconds,
                                args.resume, args.of)
    if args.soak:
        long = soak_homes.run if args.homes else soak.run
        return long(args.soak, args.seed, args.seconds)
    if args.outages:
        return outages.run(args.outages, args.seed)
    if args.fuzz:
        return fuzzed.run(args.fuzz, args.seed)
    if args.schedules:
        return schedules.run(request)
    allowed = hosts.FAULTS if args.hosts else dealt()
    if args.faults == "list":
        width = max(map(len, allowed)) + 2
        print("\n".join(f"{name:{width}}{FAULTS[name].what}" for name in allowed))
        return {"rows": [], "summary": {}}
    names = tuple(args.faults.split(",")) if args.faults else allowed
    if unknown := [name for name in names if name not in allowed]:
        raise Unmeasurable(f"--faults: got {unknown[0]!r}, allowed: {', '.join(allowed)}")
    seeds = range(args.seed, args.seed + (args.runs or (QUICK_RUNS if quick else RUNS)))
    result = _real(seeds, names, args.resume, args.seconds or math.inf, args.hosts)
    if args.hosts or args.runs or args.faults or args.resume is not None or result.get("code", 0) > 1:
        return result
    simulated = schedules.run(request)
    figures = {f"schedules.{name}": value for name, value in simulated["summary"].items()}
    return {"rows": result["rows"] + simulated["rows"], "summary": result["summary"] | figures,
            "code": max(result.get("code", 0), simulated.get("code", 0))}


def _check(args: argparse.Namespace) -> None:
    if args.homes and not args.soak:
        raise Unmeasurable("--homes: says what --soak is of; name how many steps")
    if args.of != "sums" and not args.schedules:
        raise Unmeasurable("--of: says what --schedules simulate; name how many")
    for name in ("runs", "schedules", "soak", "outages", "fuzz", "seed", "seconds"):
        if not 0 <= (value := getattr(args, name)) < math.inf:
            raise Unmeasurable(f"--{name}: got {value:g}, allowed: 0 and more")
    if (path := args.resume) is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        what = "it is a folder" if path.is_dir() else "its folder does not exist"
        raise Unmeasurable(f"--resume {path}: {what}; name a file in a folder that exists")


def _real(seeds: range, names: Sequence[str], resume: Path | None, limit_s: float, line: str) -> Result:
    """Makes the runs. If an error ends the campaign, earlier runs are kept; raises Unmeasurable if there are none."""
    try:
        kept = Kept(resume, seeds, names, line)
    except ValueError as reason:
        raise Unmeasurable(str(reason)) from None
    rows, until = kept.rows, time.monotonic() + limit_s
    code, note = 0, {}
    try:
        with hosts.campaign(line) if line else Campaign() as campaign:
            for row in campaign.run(kept.left, names):
                kept.add(row)
                if time.monotonic() > until:
                    break
    except (LabUnavailable, CommError) as reason:
        if not rows:
            raise Unmeasurable(str(reason)) from None
        code, note = 2, {"ended_by": str(reason)}
    except KeyboardInterrupt:
        if not rows:
            raise
        code, note = 130, {"ended_by": "broken off"}
    code = code or int(not all(row.right for row in rows))
    total = summary(rows, len(seeds))
    console = screen()
    if wrong := problems(rows):
        console.print(wrong)
    console.print(table(rows))
    console.print(closing(total))
    return {"rows": [row.told() for row in rows], "summary": total | note, "code": code}
