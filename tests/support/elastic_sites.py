"""The model, gradients and failures of jobs whose sites are killed, hang or join during training."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from torch import nn

from commlayer.compressors.feedback import split_by_tensor
from commlayer.engine import checkpoint
from support.sites import WAIT_S, ended

STEPS = 12
SIZES = [(40, 30), (700,), (3, 5, 7)]
EXACT = "identity()"
ODD, SLOW_S = 4, 4.0
"""The step in which a home that is left is slow, or breaks off; and how slow."""


class Breaks(torch.autograd.Function):
    """Raises in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("no more memory, say")


class Given(nn.Module):
    """Its gradients are what it is called with. Where it `breaks`, its backward pass ends behind the first of them."""

    breaks = False

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in SIZES])
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        self.calls += 1
        parts = [Breaks.apply(p) if self.breaks and n == 0 else p for n, p in enumerate(self.parts)]
        return torch.stack([(p * g).sum() for p, g in zip(parts, gradients, strict=True)]).sum()


def slopes(home: int, step: int) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(1000 * step + home)
    return [torch.randn(size, generator=made) for size in SIZES]


def unheard(session: Any, turn: int) -> None:
    """In that turn no row of the others comes here, as if one had died on the way."""
    from commlayer.errors import CommError

    rows = session.inspect.connection.local._lengths._rows
    read, count = rows.read, itertools.count(1)

    def lost(*_: Any) -> list[list[float]]:
        found = read(*_)
        if next(count) != turn:
            return found
        time.sleep(SLOW_S)
        raise CommError("a row is lost")

    rows.read = lost


def owed_of(made: Any) -> list[torch.Tensor]:
    """Between two steps, by this worker, and on rank 0 by the servers."""
    owed = [torch.zeros(size, dtype=torch.float64) for size in SIZES]
    undone = made.worker.undone()
    for bucket in made.worker.buckets:
        for debt in bucket.debts():
            owed[debt.tensor].view(-1)[debt.start : debt.stop] += debt.values.double() / made.world
    if made.rank == 0:
        for bucket in made.plan.buckets:
            state = load(made.uplink.fetch_state(bucket.server, bucket.id, undone.get(bucket.id, 0)))
            residuals = [x.view(-1) for name, x in state.items() if "residual" in name]
            for debt in (d for x in residuals for d in split_by_tensor(bucket.slices, 0, x)):
                owed[debt.tensor].view(-1)[debt.start : debt.stop] += debt.values.double() / made.world
    return owed


def flat(tensors: list[torch.Tensor]) -> list[float]:
    return torch.cat([t.reshape(-1) for t in tensors]).tolist()


def survivors(every: list[subprocess.Popen[str]], victims: dict[int, int]) -> list[dict[str, Any]]:
    """What those tell who are left. `victims`: with which exit code the others end."""
    codes = [ended(process) for process in every]
    assert [code for code, _, _ in codes] == [victims.get(home, 0) for home in range(len(every))], [e for _, _, e in codes]
    return [told[0] for home, (_, told, _) in enumerate(codes) if home not in victims]


def reference(worlds: list[int], left: list[list[int]], steps: Sequence[int] = range(STEPS)) -> list[float]:
    """The weights by hand: each step's plain mean over those who were there, as a server sums. `left`: who was, by number."""
    weights = [torch.zeros(size) for size in SIZES]
    for step, world in zip(steps, worlds, strict=True):
        who = next(homes for homes in left if len(homes) == world)
        for p, *gradients in zip(weights, *(slopes(home, step) for home in who), strict=True):
            total = gradients[0].clone()
            for g in gradients[1:]:
                total += g
            p.sub_(total.mul_(1.0 / world))
    return flat([-p.double() for p in weights])


KILLED = 128 + signal.SIGKILL


class Death:
    """Of this home: "HOME@STEP:PLACE:NUMBER", ahead of that collective, or behind that word to a server, that is the NUMBER-th
    of a save or a change of plans behind that step. "+" behind that: once another home waits to be let in."""

    def __init__(self, home: int, deaths: str) -> None:
        every = re.findall(r"(\d+)@(\d+):(\w+):(\d+)(\+?)", deaths)
        found = [(int(step), place, int(number), more) for one, step, place, number, more in every if int(one) == home]
        self.step, self.place, self._left, self._waits = found[0] if found else (STEPS, "", 0, "")
        self.silent = bool(found)

    def arm(self, made: Any, directory: str) -> None:
        from commlayer.cluster.collectives import Groups
        from commlayer.cluster.uplink import Uplink
        from commlayer.engine.local_steps import LocalSteps

        self._members, self._waits_at = made.members, waits_at(directory)
        for owner, name in ((Groups, "gather_all"), (Groups, "share_bytes"), (Uplink, "send_plan"), (LocalSteps, "drain"),
                            (LocalSteps, "exchange")):
            self._watch(owner, name, behind=name == "send_plan")

    def _watch(self, owner: Any, name: str, *, behind: bool) -> None:
        real = getattr(owner, name)

        def watched(*args: Any, **named: Any) -> Any:
            self._left -= (here := self.place in (name, name.partition("_")[0]))
            if here and not behind and self._left <= 0:
                self._die()
            found = real(*args, **named)
            if here and behind and self._left <= 0:
                self._die()
            return found

        setattr(owner, name, watched)

    def _die(self) -> None:
        if self._waits:
            self._waits_at.touch()
            until = time.monotonic() + WAIT_S
            while not self._members._new() and time.monotonic() < until:
                time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)


def waits_at(directory: str | Path) -> Path:
    """What is there when a home that is to die waits for another."""
    return Path(directory) / "a home waits"


def whole(directory: Path, world: int) -> checkpoint.SaveOnDisk:
    """The one save that lies there."""
    held = [checkpoint.saves_of(directory, rank) for rank in range(world)]
    assert [len(row) for row in held] == [1] * world
    return checkpoint.newest_save(directory, held)


DEADLINE_S = "8"


def hang(made: Any, stays: bool) -> None:
    """In the middle of a backward pass. Its heartbeats go on. It wakes when somebody else is gone, or never, if it `stays`."""
    until = time.monotonic() + 4 * WAIT_S
    while (stays or not made.uplink._membership._failed) and time.monotonic() < until:
        time.sleep(0.05)


RATE, MOMENTUM, DECAY = 1.0, 0.5, 0.999
