"""Changes of plan in mid-training: residuals are kept, and plans that do not fit change nothing. Real ranks."""

from __future__ import annotations

import gc
import math
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec import structs
from support import sync_modes
from support.attached import Run, Setting, assert_refused, coordinators, mlp, outcome, parameters, plan_of, play, same
from support.rank_pool import Servers, pool, ranks_first
from support.sync_modes import Training
from torch import nn

import commlayer.engine.switch as automatic
from commlayer.engine.observers import Observer, ObserverOrder
from commlayer.planner.buckets import fragments_of
from commlayer.records import Plan

WORLD, SERVERS, STEPS = 2, 2, 4
_ranks = ranks_first(WORLD)


def plan(model: nn.Module, kind: str) -> Plan:
    """Results come down uncompressed, so only workers have residuals."""
    path = "encode@cpu all.allgather decode@cpu" if "staged" in kind else "allreduce" if "dense" in kind else "service"
    codec = "identity()" if "dense" in kind else "topk(ratio=0.1)" if "topk" in kind else "int8(block=32)"
    layout = plan_of(model, codec, path, servers=SERVERS, nbytes=(2048, 4096) if "small" in kind else (1 << 20, 1 << 20),
                   bucket={"down": "identity()"} if path == "service" else {})
    return structs.replace(layout, servers=SERVERS)


def on_ranks(script: Any, *args: Any, plan: str = "codec") -> list[Any]:
    with coordinators(1, WORLD, SERVERS) as jobs:
        setting = Setting("module", (jobs[0].address,), "int8()", servers=SERVERS, plan=plan)
        return pool(WORLD).call(play, WORLD, script, setting, *args)


def attached(run: Run) -> tuple[nn.Module, Any]:
    model = mlp()
    run.wrap(model)
    return model, run.sessions[0]


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 12)).sum().backward()


# ---- residuals

def slopes(rank: int, step: int, model: nn.Module) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(p.shape, generator=draw) for p in model.parameters()]


def step_with(model: nn.Module, optimizer: torch.optim.Optimizer, gradients: list[torch.Tensor]) -> None:
    """Gradients are known and the rate is 1, so the averages are what the weights lose."""
    optimizer.zero_grad()
    sum((p * g).sum() for p, g in zip(model.parameters(), gradients, strict=True)).backward()  # type: ignore[union-attr]
    optimizer.step()


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.detach().view(-1) for t in tensors])


def train(run: Run, kinds: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Applied averages and residuals. In the first step of a plan "with infinities" rank 1 has some."""
    model, session = attached(run)
    before, optimizer, step = parameters(model), torch.optim.SGD(model.parameters(), lr=1.0), 0
    for kind in kinds:
        session.switch(plan(model, kind))
        for number in range(STEPS):
            gradients = slopes(run.rank, step, model)
            if "infinities" in kind and number == 0 and run.rank == 1:
                gradients[-1][:] = math.inf
            step_with(model, optimizer, gradients)
            step += 1
    worker = session.inspect.connection.worker
    residuals = [torch.zeros(p.numel()) for p in model.parameters()]
    for bucket in worker.buckets:
        for residual in bucket.ledger.residuals():
            residuals[residual.tensor][residual.start : residual.stop] += torch.as_tensor(residual.values)
    return {"applied": flat(before) - flat(parameters(model)), "residuals": flat(residuals), "steps": torch.tensor(worker.step)}


@pytest.mark.parametrize("kinds", [
    ("small topk", "topk"), ("topk", "small int8"), ("small topk", "dense with infinities"),
    ("dense", "small topk", "staged topk", "int8"), ("small staged topk", "staged int8 with infinities", "small topk"),
])
def test_residuals_are_applied_under_the_next_plan(kinds: tuple[str, ...]) -> None:
    """A step with infinities is dropped, and keeps the residuals of the plan before."""
    results = on_ranks(train, kinds)
    put = torch.zeros_like(results[0]["applied"])
    for step in range(len(kinds) * STEPS):
        if step % STEPS or "infinities" not in kinds[step // STEPS]:
            put += sum(flat(slopes(rank, step, mlp())) for rank in range(WORLD))
    got = WORLD * results[0]["applied"] + sum(r["residuals"] for r in results)
    torch.testing.assert_close(got, put, rtol=1e-3, atol=1e-3)
    assert torch.equal(results[0]["applied"], results[1]["applied"])
    assert int(results[0]["steps"]) == len(kinds) * STEPS


def save_under_another(run: Run, directory: str) -> dict[str, Any]:
    """Without a save: trains, changes the plan, trains, saves, trains. With one: loads, trains the last part."""
    model, session = attached(run)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def some(first: int) -> None:
        for step in range(first, first + STEPS):
            step_with(model, optimizer, slopes(run.rank, step, model))

    if any(Path(directory).iterdir()):
        session.resume(directory)
    else:
        some(0)
        session.switch(plan(model, "small topk"))
        some(STEPS)
        session.checkpoint(directory, model=False)
    middle = flat(parameters(model))
    some(2 * STEPS)
    return {"moved": flat(parameters(model)) - middle, "buckets": len(session.inspect.plan.buckets)}


def test_a_resumed_run_switches_to_the_plan_of_the_save(tmp_path: Path) -> None:
    continued, resumed = (on_ranks(save_under_another, str(tmp_path), plan="auto")[0] for _ in range(2))
    assert continued["buckets"] == resumed["buckets"] == len(plan(mlp(), "small topk").buckets)
    torch.testing.assert_close(resumed["moved"], continued["moved"], rtol=1e-5, atol=1e-5)


# ---- refusals

def unfit(run: Run) -> dict[str, Any]:
    """Unfit plans; then rank 1 switches inside a backward pass; then both do, and train."""
    model, session = attached(run)
    good = plan(model, "topk")
    lines = [outcome(lambda bad=bad: session.switch(bad)) for bad in (
        structs.replace(good, servers=SERVERS + 1), structs.replace(good, buckets=good.buckets[:-1]),
        structs.replace(good, job="0" * 16))]
    backward(model)

    def ask(_: Any = None) -> None:
        lines.append(outcome(lambda: session.switch(good)))

    if run.rank == 1:
        handle = model[0].weight.register_hook(ask)  # the last to be final: all others have been announced
        backward(model)
        handle.remove()
    else:
        ask()
        backward(model)
    session.switch(good)
    backward(model)
    return {"lines": lines, "steps": session.metrics()["steps"]}


def test_a_plan_that_does_not_fit_or_comes_inside_a_step_changes_nothing() -> None:
    results = on_ranks(unfit)
    for result in results:
        assert result["steps"] == 3
        servers, buckets, job, _ = result["lines"]
        assert_refused(servers, "E-PLAN-SWITCH", "3 servers", " 2")
        assert_refused(buckets, "E-PLAN-REFUSED", "no bucket")
        assert_refused(job, "E-PLAN-REFUSED", "job " + "0" * 16)
    assert_refused(results[0]["lines"][-1], "E-OTHER-RANK", "switch()", "rank 1")
    assert_refused(results[1]["lines"][-1], "E-PLAN-SWITCH", "step 1 ")


def refused(run: Run) -> list[str]:
    model, session = attached(run)
    return [outcome(lambda: session.switch(plan(model, "topk"))), outcome(lambda: backward(model))]


def test_a_server_that_refuses_the_plan_ends_the_job_on_all_ranks() -> None:
    with coordinators(1, WORLD, SERVERS) as jobs:
        jobs[0].refuse_plans(1, "no room")
        results = pool(WORLD).call(play, WORLD, refused, Setting("module", (jobs[0].address,), "int8()", servers=SERVERS))
    requested = next(rank for rank, lines in enumerate(results) if lines[0].endswith("[E-PLAN-REFUSED]"))
    assert_refused(results[requested][0], "E-PLAN-REFUSED", f"server {requested} ", "no room")
    assert_refused(results[1 - requested][0], "E-OTHER-RANK", "switch()", f"rank {requested}")
    assert all(first == again for first, again in results)


# ---- what is left of earlier plans, and what keeps a plan

def again_and_again(run: Run) -> dict[str, Any]:
    model, session = attached(run)
    workers, threads, residuals = [], [], []
    for number in range(6):
        session.switch(plan(model, ("staged topk", "small int8")[number % 2]))
        backward(model)
        workers.append(weakref.ref(session.inspect.connection.worker))
        threads.append(threading.active_count())
        states = [state for bucket in session.inspect.connection.worker.buckets for _, state in bucket.ledger.encoders]
        residuals.append([weakref.ref(state["residual"]) for state in states if "residual" in state])
    kept = [any(residual() is not None for residual in of_plan) for of_plan in residuals[:-1]]
    gc.collect()
    return {"alive": [worker() is not None for worker in workers], "threads": threads, "kept": kept, "had": any(residuals[:-1])}


def test_workers_residuals_and_threads_of_earlier_plans_are_gone() -> None:
    for result in on_ranks(again_and_again):
        assert result["alive"] == [False] * 5 + [True]
        assert result["had"]
        assert not any(result["kept"]), "freed at once"
        assert result["threads"][-1] == result["threads"][1]


def requested(run: Run) -> tuple[list[str], int]:
    model, session = attached(run)
    for number in range(24):
        if number == 4:
            session.switch(plan(model, "small topk"))
        backward(model)
    return session.inspect.decisions(), len(session.inspect.plan.buckets)


def test_a_plan_that_the_script_asked_for_is_kept() -> None:
    assert on_ranks(requested, plan="auto") == [([], len(plan(mlp(), "small topk").buckets))] * WORLD


# ---- sync modes

CALLS = ("new_group", "all_gather", "all_to_all_single", "broadcast", "all_reduce", "barrier")


@contextmanager
def collectives() -> Iterator[list[str]]:
    """The calls of torch.distributed while the block runs. On a link of 80 ms each costs a good part of a second."""
    names: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            def called(*args: Any, _name: str = name, _call: Any = getattr(dist, name), **how: Any) -> Any:
                names.append(_name)
                return _call(*args, **how)

            patch.setattr(dist, name, called)
        yield names


def counted(rank: int, address: str) -> list[list[str]]:
    """Under AdamW ranks exchange the lengths of their changes after local steps."""
    training, rows = Training(rank, address, "gradients", optimizer="adamw"), []
    training.train(2)
    for mode in ("every", "round", "whole round"):
        with collectives() as calls:
            training.switch(mode)
        rows.append(calls)
        training.train(4)
    training.session.flush()
    training.session.close()
    return rows


def test_a_switch_asks_little_of_the_network_and_makes_no_group() -> None:
    with Servers(WORLD, 1) as servers:
        for into, between, again in pool(WORLD).call(counted, servers.address):
            assert "new_group" not in [*into, *between, *again]
            # The ranks' positions; the plan; that it fits; and that servers have it.
            assert len(into) == 4, into
            # And what the round before has left, with its lengths by fragment, and that it is over on all ranks.
            assert len(between) <= 4 + 2, between
            assert len(again) <= 4 + 1 + 2 * 2, again


MODES = [("round", 1), ("gradients", 1), ("round", 4), ("round", 2), ("updates", 1), ("round", 4), ("every", 1), ("round", 2)]
"""With numbers of fragments."""


def fragmented(rank: int, address: str) -> list[dict[str, Any]]:
    training, rows = Training(rank, address, "gradients"), []
    for mode, count in MODES:
        training.train(3)
        layout = sync_modes.plan(training.connection.worker.job, mode, **({"fragments": count} if mode == "round" else {}))
        automatic.switch(training.connection, layout if rank == 0 else None, by_itself=True)
        worker = training.connection.worker
        rows.append({"fragments": [[b.id for b in fragment] for fragment in worker.fragments], "plan": worker.plan,
                     "weights": training.tensors()})
    training.train(5)
    training.session.flush()
    rows.append({"weights": training.tensors()})
    training.session.close()
    return rows


def test_a_running_job_switches_to_any_fragments_by_itself() -> None:
    with Servers(WORLD, 1) as servers:
        first, second = pool(WORLD).call(fragmented, servers.address)
    for (mode, count), row in zip(MODES, first, strict=False):
        assert row["plan"].fragments == count, mode
        assert row["fragments"] == fragments_of(row["plan"].buckets, count)
    assert all(same(mine["weights"], theirs["weights"]) for mine, theirs in zip(first, second, strict=True))


LENGTH, EVERY = 42, 3
NAMES = {"forward": "forward", "updates": "updates", "local": "every", "round": "round"}
"""The plan of a sync mode that is allowed."""
INFINITE = (2, 9, 20, 33)
"""Steps in which one rank's loss is infinite, if it is scaled."""


class Script(Training):
    """`how` names what the script does in each step."""

    def run(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            self.optimizer.zero_grad()
            micros = 3 if "accumulated" in self.how else 1
            for micro in range(micros):
                loss = self.loss(3 * self.step + micro)
                # In the last one: in an earlier one it would look like a step that the scaler has skipped already.
                infinite = "scaled" in self.how and self.rank == 1 and self.step in INFINITE and micro == micros - 1
                self.scaler.scale(loss * math.inf if infinite else loss).backward()
            if "clipped" in self.how:
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.step += 1
            losses.append(float(loss.detach()))
        return losses


def proposed(rank: int, address: str, how: str, folder: str) -> dict[str, Any]:
    """Every third exchange switches to the next mode that is allowed. In between there are saves and drains."""
    training = Script(rank, address, "gradients", how=how)
    losses = training.run(1)
    connection, switched, count = training.connection, list[str](), [0]
    connection.terms.auto = True
    modes = [mode for way in sorted(connection.terms.allowed_modes()) for mode in (NAMES[way], "gradients")]

    def propose() -> None:
        count[0] += 1
        if count[0] % EVERY == 0 and modes:
            switched.append(modes.pop(0))
            automatic.switch(connection, sync_modes.plan(connection.worker.job, switched[-1]) if rank == 0 else None)

    training.session.inspect.observers.add(
        Observer(ObserverOrder.CONTROLLER, None, after_step=propose, after_exchange=propose))
    while training.step < LENGTH:
        losses += training.run(1)
        if training.step % 7 == 0:
            training.session.flush()
        if training.step % 5 == 0:
            training.session.checkpoint(folder, model=False)
            saved = connection.plan
    training.session.flush()
    row = {"switched": switched, "weights": training.tensors(buffers=False), "losses": losses}
    training.session.resume(folder)
    row["loaded"] = connection.plan == saved
    training.session.close()
    return row


@pytest.mark.commit(2)
@pytest.mark.parametrize("how", [
    "", "clipped", "accumulated", "scaled", "scaled, clipped, accumulated", "ddp, clipped", "ddp, accumulated", "ddp, scaled",
])
def test_a_script_trains_under_each_sync_mode_that_is_allowed(how: str, tmp_path: Path) -> None:
    with Servers(WORLD, 1) as servers:
        first, second = pool(WORLD).call(proposed, servers.address, how, str(tmp_path))
    wanted = ["every", "gradients", "round", "gradients", "updates", "gradients"]
    if "ddp" not in how and "scaled" not in how:
        wanted = ["forward", "gradients", *wanted]
    assert first["switched"] == second["switched"] == wanted[: len(first["switched"])]
    assert len(first["switched"]) >= len(wanted) - 1
    assert same(first["weights"], second["weights"])
    assert median(first["losses"][-9:]) < 0.9 * median(first["losses"][:9])
    assert first["loaded"]
    assert second["loaded"]
