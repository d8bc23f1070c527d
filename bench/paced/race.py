"""Trains one task with one system on the hosts of a lab or on loopback, and returns the loss curve, times and traffic."""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from bench.lab import Lab, sound
from bench.paced.place import STEPS
from bench.ranks import launch_hosts
from bench.tasks import TASKS, Task

Curve = Sequence[tuple[int, float, float]]
"""(steps, seconds, validation loss) at the evaluation points, in order."""
REPORTED = ("decisions", "exposed_s", "exchanges", "seconds")
OVERHEAD_S = 180.0
"""Time for starting and ending, including one slow step."""
LATE_PCT = 5.0
"""If a larger percentage of the passes is late, the pace was not kept."""


class Run(NamedTuple):
    """Result of one training."""

    curve: Curve
    s_per_step: float
    """Mean between the first evaluation, which comes after all start-up, and the last."""
    steps: int
    late_pct: float
    """Percentage of passes whose real compute exceeded their pace."""
    up_kb: float = 0.0
    """Uploaded kB per step of the busiest host by the lab's counters, including start-up."""
    down_kb: float = 0.0
    sound: bool = True
    """Whether the lab met its limits during the run."""
    reported: Mapping[str, Any] = MappingProxyType({})
    """Further results that rank 0 reports."""


def run_training(
    lab: Lab | None, training: dict[str, Any], seconds: float, ranks: int, *, python: str = sys.executable,
    during: Callable[[threading.Event], None] | None = None,
) -> Run:
    """Runs one training. `training`: task, system, seed and slow, as in bench.paced.worker. `during` runs in a thread from the
    time rank 0 starts training until the event that it gets is set. Raises RankFailed if a rank fails."""
    over = threading.Event()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        np.zeros(ranks + 1, np.int64).tofile(folder / STEPS)
        if during:
            beside = threading.Thread(target=_when_begun, args=(folder / "began.0", during, over))
            beside.start()
            stack.callback(beside.join)
        stack.callback(over.set)
        before = lab.counters() if lab else None
        argv = [python, "-m", "bench.paced.worker", json.dumps(training), str(seconds), str(folder)]
        rows = launch_hosts(lab, ranks, argv, deadline_s=2 * seconds + OVERHEAD_S)
        over.set()
        after = lab.counters() if lab else None
        curve = _curve(TASKS[training["task"]](), folder, rows, training)
    steps = min(answer["steps"] for answer in rows)
    late, passes = (sum(answer[key] for answer in rows) for key in ("late", "passes"))
    run = Run(curve, _s_per_step(curve, rows), steps, 100 * late / max(1, passes),
              reported={key: rows[0][key] for key in REPORTED if key in rows[0]})
    if before is None or after is None:
        return run
    return run._replace(up_kb=_most(before, after, "sent_nbytes") / steps / 1e3,
                        down_kb=_most(before, after, "received_nbytes") / steps / 1e3, sound=sound(before, after))


def at_step(curve: Curve, step: float) -> float:
    """The loss after that number of steps, interpolated linearly; after the last evaluation, the last loss."""
    return _between([(float(n), loss) for n, _, loss in curve], step)


def reached(curve: Curve, goal: float) -> float | None:
    """The first time at which the loss is at most `goal`."""
    return _first([(s, loss) for _, s, loss in curve], goal)


def reached_step(curve: Curve, goal: float) -> float | None:
    """The number of steps after which the loss is at most `goal`."""
    return _first([(float(n), loss) for n, _, loss in curve], goal)


def _between(points: Sequence[tuple[float, float]], x: float) -> float:
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if x0 <= x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return points[-1][1]


def _first(points: Sequence[tuple[float, float]], goal: float) -> float | None:
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if y1 <= goal:
            return x1 if y0 <= goal else x0 + (x1 - x0) * (y0 - goal) / (y0 - y1)
    return None


def _curve(task: Task, folder: Path, replies: Sequence[dict[str, Any]], training: dict[str, Any]) -> Curve:
    seed = int(training.get("seed", 0))
    curve = [(0, 0.0, task.validation(task.model(seed)))]
    for step in replies[0]["looks"]:
        if all(step in answer["looks"] for answer in replies):
            states = [torch.load(folder / f"{step}.{answer['rank']}.pt") for answer in replies]
            if training["system"]["kind"] != "alone":
                states = [[torch.stack(values).mean(0) if values[0].is_floating_point() else values[0]
                           for values in zip(*states, strict=True)]]
            when = max(answer["looks"][step] for answer in replies)
            curve.append((int(step), when, statistics.mean(_loss(task, seed, state) for state in states)))
    return curve


def _loss(task: Task, seed: int, state: list[torch.Tensor]) -> float:
    model = task.model(seed)
    model.load_state_dict(dict(zip(model.state_dict(), state, strict=True)))
    return task.validation(model)


def _s_per_step(curve: Curve, replies: Sequence[dict[str, Any]]) -> float:
    looks = curve[1:]
    if len(looks) < 2:  # so slow that there is at most one evaluation
        return max(float(answer["seconds"]) / int(answer["steps"]) for answer in replies)
    return (looks[-1][1] - looks[0][1]) / (looks[-1][0] - looks[0][0])


def _most(before: dict[str, Any], after: dict[str, Any], key: str) -> int:
    return max(int(b[key] - a[key]) for a, b in zip(before["hosts"], after["hosts"], strict=True))


def _when_begun(begun: Path, during: Callable[[threading.Event], None], over: threading.Event) -> None:
    while not begun.exists():
        if over.wait(0.05):
            return
    during(over)
