"""commlayer.switch(): from one plan to another in mid-training. What was owed is paid; what does not fit changes nothing."""

from __future__ import annotations

import gc
import re
import threading
import weakref
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from support.attached import Run, Setting, coordinators, mlp, play
from support.rank_pool import pool
from torch import nn

from commlayer.engine.optimizers import job_of
from commlayer.errors import CommError
from commlayer.planner import default_plan
from commlayer.records import Job, Plan

WORLD, SERVERS = 2, 2
STEPS = 4


def plan(job: Job, kind: str) -> Plan:
    """Results come down whole, so that only workers owe anything."""
    sizes = {"fuse_nbytes": 2048, "cut_nbytes": 4096} if "small" in kind else {"fuse_nbytes": 1 << 20, "cut_nbytes": 1 << 20}
    codec = "topk(ratio=0.1)" if "topk" in kind else "identity()" if "exact" in kind else "int8(block=32)"
    made = default_plan(job, codec=codec, path="service", servers=SERVERS, ranks_per_node=1, **sizes)
    changes: dict[str, Any] = {"down": "identity()"}
    if "staged" in kind:
        changes = {"path": "encode@cpu all.allgather decode@cpu"}
    if "dense" in kind:
        changes = {"path": "allreduce", "codec": "identity()"}
    return msgspec.structs.replace(made, buckets=tuple(msgspec.structs.replace(b, **changes) for b in made.buckets))


def slopes(rank: int, step: int, model: nn.Module) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(p.shape, generator=made) for p in model.parameters()]


def train(run: Run, kinds: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Gradients are known, the rate is 1: what was applied is what the weights lost. Returns it, with what is still owed."""
    model = mlp()
    run.wrap(model)
    session = run.sessions[0]
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = 0
    for kind in kinds:
        session.switch(plan(job_of(model), kind))
        for _ in range(STEPS):
            optimizer.zero_grad()
            sum((p * s).sum() for p, s in zip(model.parameters(), slopes(run.rank, step, model), strict=True)).backward()
            optimizer.step()
            step += 1
    worker = session.inspect.connection.worker
    owed = [torch.zeros(p.numel()) for p in model.parameters()]
    for bucket in worker.buckets:
        for debt in bucket.debts():
            owed[debt.tensor][debt.start : debt.stop] += torch.as_tensor(debt.values)
    flat = torch.cat([(b - p.detach()).view(-1) for b, p in zip(before, model.parameters(), strict=True)])
    return {"applied": flat, "owed": torch.cat(owed), "steps": torch.tensor(worker.step)}


@pytest.mark.parametrize("kinds", [
    ("small topk", "topk"), ("topk", "small int8"), ("small topk", "dense"), ("dense", "small topk", "staged topk", "int8"),
    ("small staged topk", "staged int8", "small topk"),
])
def test_what_was_owed_is_paid_under_the_next_plan(kinds: tuple[str, ...]) -> None:
    with coordinators(1, WORLD, SERVERS) as made:
        results = pool(WORLD).call(play, WORLD, train, Setting("module", (made[0].address,), "int8()", servers=SERVERS), kinds)
    put = torch.zeros_like(results[0]["applied"])
    for rank in range(WORLD):
        for step in range(len(kinds) * STEPS):
            put += torch.cat([s.view(-1) for s in slopes(rank, step, mlp())])
    got = WORLD * results[0]["applied"] + sum(r["owed"] for r in results)
    torch.testing.assert_close(got, put, rtol=1e-3, atol=1e-3)
    assert torch.equal(results[0]["applied"], results[1]["applied"])
    assert int(results[0]["steps"]) == len(kinds) * STEPS


def misfit(run: Run) -> dict[str, Any]:
    model = mlp()
    run.wrap(model)
    session = run.sessions[0]
    good = plan(job_of(model), "topk")
    said = []
    for bad in (msgspec.structs.replace(good, servers=SERVERS + 1),
                msgspec.structs.replace(good, buckets=good.buckets[:-1]),
                msgspec.structs.replace(good, job="0" * 16)):
        with pytest.raises(ValueError) as caught:
            session.switch(bad)
        said.append(str(caught.value))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.ones(2, 12)).sum().backward()
    optimizer.step()
    return {"said": said, "steps": session.metrics()["steps"]}


def test_a_plan_that_does_not_fit_changes_nothing() -> None:
    with coordinators(1, WORLD, SERVERS) as made:
        results = pool(WORLD).call(play, WORLD, misfit, Setting("module", (made[0].address,), "int8()", servers=SERVERS))
    for result in results:
        assert result["steps"] == 1
        first, second, third = result["said"]
        assert re.search(r"3 servers.* 2\b.*E-PLAN-SWITCH", first), first
        assert re.search("no bucket.*E-PLAN-REFUSED", second), second
        assert re.search("job 0{16}.*E-PLAN-REFUSED", third), third


def half_announced(run: Run) -> list[str]:
    """Rank 1 asks in the middle of a backward pass; afterwards both do, at one step, and go on."""
    model = mlp()
    run.wrap(model)
    session = run.sessions[0]
    good, said = plan(job_of(model), "topk"), []

    def ask(_: torch.Tensor) -> None:
        try:
            session.switch(good)
        except ValueError as error:
            said.append(str(error))

    if run.rank == 1:
        handle = model[0].weight.register_hook(ask)  # the last to be final: all others have been announced
    else:
        ask(torch.empty(0))
    model(torch.ones(2, 12)).sum().backward()
    if run.rank == 1:
        handle.remove()
    session.switch(good)
    model(torch.ones(2, 12)).sum().backward()
    return [*said, str(session.metrics()["steps"])]


def test_a_step_that_is_half_announced_is_ended_first() -> None:
    with coordinators(1, WORLD, SERVERS) as made:
        setting = Setting("module", (made[0].address,), "int8()", servers=SERVERS)
        first, second = pool(WORLD).call(play, WORLD, half_announced, setting)
    assert re.search(r"switch\(\) .*rank 1\b.*E-OTHER-RANK", first[0]), first
    assert re.search(r"step 0 .*E-PLAN-SWITCH", second[0]), second
    assert (first[1], second[1]) == ("2", "2")


def refused(run: Run) -> list[str]:
    model = mlp()
    run.wrap(model)
    session, said = run.sessions[0], []
    again = plan(job_of(model), "topk")
    for act in (lambda: session.switch(again), lambda: model(torch.ones(2, 12)).sum().backward()):
        try:
            act()
        except CommError as error:
            said.append(str(error))
    return said


def test_a_server_that_does_not_go_over_ends_the_job_on_all_ranks() -> None:
    def refuse(_plan: bytes, _generation: int) -> Any:
        raise ValueError("no room")

    with coordinators(1, WORLD, SERVERS) as made:
        made[0].serving[1]._replan = refuse
        results = pool(WORLD).call(play, WORLD, refused, Setting("module", (made[0].address,), "int8()", servers=SERVERS))
    told = next(rank for rank, said in enumerate(results) if "cannot use" in said[0])
    first, again = results[told]
    assert re.search(rf"server {told} cannot use .*: no room \[E-PLAN-REFUSED\]$", first)
    assert again == first
    first, again = results[1 - told]
    assert re.search(rf"switch\(\) .*rank {told}\b.*E-OTHER-RANK", first)
    assert again == first


def again_and_again(run: Run) -> dict[str, Any]:
    model = mlp()
    run.wrap(model)
    session, seen, threads, residuals = run.sessions[0], [], [], []
    for number in range(6):
        session.switch(plan(job_of(model), ("staged topk", "small int8")[number % 2]))
        model(torch.ones(2, 12)).sum().backward()
        seen.append(weakref.ref(session.inspect.connection.worker))
        threads.append(threading.active_count())
        states = [state for bucket in session.inspect.connection.worker.coded for _, state in bucket.coders]
        residuals.append([weakref.ref(state["residual"]) for state in states if "residual" in state])
    kept = [any(residual() is not None for residual in of_plan) for of_plan in residuals[:-1]]
    gc.collect()
    return {"alive": [worker() is not None for worker in seen], "threads": threads, "kept": kept,
            "had": any(residuals[:-1])}


def test_workers_of_earlier_plans_are_gone() -> None:
    with coordinators(1, WORLD, SERVERS) as made:
        setting = Setting("module", (made[0].address,), "int8()", servers=SERVERS)
        for result in pool(WORLD).call(play, WORLD, again_and_again, setting):
            assert result["alive"] == [False] * 5 + [True]
            assert result["had"]
            assert not any(result["kept"]), "residuals of a plan that was left are freed at once"
            assert result["threads"][-1] == result["threads"][1]


def kept(run: Run) -> dict[str, Any]:
    model = mlp()
    run.wrap(model)
    session = run.sessions[0]
    for number in range(24):
        if number == 4:
            session.switch(plan(job_of(model), "small topk"))
        model(torch.ones(2, 12)).sum().backward()
    return {"decisions": session.inspect.decisions(), "buckets": len(session.inspect.plan.buckets)}


def test_a_plan_that_somebody_asked_for_is_kept() -> None:
    with coordinators(1, WORLD, SERVERS) as made:
        setting = Setting("module", (made[0].address,), servers=SERVERS, plan="auto")
        for result in pool(WORLD).call(play, WORLD, kept, setting):
            assert result == {"decisions": [], "buckets": len(plan(job_of(mlp()), "small topk").buckets)}


def save_under_another(run: Run, directory: str) -> dict[str, Any]:
    """Without a plan file: trains, changes the plan, trains, saves, trains. With one: loads, trains the last part."""
    model = mlp()
    run.wrap(model)
    session, saved = run.sessions[0], Path(directory) / "plan.json"
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def some(first: int) -> None:
        for step in range(first, first + STEPS):
            optimizer.zero_grad()
            sum((p * s).sum() for p, s in zip(model.parameters(), slopes(run.rank, step, model), strict=True)).backward()
            optimizer.step()

    if saved.is_file():
        session.resume(directory)
    else:
        some(0)
        session.switch(plan(job_of(model), "small topk"))
        some(STEPS)
        session.checkpoint(directory, model=False)
    middle = [p.detach().clone() for p in model.parameters()]
    some(2 * STEPS)
    moved = [p.detach() - m for p, m in zip(model.parameters(), middle, strict=True)]
    return {"moved": torch.cat([m.view(-1) for m in moved]), "buckets": len(session.inspect.plan.buckets)}


def test_a_resumed_run_goes_over_to_the_plan_of_the_save(tmp_path: Path) -> None:
    results = []
    for _ in range(2):
        with coordinators(1, WORLD, SERVERS) as made:
            setting = Setting("module", (made[0].address,), servers=SERVERS, plan="auto")
            results.append(pool(WORLD).call(play, WORLD, save_under_another, setting, str(tmp_path)))
    went_on, resumed = results
    assert went_on[0]["buckets"] == resumed[0]["buckets"] == len(plan(job_of(mlp()), "small topk").buckets)
    torch.testing.assert_close(resumed[0]["moved"], went_on[0]["moved"], rtol=1e-5, atol=1e-5)
