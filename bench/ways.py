"""Validation loss of each sync mode and codec after the same time: four hosts, shaped links, paced steps, AdamW.

    python -m bench ways --quick
    python -m bench ways --link 10m --way "int4, every=4, overlap=round"

The task is a character GPT on the project's own docs; bench.paced paces and evaluates the runs. Baselines are DDP with its
fp16 hook, each host alone, and the bound: one machine that computes all batches without a network. A step's time beyond the
bound's is exposed time: waiting for communication plus overhead. `bench tta` compares more systems, also of other projects;
`bench wire` measures link utilization.
"""

from __future__ import annotations

import argparse
from typing import Any

from bench import Unmeasurable
from bench.lab import Lab, check
from bench.paced.race import Run, at, reached, trained
from bench.report import Result

RANKS = 4
ONE_WAY_S = 0.015
SPARSE = "topk(ratio=0.01, values='int8')"
RATES = {"100m": 100e6, "10m": 10e6}
SECONDS, QUICK_SECONDS = 45.0, 20.0


def ours(**arguments: Any) -> dict[str, Any]:
    return {"kind": "commlayer", **arguments}


BY_LINK: dict[str, dict[str, dict[str, Any]]] = {
    "100m": {
        "DDP fp16 hook": {"kind": "ddp", "hook": "fp16"},
        "fp16": ours(compression="fp16"),
        "int4": ours(compression="int4"),
        "int4, overlap=forward": ours(compression="int4", sync="forward"),
        "topk 1 %": ours(compression=SPARSE),
        "topk 1 %, codes=updates": ours(compression=SPARSE, local={"every": 1, "overlap": False}),
        "int4, every=4": ours(compression="int4", local={"every": 4, "overlap": False}),
        "int4, every=4, overlap=round": ours(compression="int4", local={"every": 4, "fragments": 1}),
        "int4, every=4, overlap=round, fragments=4": ours(compression="int4", local={"every": 4, "fragments": 4}),
        "auto": ours(),
    },
    "10m": {
        "int4": ours(compression="int4"),
        "topk 1 %, codes=updates": ours(compression=SPARSE, local={"every": 1, "overlap": False}),
        "int4, every=8": ours(compression="int4", local={"every": 8, "overlap": False}),
        "int4, every=4, overlap=round": ours(compression="int4", local={"every": 4, "fragments": 1}),
        "int4, every=4, overlap=round, fragments=4": ours(compression="int4", local={"every": 4, "fragments": 4}),
        "int4, every=8, overlap=round": ours(compression="int4", local={"every": 8, "fragments": 1}),
        "int4, every=8, overlap=round, fragments=4": ours(compression="int4", local={"every": 8, "fragments": 4}),
        "auto": ours(),
    },
}
IN_QUICK = {"int4", "int4, overlap=forward", "int4, every=4, overlap=round", "int4, every=4, overlap=round, fragments=4"}


def flags(parser: argparse.ArgumentParser) -> None:
    names = sorted({name for systems in BY_LINK.values() for name in systems})
    parser.add_argument("--link", action="append", choices=RATES, metavar="LINK", help=f"only these: {', '.join(RATES)}")
    parser.add_argument("--way", action="append", choices=names, metavar="WAY", help=f"only these: {'; '.join(names)}")
    parser.add_argument("--seconds", type=float, help=f"of each training ({SECONDS:g}; {QUICK_SECONDS:g} with --quick)")


def run(quick: bool, args: argparse.Namespace | None = None) -> Result:
    choice = args or argparse.Namespace(link=None, way=None, seconds=None)
    links = choice.link or list(RATES)
    for way in choice.way or ():
        if not any(way in BY_LINK[link] for link in links):
            available = "; and ".join(f"link {link} has: {'; '.join(BY_LINK[link])}" for link in links)
            raise Unmeasurable(f"--way {way!r} is none of --link {', '.join(links)}; {available}")
    seconds = choice.seconds or (QUICK_SECONDS if quick else SECONDS)

    def one(lab: Lab | None, system: dict[str, Any], ranks: int = RANKS) -> Run:
        return trained(lab, {"task": "docs", "system": system, "batches": RANKS}, seconds, ranks)

    bound, alone = one(None, {"kind": "together"}, 1), one(None, {"kind": "alone"})
    paced_s, goal = bound.s_per_step, at(alone.curve, seconds)
    rows = [row("none", name, result, paced_s=paced_s, goal=goal, seconds=seconds)
            for name, result in (("one machine, all batches", bound), ("each host alone", alone))]
    for link in links:
        with Lab(hosts=RANKS, up_bps=RATES[link], down_bps=RATES[link], delay_s=ONE_WAY_S) as lab:
            checked = check(lab)
            for name in wanted(link, quick, choice.way):
                result = one(lab, BY_LINK[link][name])
                figures = row(link, name, result, paced_s=paced_s, goal=goal, seconds=seconds)
                rows.append(figures | {"void": not (checked.passed and result.sound)})
    return {"rows": rows, "summary": {"seconds": seconds, "paced_step_s": paced_s, "goal_loss": goal} | summary(rows)}


def wanted(link: str, quick: bool, ways: list[str] | None) -> list[str]:
    return [name for name in BY_LINK[link] if (name in ways if ways else not quick or name in IN_QUICK)]


def row(link: str, way: str, run: Run, *, paced_s: float, goal: float, seconds: float) -> dict[str, Any]:
    when = reached(run.curve, goal)
    exposed_s = run.s_per_step - paced_s
    return {
        "link": link, "way": way, "s_per_step": run.s_per_step, "x_paced": run.s_per_step / paced_s, "exposed_s": exposed_s,
        "exposed_pct": 100 * exposed_s / paced_s,
        "waited_s": run.reported["exposed_s"] / run.steps if "exposed_s" in run.reported else "-",
        "loss": at(run.curve, seconds), "s_to_goal": "-" if when is None else when, "up_kb": run.up_kb, "down_kb": run.down_kb,
        "late_pct": run.late_pct,
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Exposed time of the rows that overlap communication with compute."""
    result: dict[str, Any] = {}
    for one in rows:
        if "overlap" in one["way"]:
            place = f"{one['way']}, {one['link']}" + (" (void)" if one.get("void") else "")
            result |= {f"x_paced, {place}": one["x_paced"], f"exposed_pct, {place}": one["exposed_pct"]}
    return result
