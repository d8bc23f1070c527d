"""The law through sessions: applied updates + residuals = input gradients, for modules and DDP, for any script."""

from __future__ import annotations

from collections.abc import Callable, Set
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support import rank_pool
from support.attached import sync_of
from support.forward import Held
from support.jobs import distributed_job
from support.rank_pool import pool
from support.residuals import by_tensor, slices_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.engine.model.model_tensors import describe_model
from commlayer.errors import StepAbandoned
from commlayer.planner import default_plan, lower
from commlayer.planner.plan_rules import shard_groups
from commlayer.records import Job, Plan

WORLD, STEPS = 2, 8
SIZES: list[tuple[int, ...]] = [(300,), (40, 50), (7,)]


LOCAL: dict[str, dict[str, Any]] = {
    "updates": {"codes": "updates"}, "rounds": {"every": 4}, "overlapped": {"every": 4, "overlap": "round", "fragments": 2},
}
"""Ways in which each rank steps on its own gradients, and changes of weights are exchanged."""
WAYS = LOCAL | {"forward": {"overlap": "forward"}}
"""And that in which results come in during the next forward pass."""


class Given(nn.Module):
    """Its gradients are its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.zeros(s)) for s in SIZES])

    def forward(self, *gradients: torch.Tensor | None) -> torch.Tensor:
        return torch.stack([(p * g).sum() for p, g in zip(self.parts, gradients, strict=True) if g is not None]).sum()


def slopes(rank: int, step: int, salt: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank + 77777 * salt)
    return [torch.randn(s, generator=generator) for s in SIZES]


def plan_of(job: Job, kind: str, per_node: int) -> Plan:
    """Results are not compressed, so only workers have residuals."""
    codec = {"topk": "topk(ratio=0.1)", "int8": "int8(block=32)", "low rank": "powersgd(rank=1)",
             "momentum": "momentum(topk(ratio=0.1), beta=0.0)", "onebit": "onebit(block=64)"}[kind.split(",")[0]]
    plan = default_plan(job, codec=codec, path="service", servers=2, ranks_per_node=per_node, fuse_nbytes=2048, cut_nbytes=4096)
    changes: dict[str, Any] = {} if "powersgd" in codec else {"down": "identity()"}
    if "staged" in kind:
        changes = {"path": "encode@cpu all.allgather decode@cpu"}
    if "shards" in kind:
        changes |= {"path": "node.reduce_scatter encode@cpu net.push net.pull decode@cpu node.allgather", "owner": 0}
    late = {"all": {b.id for b in plan.buckets}, "some": {b.id for b in plan.buckets if b.id % 2}}.get(kind.split()[-1], set())
    buckets = (msgspec.structs.replace(b, stale=b.id in late, **changes) for b in plan.buckets)
    plan = lower(msgspec.structs.replace(plan, buckets=tuple(buckets)))
    assert "shards" not in kind or any(len(run) > 1 for run in shard_groups(plan.buckets, per_node))
    return plan


def applied_to(model: Given) -> list[torch.Tensor]:
    """With rate 1, what the optimizer got."""
    return [-p.detach().double() for p in model.parts]


def residuals_of(session: Any) -> list[torch.Tensor]:
    """Residuals of this rank, per tensor, after a rollback of what was not applied."""
    worker = session.inspect.context.worker
    worker.roll_back()
    return by_tensor(slices_of(worker), SIZES)


class Script:
    """The target of events: a model with known gradients and rate 1, and the account of inputs."""

    def __init__(self, rank: int, how: str, kind: str, per_node: int, address: str, folder: str) -> None:
        self.rank, self.model, self.folder = rank, Given(), folder
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        # With a scaler results would be waited for; and the first step of late ones has nothing that it could look at.
        scaled = "forward" not in how and "delayed" not in how
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=100, enabled=scaled)
        self.wrapped: Any = self.model
        if "ddp" in how:
            self.wrapped = DistributedDataParallel(self.model, bucket_cap_mb=0.002, find_unused_parameters=True,
                                                   gradient_as_bucket_view="view" in how)
        config = rank_pool.quick(ranks_per_node=per_node, join=address)
        self.way = next((name for name in WAYS if name in how), "")
        self.session = commlayer.attach(self.wrapped, None if "unnamed" in how else self.optimizer, config=config,
                                        plan=plan_of(describe_model(self.model), kind, per_node), grad_scaler=self.scaler,
                                        sync=sync_of(**WAYS.get(self.way, {})))
        if "late" in how:
            self.held = Held(distributed_job(self.session).worker, until_awaited=True)
        self.put = [torch.zeros(s, dtype=torch.float64) for s in SIZES]
        self.step = 0

    def backward(self, *, put: float = 1.0, without: Set[int] = frozenset(), salt: int = 0, spoil: bool = False) -> None:
        """`put`: what a gradient of 1 should be worth to the optimizer."""
        given: list[Any] = [None if t in without else g for t, g in enumerate(slopes(self.rank, self.step, salt))]
        for total, g in zip(self.put, given, strict=True):
            if g is not None and put:
                total += put * g.double()
        if spoil:
            given[1][3, 3] = float("inf")
        self.scaler.scale(self.wrapped(*given)).backward()

    def apply(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.step += 1

    def account(self) -> dict[str, Any]:
        if self.session.flush() and not self.way:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return {"put": [p.clone() for p in self.put], "residuals": residuals_of(self.session),
                "applied": applied_to(self.model)}


def plain(s: Script) -> None:
    for _ in range(STEPS):
        s.backward()
        s.apply()


def unused(s: Script) -> None:
    for n in range(STEPS):
        s.backward(without={0, 2} if n % 2 else set())
        s.apply()


def used_here_alone(s: Script) -> None:
    for n in range(STEPS):
        s.backward(without={1} if (n + s.rank) % 2 else set())
        s.apply()


def probe(s: Script, *, set_to_none: bool = True) -> None:
    """A backward pass before each step, whose gradients are discarded."""
    for _ in range(STEPS):
        s.backward(put=0.0, salt=1)
        s.optimizer.zero_grad(set_to_none=set_to_none)
        s.backward()
        s.apply()


def probe_with_zeros(s: Script) -> None:
    probe(s, set_to_none=False)


def stepped_with_zeros(s: Script) -> None:
    """Averages are set to zeros, and an optimizer steps with these."""
    for _ in range(STEPS):
        s.backward(put=0.0, salt=1)
        s.optimizer.zero_grad(set_to_none=False)
        s.scaler.step(s.optimizer)
        s.scaler.update()
        s.optimizer.zero_grad()
        s.backward()
        s.apply()


def step_without_clearing(s: Script) -> None:
    """A discriminator: stepped, then a pass for another model adds to the remaining gradients, then all are cleared."""
    for _ in range(STEPS):
        s.backward()
        s.scaler.step(s.optimizer)
        s.scaler.update()
        s.backward(put=0.0, salt=2)
        s.optimizer.zero_grad()
        s.step += 1


def skips(s: Script) -> None:
    for n in range(STEPS):
        bad = n % 3 == 1
        s.backward(put=0.0 if bad else 1.0, spoil=bad and s.rank == 1)
        s.apply()


def weights(s: Script) -> None:
    for n in range(STEPS):
        mine = [3.0, 3.0] if n == 5 else [64.0, 32.0]
        s.session.weight(mine[s.rank])
        s.backward(put=mine[s.rank] * WORLD / sum(mine))
        s.apply()
    s.session.weight(1.0)


def added_up(s: Script) -> None:
    """Two passes, both averaged, for one step."""
    for _ in range(STEPS):
        s.backward()
        s.backward(salt=3)
        s.apply()


def gathered(s: Script) -> None:
    """Two passes, one of them averaged, for one step."""
    for _ in range(STEPS):
        with s.session.no_sync():
            s.backward()
        s.backward(salt=3)
        s.apply()


def dense(model: nn.Module, first: Plan) -> Plan:
    return default_plan(describe_model(model), codec="identity()", path="allreduce", servers=2,
                        ranks_per_node=first.ranks_per_node,
                        fuse_nbytes=2048, cut_nbytes=4096)


def there_and_back(s: Script) -> None:
    """To a plan without residuals, whose first averages, with inherited ones, are discarded; and back to the first plan."""
    first = s.session.inspect.plan
    assert first is not None
    for plan in (dense(s.model, first), first):
        s.session.switch(plan)
        for _ in range(2):
            probe(s)
            plain(s)


def discarded_at_other_weights(s: Script) -> None:
    """Inherited residuals are part of discarded averages, in a step whose weights were not known in advance."""
    first = s.session.inspect.plan
    assert first is not None
    for plan in (dense(s.model, first), first):
        s.session.switch(plan)
        s.session.weight([64.0, 32.0][s.rank])
        s.backward(put=0.0, salt=1)
        s.optimizer.zero_grad()
        s.session.weight(1.0)
        plain(s)


def skipped_after_a_switch(s: Script) -> None:
    """The first step of each plan is not finite, so residuals of the previous plan remain."""
    first = s.session.inspect.plan
    assert first is not None
    for plan in (dense(s.model, first), first):
        s.session.switch(plan)
        s.backward(put=0.0, spoil=s.rank == 1)
        s.apply()
        plain(s)


def residuals_of_another_rank(s: Script) -> None:
    """Other ranks of a node encode these residuals, in a step whose weights were not known in advance; at last without codecs.
    """
    first = s.session.inspect.plan
    assert first is not None
    turned = msgspec.structs.replace(first, buckets=tuple(
        msgspec.structs.replace(b, owner=first.ranks_per_node - 1 - b.owner) for b in first.buckets))
    served = any("service" in b.path or "net.push" in b.path for b in first.buckets)
    bare = msgspec.structs.replace(turned, buckets=tuple(
        msgspec.structs.replace(b, codec="identity()", down="", shape=()) for b in turned.buckets)) if served else first
    for plan in (turned, first, bare, first):
        s.session.switch(plan)
        for mine in ([3.0, 5.0], [2.0, 4.0]):
            s.session.weight(mine[s.rank])
            s.backward(put=mine[s.rank] * WORLD / sum(mine))
            s.apply()
        s.session.weight(1.0)


def aborted_passes(s: Script) -> None:
    """Passes that raise on one rank: such a step has no effect on any rank. It ends when that rank's next pass begins."""
    for n in range(STEPS):
        breaks, handle = n % 3 == 0, None
        if breaks and s.rank == 1:
            handle = s.model.parts[1].register_hook(fails)
        try:
            s.backward(put=0.0 if breaks else 1.0)
            if breaks and s.way == "forward":
                s.session.flush()  # otherwise the next forward pass reports it
            assert not breaks
        except (StepAbandoned, ZeroDivisionError):
            assert breaks
        if handle is not None:
            handle.remove()
        if breaks:
            s.optimizer.zero_grad()
            s.step += 1
        else:
            s.apply()


def fails(_gradient: torch.Tensor) -> None:
    raise ZeroDivisionError


def saved_and_loaded(s: Script) -> None:
    """Some steps later the checkpoint is loaded, after averages were discarded."""
    plain(s)
    s.backward(put=0.0, salt=1)
    s.optimizer.zero_grad()
    s.session.checkpoint(s.folder, model=False)
    kept, put, step = [p.detach().clone() for p in s.model.parts], [p.clone() for p in s.put], s.step
    plain(s)
    s.backward(put=0.0, salt=1)
    s.optimizer.zero_grad()
    s.session.resume(s.folder)
    with torch.no_grad():
        for p, before in zip(s.model.parts, kept, strict=True):
            p.copy_(before)
    s.put, s.step = put, step
    plain(s)


EVENTS: dict[str, Callable[[Script], None]] = {f.__name__: f for f in (
    plain, unused, used_here_alone, probe, probe_with_zeros, stepped_with_zeros, step_without_clearing,
    skips, weights, added_up, gathered,
    there_and_back, discarded_at_other_weights, skipped_after_a_switch, residuals_of_another_rank, aborted_passes,
    saved_and_loaded,
)}


WEIGHTS = {"weights", "discarded_at_other_weights", "residuals_of_another_rank"}
SKIPS = {"skips", "skipped_after_a_switch"}
LEFT_OUT = {name: SKIPS | {"aborted_passes"} | WEIGHTS for name in LOCAL} | {"forward": SKIPS}
"""If one rank skips or aborts, the others' steps count; an outer step has one weight for all of its steps."""
LEFT_OUT["delayed"] = SKIPS | {"probe", "probe_with_zeros", "stepped_with_zeros", "step_without_clearing", "there_and_back",
                               "discarded_at_other_weights", "aborted_passes", "saved_and_loaded"}
"""What a pass is put in for comes a step later: each pass is for some step."""
LEFT_OUT["overlapped"] = SKIPS | {"there_and_back", "aborted_passes"} | WEIGHTS
"""A plan of single steps does not divide into turns."""


def run(rank: int, how: str, kind: str, per_node: int, address: str, folder: str) -> list[tuple[str, dict[str, Any]]]:
    script, results = Script(rank, how, kind, per_node, address, folder), []
    try:
        for name, event in EVENTS.items():
            if name in LEFT_OUT.get("delayed" if "delayed" in how else script.way, ()):
                continue
            if "ddp" in how and event is aborted_passes:  # torch itself refuses the next forward pass
                continue
            event(script)
            results.append((name, script.account()))
    finally:
        script.session.close()
    return results


@pytest.mark.commit(4)
@pytest.mark.parametrize(("how", "kind", "per_node"), [
    ("module", "topk", 1), ("module", "int8", 2), ("module", "onebit", 1), ("module", "low rank", 1), ("module", "topk", 2),
    ("module", "topk, staged", 1), ("module", "int8, staged", 2), ("module, optimizer unnamed", "topk", 1),
    ("module, forward", "topk", 1), ("module, forward, late", "int8", 1), ("module, forward", "onebit", 2),
    ("module, forward", "topk, staged", 1),
    ("ddp", "topk", 1), ("ddp", "int8", 1), ("ddp, view", "topk", 1), ("ddp", "onebit", 2), ("ddp", "topk, staged", 1),
    ("module, updates", "topk", 1), ("ddp, rounds", "int8", 1), ("module, overlapped", "topk", 2),
    ("ddp, overlapped", "topk, staged", 1),
    ("module", "topk, shards", 2), ("module", "momentum, shards", 2), ("ddp, view", "int8, shards", 2),
    ("module, forward", "topk, shards", 2), ("ddp, rounds", "topk, shards", 2), ("module, overlapped", "int8, shards", 2),
    ("module, delayed", "topk, late all", 1), ("module, delayed", "topk, late some", 2),
    ("module, delayed", "int8, late all", 2), ("module, delayed", "topk, shards, late some", 2),
    ("ddp, delayed", "topk, late all", 1), ("ddp, view, delayed", "int8, late some", 2),
])
def test_applied_plus_residual_equals_input(how: str, kind: str, per_node: int, tmp_path: Path) -> None:
    with rank_pool.Servers(WORLD, 2) as servers:
        results = pool(WORLD).call(run, how, kind, per_node, servers.address, str(tmp_path / "save"))
    wrong = []
    for (name, first), (_, second) in zip(*results, strict=True):
        for t in range(len(SIZES)):
            assert torch.equal(first["applied"][t], second["applied"][t]), f"{name}: ranks differ"
            put = first["put"][t] + second["put"][t]
            error = float((WORLD * first["applied"][t] + first["residuals"][t] + second["residuals"][t] - put).abs().max())
            if error > 1e-5 * float(put.abs().max()):
                wrong.append(f"{name}: tensor {t} is off by {error:.2e}")
    assert not wrong, "\n".join(wrong)


def two_optimizers(rank: int, address: str) -> dict[str, Any]:
    """One session, an optimizer for each tensor, one scaler: the optimizers of a bucket that is not finite skip."""
    model = Given()
    optimizers = [torch.optim.SGD([p], lr=1.0) for p in model.parts]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    session = commlayer.attach(model, optimizers[0], grad_scaler=scaler, config=rank_pool.quick(join=address),
                               plan=plan_of(describe_model(model), "topk", 1))
    put = [torch.zeros(s, dtype=torch.float64) for s in SIZES]
    for step in range(STEPS):
        given = slopes(rank, step)
        for t in [1] if step % 2 else range(len(SIZES)):  # the other two share a bucket
            put[t] += given[t].double()
        if step % 2 and rank == 0:
            given[0][5] = float("inf")
        scaler.scale(model(*given)).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        for optimizer in optimizers:
            optimizer.zero_grad()
    account = {"put": put, "residuals": residuals_of(session), "applied": applied_to(model)}
    session.close()
    return account


def test_optimizer_input_of_a_non_finite_step_counts_as_applied() -> None:
    with rank_pool.Servers(WORLD, 2) as servers:
        first, second = pool(WORLD).call(two_optimizers, servers.address)
    for t in range(len(SIZES)):
        got = WORLD * first["applied"][t] + first["residuals"][t] + second["residuals"][t]
        put = first["put"][t] + second["put"][t]
        torch.testing.assert_close(got, put, rtol=0, atol=1e-5 * float(put.abs().max()))
