"""`python -m bench NAME [--quick] [--json FILE]`: runs one benchmark and prints its table."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

from bench import Unmeasurable, report
from commlayer.errors import InvalidInput

MEASUREMENTS = {
    "balance": "bench.balance",
    "chaos": "tests.chaos.command",
    "check": "bench.check",
    "codecs": "bench.codecs",
    "collapse": "bench.collapse",
    "fuzz": "tests.chaos.fuzz",
    "gpu": "bench.gpu",
    "learning": "bench.learning",
    "longrun": "bench.longrun",
    "longrun-law": "bench.longrun_law",
    "memory": "bench.memory",
    "overhead": "bench.overhead",
    "planner": "bench.planner",
    "published": "bench.published",
    "scale": "bench.scale",
    "sparse": "bench.sparse",
    "storms": "bench.storms.command",
    "transport": "bench.transport",
    "tta": "bench.tta",
}


def parser_of(name: str = "") -> argparse.ArgumentParser:
    """The argument parser of a benchmark; without a name, the options that all benchmarks have."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Runs one measurement of the project.")
    parser.add_argument("name", metavar="NAME", help=", ".join(MEASUREMENTS))
    parser.add_argument("--quick", action="store_true", help="fewer rows, fewer repetitions")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows, the summary and the machine here")
    if name and hasattr(module := importlib.import_module(MEASUREMENTS[name]), "flags"):
        module.flags(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    parser = parser_of()
    args, others = parser.parse_known_args(argv)
    if args.name not in MEASUREMENTS:
        print(f"bench: no measurement is called {args.name!r}; there are: {', '.join(MEASUREMENTS)}", file=sys.stderr)
        return 2
    if args.json and not args.json.absolute().parent.is_dir():
        print(f"bench: --json {args.json}: the folder {args.json.absolute().parent} does not exist", file=sys.stderr)
        return 2
    if args.json and args.json.is_dir():
        print(f"bench: --json {args.json}: it is a folder, and a file is wanted", file=sys.stderr)
        return 2
    os.environ.setdefault("COMMLAYER_CACHE", "")  # each run is a job's first one
    module = importlib.import_module(MEASUREMENTS[args.name])
    if not (takes_more := hasattr(module, "flags")) and others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    try:
        result = module.run(args.quick, parser_of(args.name).parse_args(argv)) if takes_more else module.run(args.quick)
    except KeyboardInterrupt:
        print(f"bench: {args.name} was broken off", file=sys.stderr)
        return 130
    except (Unmeasurable, InvalidInput) as reason:
        print(f"bench: {args.name} cannot be measured here: {reason}", file=sys.stderr)
        return 2
    report.show(args.name, result)
    if args.json:
        report.write(args.json, args.name, result)
    return int(result.get("code", 0))


if __name__ == "__main__":
    sys.exit(main())
