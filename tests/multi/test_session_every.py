"""attach(every=, codes=): local steps and coded updates in a line, for modules and DDP, beside averages by hand. Real ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch
from support import rank_pool
from support.attached import data, refusals, said_in_lines
from support.rank_pool import Servers, pool
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.engine.optimizers import job_of
from commlayer.optim import Outer
from commlayer.planner import default_plan

WORLD, H, ROUNDS = 2, 4, 3


class Net(nn.Module):
    """With running statistics, two learning rates, and a layer that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.BatchNorm1d(40), nn.Linear(40, 40), nn.Tanh())
        self.head, self.unused = nn.Linear(40, 3), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))

    def groups(self) -> list[dict[str, Any]]:
        return [{"params": [*self.body.parameters(), *self.unused.parameters()], "lr": 0.01},
                {"params": [*self.head.parameters()], "lr": 0.003}]


def tensors(model: nn.Module) -> list[torch.Tensor]:
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()]


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x, y = data(rank, step)
    return nn.functional.mse_loss(model(x), y)


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, rank: int, step: int, how: str,
            no_sync: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
    """One step of the script, the same by hand and attached."""
    optimizer.zero_grad()
    if "gathered" in how:
        with no_sync():
            scaler.scale(loss_of(model, rank, 1000 + step)).backward()
    scaler.scale(loss_of(model, rank, step)).backward()
    scaler.step(optimizer)
    scaler.update()


def scaler_of(how: str) -> Any:
    return torch.amp.GradScaler("cpu", init_scale=64.0, enabled="scaled" in how)


def squares(tensors: Sequence[torch.Tensor]) -> float:
    return sum(float(t.square().sum()) for t in tensors)


def by_hand(how: str, every: int, shares: Sequence[Sequence[float]]) -> list[list[torch.Tensor]]:
    """All workers in one process; the mean of changes is as long as they are. `shares`: by round, what each one's count for.
    Behind each exchange."""
    models = [Net() for _ in range(WORLD)]
    optimizers = [torch.optim.AdamW(m.groups()) for m in models]
    scalers, found = [scaler_of(how) for _ in models], []
    starts = [p.detach().clone() for p in models[0].parameters()]
    for step in range(every * len(shares)):
        for rank, model in enumerate(models):
            stepped(model, optimizers[rank], scalers[rank], rank, step, how, contextlib.nullcontext)
        if step % every == every - 1:
            with torch.no_grad():
                share = shares[step // every]
                changes = [[p.double() - s for p, s in zip(m.parameters(), starts, strict=True)] for m in models]
                means = [sum(s * c for s, c in zip(share, row, strict=True)) for row in zip(*changes, strict=True)]
                own = sum(s * squares(each) for s, each in zip(share, changes, strict=True))
                ratio = min((own / squares(means)) ** 0.5, sum(s * s for s in share) ** -0.5)
                for start, mean, *row in zip(starts, means, *(m.parameters() for m in models), strict=True):
                    start.add_(ratio * mean)
                    for p in row:
                        p.copy_(start)
                for row in zip(*([b for b in m.buffers() if b.is_floating_point()] for m in models), strict=True):
                    average = sum(s * b.double() for s, b in zip(share, row, strict=True))
                    for b in row:
                        b.copy_(average)
            found.append(tensors(models[0]))
    return found


def run(rank: int, address: str, how: str, every: int, codec: str) -> dict[str, Any]:
    model = Net()
    optimizer, scaler = torch.optim.AdamW(model.groups()), scaler_of(how)
    wrapped: Any = model
    if "ddp" in how:
        wrapped = DistributedDataParallel(model, bucket_cap_mb=0.002, find_unused_parameters="unused" in how,
                                          static_graph="static" in how, gradient_as_bucket_view="view" in how)
    session = commlayer.attach(wrapped, optimizer, plan=codec, every=every, codes="updates", scaler=scaler,
                               config=rank_pool.quick(join=address))
    no_sync = wrapped.no_sync if "own no_sync" in how else session.no_sync
    rows, grads = [], []
    for step in range(ROUNDS * every):
        if "weighed" in how:
            session.weight(*weights(rank, step))
        stepped(wrapped, optimizer, scaler, rank, step, how, no_sync)
        rows.append(tensors(model))
        grads.append(model.head.weight.grad.clone())
    found = {"rows": rows, "grads": grads, "stats": session.stats(), "plan": session.inspect.plan}
    session.close()
    if "ddp" in how:  # it reduces again
        optimizer.zero_grad()
        loss_of(wrapped, rank, 0).backward()
        found["after"] = model.head.weight.grad.clone()
    return found


def weights(rank: int, step: int) -> tuple[float, float]:
    both = [4.0, 2.0 + step % 3]
    return both[rank], sum(both)


def shares(how: str, every: int) -> list[list[float]]:
    """What the steps of a round weighed, of what all weighed."""
    if "weighed" not in how:
        return [[1 / WORLD] * WORLD] * ROUNDS
    steps = [range(every * r, every * r + every) for r in range(ROUNDS)]
    return [[sum(weights(rank, s)[0] for s in mine) / sum(weights(0, s)[1] for s in mine) for rank in range(WORLD)]
            for mine in steps]


@pytest.mark.parametrize("how", [
    "module", "module, gathered, scaled, weighed", "ddp, unused, gathered, own no_sync", "ddp, static, scaled",
    "ddp, unused, view, gathered, weighed",
])
@pytest.mark.parametrize("every", [1, H])
def test_a_line_gives_what_averaging_weights_by_hand_gives(how: str, every: int) -> None:
    with Servers(WORLD, 2) as servers:
        first, second = pool(WORLD).call(run, servers.address, how, every, "identity()")
    assert (first["stats"]["steps"], first["stats"]["exchanges"]) == (ROUNDS * every, ROUNDS)
    assert first["plan"].local_steps == every
    wanted = by_hand(how, every, shares(how, every))
    for step, (mine, theirs) in enumerate(zip(first["rows"], second["rows"], strict=True)):
        assert not torch.equal(first["grads"][step], second["grads"][step]), "nobody has reduced gradients"
        exchanged = step % every == every - 1
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)) == exchanged
        for a, b in zip(mine, wanted[step // every], strict=True) if exchanged else ():
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert "ddp" not in how or torch.equal(first["after"], second["after"]), "a module whose session has ended reduces"


@pytest.mark.parametrize("plan", ["int4()", "auto"])
def test_any_codec_and_auto_take_local_steps(plan: str) -> None:
    with Servers(WORLD, 1) as servers:
        found = pool(WORLD).call(run, servers.address, "ddp, unused", 2, plan)
    assert {b.codec for b in found[0]["plan"].buckets} == {"error_feedback(int4(block=64))", "identity()"}
    assert all(torch.equal(a, b) for a, b in zip(found[0]["rows"][-1], found[1]["rows"][-1], strict=True))


def refused(rank: int, address: str) -> dict[str, str]:
    model = Net()
    adamw, sgd = torch.optim.AdamW(model.groups()), torch.optim.SGD(model.parameters(), lr=0.1)
    plan = msgspec.structs.replace(default_plan(job_of(model), codec="int4()", path="service", servers=1, ranks_per_node=1,
                                                fuse_nbytes=2048, cut_nbytes=4096), local_steps=8)
    stale = msgspec.structs.replace(plan, local_steps=1,
                                    buckets=tuple(msgspec.structs.replace(b, stale=True) for b in plan.buckets))
    hooked = DistributedDataParallel(Net(), find_unused_parameters=True)
    hooked.register_comm_hook(None, commlayer.comm_hook)
    tries: dict[str, Callable[[], Any]] = {
        "zero": lambda: commlayer.attach(model, adamw, every=0),
        "half": lambda: commlayer.attach(model, adamw, every=2.5),
        "codes": lambda: commlayer.attach(model, adamw, codes="weights"),
        "gradients": lambda: commlayer.attach(model, adamw, every=4, codes="gradients"),
        "alone": lambda: commlayer.attach(model, every=4),
        "alone, updates": lambda: commlayer.attach(model, codes="updates"),
        "lbfgs": lambda: commlayer.attach(model, torch.optim.LBFGS(model.parameters()), every=4),
        "hooked": lambda: commlayer.attach(hooked, torch.optim.SGD(hooked.parameters(), lr=0.1), every=4),
        "plan": lambda: commlayer.attach(model, sgd, plan=plan, every=4, config=rank_pool.quick(join=address)),
        "stale": lambda: commlayer.attach(model, sgd, plan=stale, codes="updates", config=rank_pool.quick(join=address)),
        "unlike": lambda: commlayer.attach(model, sgd, plan="int4()", every=2 + rank, config=rank_pool.quick(join=address)),
    }
    said = refusals(tries)
    session = commlayer.attach(model, adamw, plan="int4()", every=2, config=rank_pool.quick(join=address))  # nothing is left
    commlayer.switch(session, msgspec.structs.replace(plan, local_steps=1))
    assert session.inspect.plan.local_steps == 2, "every stays what the script said"
    said |= refusals({"switch": lambda: commlayer.switch(session, plan)})
    session.close()
    return said


def test_what_cannot_be_is_one_line() -> None:
    with Servers(WORLD, 1) as servers:
        said_in_lines(pool(WORLD).call(refused, servers.address), {
            "zero": "every: got 0, allowed", "half": "every: got 2.5, allowed", "codes": "codes: got 'weights', allowed",
            "gradients": "leave codes out, or take every=1", "alone": "attach(model, optimizer, every=4)",
            "alone, updates": "attach(model, optimizer, codes='updates')", "lbfgs": "LBFGS", "hooked": "communication hook",
            "plan": "every=4, but the plan has 8 local steps", "stale": "a step late with coded updates",
            "unlike": "every=2, codes='updates' on rank 0", "switch": "every=2, but the plan has 8 local steps",
        })


def outer_run(rank: int, address: str) -> list[torch.Tensor]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = commlayer.attach(model, optimizer, plan="identity()", every=2, sync=Outer(lr=0.5),
                               config=rank_pool.quick(join=address))
    for step in range(2):
        stepped(model, optimizer, scaler_of(""), rank, step, "", session.no_sync)
    session.close()
    return tensors(model)


def test_an_outer_optimizer_goes_with_it() -> None:
    with Servers(WORLD, 1) as servers:
        got = pool(WORLD).call(outer_run, servers.address)[0]
    models = [Net() for _ in range(WORLD)]
    for rank, model in enumerate(models):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            stepped(model, optimizer, scaler_of(""), rank, step, "", contextlib.nullcontext)
    for mine, start, *ends in zip(got, Net().parameters(), *(m.parameters() for m in models), strict=False):
        torch.testing.assert_close(mine, 0.5 * start + 0.25 * (ends[0] + ends[1]), rtol=1e-4, atol=1e-6)
