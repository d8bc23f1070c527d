"""Replanning when links change during training, 100 -> 5 -> 100 Mb/s.

Measures the seconds until a new plan is active, and its step time relative to a job that trained on that link from the start.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from bench.baselines import launch_hosts
from bench.lab import Lab, LabUnavailable, sound
from bench.report import Result
from commlayer.files import write_whole

HOSTS = 4
ONE_WAY_S = 0.015
HIGH_BPS, LOW_BPS = 100e6, 5e6
SEEN = 8
"""Steps whose median is a step time."""
PATIENCE_S = 60.0
DEADLINE_S = 200.0
PLANNED = ("switched to plan", "kept the current plan", "no plan")

Step = dict[str, Any]


class Late(RuntimeError):
    """A wait timed out, because no plan arrived or the machine was too busy. The message is one line."""


def run() -> Result:
    """Takes about 100 s."""
    try:
        with Lab(hosts=HOSTS, up_bps=HIGH_BPS, down_bps=HIGH_BPS, delay_s=ONE_WAY_S) as lab:
            return _rows(lab)
    except (LabUnavailable, Late) as reason:
        return {"rows": [{"scenario": "links 100 -> 5 -> 100 Mb/s", "mode": str(reason), "void": True}], "summary": {}}


def _rows(lab: Lab) -> Result:
    before = lab.counters()
    with _Job(lab) as job:
        high_s = job.step_s(job.settled())
        changes = []
        for bps in (LOW_BPS, HIGH_BPS):
            _set(lab, bps)
            changed = time.monotonic()
            planned = job.planned_since(changed)
            changes.append((planned["at_s"] - changed, job.step_s(planned), _reason(planned)))
    _set(lab, LOW_BPS)
    with _Job(lab) as job:
        low_s = job.step_s(job.settled())
    void = not sound(before, lab.counters())
    rows = [
        {"scenario": f"real processes, {name} Mb/s", "mode": "plan auto, 101 MB", "iteration_ms": step_s * 1e3,
         "oracle_ms": oracle_s * 1e3, "replan_s": after_s, "final": reason, "void": void}
        for name, (after_s, step_s, reason), oracle_s in zip(("100 -> 5", "5 -> 100"), changes, (low_s, high_s), strict=True)
    ]
    (drop_s, after_drop_s, _), (rise_s, after_rise_s, _) = changes
    summary = {
        "replan_s_after_drop": drop_s, "replan_s_after_rise": rise_s,
        "replan_x_oracle_after_drop": after_drop_s / low_s, "replan_x_oracle_after_rise": after_rise_s / high_s,
    }
    return {"rows": rows, "summary": {} if void else summary}


class _Job:
    """Context manager: ranks train in the lab until it exits."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._folder = tempfile.TemporaryDirectory()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._launch, name="launch")

    def __enter__(self) -> _Job:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        stop = Path(self._folder.name) / "stop"
        write_whole({stop: str(len(self._steps()) + 3).encode()})  # ranks differ by at most one step
        self._thread.join()
        self._folder.cleanup()
        if self._error is not None:
            raise self._error

    def _launch(self) -> None:
        try:
            command = [sys.executable, "-m", "bench.relink_worker", "--folder", self._folder.name]
            launch_hosts(self._lab, self._lab.hosts, command, deadline_s=DEADLINE_S)
        except Exception as error:
            self._error = error

    def _steps(self) -> list[Step]:
        path = Path(self._folder.name) / "steps"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]  # the last line may be incomplete

    def settled(self) -> Step:
        """The step after which the first planning was over: a plan was active, or the default was kept."""
        return self.planned_since(0.0)

    def planned_since(self, at_s: float) -> Step:
        """The first step after that time at which planning was over and its plan active."""
        return self._wait(lambda steps: [s for s in steps if s["at_s"] > at_s and _planned(s)])[0]

    def step_s(self, planned: Step) -> float:
        """Median time of the steps after `planned`, without the first, which warms up."""
        first = planned["step"] + 1
        seen = self._wait(lambda steps: steps[first : first + SEEN] if len(steps) >= first + SEEN else [])
        return float(median(step["step_s"] for step in seen))

    def _wait(self, find: Callable[[list[Step]], list[Step]]) -> list[Step]:
        """Polls the steps until `find` returns some, and returns those."""
        until = time.monotonic() + PATIENCE_S
        while not (steps := find(self._steps())):
            if self._error is not None:
                raise self._error
            if time.monotonic() > until:
                raise Late(f"no plan, or too few steps under it, within {PATIENCE_S:g} s")
            time.sleep(0.1)
        return steps


def _planned(step: Step) -> bool:
    return any(word in line for line in step["said"] for word in PLANNED)


def _reason(step: Step) -> str:
    return str(next((word for line in step["said"] for word in PLANNED if word in line), ""))


def _set(lab: Lab, bps: float) -> None:
    for host in range(lab.hosts):
        lab.set(host, up_bps=bps, down_bps=bps)
