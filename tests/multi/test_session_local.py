"""Local steps: averages of weights by hand, the outer optimizer, saves, changes of plan, mishaps. Real ranks, two servers."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support import rank_pool
from support.attached import data
from support.rank_pool import Servers, pool
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.engine.optimizers import job_of
from commlayer.optim import Outer
from commlayer.planner import default_plan, verify_alone
from commlayer.records import Job, Plan

WORLD, SERVERS, H = 3, 2, 4
NESTEROV = Outer(lr=0.7, momentum=0.9)
_ranks = rank_pool.ranks_first(WORLD)


def model_of(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(3)
    made = nn.Sequential(nn.Linear(12, 64), nn.Tanh(), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
    return made.to(dtype)


def plan(job: Job, every: int = H, codec: str = "identity()", path: str = "service", **fields: Any) -> Plan:
    coded = codec if path == "service" else "identity()"
    made = default_plan(job, codec=coded, path=path, servers=SERVERS if path == "service" else 0, ranks_per_node=1,
                        fuse_nbytes=2048, cut_nbytes=4096)
    buckets = tuple(msgspec.structs.replace(b, down="identity()" if path == "service" else "") for b in made.buckets)
    return msgspec.structs.replace(made, buckets=buckets, local_steps=every, **fields)


class Training:
    """One rank's."""

    def __init__(self, rank: int, address: str, *, outer: Outer | None = None, scaler: bool = False, **how: Any) -> None:
        self.rank, self.model = rank, model_of(how.pop("dtype", torch.float32))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=scaler)
        self.session = commlayer.attach(
            self.model, self.optimizer, plan=plan(job_of(self.model), **how), scaler=self.scaler,
            config=rank_pool.quick(join=address, servers="each"), **({"sync": outer} if outer else {}),
        )

    def train(self, first: int, last: int, hurt: int = -1) -> list[list[torch.Tensor]]:
        """The weights and buffers behind each step. In step `hurt` rank 1 has a gradient that is not finite."""
        found = []
        for step in range(first, last):
            self.optimizer.zero_grad()
            loss = self.scaler.scale(loss_of(self.model, self.rank, step))
            if step == hurt and self.rank == 1:
                loss = loss + float("inf") * self.model[5].bias.sum()
            loss.backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            found.append(self.tensors())
        return found

    def tensors(self) -> list[torch.Tensor]:
        floats = [b for b in self.model.buffers() if b.is_floating_point()]
        return [t.detach().clone() for t in (*self.model.parameters(), *floats)]


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    x, y = data(rank, step)
    weight = next(model.parameters())
    return nn.functional.mse_loss(model(x.to(weight.dtype)), y.to(weight.dtype))


def by_hand(steps: int, outer: Outer, shares: Sequence[float]) -> list[list[torch.Tensor]]:
    """All workers in one process; what torch's SGD makes of the average of their changes, made as long as these where the outer
    optimizer says so. Behind each exchange."""
    models = [model_of() for _ in shares]
    inner = [torch.optim.Adam(m.parameters(), lr=0.01) for m in models]
    starts = [p.detach().clone() for p in models[0].parameters()]
    update = torch.optim.SGD(starts, lr=outer.lr, momentum=outer.momentum, nesterov=outer.momentum > 0)
    found = []
    for step in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        if step % H < H - 1:
            continue
        with torch.no_grad():
            changes = [[start - end for start, end in zip(starts, m.parameters(), strict=True)] for m in models]
            for start, *each in zip(starts, *changes, strict=True):
                start.grad = sum((w * change for w, change in zip(shares, each, strict=True)), torch.zeros_like(start))
            if outer.matched:
                own = sum(w * squares(each) for w, each in zip(shares, changes, strict=True))
                ratio = (own / squares([start.grad for start in starts])) ** 0.5
                assert 1.1 < ratio < sum(w * w for w in shares) ** -0.5
                for start in starts:
                    start.grad *= ratio
            update.step()
            for model in models:
                for p, start in zip(model.parameters(), starts, strict=True):
                    p.copy_(start)
            buffers = [[b for b in m.buffers() if b.is_floating_point()] for m in models]
            for rows in zip(*buffers, strict=True):
                mean = sum((w * b for w, b in zip(shares, rows, strict=True)), torch.zeros_like(rows[0]))
                for b in rows:
                    b.copy_(mean)
        found.append([*(s.clone() for s in starts), *(b.clone() for b in buffers[0])])
    return found


def squares(tensors: Sequence[torch.Tensor]) -> float:
    return sum(float(t.double().square().sum()) for t in tensors)


def train(rank: int, address: str, how: dict[str, Any], uneven: bool) -> list[list[torch.Tensor]]:
    training = Training(rank, address, **how)
    if uneven:
        training.session.weight(rank + 1)
    found = training.train(0, 3 * H)
    training.session.close()
    return found


@pytest.mark.commit(3)
@pytest.mark.parametrize(("how", "uneven"), [
    ({}, False), ({}, True), ({"outer": Outer()}, False), ({"outer": NESTEROV}, True),
    ({"path": "allreduce", "outer": Outer(lr=0.5, momentum=0.5)}, False), ({"path": "allreduce"}, True),
], ids=["as long as changes", "the same, uneven", "averages", "nesterov, uneven", "allreduce", "allreduce, uneven"])
def test_exchanges_equal_averaging_by_hand(how: dict[str, Any], uneven: bool) -> None:
    with Servers(WORLD, SERVERS if how.get("path") is None else 0) as servers:
        results = pool(WORLD).call(train, servers.address, how, uneven)
    shares = [(r + 1) / 6 for r in range(WORLD)] if uneven else [1 / WORLD] * WORLD
    wanted = by_hand(3 * H, how.get("outer", Outer(matched=True)), shares)
    for step in range(3 * H):
        rows = [result[step] for result in results]
        same = all(torch.equal(a, b) for row in rows for a, b in zip(row, rows[0], strict=True))
        assert same == (step % H == H - 1), "equal behind an exchange and only there"
        if same:
            for mine, hand in zip(rows[0], wanted[step // H], strict=True):
                torch.testing.assert_close(mine, hand, rtol=1e-4, atol=1e-5)


def every_step(rank: int, address: str, outer: Outer | None) -> list[list[torch.Tensor]]:
    training = Training(rank, address, outer=outer, every=1)
    found = training.train(0, 3)
    training.session.close()
    return found


def test_an_exchange_every_step_is_the_averaging_of_gradients_whatever_the_outer_optimizer() -> None:
    runs = []
    for outer in (None, NESTEROV):
        with Servers(WORLD, SERVERS) as servers:
            runs.append(pool(WORLD).call(every_step, servers.address, outer)[0])
    assert all(torch.equal(a, b) for x, y in zip(*runs, strict=True) for a, b in zip(x, y, strict=True))


def known_changes(rank: int, address: str, how: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What this rank put in, what was applied in the end, and what it owes."""
    training = Training(rank, address, **how)
    parameters = list(training.model.parameters())
    starts = [p.detach().clone() for p in parameters]
    plain = torch.optim.SGD(parameters, lr=1.0)
    put = [torch.zeros_like(p) for p in parameters]
    for step in range(3 * H):
        made = torch.Generator().manual_seed(100 * step + rank)
        for total, p in zip(put, parameters, strict=True):
            p.grad = torch.randn(p.shape, generator=made)
            total += p.grad
        training.session.synchronize()  # counts the step
        plain.step()
        if training.session.inspect.connection.local.due:
            for p in parameters:
                p.grad = None
            training.optimizer.step()
    worker = training.session.inspect.connection.worker
    owed = [torch.zeros(p.numel()) for p in parameters]
    for bucket in worker.buckets:
        for debt in bucket.debts():
            owed[debt.tensor][debt.start : debt.stop] += debt.values
    applied = [s - p.detach() for s, p in zip(starts, parameters, strict=True)]
    training.session.close()
    return tuple(torch.cat([t.reshape(-1) for t in row]) for row in (put, applied, owed))


@pytest.mark.parametrize("codec", ["topk(ratio=0.1)", "int8(block=64)"])
def test_what_an_exchange_does_not_send_is_owed(codec: str) -> None:
    with Servers(WORLD, SERVERS) as servers:
        results = pool(WORLD).call(known_changes, servers.address, {"codec": codec, "outer": Outer()})
    put, owed = sum(r[0] for r in results), sum(r[2] for r in results)
    assert all(torch.equal(r[1], results[0][1]) for r in results)
    assert float(owed.abs().max()) > 0
    torch.testing.assert_close(WORLD * results[0][1] + owed, put, rtol=1e-3, atol=1e-3)


def skipped(rank: int, address: str, hurt: int) -> tuple[list[list[torch.Tensor]], float]:
    training = Training(rank, address, scaler=True)
    found = training.train(0, 2 * H + 1, hurt)
    training.session.drain()
    found.append(training.tensors())
    steps = training.session.stats()["exchanges"]
    training.session.close()
    return found, steps


@pytest.mark.parametrize("hurt", [1, H - 1])
def test_a_step_that_one_rank_skips_keeps_ranks_together(hurt: int) -> None:
    """Also the step that an exchange was to follow: then it comes before the next forward pass."""
    with Servers(WORLD, SERVERS) as servers:
        results = pool(WORLD).call(skipped, servers.address, hurt)
    assert {steps for _, steps in results} == {3.0}
    for at in (2 * H - 1, -1):
        assert all(torch.equal(a, b) for r, _ in results for a, b in zip(r[at], results[0][0][at], strict=True))
        assert all(bool(t.isfinite().all()) for t in results[0][0][at])


def spoilt(rank: int, address: str) -> list[list[torch.Tensor]]:
    training = Training(rank, address, codec="topk(ratio=0.1)")
    found = training.train(0, H + 1)
    if rank:
        with torch.no_grad():
            training.model[5].bias.fill_(torch.inf)
    found += training.train(H + 1, 2 * H)
    training.session.close()
    return found


def test_weights_that_are_not_finite_go_back_to_those_of_the_last_exchange() -> None:
    with Servers(WORLD, SERVERS) as servers:
        results = pool(WORLD).call(spoilt, servers.address)
    for result in results:
        weights = len(list(model_of().parameters()))
        for now, before in zip(result[2 * H - 1][:weights], results[0][H - 1][:weights], strict=True):
            assert torch.equal(now, before)


HOW = {"codec": "topk(ratio=0.05, values='int8', exact=False)", "outer": NESTEROV}


def save_and_go_on(rank: int, address: str, folder: str, dtype: torch.dtype) -> tuple[Any, list[torch.Tensor]]:
    training = Training(rank, address, dtype=dtype, **HOW)
    training.train(0, H + 2)
    training.session.save_residuals(folder)
    state = copy.deepcopy((training.model.state_dict(), training.optimizer.state_dict()))
    training.train(H + 2, 3 * H)
    training.session.close()
    return state, training.tensors()


def take_up(rank: int, address: str, folder: str, dtype: torch.dtype, states: list[Any]) -> list[torch.Tensor]:
    training = Training(rank, address, dtype=dtype, **HOW)
    training.model.load_state_dict(states[rank][0])
    training.optimizer.load_state_dict(states[rank][1])
    training.session.load_residuals(folder)
    training.train(H + 2, 3 * H)
    training.session.close()
    return training.tensors()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_save_between_two_exchanges_goes_on_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    with Servers(WORLD, SERVERS) as servers:
        saved = pool(WORLD).call(save_and_go_on, servers.address, str(tmp_path), dtype)
    with Servers(WORLD, SERVERS) as servers:
        again = pool(WORLD).call(take_up, servers.address, str(tmp_path), dtype, [state for state, _ in saved])
    for rank in range(WORLD):
        assert all(torch.equal(a, b) for a, b in zip(again[rank], saved[rank][1], strict=True))


def change_over(rank: int, address: str) -> list[list[torch.Tensor]]:
    training = Training(rank, address)
    found = []
    job = job_of(training.model)
    late = plan(job, 1)
    late = msgspec.structs.replace(late, buckets=tuple(msgspec.structs.replace(b, stale=True) for b in late.buckets))
    for number, every in enumerate((1, 2, H)):
        training.train(3 * number, 3 * number + 3)
        with pytest.raises(ValueError, match="late.*E-PLAN-SWITCH"):
            commlayer.switch(training.session, late)
        commlayer.switch(training.session, plan(job, every))
        found.append(training.tensors())
    training.train(9, 11)
    training.session.drain()
    found.append(training.tensors())
    training.session.close()
    return found


def test_a_change_of_plan_and_a_drain_bring_everyone_together() -> None:
    with Servers(WORLD, SERVERS) as servers:
        results = pool(WORLD).call(change_over, servers.address)
    for result in results:
        for mine, theirs in zip(result, results[0], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def refused(rank: int, address: str) -> list[str]:
    config = rank_pool.quick(join=address)
    model = model_of()
    with pytest.raises(ValueError) as alone:
        commlayer.attach(model, plan=plan(job_of(model)), config=config)
    wrapped = DistributedDataParallel(model)
    session = commlayer.attach(wrapped, plan=commlayer.compressors.identity(), config=config)
    loss_of(wrapped, rank, 0).backward()
    with pytest.raises(ValueError) as through_ddp:
        commlayer.switch(session, plan(session.inspect.connection.worker.job))
    loss_of(wrapped, rank, 1).backward()
    session.close()
    return [str(alone.value), str(through_ddp.value)]


def test_local_steps_without_an_optimizer_to_follow_are_refused() -> None:
    with Servers(WORLD, SERVERS) as servers:
        results = pool(WORLD).call(refused, servers.address)
    for lines in results:
        for line in lines:
            assert re.match(rf"plan: of {H} local steps: .*NoneType.*E-SYNC-OPTIMIZER", line), line


def test_local_steps_and_late_results_are_one_or_the_other() -> None:
    made = plan(job_of(model_of()))
    late = tuple(msgspec.structs.replace(b, stale=True) for b in made.buckets)
    assert verify_alone(msgspec.structs.replace(made, buckets=late)) == [
        f"of {H} local steps, and results that are a step late: one or the other"]


@pytest.mark.parametrize(("make", "said"), [
    (lambda: Outer(lr=0.0), r"Outer: lr 0\.0.*E-OPTIM-ARGUMENT"),
    (lambda: Outer(lr=float("nan")), "Outer: lr nan.*E-OPTIM-ARGUMENT"),
    (lambda: Outer(momentum=1.0), r"Outer: momentum 1\.0.*E-OPTIM-ARGUMENT"),
])
def test_an_outer_optimizer_that_cannot_be_is_refused(make: Callable[[], Outer], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make()
