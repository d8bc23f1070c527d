"""`python -m bench.lab`: prints a lab's self-check, or runs a command beside a running lab."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from bench import report
from bench.lab import Lab, LabUnavailable, check


def main(argv: list[str] | None = None) -> int:
    own, command = _split(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m bench.lab",
        usage="%(prog)s [options] (--check | -- COMMAND ...)",
        description="A WAN of hosts in network namespaces. COMMAND runs outside them, with HOSTS, LAB_NAMESPACES and "
        "LAB_ADDRESSES (space-separated) in its environment. A value is one for all hosts, or one per host with commas.",
    )
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--up", type=_numbers, default=[100.0], metavar="MBPS")
    parser.add_argument("--down", type=_numbers, default=[100.0], metavar="MBPS")
    parser.add_argument("--delay", type=_numbers, default=[15.0], metavar="MS", help="one-way delay between equal hosts")
    parser.add_argument("--queue", type=_numbers, default=[100.0], metavar="MS", help="what a link queues before it drops")
    parser.add_argument("--loss", type=_numbers, default=[0.0], metavar="CHANCE", help="of a segment being lost, 0 to 1")
    parser.add_argument("--mtu", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0, help="of the losses")
    parser.add_argument("--check", action="store_true", help="measure what the lab gives; exit code 1 if below 95 %%")
    parser.add_argument("--stats", type=Path, metavar="FILE", help="write the counters here at the end")
    args = parser.parse_args(own)
    if not command and not args.check:
        parser.error("nothing to do: give --check or -- COMMAND")
    code = 0
    try:
        lab = Lab(
            args.hosts,
            up_bps=_per_host(args.up, 1e6),
            down_bps=_per_host(args.down, 1e6),
            delay_s=_per_host(args.delay, 1e-3),
            queue_s=_per_host(args.queue, 1e-3),
            loss=_per_host(args.loss, 1),
            mtu=args.mtu,
            seed=args.seed,
        )
        with lab:
            if args.check:
                code = _print_check(lab)
            if command:
                code = _run(lab, command) or code
            counters = lab.counters()
    except LabUnavailable as reason:
        print(f"lab: {reason}", file=sys.stderr)
        return 2
    except ValueError as mistake:
        print(f"lab: {mistake}", file=sys.stderr)
        return 2
    if args.stats:
        args.stats.write_text(json.dumps(counters, indent=1) + "\n")
    return code


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Splits into the lab's own arguments and the command after the first "--"."""
    at = argv.index("--") if "--" in argv else len(argv)
    return argv[:at], argv[at + 1 :]


def _numbers(text: str) -> list[float]:
    return [float(word) for word in text.split(",")]


def _per_host(values: list[float], unit: float) -> float | list[float]:
    scaled = [value * unit for value in values]
    return scaled[0] if len(scaled) == 1 else scaled


def _print_check(lab: Lab) -> int:
    result = check(lab)
    report.show(
        f"self-check, {lab.hosts} hosts, MTU {lab.mtu}, {lab.congestion}",
        {
            "rows": result.rows,
            "summary": {
                "passed": result.passed,
                "router's share of a core, all sending": result.cpu_share,
                "share of packets over 5 ms late": result.late_5ms_share,
                "packets lost by TUN devices": result.device_dropped,
            },
        },
    )
    return 0 if result.passed else 1


def _run(lab: Lab, command: list[str]) -> int:
    env = {"HOSTS": str(lab.hosts), "LAB_NAMESPACES": " ".join(lab.names), "LAB_ADDRESSES": " ".join(lab.addresses)}
    with subprocess.Popen(command, env={**os.environ, **env}) as child:
        try:
            return child.wait()
        finally:
            if child.poll() is None:
                child.terminate()


if __name__ == "__main__":
    sys.exit(main())
