"""The end of a job: the first rank to close waits until all have the last result, and an orderly end raises on no rank.

Run as a script, this file is a rank of a job whose results reach the second node later than the first ends.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.rank_pool import Servers, gone, pool, quick, tree
from support.slow_links import slow_link

WORLD = 2
NUMEL = 6000
SLOW_S = 8.0
"""What the last result needs to reach node 1. Longer than all that closing used to wait for."""
APART_S = 2.0


def train(*, stale: bool = False, **settings: Any) -> tuple[Any, float]:
    """One step of a model of one tensor; the session, and what the gradient came to."""
    import torch
    from support.attached import plan_of
    from torch import nn

    import commlayer

    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(NUMEL))

    model = One()
    rank = torch.distributed.get_rank()
    plan = plan_of(model, "identity()", nbytes=(1 << 20, 4 << 20), bucket={"down": "identity()", "stale": stale})
    session = commlayer.attach(model, plan=plan, config=settings or None)
    (model.w.sum() * (rank + 1)).backward()
    return session, 0.0 if model.w.grad is None else float(model.w.grad[0])


def main() -> None:
    import torch

    torch.distributed.init_process_group("gloo")
    with slow_link(1e8, slow_bps(SLOW_S)) if torch.distributed.get_rank() else contextlib.nullcontext():
        session, got = train()
        children = [child.pid for child in session.inspect.context.embedded]
        print(json.dumps({"got": got, "children": children, "ended": time.monotonic()}), flush=True)
    # No close(): the interpreter just ends.


def slow_bps(slow_s: float) -> float:
    """The rate in bit/s at which a result needs this long."""
    return 8 * (4 * NUMEL + 100) / slow_s


def test_first_rank_to_end_waits_for_the_last_result_on_a_slow_link() -> None:
    settings = {"deadline_s": 40.0, "heartbeat_s": 0.5, "dead_after_s": 5.0,
                "drift_steps": 0}  # comparing replicas after the first step would block both
    with tree(__file__, WORLD, settings=settings) as run:
        lines = [json.loads(run.until(rank, "{")) for rank in range(WORLD)]
        results = run.ended(30.0)
    assert [code for code, _ in results] == [0, 0], results
    assert [line["got"] for line in lines] == [1.5, 1.5]
    assert lines[1]["ended"] - lines[0]["ended"] > 0.8 * SLOW_S, "the link had the configured rate"
    assert all(gone(pid, 10.0) for line in lines for pid in line["children"])
    assert "Traceback" not in results[0][1] + results[1][1]


def apart(rank: int, first: int, settings: dict[str, Any]) -> tuple[float, float]:
    session, got = train(**settings)
    if rank != first:
        time.sleep(APART_S)
    begin = time.monotonic()
    session.close()
    return got, time.monotonic() - begin


@pytest.mark.parametrize("first", [0, 1])
def test_ranks_may_close_long_after_each_other(first: int) -> None:
    results = pool(WORLD).call(apart, first, quick())
    assert [got for got, _ in results] == [1.5, 1.5]
    if first == 0:
        assert results[0][1] > APART_S / 2, "the host of the server waits for the others"


def on_its_way(rank: int, settings: dict[str, Any]) -> float:
    with slow_link(1e8, slow_bps(2.0)) if rank else contextlib.nullcontext():
        session, got = train(stale=True, **settings)
        session.close()
    return got


def test_close_with_a_result_in_flight_raises_on_no_rank() -> None:
    """Under a plan whose results are one step stale, no rank waits for the last ones."""
    assert pool(WORLD).call(on_its_way, quick()) == [0.0, 0.0]


def test_separate_servers_stay_until_the_last_rank_closes() -> None:
    with Servers(WORLD, 1) as servers:
        results = pool(WORLD).call(apart, 0, quick(join=servers.address))
        assert servers.serving[0].sums is not None
    assert [got for got, _ in results] == [1.5, 1.5]


def forked(rank: int, address: str) -> int:
    """The exit status of a process that a rank forks after the end of its session, as DataLoaders do, and that collects
    garbage: a group of threads that only their maker has can only be ended there."""
    import msgspec
    from support.attached import data, mlp, plan_of
    from torch.utils.data import DataLoader, TensorDataset

    import commlayer
    from commlayer.balance import Sampler

    gc.collect()
    gc.disable()
    try:
        model = mlp()
        result = plan_of(model, "int8()")
        first, *others = result.buckets
        staged = [msgspec.structs.replace(b, path="encode@cpu all.allgather decode@cpu", down="") for b in others]
        plan = msgspec.structs.replace(result, buckets=(first, *staged))
        with commlayer.attach(model, plan=plan, config=quick(join=address)) as session:
            sampler = Sampler(24, 12, world=WORLD, rank=rank)
            loader = DataLoader(TensorDataset(*data(rank, 0, n=24)), batch_sampler=sampler)
            for x, _ in commlayer.LoadBalancer(session, sampler).follow(loader):
                model(x).square().mean().backward()
        del session, model, sampler, loader
        if not (child := os.fork()):
            gc.collect()
            os._exit(0)
        until = time.monotonic() + 15.0
        while not (done := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < until:
            time.sleep(0.02)
        if not done[0]:
            os.kill(child, signal.SIGKILL)
            return os.waitpid(child, 0)[1]
        return done[1]
    finally:
        gc.enable()


def test_closed_session_can_be_collected_in_a_forked_process() -> None:
    pool(WORLD).ready(__name__)
    with Servers(WORLD, 1) as servers:
        assert pool(WORLD).call(forked, servers.address) == [0] * WORLD


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1])]
    main()
