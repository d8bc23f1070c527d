"""Time to accuracy over shaped links: commlayer and other systems on the same tasks, data, step pace and evaluation.

    python -m bench tta --quick --store out/tta.jsonl --json out/tta.json
    python -m bench tta --task digits --link 100m-30ms --link 10m-80ms --system auto --system "DDP fp16" --seeds 3

The hosts, four unless chosen, are paced to equal compute (bench/paced): 0.1 s forward and 0.2 s backward. Evaluation uses the
mean of all ranks' weights and is not timed. Rows are appended to the store as they are measured; the same command resumes an
interrupted run.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from bench import Unmeasurable, report, tasks
from bench.lab import Lab, check
from bench.paced.pace import BACKWARD_S, FORWARD_S
from bench.paced.race import LATE_PCT, Run, reached, run_training
from bench.report import Result
from bench.tta import links, systems
from bench.tta.links import NETWORKS, NO_LINK, RANKS, Network
from bench.tta.store import key_of, longest, stored
from bench.tta.summary import summary
from bench.tta.systems import SYSTEMS, System

USUAL = ("chars", "digits", "passages")
TASKS = {name: tasks.TASKS[name] for name in (*USUAL, "text")}
SECONDS, QUICK_SECONDS = 75.0, 15.0
STORED_SECONDS = 60.0
"""Length of the shortest trainings that --stored shows."""
AROUND_S = 25.0
"""Additional time per row for start, end and evaluation on an idle machine."""


class Cell(NamedTuple):
    """One row to measure."""

    task: str
    link: str
    system: System
    seed: int


def flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--store", type=Path, metavar="FILE", help="keep each row here as it comes; what it has is not run")
    parser.add_argument("--renew", action="store_true", help="measure rows again though the store has them; the newest count")
    parser.add_argument("--stored", action="store_true", help="measure nothing: show what the store has, by the choices below")
    for name, allowed in (("task", TASKS), ("link", NETWORKS), ("system", SYSTEMS)):
        parser.add_argument(f"--{name}", action="append", choices=allowed, metavar=name.upper(), help=", ".join(allowed))
    parser.add_argument("--seeds", type=int, metavar="N", help="for every row (3 for what the summary is of, 1 for others)")
    parser.add_argument("--stretch", type=float, default=1.0, metavar="X",
                        help="slow motion: compute and links X times slower, so that two cores keep up; reports seconds / X")
    parser.add_argument("--hosts", type=int, default=RANKS, metavar="N",
                        help="number of hosts; other than 4 only on links whose hosts are all alike")
    parser.add_argument("--seconds", type=float, help=f"of each training ({SECONDS:g}; {QUICK_SECONDS:g} with --quick)")


def run(quick: bool, args: argparse.Namespace) -> Result:
    """Measures the rows that the store lacks, and returns all chosen rows. `args` has the parsed flags."""
    if args.stored:
        return stored_rows(args)
    seconds = args.seconds or (QUICK_SECONDS if quick else SECONDS)
    store = stored(args.store)
    data = {name: TASKS[name]().digest() for name in TASKS}
    chosen_cells = cells(quick, args.task, args.link, args.system, args.seeds)

    def key(cell: Cell) -> tuple[Any, ...]:
        return key_of({"task": cell.task, "link": cell.link, "system": cell.system.name, "seed": cell.seed, "seconds": seconds,
                       "data": data[cell.task], "stretch": args.stretch, "hosts": args.hosts})

    networks = {cell.link: links.named(cell.link, args.hosts).stretched(args.stretch) for cell in chosen_cells}
    left = [cell for cell in chosen_cells if args.renew or key(cell) not in store.rows]
    minutes = len(left) * (seconds * args.stretch + AROUND_S) / 60
    log(f"{len(chosen_cells)} rows, {len(chosen_cells) - len(left)} of them in the store; about {minutes:.0f} minutes")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    for link in dict.fromkeys(cell.link for cell in left):
        of_link = [cell for cell in left if cell.link == link]
        network = networks[link]
        with nullcontext() if link == NO_LINK else network.lab() as lab:
            passed = lab is None or check(lab).passed
            for cell in of_link:
                store.add(measure(lab, network, passed, cell, seconds, data[cell.task]))
    rows = [store.rows[key(cell)] for cell in chosen_cells]
    return {"rows": [shown(row) for row in rows], "summary": {"seconds": seconds, **summary(rows)}}


def stored_rows(args: argparse.Namespace) -> Result:
    """Rows from the store with the tasks' current data, trained for at least `--seconds` or STORED_SECONDS."""
    if not (args.store and args.store.exists()):
        raise Unmeasurable("--stored shows what a store has: name one that exists with --store FILE")
    seconds = args.seconds or STORED_SECONDS
    data = {name: TASKS[name]().digest() for name in TASKS}
    order = {name: at for at, name in enumerate((*TASKS, NO_LINK, *NETWORKS, *SYSTEMS))}
    rows = sorted(
        (row for row in longest(stored(args.store).rows.values())
         if row["seconds"] >= seconds and row.get("stretch", 1.0) == args.stretch
         and row.get("hosts", RANKS) == args.hosts and row["data"] == data.get(row["task"])
         and row["system"] in (args.system or SYSTEMS) and row["task"] in (args.task or TASKS)
         and row["link"] in (NO_LINK, *(args.link or NETWORKS))),
        key=lambda row: (order[row["task"]], order[row["link"]], order[row["system"]], row["seed"]))
    return {"rows": [shown(row) for row in rows], "summary": {"seconds": seconds, **summary(rows)}}


def cells(
    quick: bool, task_names: Sequence[str] | None, networks: Sequence[str] | None, names: Sequence[str] | None,
    seeds: int | None,
) -> list[Cell]:
    """Rows to measure, in order: first those that need no network, then link by link.

    Unless both tasks and links are chosen, tasks other than "chars" use only the links of the summary. The task "text" is for
    long trainings, and only runs if it is chosen.
    """
    chosen = names or (systems.QUICK if quick else SYSTEMS)
    result = []
    for link in (NO_LINK, *(networks or (links.QUICK if quick else NETWORKS))):
        for task in task_names or (["chars"] if quick else USUAL):
            if link not in (NO_LINK, *links.HEADLINE) and task != "chars" and not (task_names and networks):
                continue
            for name in sorted(chosen, key=lambda name: name not in systems.HEADLINE):
                system = SYSTEMS[name]
                if (system.group == "bound") == (link == NO_LINK) and system.only in ("", link):
                    headline = name in systems.HEADLINE and link in (NO_LINK, *links.HEADLINE)
                    result += [Cell(task, link, system, seed) for seed in range(seeds or (3 if headline and not quick else 1))]
    return sorted(result, key=lambda cell: (cell.link != NO_LINK, cell.seed > 0)) if not quick else result


def measure(lab: Lab | None, network: Network, passed: bool, cell: Cell, seconds: float, data: str) -> dict[str, Any]:
    """Measures one row; a row that cannot be measured has the reason under "error"."""
    row: dict[str, Any] = {
        "task": cell.task, "link": cell.link, "system": cell.system.name, "seed": cell.seed, "seconds": seconds, "data": data,
        "group": cell.system.group, "targets": TASKS[cell.task]().targets, "commit": report.commit(),
        "day": time.strftime("%Y-%m-%d"), "stretch": network.stretch, "hosts": network.hosts,
    }
    log(f"{time.strftime('%H:%M:%S')} {cell.task}, {cell.link}, {cell.system.name}, seed {cell.seed}", end=" ... ")
    if reason := cell.system.missing():
        log(reason)
        return row | {"error": reason}
    training = {"task": cell.task, "system": cell.system.start, "seed": cell.seed, "batches": network.hosts,
                "slow": network.slow}
    during = (lambda over: network.play(lab, over)) if network.events and lab else None
    try:
        ranks = 1 if cell.system.name == "ideal" else network.hosts
        slow_motion = run_training(lab, training, seconds * network.stretch, ranks, python=cell.system.python(), during=during)
        result = _unstretched(slow_motion, network.stretch)
    except (RuntimeError, OSError, ValueError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        row["error"] = " ".join(dict.fromkeys([lines[0], lines[-1].strip()]))[:200]
        log(row["error"])
        return row
    row |= {key: value for key, value in result._asdict().items() if key != "sound"} | {"void": void(passed, result)}
    log(f"{result.s_per_step:.2f} s a step, loss {result.curve[-1][2]:.3f} {row['void']}")
    return row


def _unstretched(result: Run, stretch: float) -> Run:
    curve = [(step, seconds / stretch, loss) for step, seconds, loss in result.curve]
    return result._replace(curve=curve, s_per_step=result.s_per_step / stretch)


def void(passed: bool, result: Run) -> str:
    """Reason why a row is void; "" if it is valid."""
    if not passed:
        return "the lab's self-check failed"
    if not result.sound:
        return "the lab did not keep its rates"
    return f"{result.late_pct:.0f} % of passes late" if result.late_pct > LATE_PCT else ""


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """The row as a line of the table."""
    cells = {key: row[key] for key in ("task", "link", "system", "seed")}
    if "error" in row:
        return cells | {"void": row["error"], "commit": row.get("commit", "")}
    for name, target in zip(("easy", "middle", "hard"), row["targets"], strict=True):
        seconds = reached(row["curve"], target)
        cells[f"s to {name}"] = "-" if seconds is None else round(seconds, 1)
    return cells | {
        "loss at the end": row["curve"][-1][2], "steps/s": 1 / row["s_per_step"], "exposed s": exposed_s(row),
        "up kB": row["up_kb"], "down kB": row["down_kb"], "late %": row["late_pct"], "void": row["void"],
        "commit": row.get("commit", ""),
    }


def exposed_s(row: dict[str, Any]) -> float:
    """Step time beyond the paced compute of the slowest host."""
    slowest = max(links.named(row["link"]).slow)
    return max(0.0, float(row["s_per_step"]) - slowest * (FORWARD_S + BACKWARD_S))


def log(text: str, end: str = "\n") -> None:
    print(text, end=end, file=sys.stderr, flush=True)
