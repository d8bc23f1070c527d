"""One rank that trains bench.ways_task in one way, its steps paced, until its seconds are over. Knows no lab, draws no table.

    python -m bench.ways_worker '{"plan": "int4()", "every": 4}' --seconds 60 --out FOLDER

A step is paced: module by module, the forward pass takes FORWARD_S in all and the backward pass BACKWARD_S, as on a device that
computes so fast; the rest of that time this process sleeps. So ranks that share a machine's cores are as fast as ranks that
share nothing, as long as what they truly compute fits in (`late` counts the steps in which it did not).

Weights go to files in FOLDER every LOOK steps, and validation is the caller's: it costs no network and none of the time.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import commlayer
from bench.ways_task import RATE, SEQUENCES, Task
from bench.worker import DEADLINE, MODES, as_rank, host_config

RANKS, WIDTH = 4, 192
"""At that width the model has 1.9 M parameters."""
FORWARD_S, BACKWARD_S = 0.1, 0.2
LOOK = 8
"""Steps between two looks at the weights."""
WAYS = ("alone", "together", "ddp_fp16", "ddp_fp32")
"""What needs no commlayer, by name: each rank by itself; one with the batch of all; DDP with its fp16 hook, or without."""


class Pace:
    """Makes each pass of a model take its time, module by module."""

    def __init__(self, model: nn.Module, modules: nn.Sequential) -> None:
        self._begin, self._count, self.late = 0.0, len(modules), 0
        for i, module in enumerate(modules):
            module.register_forward_pre_hook(self._until(FORWARD_S * i / self._count))
            # Its gradients are final when its part of the pass is over.
            module.register_full_backward_pre_hook(self._until(BACKWARD_S * (self._count - i) / self._count))
        model.register_forward_hook(self._until(FORWARD_S))

    def begin(self) -> None:
        """A pass begins."""
        self._begin = time.perf_counter()

    def _until(self, seconds: float) -> Callable[..., None]:
        def wait(*_: object) -> None:
            if (left := self._begin + seconds - time.perf_counter()) > 0:
                time.sleep(left)
            elif seconds in (FORWARD_S, BACKWARD_S):
                self.late += 1

        return wait


def wrapped(way: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Callable[[], dict[str, Any]]]:
    """What to call forward on, and what ends it and tells of it."""
    if way in ("alone", "together"):
        return model, dict
    if way in WAYS:
        trained = MODES[way](model, optimizer, "")
        return trained.module, lambda: trained.close() or {}
    dist.init_process_group("gloo", timeout=DEADLINE)
    if "sync" in way:
        way = way | {"sync": commlayer.Outer(**way["sync"])}
    session = commlayer.attach(model, optimizer, config=host_config(servers="each"), **way)

    def end() -> dict[str, Any]:
        told = {"sent_nbytes": session.stats()["sent_nbytes"], "exposed_s": session.stats()["exposed_s"],
                "decisions": session.inspect.decisions()}
        session.close()
        return told

    return model, end


def run(way: Any, seconds: float, out: Path) -> dict[str, Any]:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    task = Task()
    model = task.model(width=WIDTH)
    pace = Pace(model, model.blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    module, end = wrapped(way, model, optimizer)
    told: dict[str, Any] = {"rank": rank, "step_s": [], "looks": {}}
    stop = out / "stop"
    last, began, seen = None, time.perf_counter(), 0.0
    step = 0
    while last is None or step < last:
        begin = time.perf_counter()
        optimizer.zero_grad()
        pace.begin()
        loss = task.loss(module, rank, step, SEQUENCES * (RANKS if way == "together" else 1))
        pace.begin()
        loss.backward()
        optimizer.step()
        step += 1
        told["step_s"].append(time.perf_counter() - begin)
        if step % LOOK == 0:
            looking = time.perf_counter()
            told["looks"][step] = looking - began - seen
            torch.save([value.clone() for value in model.state_dict().values()], out / f"{step}.{rank}.pt")
            seen += time.perf_counter() - looking
        if rank == 0 and last is None and time.perf_counter() - began - seen > seconds:
            # No rank is as far ahead of another, so all hear it in time: a round that overlaps is one behind at most.
            last = step + 2 * (way.get("every", 1) if isinstance(way, dict) else 1) + 4
            stop.with_suffix(".part").write_text(str(last))
            stop.with_suffix(".part").rename(stop)
        elif last is None and stop.exists():
            last = int(stop.read_text())
    return told | end() | {"late": pace.late, "world": world}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.ways_worker")
    parser.add_argument("way", type=json.loads, help=f"arguments of attach() as JSON, or one of {', '.join(WAYS)}")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(run(args.way, args.seconds, args.out)), flush=True)


if __name__ == "__main__":
    as_rank(main)
