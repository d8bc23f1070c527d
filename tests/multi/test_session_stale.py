"""Training with results that are a step late: delayed SGD, through saves and changes of plan. Real ranks and two servers."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path
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
from commlayer.engine.optimizers import job_of
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
    made = default_plan(job, codec=codec, path="service", servers=SERVERS, ranks_per_node=per_node, fuse_nbytes=2048,
                        cut_nbytes=4096)
    last = 2 * len(made.buckets) // 3
    chosen = {"none": set[int](), "some": {0, *(b.id for b in made.buckets[last:])}, "all": {b.id for b in made.buckets}}[late]
    return msgspec.structs.replace(
        made, buckets=tuple(msgspec.structs.replace(b, stale=b.id in chosen, down="identity()") for b in made.buckets)
    )


class Training:
    """One rank's, attached."""

    def __init__(
        self, rank: int, address: str, made: Callable[[Job], Plan], optimizer: str = "plain", how: str = "module",
        per_node: int = 1,
    ) -> None:
        self.rank, self.model = rank, mlp(width=64)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.called: Any = self.model if how == "module" else DistributedDataParallel(self.model, bucket_cap_mb=0.002)
        config = rank_pool.quick(join=address, servers="each", ranks_per_node=per_node)
        first: Any = made(job_of(self.model)) if how == "module" else commlayer.compressors.identity()
        self.session = commlayer.attach(self.called, self.optimizer, plan=first, config=config)

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.optimizer.zero_grad()
            x, y = data(self.rank, step)
            nn.functional.mse_loss(self.called(x), y).backward()
            self.optimizer.step()

    def drain(self) -> bool:
        if late := self.session.drain():
            self.optimizer.step()
        return late

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]


def by_hand(late: str, optimizer: str, begin: int) -> list[torch.Tensor]:
    """Delayed SGD in one process: the mean gradient, in late elements that of the step before; a last step for what is left.

    Until step `begin` nothing is late.
    """
    model = mlp(width=64)
    made = plan(job_of(model), late=late)
    masks = [torch.zeros(p.numel(), dtype=torch.bool) for p in model.parameters()]
    for bucket in made.buckets:
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
            if step < begin:
                before[number] = None
                continue
            first = step == begin and bool(mask.all())
            over = step == STEPS and not bool(mask.any())
            p.grad = None if first or over else torch.where(mask, torch.zeros_like(now) if old is None else old, now).view_as(p)
        update.step()
    return [p.detach().clone() for p in model.parameters()]


def delayed(rank: int, address: str, late: str, optimizer: str, how: str, per_node: int) -> tuple[bool, bool, Any]:
    training = Training(rank, address, lambda job: plan(job, late=late, per_node=per_node), optimizer, how, per_node)
    begin = int(how == "ddp")
    training.train(0, begin)
    if begin:  # the order of DDP's parameters is known now
        commlayer.switch(training.session, plan(training.session.inspect.connection.worker.job, late=late, per_node=per_node))
    training.train(begin, STEPS)
    drained = training.drain(), training.session.drain()
    training.session.close()
    return *drained, training.weights()


@pytest.mark.commit(3)
@pytest.mark.parametrize(("late", "optimizer", "how", "per_node"), [
    ("none", "sgd", "module", 1), ("some", "sgd", "module", 1), ("some", "adam", "module", 1), ("all", "adam", "module", 1),
    ("all", "plain", "ddp", 1), ("some", "sgd", "module", 2), ("all", "adam", "module", 2), ("all", "plain", "ddp", 2),
])
def test_training_is_delayed_sgd(late: str, optimizer: str, how: str, per_node: int) -> None:
    with Servers(WORLD, SERVERS) as servers:
        results = pool(WORLD).call(delayed, servers.address, late, optimizer, how, per_node)
    wanted = by_hand(late, optimizer, int(how == "ddp"))
    for first, again, weights in results:
        assert (first, again) == (late != "none", False)
        for mine, theirs, hand in zip(weights, results[0][2], wanted, strict=True):
            assert torch.equal(mine, theirs)
            torch.testing.assert_close(mine, hand, rtol=1e-5, atol=1e-6)


TOPK = "topk(ratio=0.05, values='int8', exact=False)"


def save_and_go_on(rank: int, address: str, folder: str) -> tuple[dict[str, Any], list[torch.Tensor]]:
    training = Training(rank, address, lambda job: plan(job, TOPK), "adam")
    training.train(0, STEPS)
    training.session.save_residuals(folder)
    state = copy.deepcopy((training.model.state_dict(), training.optimizer.state_dict()))
    training.train(STEPS, 2 * STEPS)
    went_on = training.weights()
    # Back again, with results of the step before under way.
    training.model.load_state_dict(state[0])
    training.optimizer.load_state_dict(copy.deepcopy(state[1]))
    training.session.load_residuals(folder)
    training.train(STEPS, 2 * STEPS)
    assert all(torch.equal(a, b) for a, b in zip(training.weights(), went_on, strict=True))
    training.session.close()
    return state, went_on


def take_up(rank: int, address: str, folder: str, states: list[Any]) -> list[torch.Tensor]:
    training = Training(rank, address, lambda job: plan(job, TOPK), "adam")
    training.model.load_state_dict(states[rank][0])
    training.optimizer.load_state_dict(states[rank][1])
    training.session.load_residuals(folder)
    training.train(STEPS, 2 * STEPS)
    training.session.close()
    return training.weights()


def test_a_save_holds_what_is_under_way(tmp_path: Path) -> None:
    with Servers(WORLD, SERVERS) as servers:
        saved = pool(WORLD).call(save_and_go_on, servers.address, str(tmp_path))
    with Servers(WORLD, SERVERS) as servers:
        again = pool(WORLD).call(take_up, servers.address, str(tmp_path), [state for state, _ in saved])
    for rank in range(WORLD):
        assert all(torch.equal(a, b) for a, b in zip(again[rank], saved[rank][1], strict=True))


KINDS = ("some", "none", "all", "some")


def slopes(rank: int, step: int, model: nn.Module) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(p.shape, generator=made) for p in model.parameters()]


def change_over(rank: int, address: str) -> list[torch.Tensor]:
    """Gradients are known, the rate is 1: what was applied is what the weights lost."""
    training = Training(rank, address, plan)
    training.session.weight(1 + rank)
    before = training.weights()
    for group in training.optimizer.param_groups:
        group["lr"] = 1.0
    for number, kind in enumerate(KINDS):
        commlayer.switch(training.session, plan(job_of(training.model), late=kind))
        for step in range(2 * number, 2 * number + 2):
            training.optimizer.zero_grad()
            rows = zip(training.model.parameters(), slopes(rank, step, training.model), strict=True)
            sum((p * s).sum() for p, s in rows).backward()
            training.optimizer.step()
    training.drain()
    training.session.close()
    return [b - a for b, a in zip(before, training.weights(), strict=True)]


def test_late_results_are_applied_under_the_next_plan() -> None:
    with Servers(WORLD, SERVERS) as servers:
        results = pool(WORLD).call(change_over, servers.address)
    model = mlp(width=64)
    for number, got in enumerate(results[0]):
        put = torch.zeros_like(got)
        for step in range(2 * len(KINDS)):
            put += sum((1 + rank) * slopes(rank, step, model)[number] for rank in range(WORLD)) / 3
        torch.testing.assert_close(got, put, rtol=1e-4, atol=1e-4)
        assert torch.equal(got, results[1][number])


def ends_at_once(rank: int, address: str) -> str:
    """Rank 0 is slow to add up and to hand on; rank 1 ends meanwhile."""
    training = Training(rank, address, lambda job: plan(job, late="all", per_node=2), per_node=2)
    training.train(0, STEPS - 1)
    if rank == 0:
        training.session.inspect.connection.worker._routes.late._lane.put(lambda: time.sleep(1.5))
    training.train(STEPS - 1, STEPS)
    worker = training.session.inspect.connection.worker
    here = rank == 1 or all(one.wait(time.monotonic() + 5.0, worker.now.failed) for one in worker.late.of.values())
    error = worker.error
    training.session.close()
    return str(error or "") if here else "results that rank 1 should have handed on are missing"


def test_a_rank_that_ends_at_once_leaves_its_node_no_error() -> None:
    with Servers(WORLD, SERVERS) as servers:
        assert pool(WORLD).call(ends_at_once, servers.address) == ["", ""]
