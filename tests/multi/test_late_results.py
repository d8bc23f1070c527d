"""Training with results that are one step stale: delayed SGD, through checkpoints and plan changes.

Real ranks and two servers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from support import rank_pool
from support.attached import data, mlp
from support.rank_pool import Servers, pool
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.engine.model.model_tensors import describe_model
from commlayer.planner import default_plan
from commlayer.records import Job, Plan

WORLD, SERVERS, STEPS = 2, 2, 7
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01),
    "plain": lambda ps: torch.optim.SGD(ps, lr=0.05),
}
_ranks = rank_pool.ranks_first(WORLD)


def plan(job: Job, codec: str = "identity()", late: str = "some", per_node: int = 1) -> Plan:
    base = default_plan(job, codec=codec, path="service", servers=SERVERS, ranks_per_node=per_node, fuse_nbytes=2048,
                        cut_nbytes=4096)
    last = 2 * len(base.buckets) // 3
    chosen = {"none": set[int](), "some": {0, *(b.id for b in base.buckets[last:])}, "all": {b.id for b in base.buckets}}[late]
    return msgspec.structs.replace(
        base, buckets=tuple(msgspec.structs.replace(b, stale=b.id in chosen, down="identity()") for b in base.buckets)
    )


class Training:
    """One rank's, attached."""

    def __init__(
        self, rank: int, address: str, planned: Callable[[Job], Plan], optimizer: str = "plain", how: str = "module",
        per_node: int = 1,
    ) -> None:
        self.rank, self.model = rank, mlp(width=64)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.called: Any = self.model if how == "module" else DistributedDataParallel(self.model, bucket_cap_mb=0.002)
        config = rank_pool.quick(join=address, servers="each", ranks_per_node=per_node)
        self.session = commlayer.attach(self.called, self.optimizer, plan=planned(describe_model(self.model)), config=config)

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.optimizer.zero_grad()
            x, y = data(self.rank, step)
            nn.functional.mse_loss(self.called(x), y).backward()
            self.optimizer.step()

    def drain(self) -> bool:
        if late := self.session.flush():
            self.optimizer.step()
        return late

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


def by_hand(late: str, optimizer: str) -> list[torch.Tensor]:
    """Delayed SGD in one process: the mean gradient, in stale elements that of the previous step; a last step for the rest."""
    model = mlp(width=64)
    layout = plan(describe_model(model), late=late)
    masks = [torch.zeros(p.numel(), dtype=torch.bool) for p in model.parameters()]
    for bucket in layout.buckets:
        for part in bucket.slices:
            masks[part.tensor][part.start : part.stop] = bucket.stale
    update = OPTIMIZERS[optimizer](model.parameters())
    before: list[torch.Tensor | None] = [None] * len(masks)
    for step in range(STEPS + 1):
        update.zero_grad()
        if step < STEPS:
            losses = [nn.functional.mse_loss(model(x), y) for x, y in (data(rank, step) for rank in range(WORLD))]
            torch.stack(losses).mean().backward()
        for number, (p, mask) in enumerate(zip(model.parameters(), masks, strict=True)):
            now = torch.zeros(p.numel()) if p.grad is None else p.grad.view(-1).clone()
            old, before[number] = before[number], now
            first = step == 0 and bool(mask.all())
            over = step == STEPS and not bool(mask.any())
            p.grad = None if first or over else torch.where(mask, torch.zeros_like(now) if old is None else old, now).view_as(p)
        update.step()
    return [p.detach().clone() for p in model.parameters()]


def delayed(rank: int, address: str, late: str, optimizer: str, how: str, per_node: int) -> tuple[bool, bool, Any]:
    training = Training(rank, address, lambda job: plan(job, late=late, per_node=per_node), optimizer, how, per_node)
    training.train(0, STEPS)
    drained = training.drain(), training.session.flush()
    training.session.close()
    return *drained, training.weights()


@pytest.mark.commit(3)
@pytest.mark.parametrize(("late", "optimizer", "how", "per_node"), [
    ("none", "sgd", "module", 1), ("some", "sgd", "module", 1), ("some", "adam", "module", 1), ("all", "adam", "module", 1),
    ("all", "plain", "ddp", 1), ("some", "sgd", "module", 2), ("all", "adam", "module", 2),
])
def test_training_is_delayed_sgd(late: str, optimizer: str, how: str, per_node: int) -> None:
    with Servers(WORLD, SERVERS) as servers:
        results = pool(WORLD).call(delayed, servers.address, late, optimizer, how, per_node)
    wanted = by_hand(late, optimizer)
    for first, again, weights in results:
        assert (first, again) == (late != "none", False)
        for mine, theirs, hand in zip(weights, results[0][2], wanted, strict=True):
            assert torch.equal(mine, theirs)
            torch.testing.assert_close(mine, hand, rtol=1e-5, atol=1e-6)
