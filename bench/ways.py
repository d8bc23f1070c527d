"""What each way of training has learnt after the same seconds: four hosts over shaped links, every step paced, AdamW.

The task is a character GPT on the project's own docs; how a run is paced and judged is bench.paced's. Beside the ways of
commlayer stand what a user would have without it: DDP with its fp16 hook, each host alone, and the bound, one machine that has
the batch of all and no network. `bench tta` compares more, with other projects too.
"""

from __future__ import annotations

from typing import Any

from bench.lab import Lab, check
from bench.paced.race import Run, at, reached, trained
from bench.report import Result

RANKS = 4
ONE_WAY_S = 0.015
SPARSE = "topk(ratio=0.01, values='int8')"
RATES = {"100m": 100e6, "10m": 10e6}


def ours(**arguments: Any) -> dict[str, Any]:
    return {"kind": "commlayer", **arguments}


BY_LINK: dict[str, dict[str, dict[str, Any]]] = {
    "100m": {
        "DDP fp16 hook": {"kind": "ddp", "hook": "fp16"},
        "fp16": ours(plan="fp16()"),
        "int4": ours(plan="int4()"),
        "int4, overlap=forward": ours(plan="int4()", overlap="forward"),
        "topk 1 %": ours(plan=SPARSE),
        "topk 1 %, codes=updates": ours(plan=SPARSE, codes="updates"),
        "int4, every=4": ours(plan="int4()", every=4),
        "int4, every=4, overlap=round": ours(plan="int4()", every=4, overlap="round"),
        "auto": ours(plan="auto"),
    },
    "10m": {
        "int4": ours(plan="int4()"),
        "topk 1 %, codes=updates": ours(plan=SPARSE, codes="updates"),
        "int4, every=8": ours(plan="int4()", every=8),
        "int4, every=4, overlap=round": ours(plan="int4()", every=4, overlap="round"),
        "int4, every=8, overlap=round": ours(plan="int4()", every=8, overlap="round"),
        "auto": ours(plan="auto"),
    },
}
IN_QUICK = {"int4", "int4, overlap=forward", "int4, every=4, overlap=round"}


def run(quick: bool) -> Result:
    seconds = 20.0 if quick else 45.0

    def one(lab: Lab | None, system: dict[str, Any], ranks: int = RANKS) -> Run:
        return trained(lab, {"task": "docs", "system": system, "batches": RANKS}, seconds, ranks)

    bound, alone = one(None, {"kind": "together"}, 1), one(None, {"kind": "alone"})
    paced_s, goal = bound.s_per_step, at(alone.curve, seconds)

    def row(link: str, way: str, run: Run) -> dict[str, Any]:
        when = reached(run.curve, goal)
        return {
            "link": link, "way": way, "s_per_step": run.s_per_step, "x_paced": run.s_per_step / paced_s,
            "loss": at(run.curve, seconds), "s_to_goal": "-" if when is None else when, "up_kb": run.up_kb,
            "late_pct": run.late_pct,
        }

    rows = [row("none", "one machine, all batches", bound), row("none", "each host alone", alone)]
    summary: dict[str, Any] = {"seconds": seconds, "paced_step_s": paced_s, "goal_loss": goal}
    for link, bps in RATES.items():
        with Lab(hosts=RANKS, up_bps=bps, down_bps=bps, delay_s=ONE_WAY_S) as lab:
            checked = check(lab)
            for name, system in BY_LINK[link].items():
                if quick and name not in IN_QUICK:
                    continue
                found = one(lab, system)
                rows.append(row(link, name, found) | {"void": not (checked.passed and found.sound)})
                if "overlap" in name:
                    summary[f"x_paced, {name}, {link}"] = found.s_per_step / paced_s
    return {"rows": rows, "summary": summary}
