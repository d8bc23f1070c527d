"""A worker of a chaos run: a small model, trained as a script would train it, that tells what it did in every step.

It tells a digest of the weights after each step, which samples it used, and what it was to send and what came back, so that
others can say whether anything was lost.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.utils.data import DataLoader, Dataset

from bench.chaos.reports import SETTLING, STEPS_PER_EPOCH, Began, Ended, Stepped, Task
from bench.chaos.wire import weights
from commlayer.balance import Sampler
from commlayer.config import read_launch
from commlayer.engine.start import begin_world
from commlayer.errors import CommError
from commlayer.session import Session, attach, switch

PAYS = "error_feedback(fp16())"
"""It has a residual at both ends, so what was owed under another codec is not dropped, and sends everything in each step."""
INPUTS, WIDTH, OUTPUTS = 12, 40, 3
PAUSE_S = 0.02
"""Between steps, while it is open when a home comes again."""


class Samples(Dataset[Any]):
    """Number, input and target of each."""

    def __init__(self, count: int) -> None:
        made = torch.Generator().manual_seed(11)
        self._x = torch.randn(count, INPUTS, generator=made)
        self._y = torch.stack([self._x[:, 0] * self._x[:, 1], self._x[:, 2].abs(), self._x.sum(1).sin()], dim=1)

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, number: int) -> Any:
        return number, self._x[number], self._y[number]


def train(pipe: Any, task: Task) -> None:
    """A process's work. It is struck where it stands, so nothing here knows of faults."""
    logging.basicConfig(level=logging.WARNING, format=f"worker {task.rank}: %(message)s")
    torch.set_num_threads(1)
    done = [0]
    try:
        _train(pipe, task, done)
        said = Ended(done[0], time.monotonic())
    except CommError as error:
        said = Ended(done[0], time.monotonic(), peer=error.peer, what=str(error))
    except Exception:
        said = Ended(done[0], time.monotonic(), bug=traceback.format_exc())
    pipe.send(said)


def _train(pipe: Any, task: Task, done: list[int]) -> None:
    joins = task.rank >= task.workers
    if task.least:
        begin_world(read_launch(), "gloo")
    else:
        known = PrefixStore(task.meeting, TCPStore(*task.store, is_master=False, wait_for_workers=False))
        dist.init_process_group("gloo", store=known, rank=task.rank, world_size=task.workers)
    model, optimizer = _made()
    shares = weights(task.workers)
    data = Samples(STEPS_PER_EPOCH * sum(shares))
    sampler = Sampler(data, batch=sum(shares), shares=shares, rank=task.rank % task.workers, world=task.workers, seed=3)
    loader = DataLoader(data, batch_sampler=sampler)
    waits_at = task.waits_at
    account = Account(model, 0.0 if joins else shares[task.rank] / sum(shares))
    with attach(model, optimizer, plan=task.codec, config=task.settings) as session:
        done[0], last = session.step, sys.maxsize if task.behind else task.steps
        while done[0] < last:
            for numbers, x, y in sampler.follow(loader, session):
                used = tuple(numbers.tolist()) if sampler.samples else ()
                if task.least:
                    pipe.send(Began(done[0] + 1, sampler.epoch, used))
                loss = nn.functional.mse_loss(model(x), y)
                account.put_in(loss)
                loss.backward()
                account.applied()
                optimizer.step()
                optimizer.zero_grad()
                done[0] += 1
                if done[0] % task.told_every == 0:
                    members = tuple(session.inspect.members) if task.least else ()
                    pipe.send(Stepped(done[0], digest(model), used, time.monotonic(), members))
                while pipe.poll() or done[0] == waits_at:
                    pipe.recv()  # it says no more than that the fault has struck
                    waits_at = 0
                if last == sys.maxsize:
                    time.sleep(PAUSE_S)
                    last = done[0] + task.behind if max(session.inspect.members) >= task.workers else last
                if done[0] == last:
                    break
        account.settle(session, optimizer)
        account.write(Path(task.folder), task.rank)


def _made() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(INPUTS, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, OUTPUTS))
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def replay(pipe: Any, workers: int, steps: Sequence[Sequence[Sequence[int]]]) -> None:
    """The same training without commlayer, of what each member used in each step: plain means over samples, added in the order
    of members. Tells the digests."""
    torch.set_num_threads(1)
    (model, optimizer), data, said = _made(), Samples(STEPS_PER_EPOCH * sum(weights(workers))), []
    for step in steps:
        sums: list[torch.Tensor] = []
        for used in filter(None, step):
            x, y = (torch.stack(parts) for parts in list(zip(*(data[number] for number in used), strict=True))[1:])
            own = torch.autograd.grad(nn.functional.mse_loss(model(x), y), list(model.parameters()))
            parts = [g * float(len(used)) for g in own]
            sums = [total.add_(part) for total, part in zip(sums, parts, strict=True)] if sums else parts
        for p, total in zip(model.parameters(), sums, strict=True):
            p.grad = total.mul_(1.0 / sum(map(len, step)))
        optimizer.step()
        said.append(digest(model))
    pipe.send(said)


def digest(model: nn.Module) -> str:
    """Of all weights, bit for bit."""
    sums = hashlib.sha256()
    for tensor in model.parameters():
        sums.update(tensor.detach().numpy().tobytes())
    return sums.hexdigest()[:16]


class Account:
    """What this worker's gradients put into the mean, and what of the mean was applied, in float64."""

    def __init__(self, model: nn.Module, part: float) -> None:
        self._parameters, self._part = list(model.parameters()), part
        self._put, self._applied = (torch.zeros(sum(p.numel() for p in self._parameters), dtype=torch.float64) for _ in "pa")

    def put_in(self, loss: torch.Tensor) -> None:
        """Ahead of the backward pass, which leaves averages alone."""
        gradients = torch.autograd.grad(loss, self._parameters, retain_graph=True)
        self._put += self._part * torch.cat([g.reshape(-1) for g in gradients]).double()

    def applied(self) -> None:
        self._applied += torch.cat([p.grad.reshape(-1) for p in self._parameters if p.grad is not None]).double()

    def settle(self, session: Session, optimizer: torch.optim.Optimizer) -> None:
        """All that is owed, by workers and servers, is paid in two more steps, under a plan that keeps back next to nothing."""
        plan = session.inspect.plan
        assert plan is not None
        buckets = tuple(msgspec.structs.replace(b, codec=PAYS, down="") for b in plan.buckets)
        switch(session, msgspec.structs.replace(plan, buckets=buckets))
        for _ in range(SETTLING):
            for p in self._parameters:
                p.grad = torch.zeros_like(p)
            session.synchronize()
            self.applied()
            optimizer.step()  # what no optimizer takes is owed again
            optimizer.zero_grad()

    def write(self, folder: Path, rank: int) -> None:
        (folder / f"put-{rank}").write_bytes(self._put.numpy().tobytes())
        (folder / f"applied-{rank}").write_bytes(self._applied.numpy().tobytes())
