"""Ranks with unequal numbers of backward passes: a rank that would wait forever fails immediately; orderly ends raise nothing.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from support.attached import Raises, assert_refused, data, log_lines, mlp, outcome
from support.rank_pool import Servers, pool, quick
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.engine.worker.finished_peers import FinishedPeers

WORLD, STEPS = 2, 3
FAR_S = 300.0
"""The deadline: an error within a test did not wait for it."""
AT_ONCE_S = 60.0


def train(rank: int, how: str, cause: str, odd: int, address: str) -> tuple[str, float]:
    """The odd rank makes one backward pass less; both end in order. The error, and how long the last pass took."""
    model = mlp()
    if how == "buffers":  # which DDP copies in each forward pass
        model.insert(0, nn.BatchNorm1d(data(0, 0)[0].shape[1]))
    wrapped: Any = DistributedDataParallel(model, bucket_cap_mb=0.002) if how in ("ddp", "buffers") else model
    session = commlayer.attach(
        wrapped, compression=None if how == "allreduce" else "topk(ratio=0.1)",
        config=quick(deadline_s=FAR_S, ranks_per_node=WORLD if how == "allreduce" else 1, join=address))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05)
    if cause == "lbfgs":
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=STEPS - (rank == odd), tolerance_change=0.0)
    begin_s = 0.0

    def run() -> None:
        for step in range(1 if cause == "lbfgs" else STEPS - (rank == odd and cause == "loader")):
            def closure(step: int = step) -> Any:
                nonlocal begin_s
                begin_s = time.monotonic()
                optimizer.zero_grad()
                x, y = data(rank, step)
                loss = nn.functional.mse_loss(Raises.apply(wrapped(x), rank == odd and cause == "raises" and step == 1), y)
                loss.backward()
                return loss

            try:
                optimizer.step(closure)
            except ArithmeticError:
                continue

    line = outcome(run)
    elapsed_s = time.monotonic() - begin_s
    session.close()
    return line, elapsed_s


@pytest.mark.commit(4)
@pytest.mark.parametrize(("how", "cause", "odd"), [
    ("service", "loader", 0), ("service", "raises", 1), ("service", "lbfgs", 1), ("allreduce", "loader", 1),
    ("allreduce", "raises", 0), ("allreduce", "lbfgs", 0), ("ddp", "loader", 1), ("buffers", "loader", 0),
    ("buffers", "loader", 1),
])
def test_wait_for_a_finished_rank_fails_immediately(how: str, cause: str, odd: int) -> None:
    with Servers(WORLD, 0 if how == "allreduce" else 1, deadline_s=FAR_S) as servers:
        results = pool(WORLD).call(train, how, cause, odd, servers.address)
    assert results[odd][0] == "", "an orderly end"
    line, elapsed_s = results[1 - odd]
    assert_refused(line, "E-UNEQUAL-PASSES", f"PeerLost: worker {odd}: ", f" {STEPS - 1} ", f"exchange {STEPS}: ")
    assert elapsed_s < AT_ONCE_S


def test_wait_for_a_finished_rank_that_hosts_the_server_fails_immediately() -> None:
    (ended, _), (waited, _) = pool(WORLD).call(train, "service", "loader", 0, "")
    assert ended == ""
    assert_refused(waited, "E-UNEQUAL-PASSES", "PeerLost: worker 0: ", f" {STEPS - 1} ")


@pytest.mark.commit(2)
@pytest.mark.parametrize("how", ["service", "allreduce", "ddp", "buffers"])
def test_equal_numbers_of_passes_end_without_an_error(how: str) -> None:
    with Servers(WORLD, 0 if how == "allreduce" else 1, deadline_s=FAR_S) as servers:
        assert [line for line, _ in pool(WORLD).call(train, how, "none", -1, servers.address)] == ["", ""]


def test_only_unmatched_exchanges_fail() -> None:
    ended = FinishedPeers()
    assert ended.begin(11) is None
    assert ended.add("worker 2", 12) is None, "it has done its part of this one"
    ended.end()
    assert ended.add("worker 1", 13) is None, "nothing is waited for"
    error = ended.begin(12)
    assert error is not None
    assert_refused(str(error), "E-UNEQUAL-PASSES", "worker 2", "after 12 ", "exchange 13")
    late = FinishedPeers()
    assert late.begin(12) is None
    assert str(late.add("worker 2", 12)) == str(error), "in either order"


def with_lbfgs(rank: int, line_search: str | None, steps: int, address: str) -> list[str]:
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2, line_search_fn=line_search)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(data(0, 0)[0]), data(0, 0)[1])  # the same on all ranks
        loss.backward()
        return loss

    with log_lines() as lines, commlayer.attach(model, optimizer, config=quick(ranks_per_node=WORLD, join=address)):
        for _ in range(steps):
            optimizer.step(closure)
    return [line for line in lines if "LBFGS" in line]


def test_optimizer_driven_by_the_loss_is_named_at_its_first_step() -> None:
    with Servers(WORLD, 0) as servers:
        for (line,) in pool(WORLD).call(with_lbfgs, "strong_wolfe", 2, servers.address):
            assert "line_search_fn='strong_wolfe'" in line
    with Servers(WORLD, 0) as servers:
        assert pool(WORLD).call(with_lbfgs, None, 1, servers.address) == [[], []]
