"""A worker of a chaos run: trains a small model like a user's script and reports every step.

It reports a digest of the weights and the samples of each step, and finally what it put in and what was applied, so that lost
data can be detected.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.utils.data import DataLoader, Dataset

from commlayer.balance import Sampler
from commlayer.cluster.membership.client import Membership
from commlayer.cluster.processes.script_host import begin_world
from commlayer.config import read_launch
from commlayer.errors import CommError
from commlayer.session import Session, attach
from tests.chaos.reports import SETTLING, STEPS_PER_EPOCH, Began, Elements, Ended, Stepped, Summed, Task
from tests.chaos.wire import weights

PAYS = "error_feedback(fp16())"
"""A codec that sends everything in each step. It has residuals at both ends, so those of an earlier codec are kept."""
INPUTS, OUTPUTS = 12, 3
PAUSE_S = 0.02
"""Pause between steps while the run waits for a home that joins again."""


class Samples(Dataset[Any]):
    """Returns the number, input and target of a sample."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(11)
        self._x = torch.randn(count, INPUTS, generator=generator)
        self._y = torch.stack([self._x[:, 0] * self._x[:, 1], self._x[:, 2].abs(), self._x.sum(1).sin()], dim=1)

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, number: int) -> Any:
        return number, self._x[number], self._y[number]


def train(pipe: Any, task: Task) -> None:
    """The work of a process. Faults strike it from outside."""
    logging.basicConfig(level=logging.WARNING, format=f"worker {task.rank}: %(message)s")
    torch.set_num_threads(1)
    record_heartbeats(Path(task.folder) / f"heartbeats-{task.rank}")
    done = [0]
    try:
        _train(pipe, task, done)
        report = Ended(done[0], time.monotonic())
    except CommError as error:
        report = Ended(done[0], time.monotonic(), peer=error.peer, what=str(error))
    except Exception:
        report = Ended(done[0], time.monotonic(), bug=traceback.format_exc())
    pipe.send(report)


def _train(pipe: Any, task: Task, done: list[int]) -> None:
    joins = task.rank >= task.workers
    if task.least:
        begin_world(read_launch(), "gloo")
    else:
        known = PrefixStore(task.meeting, TCPStore(*task.store, is_master=False, wait_for_workers=False))
        dist.init_process_group("gloo", store=known, rank=task.rank, world_size=task.workers)
    model, optimizer = made(task.width)
    shares = weights(task.workers)
    data = Samples(STEPS_PER_EPOCH * sum(shares))
    sampler = Sampler(data, batch=sum(shares), shares=shares, rank=task.rank % task.workers, world=task.workers, seed=3)
    loader = DataLoader(data, batch_sampler=sampler)
    waits_at = task.waits_at
    account = Account(model, 0.0 if joins else shares[task.rank] / sum(shares))
    with attach(model, optimizer, compression=task.codec, config=task.settings) as session:
        done[0], last = session.step, sys.maxsize if task.behind else task.steps
        known: set[int] = set()
        write_buckets(session, Path(task.folder) / f"buckets-{task.rank}")
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
                    known |= {*members}
                    exits = {member: session.inspect.steps_at_exit(member) for member in known.difference(members)}
                    pipe.send(Stepped(done[0], digest(model.parameters()), used, time.monotonic(), members, exits))
                while pipe.poll() or done[0] == waits_at:
                    pipe.recv()  # every message means only that the fault has struck
                    waits_at = 0
                time.sleep(task.pace_s)
                if last == sys.maxsize:
                    time.sleep(PAUSE_S)
                    last = done[0] + task.behind if max(session.inspect.members) >= task.workers else last
                if done[0] == last:
                    break
        account.settle(session, optimizer)
        account.write(Path(task.folder), task.rank)


def made(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(INPUTS, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, OUTPUTS))
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def write_buckets(session: Session, path: Path) -> None:
    """Writes which elements the buckets of the plan contain."""
    plan = session.inspect.plan
    assert plan is not None
    path.write_bytes(msgspec.json.encode([[(s.tensor, s.start, s.stop) for s in b.slices] for b in plan.buckets]))


def replay(pipe: Any, workers: int, width: int, steps: Sequence[Summed], buckets: Sequence[Sequence[Elements]]) -> None:
    """Repeats a training without commlayer from the samples of each worker in each step: plain means over samples, added in the
    order of the workers. The mean of a bucket may lack workers that did not complete the step. Sends the digests."""
    torch.set_num_threads(1)
    (model, optimizer), data, digests = made(width), Samples(STEPS_PER_EPOCH * sum(weights(workers))), []
    parameters = list(model.parameters())

    def stepped(given: Sequence[tuple[Sequence[int], list[torch.Tensor]]]) -> list[torch.Tensor]:
        """Returns the weights after a step with the mean of these gradients."""
        before = [p.detach().clone() for p in parameters]
        total = sum(len(used) for used, _ in given)
        for p, *parts in zip(parameters, *(gradients for _, gradients in given), strict=True):
            p.grad = functools.reduce(torch.add, parts).mul_(1.0 / total)
        optimizer.step()
        after = [p.detach().clone() for p in parameters]
        set_weights(before)
        return after

    def set_weights(values: Sequence[torch.Tensor]) -> None:
        for p, value in zip(parameters, values, strict=True):
            p.data.copy_(value)

    for step in steps:
        taken = []
        for used, sure in step.samples:
            x, y = (torch.stack(parts) for parts in list(zip(*(data[number] for number in used), strict=True))[1:])
            own = torch.autograd.grad(nn.functional.mse_loss(model(x), y), parameters)
            taken.append((sure, (used, [g * float(len(used)) for g in own])))
        options = [[one for (_, one), is_in in zip(taken, chosen, strict=True) if is_in]
                   for chosen in itertools.product((True, False), repeat=len(taken))
                   if any(chosen) and all(is_in for (sure, _), is_in in zip(taken, chosen, strict=True) if sure)]
        found = [stepped(option) for option in options]
        for choice in itertools.product(found, repeat=len(buckets)) if len(found) > 1 else [found * len(buckets)]:
            mixed = [value.clone() for value in found[0]]
            for bucket, values in zip(buckets, choice, strict=True):
                for tensor, start, stop in bucket:
                    mixed[tensor].view(-1)[start:stop] = values[tensor].view(-1)[start:stop]
            if (result := digest(mixed)) == step.digest:
                break
        set_weights(mixed)
        digests.append(result)
    pipe.send(digests)


def record_heartbeats(path: Path) -> None:
    """Writes a line for each heartbeat of this process: when it began (time.monotonic()), how long it took, and whether it was
    answered."""
    file, send = path.open("w", buffering=1), Membership._send_beat

    def timed(membership: Membership, timeout_s: float) -> Any:
        begin, answered = time.monotonic(), False
        try:
            reply = send(membership, timeout_s)
            answered = True
            return reply
        finally:
            file.write(f"{begin} {time.monotonic() - begin} {int(answered)}\n")

    Membership._send_beat = timed  # type: ignore[method-assign,assignment]


def digest(weights: Iterable[torch.Tensor]) -> str:
    """A digest of all weights, bit for bit."""
    sums = hashlib.sha256()
    for tensor in weights:
        sums.update(tensor.detach().numpy().tobytes())
    return sums.hexdigest()[:16]


class Account:
    """What this worker's gradients put into the mean, and what was applied of the mean, in float64."""

    def __init__(self, model: nn.Module, part: float) -> None:
        self._parameters, self._part = list(model.parameters()), part
        self._put, self._applied = (torch.zeros(sum(p.numel() for p in self._parameters), dtype=torch.float64) for _ in "pa")

    def put_in(self, loss: torch.Tensor) -> None:
        """Call before the backward pass, which replaces gradients by averages."""
        gradients = torch.autograd.grad(loss, self._parameters, retain_graph=True)
        self._put += self._part * torch.cat([g.reshape(-1) for g in gradients]).double()

    def applied(self) -> None:
        self._applied += torch.cat([p.grad.reshape(-1) for p in self._parameters if p.grad is not None]).double()

    def settle(self, session: Session, optimizer: torch.optim.Optimizer) -> None:
        """Sends the residuals of workers and servers in two more steps, with a codec that keeps back almost nothing."""
        plan = session.inspect.plan
        assert plan is not None
        buckets = tuple(msgspec.structs.replace(b, codec=PAYS, down="") for b in plan.buckets)
        session.switch(msgspec.structs.replace(plan, buckets=buckets))
        for _ in range(SETTLING):
            for p in self._parameters:
                p.grad = torch.zeros_like(p)
            session.synchronize()
            self.applied()
            optimizer.step()  # an average that no optimizer applies becomes a residual again
            optimizer.zero_grad()

    def write(self, folder: Path, rank: int) -> None:
        (folder / f"put-{rank}").write_bytes(self._put.numpy().tobytes())
        (folder / f"applied-{rank}").write_bytes(self._applied.numpy().tobytes())
