"""Ranks that make unequal numbers of backward passes: who would wait in vain says so at once, an orderly end raises nowhere."""

from __future__ import annotations

import logging
import re
import time
from typing import Any

import pytest
import torch
from support.attached import data, mlp
from support.rank_pool import Servers, pool, quick
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.engine.worker import FinishedPeers

WORLD, STEPS = 2, 3
FAR_S = 300.0
"""The deadline: what is heard within a test was not heard by it."""
AT_ONCE_S = 60.0


class Raises(torch.autograd.Function):
    """In its backward pass, if it is told to."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, now: bool) -> torch.Tensor:
        ctx.now = now
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.now:
            raise ArithmeticError("no more memory, say")
        return grad, None


def train(rank: int, how: str, cause: str, odd: int, address: str) -> tuple[str, float]:
    """One rank makes a backward pass less; both end in order. What was raised, and how long the last pass took."""
    model = mlp()
    if how == "buffers":  # which DDP copies in each forward pass
        model.insert(0, nn.BatchNorm1d(data(0, 0)[0].shape[1]))
    wrapped: Any = DistributedDataParallel(model, bucket_cap_mb=0.002) if how in ("ddp", "buffers") else model
    codec = None if how == "allreduce" else "topk(ratio=0.1)"
    config = quick(deadline_s=FAR_S, ranks_per_node=WORLD if how == "allreduce" else 1, join=address)
    said, begin = "", 0.0
    session = commlayer.attach(wrapped, compression=codec, config=config)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
    if cause == "lbfgs":
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=STEPS - (rank == odd), tolerance_change=0.0)
    try:
        for step in range(1 if cause == "lbfgs" else STEPS - (rank == odd and cause == "loader")):
            x, y = data(rank, step)

            def closure(x: Any = x, y: Any = y, raises: bool = rank == odd and cause == "raises" and step == 1) -> Any:
                nonlocal begin
                begin = time.monotonic()
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(Raises.apply(wrapped(x), raises), y)
                loss.backward()
                return loss

            try:
                optimizer.step(closure)
            except ArithmeticError:
                continue
    except commlayer.CommError as error:
        said = f"{type(error).__name__}: {error}"
    took_s = time.monotonic() - begin
    session.close()
    return said, took_s


CASES = [("service", "loader", 0), ("service", "raises", 1), ("service", "lbfgs", 1), ("allreduce", "loader", 1),
         ("allreduce", "raises", 0), ("allreduce", "lbfgs", 0), ("ddp", "loader", 1),
         ("buffers", "loader", 0), ("buffers", "loader", 1)]


@pytest.mark.commit(3)
@pytest.mark.parametrize(("how", "cause", "odd"), CASES)
def test_who_waits_for_a_rank_that_has_ended_in_order_says_so(how: str, cause: str, odd: int) -> None:
    with Servers(WORLD, 0 if how == "allreduce" else 1, deadline_s=FAR_S) as servers:
        results = pool(WORLD).call(train, how, cause, odd, servers.address)
    assert results[odd][0] == "", "an orderly end"
    said, took_s = results[1 - odd]
    assert re.fullmatch(rf"PeerLost: worker {odd}: .* {STEPS - 1} .*exchange {STEPS}: .*\[E-UNEQUAL-PASSES\]", said), results
    assert took_s < AT_ONCE_S


def test_the_same_where_the_rank_that_ends_hosts_the_server() -> None:
    (ended, _), (waited, _) = pool(WORLD).call(train, "service", "loader", 0, "")
    assert ended == ""
    assert re.fullmatch(rf"PeerLost: worker 0: .* {STEPS - 1} .*\[E-UNEQUAL-PASSES\]", waited), waited


def equal(rank: int, how: str, address: str) -> tuple[str, float]:
    return train(rank, how, "none", -1, address)


@pytest.mark.parametrize("how", ["service", "allreduce", "ddp", "buffers"])
def test_equal_numbers_end_without_a_word(how: str) -> None:
    with Servers(WORLD, 0 if how == "allreduce" else 1, deadline_s=FAR_S) as servers:
        assert [said for said, _ in pool(WORLD).call(equal, how, servers.address)] == ["", ""]


def test_only_who_is_in_an_exchange_that_another_does_not_make_waits_in_vain() -> None:
    ended = FinishedPeers()
    assert ended.begin(11) is None
    assert ended.hear("worker 2", 12) is None, "it has done its part of this one"
    ended.over()
    assert ended.hear("worker 1", 13) is None, "nobody waits"
    error = ended.begin(12)
    assert error is not None
    assert (error.code, error.peer) == ("E-UNEQUAL-PASSES", "worker 2")
    assert "after 12 " in error.what
    assert "exchange 13" in error.what
    late = FinishedPeers()
    assert late.begin(12) is None
    assert str(late.hear("worker 2", 12)) == str(error), "whichever comes first"


def with_lbfgs(rank: int, line_search: str | None, twice: bool, address: str) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("commlayer")
    log.addHandler(handler)
    try:
        model = mlp()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2, line_search_fn=line_search)
        with commlayer.attach(model, optimizer, config=quick(ranks_per_node=WORLD, join=address)):
            def closure() -> Any:
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(data(0, 0)[0]), data(0, 0)[1])  # the same everywhere
                loss.backward()
                return loss

            for _ in range(1 + twice):
                optimizer.step(closure)
    finally:
        log.removeHandler(handler)
    return [line for line in lines if "LBFGS" in line]


def test_an_optimizer_that_goes_by_the_loss_is_named_at_its_first_step() -> None:
    with Servers(WORLD, 0) as servers:
        for (line,) in pool(WORLD).call(with_lbfgs, "strong_wolfe", True, servers.address):
            assert line.startswith("LBFGS with line_search_fn='strong_wolfe' depends on the loss that its closure returns")
            assert "mean over all ranks" in line
    with Servers(WORLD, 0) as servers:
        assert pool(WORLD).call(with_lbfgs, None, False, servers.address) == [[], []]
