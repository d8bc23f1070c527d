"""switch() from any way of exchanging steps to any other, at one step of a running job. Real ranks, plain modules."""

from __future__ import annotations

from itertools import pairwise, permutations
from statistics import median
from typing import Any

import pytest
import torch
from msgspec import structs
from support import rank_pool
from support.attached import data, mlp
from support.rank_pool import Servers, pool
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.engine.model_job import job_of
from commlayer.planner import default_plan
from commlayer.records import Job, Plan

WORLD = 2
_ranks = rank_pool.ranks_first(WORLD)
WAYS: dict[str, dict[str, Any]] = {
    "gradients": {},
    "forward": {"overlap": "forward"},
    "updates": {"codes": "updates"},
    "every": {"local_steps": 2},
    "round": {"local_steps": 4, "overlap": "round", "fragments": 2},
    "whole round": {"local_steps": 3, "overlap": "round"},
    "late": {},
}
LOCAL = {name for name, fields in WAYS.items() if "local_steps" in fields or "codes" in fields}


def walk(how: str = "") -> list[str]:
    """A way through all ordered pairs of ways, each once (Hierholzer)."""
    # A GradScaler wants gradients in every step, and late ones are none in the first.
    without = {"forward"} if "ddp" in how else {"late"} if "scaled" in how else set()
    ways = [way for way in WAYS if way not in without]
    left = {a: [b for b in ways if b != a] for a in ways}
    path, found = ["gradients"], []
    while path:
        if left[path[-1]]:
            path.append(left[path[-1]].pop(0))
        else:
            found.append(path.pop())
    return found[::-1]


def test_the_walk_sees_all_ordered_pairs() -> None:
    path = walk()
    assert sorted(pairwise(path)) == sorted(permutations(WAYS, 2))


def plan(job: Job, way: str, codec: str = "identity()", per_node: int = 1, **changes: Any) -> Plan:
    """Results come down whole, so that only workers owe anything."""
    made = default_plan(job, codec=codec, path="service", servers=1, ranks_per_node=per_node, fuse_nbytes=2048, cut_nbytes=4096)
    late = [way == "late" and not job.tensors[b.slices[0].tensor].buffer for b in made.buckets]
    buckets = tuple(structs.replace(b, down="identity()", stale=stale) for b, stale in zip(made.buckets, late, strict=True))
    return structs.replace(made, buckets=buckets, **WAYS[way] | changes)


class Net(nn.Module):
    """With running statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.BatchNorm1d(40), nn.Linear(40, 40), nn.Tanh())
        self.head = nn.Linear(40, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


OPTIMIZERS: dict[str, Any] = {
    "plain": lambda m: torch.optim.SGD(m.parameters(), lr=0.05),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.02, momentum=0.9),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
}


class Training:
    """One rank's."""

    def __init__(self, rank: int, address: str, way: str, *, optimizer: str = "plain", codec: str = "identity()",
                 how: str = "", model: nn.Module | None = None, **fields: Any) -> None:
        self.rank, self.how, self.codec, self.model = rank, how, codec, model or Net()
        self.optimizer = OPTIMIZERS[optimizer](self.model)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled="scaled" in how)
        self.step, self.per_node = 0, 2 if "node" in how else 1
        self.called: Any = self.model
        if "ddp" in how:
            self.called = DistributedDataParallel(self.model, bucket_cap_mb=0.002, static_graph="static" in how,
                                                  gradient_as_bucket_view="view" in how)
        self.session = commlayer.attach(
            self.called, self.optimizer, plan=plan(job_of(self.model), way, codec, self.per_node),
            scaler=self.scaler if "scaled" in how else None,
            config=rank_pool.quick(join=address, ranks_per_node=self.per_node, **fields) if address else None)

    @property
    def connection(self) -> Any:
        return self.session.inspect.connection

    def switch(self, way: str, **changes: Any) -> None:
        commlayer.switch(self.session, plan(self.connection.worker.job, way, self.codec, self.per_node, **changes))

    def loss(self, number: int) -> torch.Tensor:
        x, y = data(self.rank, number)
        return nn.functional.mse_loss(self.called(x), y)

    def train(self, steps: int) -> float:
        """The last loss."""
        for _ in range(steps):
            self.optimizer.zero_grad()
            if "weighed" in self.how:
                self.session.weight(1.0 + self.rank + self.step % 2)
            if "gathered" in self.how:
                with self.session.no_sync():
                    self.scaler.scale(self.loss(1000 + self.step)).backward()
            loss = self.loss(self.step)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.step += 1
        return float(loss.detach())

    def tensors(self, *, buffers: bool = True) -> list[torch.Tensor]:
        held = [*self.model.parameters(), *(self.model.buffers() if buffers else ())]
        return [t.detach().clone() for t in held if t.is_floating_point()]

    def owed(self) -> torch.Tensor:
        found = [torch.zeros(p.numel()) for p in self.model.parameters()]
        for bucket in self.connection.worker.buckets:
            for debt in bucket.debts():
                found[debt.tensor][debt.start : debt.stop] += debt.values
        return torch.cat(found)


def all_pairs(rank: int, address: str, how: str) -> dict[str, Any]:
    first, *rest = walk(how)
    training = Training(rank, address, first, how=how, drift="end", drift_steps=3)
    rows, losses, local = [], [training.train(3)], []
    for before, way in zip(walk(how), rest, strict=False):
        training.switch(way)
        local.append((way, training.connection.local is not None, training.session.inspect.plan))
        # Behind a step of gradients DDP leaves buffers as they are, to copy rank 0's ahead of the next.
        rows.append(training.tensors(buffers="ddp" not in how or before in LOCAL))
        losses.append(training.train(3))
    training.session.drain()
    rows.append(training.tensors(buffers="ddp" not in how))
    found = {"rows": rows, "losses": losses, "local": local, "said": training.session.inspect.decisions()}
    training.session.close()
    return found


@pytest.mark.parametrize("how", [
    "", "gathered, scaled, weighed", "ddp, view, gathered, scaled, weighed", "ddp, static",
])
def test_any_way_follows_any_other(how: str) -> None:
    with Servers(WORLD, 1) as servers:
        first, second = pool(WORLD).call(all_pairs, servers.address, how)
    for place, (mine, theirs) in enumerate(zip(first["rows"], second["rows"], strict=True)):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)), f"apart behind {walk(how)[: place + 2][-2:]}"
    assert first["said"] == []
    for way, local, planned in first["local"]:
        assert local == (way in LOCAL)
        assert [getattr(planned, name) for name in WAYS[way]] == [*WAYS[way].values()]
    assert median(first["losses"][-9:]) < 0.8 * first["losses"][0]


RATE = 0.1


def slopes(rank: int, step: int, model: nn.Module) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(p.shape, generator=made) for p in model.parameters()]


def law(rank: int, address: str, codec: str, how: str) -> dict[str, torch.Tensor]:
    """Gradients are known, and so is what SGD makes of them, on whichever way they go."""
    model = mlp()
    training = Training(rank, address, "gradients", model=model, codec=codec, how=how)
    for group in training.optimizer.param_groups:
        group["lr"] = RATE
    start = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    put, step = torch.zeros_like(start), 0
    for way in walk():
        training.switch(way)
        for _ in range(3):
            given = slopes(rank, step, model)
            idle = 1 if "idle" in how and way in LOCAL else 0  # so many have no gradient then to pay a debt into
            given[:idle] = [torch.zeros_like(s) for s in given[:idle]]
            terms = [(p, s) for p, s in zip(model.parameters(), given, strict=True)][idle:]

            def loss(terms: Any = terms) -> torch.Tensor:
                training.optimizer.zero_grad()
                total = sum((p * s).sum() for p, s in terms)
                total.backward()
                return total

            put += RATE * torch.cat([s.reshape(-1) for s in given])
            if "cleared" in how and way in LOCAL:
                loss()  # a probe, whose gradients are thrown away
            if "closure" in how:
                training.optimizer.step(loss)
            else:
                loss()
                training.optimizer.step()
            step += 1
    end = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    found = {"put": put, "applied": start - end, "owed": RATE * training.owed()}
    training.session.close()
    return found


@pytest.mark.parametrize(("codec", "how"), [
    ("topk(ratio=0.1)", ""), ("topk(ratio=0.1)", "idle"), ("topk(ratio=0.1)", "closure"), ("topk(ratio=0.1)", "cleared"),
    ("int8(block=32)", "node"), ("int8(block=32)", "node, idle"),
])
def test_applied_and_owed_is_what_was_put_in_through_all_of_them(codec: str, how: str) -> None:
    with Servers(WORLD, 1) as servers:
        results = pool(WORLD).call(law, servers.address, codec, how)
    put, owed = sum(r["put"] for r in results), sum(r["owed"] for r in results)
    assert torch.equal(results[0]["applied"], results[1]["applied"])
    assert float(owed.abs().max()) > 0
    torch.testing.assert_close(WORLD * results[0]["applied"] + owed, put, rtol=1e-4, atol=1e-4)
