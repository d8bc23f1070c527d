"""Reentrant activation checkpointing on a plain module: each segment is a backward pass inside the outer one. Real ranks."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.arguments import sync_of
from support.attached import Run, Setting, coordinators, data, loss_of, mlp, play, weights
from support.rank_pool import Servers, pool, quick, ranks_first
from torch import nn
from torch.utils.checkpoint import checkpoint

import commlayer
from commlayer.engine.hooks import REENTRANT

WORLD, STEPS = 2, 4
_ranks = ranks_first(WORLD)


def segment(module: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return checkpoint(module, x if x.requires_grad else x.requires_grad_(), use_reentrant=True)


class Body(nn.Module):
    """The first layers are a segment: the outer pass has hooks of its own before it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = mlp()[:4], mlp(1)[4]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(segment(self.body, x))


class Head(Body):
    """The last layer is a segment: the outer pass has hooks of its own after it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return segment(self.head, self.body(x))


class All(Body):
    """Segments alone, one inside another."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return segment(self.head, segment(lambda x: segment(self.body[2:], self.body[:2](x)), x))


class Shared(nn.Module):
    """One layer in three segments, and outside of them closer to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.layer, self.head = nn.Linear(12, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        for number, p in enumerate(self.parameters()):
            nn.init.normal_(p, std=0.3, generator=torch.Generator().manual_seed(number))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.enter(x))
        for _ in range(3):
            x = segment(lambda x: self.layer(x).tanh(), x)
        return self.head(x)


MODELS: list[Callable[[], nn.Module]] = [Body, Head, All, Shared]


def trained(run: Run, make: Callable[[], nn.Module], micro: int) -> dict[str, Any]:
    """`micro`: backward passes to a step."""
    model = make()
    wrapped, optimizer = run.wrap(model), torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(micro):
            with contextlib.nullcontext() if part == micro - 1 else run.no_sync(wrapped):
                loss_of(run, wrapped, micro * step + part).backward()
        optimizer.step()
    return weights(model)


SETTINGS = {"service": Setting("module"), "all-reduce": Setting("module", servers=0, plan="auto", ranks_per_node=2)}


@pytest.mark.parametrize("path", SETTINGS)
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("make", MODELS)
def test_as_alone(make: Callable[[], nn.Module], micro: int, path: str) -> None:
    with coordinators(1, WORLD, SETTINGS[path].servers) as result:
        setting = SETTINGS[path]._replace(addresses=tuple(m.address for m in result))
        results = pool(WORLD).call(play, WORLD, trained, setting, make, micro)
    for name, tensor in play(0, WORLD, trained, None, make, micro).items():
        torch.testing.assert_close(results[0][name], tensor, msg=lambda m, n=name: f"{n}: {m}")
        assert torch.equal(results[0][name], results[1][name]), f"{name} differs between ranks"


class Raises(torch.autograd.Function):
    """In its backward pass, if `now`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, now: bool) -> torch.Tensor:
        ctx.now = now
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.now:
            raise ArithmeticError("no more memory, say")
        return grad, None


def broken(rank: int, how: str, address: str) -> tuple[list[str], torch.Tensor]:
    """The outer pass of rank 1 raises in step 1, after a segment. What became of each step, and the weights."""
    model: Any = All()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results = []
    sync = "forward" if how == "forward" else None
    with commlayer.attach(model, optimizer, compression="identity()", config=quick(join=address), sync=sync):
        for step in range(STEPS):
            optimizer.zero_grad()
            x, y = data(rank, step)
            hidden = Raises.apply(segment(model.body[:2], x), rank == step == 1)
            try:
                nn.functional.mse_loss(segment(model.head, segment(model.body[2:], hidden)), y).backward()
                optimizer.step()
                results.append("")
            except (ArithmeticError, commlayer.CommError) as error:
                results.append(type(error).__name__)
        return results, torch.cat([p.detach().view(-1) for p in model.parameters()])


def test_a_pass_that_raises_drops_its_step_on_all_ranks() -> None:
    with Servers(WORLD, 1) as servers:
        (waited, one), (raised, other) = pool(WORLD).call(broken, "step", servers.address)
    assert waited == ["", "StepAbandoned", "", ""]
    assert raised == ["", "ArithmeticError", "", ""]
    assert torch.equal(one, other)


def overlapped(rank: int, arguments: dict[str, Any], address: str) -> tuple[list[str], dict[str, torch.Tensor]]:
    lines: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log, model = logging.getLogger("commlayer"), Shared()
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with commlayer.attach(model, optimizer, compression="identity()", config=quick(join=address),
                              sync=sync_of(**arguments)) as session:
            for step in range(STEPS):
                optimizer.zero_grad()
                x, y = data(rank, step)
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
            session.flush()
            return [line for line in lines if line == REENTRANT], weights(model)
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


def test_other_sync_modes_and_one_log_line() -> None:
    results = []
    for arguments in ({}, {"overlap": "forward"}, {"every": 1, "codes": "updates"}):
        with Servers(WORLD, 1) as servers:
            (text, one), (_, other) = pool(WORLD).call(overlapped, arguments, servers.address)
        assert text == [REENTRANT]
        assert all(torch.equal(one[name], other[name]) for name in one), arguments
        results.append(one)
    for name, tensor in results[0].items():
        assert torch.equal(tensor, results[1][name]), "the same bits with and without overlap"
        torch.testing.assert_close(tensor, results[2][name])
