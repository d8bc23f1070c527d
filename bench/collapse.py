"""Links that become much slower and recover: seconds until the automatic plan has followed, and what the steps take then."""

from __future__ import annotations

import itertools
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import commlayer
from bench.lab import Lab, LabUnavailable, check, sound
from bench.ranks import DEADLINE, as_rank, host_config, launch_hosts, program
from bench.report import Result

HOSTS, UP_BPS, ONE_WAY_S, QUEUE_S = 4, 100e6, 0.02, 0.1
SCENARIOS = {
    "all of 4 homes, 100 -> 5 -> 100 Mb/s": ((0, 1, 2, 3), 5e6),
    "one of 4 homes, 100 -> 5 -> 100 Mb/s": ((1,), 5e6),
    "all of 4 homes, 100 -> 50 -> 100 Mb/s": ((0, 1, 2, 3), 50e6),
}
DOWN_S, RECOVER_S, END_S = 30.0, 60.0, 85.0
"""When the links become slower, when they recover, and when training ends, in seconds after the first step."""
COMPUTE_S, WIDTH, LAYERS = 0.3, 2048, 6
"""A step's computing time, which the process sleeps, and the model of 25 million parameters."""
AHEAD = 40
"""Number of steps after which all ranks end once rank 0 wants to end: no rank is further ahead."""


def run(quick: bool) -> Result:
    rows = [_row(name, *SCENARIOS[name]) for name in itertools.islice(SCENARIOS, 1 if quick else None)]
    return {"rows": rows, "summary": {} if rows[0]["void"] else {"collapse_s": rows[0]["follows_s"]}}


def _row(scenario: str, hosts: tuple[int, ...], bps: float) -> dict[str, Any]:
    try:
        with Lab(hosts=HOSTS, up_bps=UP_BPS, down_bps=UP_BPS, delay_s=ONE_WAY_S, queue_s=QUEUE_S) as lab, \
                tempfile.TemporaryDirectory() as folder:
            passed, before, changed = check(lab).passed, lab.counters(), list[float]()
            thread = threading.Thread(target=_change_links, args=(lab, hosts, bps, Path(folder), changed), daemon=True)
            thread.start()
            replies = launch_hosts(lab, HOSTS, program("bench.collapse", folder), deadline_s=END_S + 120)
            void = not (passed and sound(before, lab.counters()))
    except LabUnavailable as reason:
        return {"scenario": scenario, "plan": str(reason), "void": True}
    down, up = changed
    reply = replies[0]
    plans = [(at, float(step_s)) for at, step_s in reply["plans"]]
    steps = [(begin, end - begin) for begin, end in itertools.pairwise(reply["begun"])]
    slower = next(((at, step_s) for at, step_s in plans if down < at < up), None)
    faster = next((at for at, _ in plans if at > up), None)
    after = [step_s for begin, step_s in steps if slower and slower[0] < begin < up]
    return {"scenario": scenario,
            "usual_s": median(step_s for begin, step_s in steps if down - 10 < begin < down),
            "follows_s": slower[0] - down if slower else None, "recovers_s": faster - up if faster else None,
            "longest_s": max(step_s for begin, step_s in steps if down - 2 < begin < up),
            "then_s": sum(after) / len(after) if after else None, "predicted_s": slower[1] if slower else None, "void": void}


def _change_links(lab: Lab, hosts: tuple[int, ...], bps: float, folder: Path, changed: list[float]) -> None:
    while not (folder / "begun").exists():
        time.sleep(0.05)
    for wait_s, new_bps in ((DOWN_S, bps), (RECOVER_S - DOWN_S, UP_BPS)):
        time.sleep(wait_s)
        changed.append(time.monotonic())
        for host in hosts:
            lab.set(host, up_bps=new_bps, down_bps=new_bps)


def rank(folder: str) -> dict[str, Any]:
    """One rank. Returns when its steps began, and when plans took effect, with their predicted step times."""
    dist.init_process_group("gloo", timeout=DEADLINE)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    session = commlayer.attach(model, optimizer, sync="auto", config=host_config(servers="each"))
    x, begun, plans, last = torch.randn(2, WIDTH), list[float](), list[tuple[float, float]](), Path(folder, "last")
    if dist.get_rank() == 0:
        Path(folder, "begun").touch()
    while not (last.exists() and len(begun) >= int(last.read_text() or AHEAD * AHEAD)):
        begun.append(time.monotonic())
        plan = session.inspect.context.plan
        optimizer.zero_grad()
        time.sleep(COMPUTE_S)
        model(x).square().mean().backward()
        optimizer.step()
        if (plan_now := session.inspect.context.plan) is not plan and plan_now is not None:
            plans.append((time.monotonic(), plan_now.step_s))
        if dist.get_rank() == 0 and time.monotonic() > begun[0] + END_S and not last.exists():
            last.write_text(str(len(begun) + AHEAD))
    session.close()
    return {"begun": begun, "plans": plans}


if __name__ == "__main__":
    as_rank(rank)
