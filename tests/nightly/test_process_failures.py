"""Training processes that fail, die, are stopped and interrupted: all end, name the peer and leave no processes or files.

Run as a script, this file is the training: world, server and coordinator as under torchrun, with DataLoader workers.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from typing import Any

import pytest
from support.rank_pool import END_S, SETTINGS, Tree, gone, last_line, tree


def main(how: str, fail_on: int) -> None:
    import torch
    from support.attached import data, mlp
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    import commlayer
    from commlayer.cluster.processes.collectives import Groups

    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    model: Any = mlp(seed=rank)
    model = DistributedDataParallel(model, bucket_cap_mb=0.002) if how == "ddp" else model
    together = {"config": {"ranks_per_node": torch.distributed.get_world_size()}}
    apart = {"compression": "topk(ratio=0.1)"}
    stages = {"plan": staged(model)} if how == "staged" else {}
    if how == "groups" and rank == fail_on:
        Groups.__init__ = end  # type: ignore[method-assign]
    session = commlayer.attach(model, **stages or (together if how == "allreduce" else apart))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batches = DataLoader([data(rank, step) for step in range(20)], batch_size=None, num_workers=1, persistent_workers=True)
    step = 0
    while True:
        for x, y in batches:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            step += 1
            if step == 3:
                tell(pid=os.getpid(), embedded=[child.pid for child in session.inspect.context.embedded])
            if step == 10 and rank == fail_on:
                end()


def end(*_: Any, **__: Any) -> None:
    raise ValueError("the script's own mistake")


def staged(model: Any) -> Any:
    """Two exchanges of payloads a bucket, so that a step can be aborted inside a path."""
    from support.attached import plan_of

    return plan_of(model, "topk(ratio=0.1)", "encode@cpu all.alltoall decode@cpu encode@cpu all.allgather decode@cpu")


def tell(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def begin(run: Tree) -> list[int]:
    """Waits until all ranks have trained; the ids of the servers among their children."""
    lines = [json.loads(run.until(rank, "{")) for rank in range(len(run.processes))]
    servers: list[int] = lines[0]["embedded"]
    assert len(servers) == 1
    assert not lines[1]["embedded"]
    assert not gone(servers[0], 0.1)
    return servers


@pytest.mark.parametrize(("how", "failing"), [("module", 1), ("ddp", 0)], ids=["module", "ddp, on the host of the server"])
def test_exception_on_one_rank_ends_all(how: str, failing: int) -> None:
    with tree(__file__, 2, args=(how, str(failing)), settings=SETTINGS) as run:
        servers = begin(run)
        results = run.ended(END_S)
        assert all(code == 1 for code, _ in results), results
        assert last_line(results[failing][1]) == "ValueError: the script's own mistake"
        expected = f"commlayer.errors.PeerLost: worker {failing}: .*: ValueError: the script's own mistake.*E-PEER-LOST"
        assert re.match(expected, last_line(results[1 - failing][1])), results
        assert all(gone(pid, END_S) for pid in servers)


def test_rank_that_fails_during_group_creation_is_named() -> None:
    """Heartbeats have not started."""
    with tree(__file__, 2, args=("groups", "1"), settings=SETTINGS | {"deadline_s": 2.0}) as run:
        results = run.ended(END_S)
        assert [code for code, _ in results] == [1, 1]
        assert last_line(results[1][1]) == "ValueError: the script's own mistake"
        assert re.match("commlayer.errors.DeadlineExceeded: rank 1: .*E-DEADLINE", last_line(results[0][1])), results


@pytest.mark.commit(1)
@pytest.mark.parametrize(("how", "sent"), [
    ("module", signal.SIGKILL), ("ddp", signal.SIGSTOP), ("allreduce", signal.SIGKILL), ("allreduce", signal.SIGSTOP),
    ("staged", signal.SIGKILL), ("staged", signal.SIGSTOP),
], ids=["killed", "stopped", "killed, all-reduce", "stopped, all-reduce", "killed, staged", "stopped, staged"])
def test_dead_or_stopped_worker_is_named_by_all_others(how: str, sent: signal.Signals) -> None:
    with tree(__file__, 3, args=(how, "-1"), settings=SETTINGS) as run:
        servers = begin(run)
        os.kill(run.processes[1].pid, sent)
        results = {rank: run.ended_one(rank, END_S) for rank in (0, 2)}
        for code, errors in results.values():
            assert code == 1
            line = r"commlayer.errors.(PeerLost|DeadlineExceeded): worker 1: .*E-(PEER-LOST|DEADLINE)"
            assert re.match(line, last_line(errors)), results
        assert all(gone(pid, END_S) for pid in servers)


@pytest.mark.parametrize("how", ["module", "allreduce"])
def test_death_of_the_host_of_coordinator_and_server_does_not_hang(how: str) -> None:
    """They end with their parent: only silence shows the death."""
    with tree(__file__, 2, args=(how, "-1"), settings=SETTINGS) as run:
        servers = begin(run)
        os.kill(run.processes[0].pid, signal.SIGKILL)
        code, errors = run.ended_one(1, END_S)
        assert code == 1
        assert re.match("commlayer.errors.PeerLost: worker 0: .*E-PEER-LOST", last_line(errors)), errors
        assert all(gone(pid, END_S) for pid in servers)


@pytest.mark.parametrize(("server", "sent"), [(0, signal.SIGSTOP), (0, signal.SIGKILL), (1, signal.SIGSTOP)],
                         ids=["stopped, with the coordinator", "killed, with the coordinator", "stopped, elsewhere"])
def test_stopped_or_killed_server_is_named_with_its_node(server: int, sent: signal.Signals) -> None:
    """Long before the deadline: heartbeats show it."""
    settings = SETTINGS | {"deadline_s": 300.0} | ({"servers": "each"} if server else {})
    with tree(__file__, 2, args=("module", "-1"), settings=settings) as run:
        lines = [json.loads(run.until(rank, "{")) for rank in range(2)]
        os.kill(lines[server]["embedded"][0], sent)
        for code, errors in run.ended(END_S):
            assert code == 1
            expected = rf"commlayer.errors.PeerLost: server {server}: .* on node {server}\b.*E-PEER-LOST"
            assert re.match(expected, last_line(errors)), errors
        assert all(gone(pid, END_S) for line in lines for pid in line["embedded"])


@pytest.mark.parametrize("how", ["module", "ddp"])
def test_ctrl_c_ends_everything(how: str) -> None:
    with tree(__file__, 2, args=(how, "-1"), settings=SETTINGS) as run:
        servers = begin(run)
        run.interrupt()
        results = run.ended(10.0)
        assert all(code != 0 for code, _ in results)
        assert all(gone(pid, 5.0) for pid in servers)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
