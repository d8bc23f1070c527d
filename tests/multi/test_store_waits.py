"""torch's store does not answer: waits end in time with an error, and the process can exit. After attach()."""

from __future__ import annotations

import datetime
import os
import signal
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.attached import data, mlp, sync_of
from support.jobs import distributed_job
from support.rank_pool import pool, quick, tree
from torch import nn

import commlayer
from commlayer.cluster.processes.process_groups import Members
from commlayer.errors import CommError

WAIT_S = 1.0
END_S = 30.0
SILENT = "the process group's store has not answered within 1 s"
STORE = """
from torch._C._distributed_c10d import TCPStore
made = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(made.port, flush=True)
input()
"""


def main(port: int, store: int) -> None:
    rank = int(os.environ["RANK"])
    known = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False,
                          timeout=datetime.timedelta(seconds=60.0))
    dist.init_process_group("gloo", store=dist.PrefixStore("job", known), rank=rank, world_size=2)
    members = Members()
    dist.barrier()
    if rank == 0:
        os.kill(store, signal.SIGSTOP)
    dist.barrier()
    for act in (lambda: members.group(timeout_s=WAIT_S, backend="gloo"),
                lambda: members.exchange_bytes(b"", WAIT_S, "asking all")):
        try:
            act()
        except CommError as error:
            print(f"{type(error).__name__}: {error}", flush=True)


@pytest.mark.nightly
def test_wait_for_a_silent_store_ends_at_its_timeout() -> None:
    with subprocess.Popen([sys.executable, "-c", STORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as store:
        assert store.stdout is not None
        try:
            with tree(__file__, 2, args=(store.stdout.readline().strip(), str(store.pid))) as run:
                for rank in range(2):
                    run.until(rank, f"DeadlineExceeded: a peer of the process group: making a process group: {SILENT}")
                    run.until(rank, f"DeadlineExceeded: the launcher: asking all: {SILENT}")
                assert [code for code, _ in run.ended(END_S)] == [0, 0]
        finally:
            store.kill()


def groups_after_attach(rank: int, how: dict[str, Any]) -> int:
    """Number of process groups that a training with rows from all ranks creates after attach()."""
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    real, count = dist.new_group, 0

    def counted(*args: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        return real(*args, **named)

    with commlayer.attach(model, optimizer, compression="fp16", config=quick(drift_steps=2), sync=sync_of(**how)) as session:
        dist.new_group = counted
        try:
            for step in range(12):
                x, y = data(rank, step)
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        finally:
            dist.new_group = real
        assert distributed_job(session).rows is not None
    return count


@pytest.mark.parametrize("how", [{}, {"every": 2}], ids=["gradients", "local steps"])
def test_no_process_group_is_created_after_attach(how: dict[str, Any]) -> None:
    assert pool(2).call(groups_after_attach, how) == [0, 0]


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
