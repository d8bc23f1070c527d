"""Scripts whose connections break again and again, in each sync mode, train the same weights bit for bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support import rank_pool
from support.arguments import sync_of
from support.attached import data, mlp
from support.broken import Cutter, random_cuts
from support.rank_pool import Servers, pool
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.cluster import messages
from commlayer.config import host_port, join_host
from commlayer.engine.optimizers import job_of
from commlayer.engine.switch import switch
from commlayer.planner import default_plan
from commlayer.records import Plan

WORLD, STEPS = 2, 9
_ranks = rank_pool.ranks_first(WORLD)
WAYS: dict[str, dict[str, Any]] = {
    "gradients": {}, "forward": {"overlap": "forward"}, "every": {"every": 3}, "round": {"every": 3, "overlap": "round"},
    "ddp": {}, "states": {},
}


def other(model: nn.Module) -> Plan:
    return default_plan(job_of(model), codec="int8()", path="service", servers=1, ranks_per_node=1, fuse_nbytes=2048,
                        cut_nbytes=4096)


def trained(rank: int, address: str, how: str, folder: str) -> tuple[list[torch.Tensor], dict[str, float]]:
    """In "states" servers are asked for their states, get them back, hear what was not applied, and go over to another plan."""
    model: Any = mlp(width=64)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    called = DistributedDataParallel(model, bucket_cap_mb=0.002) if how == "ddp" else model
    session = commlayer.attach(called, optimizer, compression=commlayer.compressors.topk(ratio=0.1),
                               config=rank_pool.quick(join=address), sync=sync_of(**WAYS[how]))
    for number in range(STEPS):
        optimizer.zero_grad()
        x, y = data(rank, number)
        nn.functional.mse_loss(called(x), y).backward()
        if how == "states" and number == 2:
            optimizer.zero_grad()
            switch(session.inspect.connection, other(model) if rank == 0 else None)
            continue
        optimizer.step()
        if how == "states" and number in (4, 6):
            session.checkpoint(folder, model=False) if number == 4 else session.resume(folder)
    session.flush()
    stats = session.metrics()
    session.close()
    return [p.detach().clone() for p in model.parameters()], stats


@pytest.mark.commit(2)
@pytest.mark.parametrize("how", WAYS)
def test_training_goes_on_with_the_same_bits(how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cutters: list[Cutter] = []
    passed = [0, 0]
    chance, real = random.Random(how), messages.server_request

    def behind_a_cutter(address: str, *rest: Any, **more: Any) -> Any:
        cuts = [] if not any(passed) else [cut for _ in range(3) for cut in random_cuts(chance, *passed)]
        cutters.append(Cutter(host_port(address), cuts))
        return real(join_host(*cutters[-1].address), *rest, **more)

    monkeypatch.setattr(messages, "server_request", behind_a_cutter)
    results = []
    for name in ("plain", "cut"):
        with Servers(WORLD, 1) as servers:
            results.append(pool(WORLD).call(trained, servers.address, how, str(tmp_path / name)))
        passed = cutters[-1].passed
        cutters[-1].close()
    assert cutters[1].shots
    assert sum(stats["reconnects"] for _, stats in results[0]) == 0
    assert sum(stats["reconnects"] for _, stats in results[1]) > 0
    for (plain, _), (cut, _) in zip(*results, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(plain, cut, strict=True))
