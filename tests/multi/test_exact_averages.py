"""Averages without rounding: float64 models, and scripts with gradient hooks, train as under DDP.

Buffers that are equal on all ranks keep their bits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from msgspec import structs
from support.attached import Run, Setting, coordinators, data, plan_or_codec, play
from support.rank_pool import pool, quick
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.records import Plan, Slice

WORLD, STEPS = 2, 5


def double_mlp() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(12, 40), nn.Tanh(), nn.BatchNorm1d(40), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3)
    return nn.Sequential(*layers).double()


def doubles(run: Run, *, ddp: bool) -> dict[str, Any]:
    model = double_mlp()
    wrapped = DistributedDataParallel(model, broadcast_buffers=False) if ddp else run.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = (part.double() for part in data(run.rank, step))
        nn.functional.mse_loss(wrapped(x), y).backward()
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def as_ddp(run: Run) -> dict[str, Any]:
    return doubles(run, ddp=True)


def attached(run: Run) -> dict[str, Any]:
    return doubles(run, ddp=False)


@pytest.mark.commit(2)
@pytest.mark.parametrize(("how", "codec"), [
    ("module", ""), ("ddp", ""), ("hook", ""), ("module", "topk(ratio=0.1)"), ("ddp", "int8()"), ("module", "identity()"),
])
def test_float64_trains_as_under_ddp(how: str, codec: str) -> None:
    ranks = pool(WORLD)
    wanted = ranks.call(play, WORLD, as_ddp, None)
    with coordinators(1, WORLD, 1 if codec else 0) as jobs:
        # Without a codec: the default plan, of one node.
        setting = Setting(how, tuple(each.address for each in jobs), codec, servers=1) if codec else \
            Setting(how, plan="auto", ranks_per_node=WORLD)
        results = ranks.call(play, WORLD, attached, setting)
    for name, one in wanted[0].items():
        assert torch.equal(results[0][name], results[1][name])
        assert (results[0][name] - one).abs().max() <= 1e-13 * one.abs().max()


class Still(nn.Module):
    """Buffers that no rank changes, one that all change equally, and statistics that each rank changes by its own data."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        self.body, self.norm = nn.Linear(12, 3), nn.BatchNorm1d(12)
        for name, dtype in (("f32", torch.float32), ("f64", torch.float64), ("bf16", torch.bfloat16), ("f16", torch.float16)):
            self.register_buffer(name, torch.randn(300, generator=draw, dtype=torch.float64).to(dtype))
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("whole", torch.arange(5))
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 0.1
        return self.body(self.norm(x))


def stay(rank: int, address: str, plan: str, per_node: int, steps: int) -> tuple[dict[str, torch.Tensor], list[bool]]:
    model = Still()
    before = {name: b.clone() for name, b in model.named_buffers()}
    where: dict[str, Any] = {"join": address} if address else {}
    count = torch.zeros(())
    with commlayer.attach(model, **plan_or_codec(plan), config=quick(ranks_per_node=per_node, batch=10, **where)) as session:
        session.weight(3 + 4 * rank)
        for step in range(steps):
            x, y = data(rank, step)
            nn.functional.mse_loss(model(x), y).backward()
            count += 0.1
            if step == steps // 2:
                session.weight(7 - 6 * rank)
    after = dict(model.named_buffers())
    same = [torch.equal(after[name], before[name]) for name in ("f32", "f64", "bf16", "f16", "whole", "mask")]
    return {name: b.clone() for name, b in after.items()}, [*same, torch.equal(after["count"], count)]


@pytest.mark.commit(2)
@pytest.mark.parametrize(("plan", "per_node"), [("auto", 2), ("identity()", 1), ("identity()", 2), ("int8()", 1)])
def test_equal_buffers_keep_their_bits(plan: str, per_node: int) -> None:
    with coordinators(1, WORLD, 0 if plan == "auto" else 1) as jobs:
        results = pool(WORLD).call(stay, jobs[0].address if jobs else "", plan, per_node, 20)
    (one, same), (other, too) = results
    assert same == too == [True] * 7
    assert torch.equal(one["norm.running_mean"], other["norm.running_mean"])
    assert (one["norm.running_mean"] != 0).all()


def light(rank: int, plan: str, per_node: int, address: str) -> bool:
    """Changes of a buffer by a rank of weight 0 are overwritten."""
    model = Still()
    where: dict[str, Any] = {"join": address} if address else {}
    with commlayer.attach(model, **plan_or_codec(plan), config=quick(ranks_per_node=per_node, **where)) as session:
        session.weight(0.3 if rank else 0)
        for step in range(3):
            if not rank:
                model.f32.mul_(float("nan") if step == 1 else 2.0)
            nn.functional.mse_loss(model(data(rank, step)[0]), data(rank, step)[1]).backward()
    return torch.equal(model.f32, Still().f32)


@pytest.mark.commit(1)
@pytest.mark.parametrize(("plan", "per_node"), [("auto", 2), ("identity()", 1), ("identity()", 2)])
def test_rank_without_weight_has_no_effect(plan: str, per_node: int) -> None:
    with coordinators(1, WORLD, 0 if plan == "auto" else 1) as jobs:
        assert pool(WORLD).call(light, plan, per_node, jobs[0].address if jobs else "") == [True, True]


def differ(rank: int) -> list[torch.Tensor]:
    """Only one rank changes a buffer."""
    model = Still()
    seen = []
    with commlayer.attach(model, config=quick(ranks_per_node=WORLD, batch=4)) as session:
        session.weight(1 + 2 * rank)
        for step in range(4):
            if step == 1 and rank:
                model.f32.add_(4.0)
            nn.functional.mse_loss(model(data(rank, step)[0]), data(rank, step)[1]).backward()
            seen.append(model.f32.clone())
    return seen


def test_changed_buffer_becomes_the_weighted_mean_on_all_ranks() -> None:
    one, other = pool(WORLD).call(differ)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert torch.equal(one[0], Still().f32)
    torch.testing.assert_close(one[1], Still().f32 + 3.0)
    assert torch.equal(one[1], one[2])
    assert torch.equal(one[1], one[3])


def halves(plan: Plan) -> Plan:
    """The same with every slice in two buckets."""
    layout = [structs.replace(b, slices=(Slice(s.tensor, low, high),), shape=()) for b in plan.buckets for s in b.slices
              for low, high in pairwise(sorted({s.start, (s.start + s.stop) // 2, s.stop}))]
    return structs.replace(plan, buckets=tuple(structs.replace(b, id=i) for i, b in enumerate(layout)))


def switched(rank: int) -> tuple[bool, torch.Tensor]:
    model = Still()
    with commlayer.attach(model, config=quick(ranks_per_node=WORLD, batch=10)) as session:
        session.weight(3 + 4 * rank)
        for step in range(6):
            if step == 3:
                assert session.inspect.plan is not None
                session.switch(halves(session.inspect.plan))
            nn.functional.mse_loss(model(data(rank, step)[0]), data(rank, step)[1]).backward()
    return torch.equal(model.f64, Still().f64), model.norm.running_var


def test_equal_buffers_keep_their_bits_under_the_next_plan() -> None:
    (still, one), (too, other) = pool(WORLD).call(switched)
    assert still
    assert too
    assert torch.equal(one, other)


def equal_gradients(rank: int) -> bool:
    """With equal weights, and a number of ranks that float32 divides by, a mean of equal gradients is that gradient."""
    torch.manual_seed(4)
    model = nn.Linear(50, 50)
    alone = [torch.randn(50, 50), torch.randn(50)]
    with commlayer.attach(model, config=quick(ranks_per_node=WORLD)):
        (model.weight * alone[0]).sum().add((model.bias * alone[1]).sum()).backward()
    return torch.equal(model.weight.grad, alone[0]) and torch.equal(model.bias.grad, alone[1])


def test_equal_gradients_of_equal_weights_keep_their_bits() -> None:
    assert pool(WORLD).call(equal_gradients) == [True, True]


WIDE, MICROS = 512, 3
"""Each weight has 1 MiB, the size of one bucket, which lanes read while backward() runs."""


def scales(rank: int) -> Callable[[torch.Tensor], None]:
    def hook(p: torch.Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(1.5 - rank).add_(0.01)

    return hook


def replaces(rank: int) -> Callable[[torch.Tensor], None]:
    def hook(p: torch.Tensor) -> None:
        assert p.grad is not None
        p.grad = p.grad.sign() * (0.01 + rank)

    return hook


def hooked(rank: int, how: str, kind: str, address: str) -> list[torch.Tensor]:
    """Weights after steps in which the script's hooks change gradients. `how`: "alone" (plain DDP), "ddp" (attached), or a sync
    mode. `kind`: the hook; registered once after attach(), or "again" for each step."""
    torch.manual_seed(9)
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(WIDE, WIDE), nn.Tanh())))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    wrapped: Any = DistributedDataParallel(model) if how in ("alone", "ddp") else model
    session: Any = None
    if how != "alone":
        where: dict[str, Any] = {"join": address, "ranks_per_node": 1} if address else {"ranks_per_node": WORLD}
        config = quick(fuse_nbytes=1 << 18, cut_nbytes=1 << 20) | where
        session = commlayer.attach(wrapped, optimizer, compression=commlayer.compressors.identity(), config=config,
                                   sync="forward" if how == "forward" else None)
    quiet = wrapped.no_sync if session is None else session.no_sync
    draw = torch.Generator().manual_seed(rank)
    with session or contextlib.nullcontext():
        handles = list[Any]()
        for step in range(3):
            if not step or "again" in kind:
                for handle in handles:
                    handle.remove()
                hook = (replaces if "replaces" in kind else scales)(rank)
                handles = [p.register_post_accumulate_grad_hook(hook) for p in model.parameters()]
            optimizer.zero_grad()
            for micro in range(MICROS if step == 1 else 1):
                with quiet() if step == 1 and micro < MICROS - 1 else contextlib.nullcontext():
                    wrapped(torch.randn(2, WIDE, generator=draw)).square().mean().backward()
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("kind", ["scales", "replaces again"])
def test_gradient_hooks_train_bit_equal_to_ddp(kind: str) -> None:
    ranks = pool(WORLD)
    wanted = ranks.call(hooked, "alone", kind, "")
    for how in ("step", "ddp", "service", "forward"):
        with coordinators(1, WORLD, how == "service", fuse_nbytes=1 << 18, cut_nbytes=1 << 20) as jobs:
            for result in ranks.call(hooked, how, kind, jobs[0].address if jobs else ""):
                assert all(map(torch.equal, result, wanted[0])), how


def hooked_locally(rank: int, hooks: bool) -> list[torch.Tensor]:
    """Local steps, whose gradients a hook replaces, or the script after backward()."""
    model = double_mlp().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with commlayer.attach(model, optimizer, compression=commlayer.compressors.identity(), sync=commlayer.LocalSteps(2),
                          config=quick(ranks_per_node=WORLD)):
        for p in model.parameters() if hooks else ():
            p.register_post_accumulate_grad_hook(replaces(rank))
        for step in range(4):
            optimizer.zero_grad()
            x, y = data(rank, step)
            nn.functional.mse_loss(model(x), y).backward()
            for p in () if hooks else model.parameters():
                replaces(rank)(p)
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def test_gradient_hooks_apply_to_local_steps() -> None:
    ranks = pool(WORLD)
    for with_hooks, without in zip(ranks.call(hooked_locally, True), ranks.call(hooked_locally, False), strict=True):
        assert all(map(torch.equal, with_hooks, without))
