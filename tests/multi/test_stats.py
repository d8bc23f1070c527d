"""session.metrics(): one definition of each counter, alone and in every kind of job. Real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec import structs
from support import rank_pool
from support.arguments import plan_or_codec, sync_of
from support.attached import data, mlp
from support.rank_pool import Servers, pool
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.engine.optimizers import job_of
from commlayer.planner import default_plan

WORLD, STEPS, H = 2, 9, 4
KEYS = ["steps", "exchanges", "sent_nbytes", "received_nbytes", "encode_s", "decode_s", "exposed_s", "guard_s", "reconnects",
        "resent_nbytes", "kept_nbytes"]
STAGED = "all.reduce_scatter all.allgather"

_ranks = rank_pool.ranks_first(WORLD)


def train(rank: int, how: str, address: str) -> dict[str, Any]:
    """STEPS steps of two backward passes each, of which the first gathers."""
    model: Any = mlp()
    nbytes = 4 * sum(p.numel() for p in model.parameters())
    path = "allreduce" if how in ("allreduce", "staged") else "service"
    plan: Any = default_plan(job_of(model), codec="identity()", path=path, servers=int(path == "service"), ranks_per_node=1,
                        fuse_nbytes=2048, cut_nbytes=4096)
    if how == "staged":
        plan = structs.replace(plan, buckets=tuple(structs.replace(b, path=STAGED) for b in plan.buckets))
    if how in ("alone", "no optimizer"):
        plan = "identity"
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    config = rank_pool.quick(**({"join": address} if address else {}))
    wrapped = DistributedDataParallel(model) if how == "DDP" else model
    session = commlayer.attach(wrapped, None if how == "no optimizer" else optimizer, config=config, **plan_or_codec(plan),
                               sync=sync_of(H if how in ("local steps", "overlapped") else None,
                                            overlap="round" if how == "overlapped" else None))
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(2):
            x, y = data(rank, 2 * step + micro)
            with session.no_sync() if micro == 0 and how != "DDP" else wrapped.no_sync() if micro == 0 else torch.enable_grad():
                nn.functional.mse_loss(wrapped(x), y).backward()
        optimizer.step()
    results = {"stats": session.metrics(), "step": session.step, "nbytes": nbytes, "unsent": 0}
    if (local := session.inspect.connection.local) is not None:
        results["unsent"] = local.unsent
    session.close()
    return results


@pytest.mark.parametrize(("how", "exchanges", "unsent"), [
    ("service", STEPS, 0), ("allreduce", STEPS, 0), ("staged", STEPS, 0), ("DDP", STEPS, 0), ("local steps", 2, 1),
    ("overlapped", 1, 1),
])
def test_counters_mean_the_same_in_every_job(how: str, exchanges: int, unsent: int) -> None:
    with Servers(WORLD, 1) as servers:
        address = servers.address if how not in ("allreduce", "staged") else ""
        for results in pool(WORLD).call(train, how, address):
            stats = results["stats"]
            assert list(stats) == KEYS
            assert (stats["steps"], results["step"], stats["exchanges"]) == (STEPS, STEPS, exchanges)
            assert results["unsent"] == unsent
            # With two ranks a ring, too, sends what the gradients have: (2 - 1) / 2 of them, twice.
            begun = exchanges + (how == "overlapped")
            for key in ("sent_nbytes", "received_nbytes"):
                assert 0.94 * exchanges <= stats[key] / results["nbytes"] <= 1.06 * begun


@pytest.mark.parametrize("how", ["alone", "no optimizer"])
def test_alone_steps_count_too(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    stats = train(0, how, "")["stats"]
    assert list(stats) == KEYS
    assert stats == {name: STEPS * (name == "steps") for name in KEYS}
