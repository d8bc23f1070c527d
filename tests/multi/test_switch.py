"""Changes of plan and of sync mode during training: residuals are kept, and a refused plan has no effect.

Real ranks. Run as a script: a training in which one rank dies inside a plan change.
"""

from __future__ import annotations

import gc
import math
import os
import re
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise, permutations
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec import structs
from support import rank_pool, sync_modes
from support.attached import Run, Setting, assert_refused, coordinators, mlp, outcome, parameters, plan_of, play, same
from support.components import Calls
from support.rank_pool import SETTINGS, Servers, last_line, pool, ranks_first, tree
from support.sync_modes import LOCAL, MODES, OPTIMIZERS, Net, Training
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import commlayer
import commlayer.engine.epochs.plan_switch as automatic
from commlayer.cluster.processes.collectives import all_or_none
from commlayer.engine.components import ComponentOrder
from commlayer.engine.model.model_tensors import describe_model
from commlayer.engine.model.optimizer_state import RESTARTED_STEPS
from commlayer.errors import PeerLost
from commlayer.records import Plan
from commlayer.transport.protocol import SERVER_BASE

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


def test_resumed_run_switches_to_the_checkpointed_plan(tmp_path: Path) -> None:
    continued, resumed = (on_ranks(save_under_another, str(tmp_path), plan="auto")[0] for _ in range(2))
    assert continued["buckets"] == resumed["buckets"] == len(plan(mlp(), "small topk").buckets)
    torch.testing.assert_close(resumed["moved"], continued["moved"], rtol=1e-5, atol=1e-5)


def unfit(run: Run) -> dict[str, Any]:
    """Invalid plans; then rank 1 switches inside a backward pass; then both do, and train."""
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


def test_invalid_plan_or_plan_inside_a_step_has_no_effect() -> None:
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


def test_server_that_refuses_the_plan_ends_the_job_on_all_ranks() -> None:
    with coordinators(1, WORLD, SERVERS) as jobs:
        jobs[0].refuse_plans(1, "no room")
        results = pool(WORLD).call(play, WORLD, refused, Setting("module", (jobs[0].address,), "int8()", servers=SERVERS))
    requested = next(rank for rank, lines in enumerate(results) if lines[0].endswith("[E-PLAN-REFUSED]"))
    assert_refused(results[requested][0], "E-PLAN-REFUSED", f"server {requested} ", "no room")
    assert_refused(results[1 - requested][0], "E-OTHER-RANK", "switch()", f"rank {requested}")
    assert all(first == again for first, again in results)


def lost_while_switching(run: Run) -> list[str]:
    """In a job whose members can leave; here none does."""
    model, session = attached(run)
    context, made = session.inspect.context, list[Any]()
    context.members.elastic = True
    make = context.worker_for
    context.worker_for = lambda *args: made.append(make(*args)) or made[-1]
    if run.rank == 1:
        context.uplink.transport.abort(PeerLost("is gone", peer="server 1"), SERVER_BASE + 1)
    lines = [outcome(lambda: session.switch(plan(model, "topk")))]
    return [*lines, str(made[-1].error), *(outcome(lambda error=error: _together(context, error)) for error in (
        PeerLost("is gone", peer="server 1"), RuntimeError("a bug")))]


def _together(context: Any, error: Exception) -> None:
    with all_or_none(context.groups, "a call"):
        if context.rank == 1:
            raise error


def test_failed_connection_of_another_rank_may_be_that_of_a_lost_one() -> None:
    first, second = on_ranks(lost_while_switching)
    assert_refused(second[0], "E-PEER-LOST", "PeerLost: server 1: ")
    assert first[0].startswith("CommError: switch() failed on rank 1"), "it would continue without rank 1"
    assert [lines[1] for lines in (first, second)] == ["the session is closed [E-SESSION-CLOSED]"] * 2
    assert first[2:] == [f"{kind}: a call failed on rank 1: see the error on that rank [E-OTHER-RANK]"
                         for kind in ("CommError", "InvalidInput")]
    assert second[2:] == ["PeerLost: server 1: is gone [E-PEER-LOST]", "RuntimeError: a bug"]


def again_and_again(run: Run) -> dict[str, Any]:
    model, session = attached(run)
    workers, threads, residuals = [], [], []
    for number in range(6):
        session.switch(plan(model, ("staged topk", "small int8")[number % 2]))
        backward(model)
        workers.append(weakref.ref(session.inspect.context.worker))
        threads.append(threading.active_count())
        states = [state for bucket in session.inspect.context.worker.buckets for _, state in bucket.ledger.encoders]
        residuals.append([weakref.ref(state["residual"]) for state in states if "residual" in state])
    kept = [any(residual() is not None for residual in of_plan) for of_plan in residuals[:-1]]
    gc.collect()
    return {"alive": [worker() is not None for worker in workers], "threads": threads, "kept": kept, "had": any(residuals[:-1])}


def test_workers_residuals_and_threads_of_earlier_plans_are_released() -> None:
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
    later = [line for line in session.inspect.decisions() if not line.startswith("step 0: ")]
    return later, len(session.inspect.plan.buckets)


def test_plan_requested_by_the_script_is_kept() -> None:
    assert on_ranks(requested, plan="auto") == [([], len(plan(mlp(), "small topk").buckets))] * WORLD


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


def test_switch_needs_few_messages_and_no_process_group() -> None:
    with Servers(WORLD, 1) as servers:
        for into, between, again in pool(WORLD).call(counted, servers.address):
            assert "new_group" not in [*into, *between, *again]
            # The ranks' positions; the plan; that it fits; and that servers have it.
            assert len(into) == 4, into
            # And what the round before has left, with its lengths by fragment, and that it is over on all ranks.
            assert len(between) <= 4 + 2, between
            assert len(again) <= 4 + 1 + 2 * 2, again


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
    """Every third exchange switches to the next allowed mode, with saves and drains in between."""
    training = Script(rank, address, "gradients", how=how)
    losses = training.run(1)
    connection, switched, count = training.connection, list[str](), [0]
    connection.terms.auto = True
    modes = [mode for way in sorted(connection.terms.allowed_modes()) for mode in (NAMES[way], "gradients")]

    def propose(*, early: bool = False) -> None:
        if early:
            return
        count[0] += 1
        if count[0] % EVERY == 0 and modes:
            switched.append(modes.pop(0))
            automatic.switch(connection, sync_modes.plan(connection.worker.job, switched[-1]) if rank == 0 else None)

    training.session.inspect.components.add(Calls(ComponentOrder.CONTROLLER, end_step=propose, end_exchange=propose))
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
def test_script_trains_in_each_allowed_sync_mode(how: str, tmp_path: Path) -> None:
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


def walk(how: str = "") -> list[str]:
    """A walk through all ordered pairs of sync modes, each once (Hierholzer)."""
    # A GradScaler wants gradients in every step, and late ones are none in the first.
    without = {name for name, part in (("forward", "ddp"), ("late", "scaled")) if part in how}
    ways = [way for way in MODES if way not in without]
    left = {a: [b for b in ways if b != a] for a in ways}
    path, results = ["gradients"], []
    while path:
        if left[path[-1]]:
            path.append(left[path[-1]].pop(0))
        else:
            results.append(path.pop())
    return results[::-1]


def all_pairs(rank: int, address: str, how: str) -> dict[str, Any]:
    first, *rest = walk(how)
    training = Training(rank, address, first, how=how, drift="end", drift_steps=3)
    rows, losses, local = [], [training.train(3)], []
    for way in rest:
        training.switch(way)
        local.append((way, training.connection.local is not None, training.session.inspect.plan))
        rows.append(training.tensors())
        losses.append(training.train(3))
    training.session.flush()
    rows.append(training.tensors())
    results = {"rows": rows, "losses": losses, "local": local, "said": training.session.inspect.decisions()}
    training.session.close()
    return results


@pytest.mark.nightly
@pytest.mark.parametrize("how", [
    "", "gathered, scaled, weighed", "ddp, view, gathered, scaled, weighed", "ddp, static",
])
def test_every_sync_mode_follows_every_other(how: str) -> None:
    assert sorted(pairwise(walk())) == sorted(permutations(MODES, 2))
    with Servers(WORLD, 1) as servers:
        first, second = pool(WORLD).call(all_pairs, servers.address, how)
    for place, (mine, theirs) in enumerate(zip(first["rows"], second["rows"], strict=True)):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)), f"apart behind {walk(how)[: place + 2][-2:]}"
    assert first["said"] == []
    for way, local, planned in first["local"]:
        assert local == (way in LOCAL)
        assert [getattr(planned, name) for name in MODES[way]] == [*MODES[way].values()]
    assert median(first["losses"][-9:]) < 0.8 * first["losses"][0]


RATE = 0.1


def law(rank: int, address: str, codec: str, how: str) -> dict[str, torch.Tensor]:
    """Gradients and SGD's updates are known in every sync mode."""
    model = mlp()
    training = Training(rank, address, "gradients", model=model, codec=codec, how=how)
    for group in training.optimizer.param_groups:
        group["lr"] = RATE
    start = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    put, step = torch.zeros_like(start), 0
    weight = 1.0 + rank if "weighed" in how else 1.5
    for way in walk():
        training.switch(way)
        for _ in range(3):
            training.session.weight(weight)
            given = slopes(rank, step, model)
            idle = 1 if "idle" in how and way in LOCAL else 0  # tensors without a gradient that could carry a residual
            given[:idle] = [torch.zeros_like(s) for s in given[:idle]]
            terms = [(p, s) for p, s in zip(model.parameters(), given, strict=True)][idle:]

            def loss(terms: Any = terms) -> torch.Tensor:
                training.optimizer.zero_grad()
                total = sum((p * s).sum() for p, s in terms)
                total.backward()
                return total

            put += RATE * weight / 1.5 * torch.cat([s.reshape(-1) for s in given])
            if "cleared" in how and way in LOCAL:
                loss()  # a probe, whose gradients are discarded
            if "closure" in how:
                training.optimizer.step(loss)
            else:
                loss()
                training.optimizer.step()
            step += 1
    end = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    results = {"put": put, "applied": start - end, "owed": RATE * training.residuals()}
    training.session.close()
    return results


@pytest.mark.nightly
@pytest.mark.parametrize(("codec", "how"), [
    ("topk(ratio=0.1)", ""), ("topk(ratio=0.1)", "idle"), ("topk(ratio=0.1)", "closure"), ("topk(ratio=0.1)", "cleared"),
    ("topk(ratio=0.1)", "weighed"), ("int8(block=32)", "node"), ("int8(block=32)", "node, idle"),
    ("topk(ratio=0.1)", "by itself"), ("int8(block=32)", "by itself, weighed"),
])
def test_applied_plus_residual_equals_input_through_all_sync_modes(codec: str, how: str) -> None:
    with Servers(WORLD, 1) as servers:
        results = pool(WORLD).call(law, servers.address, codec, how)
    put, owed = sum(r["put"] for r in results), sum(r["owed"] for r in results)
    assert torch.equal(results[0]["applied"], results[1]["applied"])
    assert float(owed.abs().max()) > 0
    torch.testing.assert_close((WORLD * results[0]["applied"] + owed).float(), put, rtol=1e-4, atol=1e-4)


PLAIN = {"overlap": "", "codes": "gradients", "local_steps": 1}


def through(rank: int, address: str, optimizer: str, how: str) -> dict[str, Any]:
    """From gradients to local steps and back to a plan of gradients."""
    training = Training(rank, address, "gradients", optimizer=optimizer, how=how, codec="topk(ratio=0.1)", drift="end",
                        drift_steps=2)
    results: dict[str, Any] = {"losses": [training.train(4)], "sent": [], "rows": [], "refused": [], "undone": []}
    for way in ("every", "round", "whole round", "updates", "gradients"):
        training.switch(way)
        results["rows"].append(training.tensors(buffers=False))
        before = training.session.metrics()["sent_nbytes"]
        results["losses"].append(training.train(12))
        results["sent"].append(training.session.metrics()["sent_nbytes"] - before)
    for bad in ("forward", "late"):
        with pytest.raises(ValueError) as caught:
            training.switch(bad)
        results["refused"].append(str(caught.value))
    for again in () if how == "ddp" else ("forward", "late"):
        training.switch("every")
        training.train(2)
        wanted = sync_modes.plan(training.connection.worker.job, again, training.codec)
        automatic.switch(training.connection, wanted, by_itself=True)
        training.train(1)
        results["undone"].append(training.session.inspect.plan)
    training.train(1)
    training.session.flush()
    results["rows"].append(training.tensors(buffers=False))
    results |= {"plan": training.session.inspect.plan, "said": training.session.inspect.decisions()}
    training.session.close()
    return results


def returning(rank: int, address: str, way: str, steps: int, script: str) -> dict[str, Any]:
    """From the local steps with which a job begins back to averaged gradients. `script`: "loads" an optimizer state meanwhile,
    or itself "switches"."""
    training = Training(rank, address, "every", optimizer="adamw", drift="end", drift_steps=2)
    training.train(steps)
    if script == "loads":
        training.optimizer.load_state_dict(training.optimizer.state_dict())
    memory, rates = training.connection.memory, [group["lr"] for group in training.optimizer.param_groups]
    before = memory.has_optimizer_state
    automatic.switch(training.connection, sync_modes.plan(training.connection.worker.job, way, training.codec),
                     by_itself=script != "switches")
    results = {"state before": before, "state after": memory.has_optimizer_state, "plan": training.session.inspect.plan,
               "rates": rates == [group["lr"] for group in training.optimizer.param_groups]}
    training.train(3)
    training.session.flush()
    states = training.optimizer.state_dict()["state"]
    results["states"] = [value for number in sorted(states) for value in states[number].values()]
    results["rows"] = training.tensors(buffers=False)
    results["said"] = training.session.inspect.decisions()
    training.session.close()
    return results


@pytest.mark.parametrize(("way", "steps", "script", "averages"), [
    ("gradients", 5, "", True), ("forward", 5, "", True), ("gradients", RESTARTED_STEPS + 1, "", False),
    ("gradients", 5, "switches", False), ("gradients", 5, "loads", False),
])
def test_first_local_steps_end_in_averaged_gradients_with_restarted_optimizers(
    way: str, steps: int, script: str, averages: bool,
) -> None:
    with Servers(WORLD, 1) as servers:
        first, second = pool(WORLD).call(returning, servers.address, way, steps, script)
    assert first["plan"].synchronous is averages
    assert first["plan"].overlap == ("forward" if way == "forward" else "")
    assert any("start again" in line for line in first["said"]) is averages
    for result in (first, second):
        assert result["state before"]
        assert result["state after"] is not averages
        assert result["rates"]
    for mine, theirs in zip(first["rows"], second["rows"], strict=True):
        assert torch.equal(mine, theirs)
    equal = all(torch.equal(a, b) for a, b in zip(first["states"], second["states"], strict=True))
    assert equal is averages


def returning_on_one(rank: int, address: str) -> tuple[str, bool]:
    training = Training(rank, address, "every", optimizer="adamw")
    training.train(4)
    if rank:
        training.connection.memory.restart()  # once only
    with pytest.raises(ValueError) as caught:
        automatic.switch(training.connection, sync_modes.plan(training.connection.worker.job, "gradients"), by_itself=True)
    training.train(4)
    local = training.session.inspect.plan.steps_locally
    training.session.close()
    return str(caught.value), local


def test_first_local_steps_continue_unless_all_optimizers_can_restart() -> None:
    with Servers(WORLD, 1) as servers:
        for text, local in pool(WORLD).call(returning_on_one, servers.address):
            assert re.search("rank 1.*E-PLAN-SWITCH", text)
            assert local


@pytest.mark.nightly
@pytest.mark.parametrize(("optimizer", "how"), [("momentum", ""), ("adamw", ""), ("adamw", "ddp")])
def test_deltas_stay_compressed_once_optimizer_states_differ(optimizer: str, how: str) -> None:
    with Servers(WORLD, 1) as servers:
        first, second = pool(WORLD).call(through, servers.address, optimizer, how)
    for mine, theirs in zip(first["rows"], second["rows"], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert first["plan"].codes == "updates"
    assert first["plan"].local_steps == 1
    lines = [line for line in first["said"] if "different states" in line]
    assert len(lines) == 1 + len(first["undone"])
    assert all("ranks continue to exchange weight changes, now after every step" in line for line in lines)
    for result in first["undone"]:  # what plan="auto" goes back to
        assert (result.codes, result.local_steps, result.overlap) == ("updates", 1, "")
        assert not any(b.stale for b in result.buckets)
    why = "different states.*E-PLAN-SWITCH|sync='forward' is not supported with DistributedDataParallel.*E-SYNC-FORWARD"
    assert all(re.search(why, line) for line in first["refused"]), first["refused"]
    every, in_rounds, _, updates, gradients = first["sent"]
    assert 5 * every < 3 * updates, "every second step"
    assert in_rounds < every
    assert 0.9 < gradients / updates < 1.1
    assert first["losses"][-1] < first["losses"][0]


def interrupted(rank: int, address: str, folder: str) -> dict[str, Any]:
    """A plan is requested while the script saves, flushes, changes plans itself and ends."""
    training = Training(rank, address, "round", optimizer="plain")
    lines, wanted, plans = [], [""], []

    def go_on(*, early: bool = False) -> None:
        if early:
            return
        lines.append(training.step)
        if way := wanted[0]:
            wanted[0] = ""
            automatic.switch(training.connection, sync_modes.plan(training.connection.worker.job, way) if rank == 0 else None)

    def note() -> None:
        plans.append(next(name for name, fields in MODES.items() if all(
            getattr(training.connection.plan, field) == value for field, value in (PLAIN | fields).items())))

    training.session.inspect.components.add(Calls(ComponentOrder.CONTROLLER, end_step=go_on, end_exchange=go_on))
    training.train(3)
    wanted[0] = "every"
    session = training.session
    for act in (lambda: session.checkpoint(folder, model=False), lambda: session.resume(folder), session.flush):
        act()
        note()
    training.train(3)
    note()
    wanted[0] = "updates"
    training.switch("whole round")
    note()
    training.train(4)
    note()
    results = {"told": lines[:], "plans": plans, "rows": training.tensors()}
    training.switch("every")
    training.train(1)
    wanted[0] = "updates"
    training.session.flush()
    training.session.close()
    note()
    return results | {"left": wanted[0]}


@pytest.mark.nightly
def test_plans_change_only_after_an_outer_step_and_not_inside_other_operations(tmp_path: Path) -> None:
    with Servers(WORLD, 1) as servers:
        first, second = pool(WORLD).call(interrupted, servers.address, str(tmp_path))
    assert first["plans"] == ["round", "round", "round", "every", "whole round", "updates", "every"]
    assert first["told"] == [1, 4, 8, 9], "after the second step of a fragment, counted from a drain or plan change"
    assert first["left"] == "updates"
    assert first["told"] == second["told"]
    assert all(torch.equal(a, b) for a, b in zip(first["rows"], second["rows"], strict=True))


def refused_on_one(rank: int, address: str) -> dict[str, str]:
    """Rank 1 cannot switch; then no rank does, and all continue as before."""
    training, report = Training(rank, address, "gradients", optimizer="adamw"), {}
    training.train(1)
    training.optimizer.param_groups[0]["capturable"] = rank == 1
    for name, act in {"forward": lambda: training.switch("forward"),
                      "contradiction": lambda: training.switch("every", fragments=3)}.items():
        with pytest.raises(ValueError) as caught:
            act()
        report[name] = str(caught.value)
    training.optimizer.param_groups[0]["capturable"] = False
    training.train(2)
    assert training.connection.exchanges == 3
    training.switch("forward")
    training.train(2)
    training.switch("every")
    training.train(2 + rank)
    with pytest.raises(ValueError) as caught:
        training.switch("round")
    report["uneven"] = str(caught.value)
    training.train(2 - rank)
    training.switch("round")
    training.session.close()
    wrapped = DistributedDataParallel(Net())
    wrapped.register_comm_hook(commlayer.HookState(plan=sync_modes.plan(describe_model(wrapped.module), "every")),
                               commlayer.comm_hook)
    with pytest.raises(ValueError) as caught:
        wrapped(torch.ones(4, 12)).sum().backward()
    return report | {"hook": str(caught.value)}


@pytest.mark.nightly
def test_no_rank_switches_unless_all_can() -> None:
    with Servers(WORLD, 1) as servers:
        first, second = pool(WORLD).call(refused_on_one, servers.address)
    assert re.match(r"switch\(\) .*rank 1\b.*E-OTHER-RANK", first["forward"])
    assert re.search("sync='forward'.*AdamW is capturable.*E-SYNC-FORWARD", second["forward"])
    for text in (first, second):
        assert re.search("fragments=3.*E-PLAN-REFUSED", text["contradiction"])
        assert re.search(r"local steps 0 to 1\b.*E-PLAN-SWITCH", text["uneven"])
        assert re.search("2 local steps: .*optimizer.*E-SYNC-OPTIMIZER", text["hook"])


class Wrapping(torch.optim.Optimizer):
    """Like Accelerate's: an Optimizer by type whose constructor never ran."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer = inner

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


ODD: dict[str, Any] = {
    "lbfgs": lambda m: torch.optim.LBFGS(m.parameters()),
    "wrapping": lambda m: Wrapping(torch.optim.AdamW(m.parameters())),
    "sharded": lambda m: ZeroRedundancyOptimizer(m.parameters(), optimizer_class=torch.optim.AdamW),
}


def allowed(rank: int, address: str, how: dict[str, Any]) -> tuple[set[str], dict[str, str]]:
    model = Net()
    optimizer = how.pop("optimizer", "adamw")
    stepped = optimizer and (OPTIMIZERS | ODD)[optimizer](model)
    if how.pop("resumed", False):
        torch.nn.functional.mse_loss(model(torch.ones(4, 12)), torch.ones(4, 3)).backward()
        stepped.step()
    if how.pop("scaled", False):
        how["grad_scaler"] = torch.amp.GradScaler("cpu")
    called: Any = DistributedDataParallel(model) if how.pop("ddp", False) else model
    session = commlayer.attach(called, stepped, plan=sync_modes.plan(describe_model(model), how.pop("way", "gradients")),
                               config=rank_pool.quick(join=address), **how)
    torch.nn.functional.mse_loss(called(torch.ones(4, 12)), torch.ones(4, 3)).backward()
    if stepped and optimizer != "lbfgs" and "grad_scaler" not in how:
        stepped.step()
    connection = session.inspect.context
    result = connection.terms.allowed_modes(), connection.terms.forbidden_modes()
    session.flush()
    session.close()
    return result


@pytest.mark.nightly
@pytest.mark.parametrize(("how", "wanted", "text"), [
    ({}, {"forward", "updates", "local", "round"}, ""),
    ({"optimizer": None}, set(), "local: optimizer: got NoneType, allowed with local steps"),
    ({"optimizer": "lbfgs"}, set(), "local: local steps are not supported with LBFGS"),
    ({"optimizer": "wrapping"}, set(), "local: local steps: optimizer Wrapping does not support step hooks"),
    ({"optimizer": "sharded"}, set(), "local: local steps are not supported with ZeroRedundancyOptimizer"),
    ({"ddp": True}, {"updates", "local", "round"}, "forward: sync='forward' is not supported with DistributedDataParallel"),
    ({"scaled": True}, {"updates", "local", "round"}, "forward: a GradScaler needs all gradients"),
    ({"clip_grad_norm": 1.0}, {"updates", "local", "round"}, "forward: clip_grad_norm clips"),
    ({"sync": commlayer.LocalSteps(4)}, {"local", "round"}, "updates: attach() was given sync=LocalSteps(every=4"),
    ({"sync": "step"}, {"forward"}, "local: attach() was given sync='step'"),
    ({"sync": "forward"}, {"forward"}, "updates: attach() was given"),
    ({"way": "every"}, {"forward", "updates", "local", "round"}, ""),
    ({"way": "every", "resumed": True}, {"updates", "local", "round"}, "forward: the optimizers have different states"),
])
def test_planner_receives_the_available_sync_modes(how: dict[str, Any], wanted: set[str], text: str) -> None:
    with Servers(WORLD, 1) as servers:
        for result, why in pool(WORLD).call(allowed, servers.address, how):
            assert result == wanted
            assert not text or any(f"{way}: {line}".startswith(text) for way, line in why.items())


def main(place: str) -> None:
    """Rank 1 dies in the middle of a switch."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    training = Training(rank, "", "every", optimizer="adamw", how="unbounded")
    training.train(3)
    connection = training.connection
    if rank == 1:
        getattr(connection, place).insert(0, lambda: os.kill(os.getpid(), signal.SIGKILL))
    training.switch("round")
    training.train(1000)


@pytest.mark.nightly
@pytest.mark.parametrize("place", ["catch_up", "before_switch", "after_switch"])
def test_rank_that_dies_inside_a_change_is_named(place: str) -> None:
    with tree(__file__, 3, args=(place,), settings=SETTINGS) as run:
        for rank in (0, 2):
            code, errors = run.ended_one(rank, 40.0)
            assert code == 1
            line = r"commlayer.errors.(PeerLost|DeadlineExceeded): worker 1: .*E-(PEER-LOST|DEADLINE)"
            assert re.match(line, last_line(errors)), errors


if __name__ == "__main__":
    main(sys.argv[1])
