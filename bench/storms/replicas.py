"""torchft's replicas for a storm: `python -m bench.storms.replicas FOLDER MODE PACE SCALE` in torchft's environment.

It loads torch once and forks the lighthouse, and a replica for each line on its standard input: a number, and whether the
replica joins a running job. It prints the process id of each. A replica appends its reports to FOLDER/NUMBER.jsonl until it
is killed. It is set up like torchft's train_diloco.py, or averages gradients in each step.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torchft  # type: ignore[import-not-found, unused-ignore]
from torchft import coordination, local_sgd  # type: ignore[import-not-found, unused-ignore]

from bench.storms.reports import EVERY, LEAST, LOCAL, Ended, Stepped, Work, line
from bench.storms.training import task

HERE = "127.0.0.1"
PR_SET_PDEATHSIG = 1
OUTER_LR, OUTER_MOMENTUM = 0.7, 0.9
DEAD_S, WAIT_S, STUCK_S = 10.0, 20.0, 120.0
"""Seconds of real life: without heartbeats until a replica counts as dead, until a collective fails, until a quorum fails. The
last is long: replicas call for a quorum only when they exchange."""


def lighthouse(folder: Path, scale: float) -> None:
    server = coordination.LighthouseServer(bind=f"{HERE}:0", min_replicas=LEAST, join_timeout_ms=round(1000 * DEAD_S / scale),
                                           quorum_tick_ms=20, heartbeat_timeout_ms=round(1000 * DEAD_S / scale))
    (folder / "address.part").write_text(f"http://{HERE}:{server.address().rpartition(':')[2]}")
    (folder / "address.part").rename(folder / "address")
    signal.pause()


def train(folder: Path, number: int, work: Work, scale: float, *, joins: bool) -> None:
    while not (folder / "address").exists():
        time.sleep(0.02)
    trained_task = task()
    model = trained_task.model(number if joins else 0)  # a replica that joins must receive weights
    inner = trained_task.optimizer(model.parameters())
    outer = torch.optim.SGD(model.parameters(), lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True)
    parts: dict[str, Any] = {"model": model, "inner": inner, "outer": outer}

    def load(state: dict[str, Any]) -> None:
        for name, part in parts.items():
            part.load_state_dict(state[name])

    store = torch._C._distributed_c10d.TCPStore(HERE, 0, is_master=True, wait_for_workers=False)
    wait, stuck = timedelta(seconds=WAIT_S / scale), timedelta(seconds=STUCK_S / scale)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=wait), load_state_dict=load,
        state_dict=lambda: {name: part.state_dict() for name, part in parts.items()}, min_replica_size=LEAST,
        use_async_quorum=work.mode != LOCAL, timeout=wait, quorum_timeout=stuck, rank=0, world_size=1, store_addr=HERE,
        store_port=store.port, lighthouse_addr=(folder / "address").read_text(), replica_id=f"storm_{number}", hostname=HERE,
        init_sync=False, heartbeat_interval=timedelta(seconds=1 / scale))
    if work.mode == LOCAL:
        around = local_sgd.DiLoCo(manager, [model], inner, outer, sync_every=EVERY, backup_device=torch.device("cpu"))
        around.__enter__()
        optimizer: Any = inner
    else:
        optimizer = torchft.Optimizer(manager, inner)
    every, local_steps = (EVERY if work.mode == LOCAL else 1), 0
    with (folder / f"{number}.jsonl").open("a", buffering=1) as reports:
        while True:
            begin = time.monotonic()
            exchanged = manager.current_step()
            optimizer.zero_grad()
            loss = trained_task.loss(model, trained_task.batch(number, local_steps))
            loss.backward()
            if work.mode != LOCAL:
                gradients = [parameter.grad for parameter in model.parameters()]
                flat = torch.cat([gradient.reshape(-1) for gradient in gradients if gradient is not None])
                manager.allreduce(flat).wait()  # DistributedDataParallel of torchft 0.2.0 raises when an all-reduce fails
                for gradient, mean in zip(gradients, flat.split([p.numel() for p in model.parameters()]), strict=True):
                    if gradient is not None:
                        gradient.copy_(mean.view_as(gradient))
            optimizer.step()
            local_steps += 1
            step = manager.current_step() * every + local_steps % every
            if not joins or exchanged:
                reports.write(line(Stepped(step, manager.current_step(), loss.item(), time.time())) + "\n")
            time.sleep(max(0.0, begin + work.pace_s - time.monotonic()))


def _fork(child: Callable[[], None]) -> None:
    """Runs `child` in a process that ends with this one."""
    if pid := os.fork():
        print(pid, flush=True)
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    child()
    os._exit(0)


def _replica(folder: Path, number: int, work: Work, scale: float, *, joins: bool) -> None:
    torch.set_num_threads(1)
    os.dup2(os.open(folder / f"{number}.lines", os.O_WRONLY | os.O_CREAT), 2)
    ended = Ended(0)
    try:
        train(folder, number, work, scale, joins=joins)
    except BaseException as error:
        traceback.print_exc()
        ended = Ended(0, what=f"{type(error).__name__}: {error}")
    with (folder / f"{number}.jsonl").open("a") as reports:
        reports.write(line(ended) + "\n")


def main() -> None:
    folder, mode, pace_s, scale = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), float(sys.argv[4])
    _fork(partial(lighthouse, folder, scale))
    for text in sys.stdin:
        number, joins = map(int, text.split())
        _fork(partial(_replica, folder, number, Work(mode, pace_s), scale, joins=bool(joins)))
    os._exit(0)  # the bench has ended: so do all children, at once


if __name__ == "__main__":
    main()
