"""What each way of training has learnt after the same seconds: four hosts over shaped links, every step paced, AdamW.

The task is bench.ways_task's character GPT; the pace is bench.ways_worker's: 0.1 s forward, 0.2 s backward, on every host.
Beside the ways of commlayer stand what a user would have without it: DDP with its fp16 hook, each host alone, and the bound,
one machine that has the batch of all and no network. Validation is of the mean of all ranks' weights, and takes no rank's time.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.baselines import launch_hosts
from bench.lab import Lab, check, sound
from bench.report import Result
from bench.ways_task import Task
from bench.ways_worker import RANKS, WIDTH

ONE_WAY_S = 0.015
SPARSE = "topk(ratio=0.01, values='int8')"
RATES = {"100m": 100e6, "10m": 10e6}
BY_LINK: dict[str, dict[str, Any]] = {
    "100m": {
        "DDP fp16 hook": "ddp_fp16",
        "fp16": {"plan": "fp16()"},
        "int4": {"plan": "int4()"},
        "int4, overlap=forward": {"plan": "int4()", "overlap": "forward"},
        "topk 1 %": {"plan": SPARSE},
        "topk 1 %, codes=updates": {"plan": SPARSE, "codes": "updates"},
        "int4, every=4": {"plan": "int4()", "every": 4},
        "int4, every=4, overlap=round": {"plan": "int4()", "every": 4, "overlap": "round"},
        "auto": {"plan": "auto"},
    },
    "10m": {
        "int4": {"plan": "int4()"},
        "topk 1 %, codes=updates": {"plan": SPARSE, "codes": "updates"},
        "int4, every=8": {"plan": "int4()", "every": 8},
        "int4, every=4, overlap=round": {"plan": "int4()", "every": 4, "overlap": "round"},
        "int4, every=8, overlap=round": {"plan": "int4()", "every": 8, "overlap": "round"},
        "auto": {"plan": "auto"},
    },
}
IN_QUICK = {"int4", "int4, overlap=forward", "int4, every=4, overlap=round"}


def run(quick: bool) -> Result:
    seconds = 20.0 if quick else 45.0
    task = Task()
    bound, alone = (trained(None, way, seconds, task) for way in ("together", "alone"))
    paced_s, goal = bound.s_per_step, at(alone.curve, seconds)

    def row(link: str, way: str, run: Run) -> dict[str, Any]:
        return {
            "link": link, "way": way, "s_per_step": run.s_per_step, "x_paced": run.s_per_step / paced_s,
            "loss": at(run.curve, seconds), "s_to_goal": reached(run.curve, goal), "kb_per_step": run.nbytes / 1e3,
            "late_pct": run.late_pct,
        }

    rows = [row("none", "one machine, all batches", bound), row("none", "each host alone", alone)]
    summary: dict[str, Any] = {"seconds": seconds, "paced_step_s": paced_s, "goal_loss": goal}
    for link, bps in RATES.items():
        with Lab(hosts=RANKS, up_bps=bps, down_bps=bps, delay_s=ONE_WAY_S) as lab:
            checked = check(lab)
            for name, way in BY_LINK[link].items():
                if quick and name not in IN_QUICK:
                    continue
                before = lab.counters()
                told = row(link, name, trained(lab, way, seconds, task))
                rows.append(told | {"void": not (checked.passed and sound(before, lab.counters()))})
                if "overlap" in name:
                    summary[f"x_paced, {name}, {link}"] = told["x_paced"]
    return {"rows": rows, "summary": summary}


Curve = Sequence[tuple[float, float]]
"""Seconds and loss at looks, in order."""


class Run(NamedTuple):
    """What came of one way."""

    s_per_step: float
    """The mean between the first look, behind the start of everything, and the last."""
    curve: Curve
    nbytes: float
    """Sent by rank 0 in a step."""
    late_pct: float
    """Passes that took longer than their pace for what they truly compute."""


def trained(lab: Lab | None, way: Any, seconds: float, task: Task) -> Run:
    """Trains that way."""
    ranks = 1 if way == "together" else RANKS
    with tempfile.TemporaryDirectory() as folder:
        argv = [sys.executable, "-m", "bench.ways_worker", json.dumps(way), "--seconds", str(seconds), "--out", folder]
        told = launch_hosts(lab, ranks, argv, deadline_s=20 * seconds + 120)
        looks = {int(step): max(answer["looks"][step] for answer in told) for step in told[0]["looks"]}
        curve = [(at_s, loss_at(task, Path(folder), step, ranks, apart=way == "alone")) for step, at_s in looks.items()]
    steps, times = list(looks), list(looks.values())
    passes = 2 * sum(len(answer["step_s"]) for answer in told)
    if len(steps) == 1:  # a way so slow that there is one look
        steps, times = [0, *steps], [0.0, *times]
    return Run((times[-1] - times[0]) / (steps[-1] - steps[0]), curve, told[0].get("sent_nbytes", 0) / steps[-1],
               100 * sum(answer["late"] for answer in told) / passes)


def loss_at(task: Task, folder: Path, step: int, ranks: int, *, apart: bool) -> float:
    """Of the mean of all ranks' weights; or the mean of their losses, where each has a model of its own."""
    states = [torch.load(folder / f"{step}.{rank}.pt") for rank in range(ranks)]
    if not apart:
        states = [[torch.stack(values).mean(0) for values in zip(*states, strict=True)]]
    losses = []
    for state in states:
        model = task.model(width=WIDTH)
        model.load_state_dict(dict(zip(model.state_dict(), state, strict=True)))
        losses.append(task.validation(model))
    return statistics.mean(losses)


def at(curve: Curve, seconds: float) -> float:
    """The loss at that time, between two looks on the line through them; that of the last one where there is none behind."""
    for (s0, l0), (s1, l1) in itertools.pairwise(curve):
        if s0 <= seconds <= s1:
            return l0 + (l1 - l0) * (seconds - s0) / (s1 - s0)
    return curve[-1][1]


def reached(curve: Curve, goal: float) -> float | str:
    """The first time at which the loss is as low; "-" if it never was."""
    for (s0, l0), (s1, l1) in itertools.pairwise(curve):
        if l1 <= goal:
            return s1 if l0 <= goal else s0 + (s1 - s0) * (l0 - goal) / (l0 - l1)
    return "-"
