"""What a change of the sync mode means for optimizers: their states, their gradients, and refusals. Real ranks.

Run as a script, this file is a training in which one rank dies in the middle of a change.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support import rank_pool
from support.rank_pool import Servers, last_line, pool, tree
from support.sync_modes import MODES, OPTIMIZERS, WORLD, Net, Training, plan
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.engine.observers import Observer, ObserverOrder
from commlayer.engine.optimizers import job_of
from commlayer.engine.switch import switch as go_over

_ranks = rank_pool.ranks_first(WORLD)
PLAIN = {"overlap": "", "codes": "gradients", "local_steps": 1}


def back_and_forth(rank: int, address: str, optimizer: str, ways: list[str]) -> list[torch.Tensor]:
    training = Training(rank, address, ways[0], optimizer=optimizer, codec="topk(ratio=0.1)")
    for way in ways:
        training.switch(way)
        training.train(2)
    training.session.synchronize()
    result = training.tensors()
    training.session.close()
    return result


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_gradients_and_forward_give_the_same_weights_bit_for_bit(optimizer: str) -> None:
    runs = []
    for ways in (["gradients"] * 4, ["gradients", "forward"] * 2, ["forward", "forward", "gradients", "gradients"]):
        with Servers(WORLD, 1) as servers:
            runs += pool(WORLD).call(back_and_forth, servers.address, optimizer, ways)
    for run in runs:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


def through(rank: int, address: str, optimizer: str, how: str) -> dict[str, Any]:
    """From gradients to local steps and round, and back to a plan of gradients."""
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
        go_over(training.connection, plan(training.connection.worker.job, again, training.codec), by_itself=True)
        training.train(1)
        results["undone"].append(training.session.inspect.plan)
    training.train(1)
    training.session.flush()
    results["rows"].append(training.tensors(buffers=False))
    results |= {"plan": training.session.inspect.plan, "said": training.session.inspect.decisions()}
    training.session.close()
    return results


@pytest.mark.parametrize(("optimizer", "how"), [("momentum", ""), ("adamw", ""), ("adamw", "ddp")])
def test_updates_stay_what_is_coded_once_optimizers_remember_different_things(optimizer: str, how: str) -> None:
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
    why = "different states.*E-PLAN-SWITCH|overlap='forward' is not supported with DistributedDataParallel.*E-SYNC-FORWARD"
    assert all(re.search(why, line) for line in first["refused"]), first["refused"]
    every, in_rounds, _, updates, gradients = first["sent"]
    assert 5 * every < 3 * updates, "every second step"
    assert in_rounds < every
    assert 0.9 < gradients / updates < 1.1
    assert first["losses"][-1] < first["losses"][0]


def balanced(rank: int, address: str) -> tuple[Any, Any]:
    from commlayer import LoadBalancer
    from commlayer.balance import Sampler

    training = Training(rank, address, "gradients")
    training.train(1)
    if rank == 1:
        LoadBalancer(training.session, Sampler(8, 2, rank=1, world=2))
    local = plan(training.connection.worker.job, "every")
    with pytest.raises(ValueError, match="LoadBalancer.*E-PLAN-SWITCH|rank 1.*E-OTHER-RANK") as caught:
        go_over(training.connection, local, by_itself=True)
    refused = training.session.inspect.plan
    training.train(1)
    training.switch("every")
    result = (refused, training.session.inspect.plan)
    assert "\n" not in str(caught.value)
    training.session.close()
    return result


def test_nobody_steps_locally_by_itself_where_some_rank_moves_shares_of_the_batch() -> None:
    with Servers(WORLD, 1) as servers:
        for refused, request in pool(WORLD).call(balanced, servers.address):
            assert (refused.steps_locally, request.steps_locally) == (False, True)


def interrupted(rank: int, address: str, folder: str) -> dict[str, Any]:
    """Another plan is wanted while the script saves, flushes, changes plans itself and ends."""
    training = Training(rank, address, "round", optimizer="plain")
    lines, wanted, plans = [], [""], []

    def go_on() -> None:
        lines.append(training.step)
        if way := wanted[0]:
            wanted[0] = ""
            go_over(training.connection, plan(training.connection.worker.job, way) if rank == 0 else None)

    def note() -> None:
        plans.append(next(name for name, fields in MODES.items() if all(
            getattr(training.connection.plan, field) == value for field, value in (PLAIN | fields).items())))

    training.session._driver.observers.add(Observer(ObserverOrder.CONTROLLER, None, after_step=go_on, after_exchange=go_on))
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


def test_plans_change_behind_a_round_and_not_inside_a_save_a_drain_or_another_change(tmp_path: Path) -> None:
    with Servers(WORLD, 1) as servers:
        first, second = pool(WORLD).call(interrupted, servers.address, str(tmp_path))
    assert first["plans"] == ["round", "round", "round", "every", "whole round", "updates", "every"]
    assert first["told"] == [1, 4, 8, 9], "behind the second step of a turn, from a drain or a change of plans on"
    assert first["left"] == "updates"
    assert first["told"] == second["told"]
    assert all(torch.equal(a, b) for a, b in zip(first["rows"], second["rows"], strict=True))


def refused(rank: int, address: str) -> dict[str, str]:
    """Rank 1 alone cannot; then no rank switches, and all continue as before."""
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
    wrapped.register_comm_hook(commlayer.HookState(plan=plan(job_of(wrapped.module), "every")), commlayer.comm_hook)
    with pytest.raises(ValueError) as caught:
        wrapped(torch.ones(4, 12)).sum().backward()
    return report | {"hook": str(caught.value)}


def test_nobody_goes_unless_all_can() -> None:
    with Servers(WORLD, 1) as servers:
        first, second = pool(WORLD).call(refused, servers.address)
    assert re.match(r"switch\(\) .*rank 1\b.*E-OTHER-RANK", first["forward"])
    assert re.search("overlap='forward'.*AdamW is capturable.*E-SYNC-FORWARD", second["forward"])
    for text in (first, second):
        assert re.search("2 local steps, and fragments=3.*E-PLAN-REFUSED", text["contradiction"])
        assert re.search(r"local steps 0 to 1\b.*E-PLAN-SWITCH", text["uneven"])
        assert re.search("2 local steps: .*optimizer.*E-PLAN-REFUSED", text["hook"])


class Wrapping(torch.optim.Optimizer):
    """As Accelerate's: one by its type, which has never been made one."""

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
    if how.pop("scaled", False):
        how["grad_scaler"] = torch.amp.GradScaler("cpu")
    called: Any = DistributedDataParallel(model) if how.pop("ddp", False) else model
    session = commlayer.attach(called, stepped, plan=plan(job_of(model), how.pop("way", "gradients")),
                               config=rank_pool.quick(join=address), **how)
    torch.nn.functional.mse_loss(called(torch.ones(4, 12)), torch.ones(4, 3)).backward()
    if stepped and optimizer != "lbfgs" and "grad_scaler" not in how:
        stepped.step()
    connection = session.inspect.connection
    result = connection.terms.allowed_modes(), connection.terms.forbidden_modes()
    session.flush()
    session.close()
    return result


@pytest.mark.parametrize(("how", "wanted", "text"), [
    ({}, {"forward", "updates", "local", "round"}, ""),
    ({"optimizer": None}, set(), "local: local steps need a torch.optim.Optimizer"),
    ({"optimizer": "lbfgs"}, set(), "local: local steps are not supported with LBFGS"),
    ({"optimizer": "wrapping"}, set(), "local: local steps: optimizer Wrapping does not support step hooks"),
    ({"optimizer": "sharded"}, set(), "local: local steps are not supported with ZeroRedundancyOptimizer"),
    ({"ddp": True}, {"updates", "local", "round"}, "forward: sync='forward' is not supported with DistributedDataParallel"),
    ({"scaled": True}, {"updates", "local", "round"}, "forward: a GradScaler needs all gradients"),
    ({"clip_grad_norm": 1.0}, {"updates", "local", "round"}, "forward: clip_grad_norm clips"),
    ({"sync": commlayer.LocalSteps(4)}, {"local", "round"}, "updates: attach() was given sync=LocalSteps(every=4"),
    ({"sync": "step"}, {"forward"}, "local: attach() was given sync='step'"),
    ({"sync": "forward"}, {"forward"}, "updates: attach() was given"),
    ({"way": "every"}, {"updates", "local", "round"}, "forward: the optimizers have different states"),
])
def test_a_planner_is_told_which_ways_there_are(how: dict[str, Any], wanted: set[str], text: str) -> None:
    with Servers(WORLD, 1) as servers:
        for result, why in pool(WORLD).call(allowed, servers.address, how):
            assert result == wanted
            assert not text or any(f"{way}: {line}".startswith(text) for way, line in why.items())


SETTINGS = {"deadline_s": 6.0, "join_deadline_s": 60.0, "heartbeat_s": 0.5, "dead_after_s": 2.5}


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


@pytest.mark.parametrize("place", ["catch_up", "before_switch", "after_switch"])
def test_a_rank_that_dies_in_the_middle_of_a_change_is_named(place: str) -> None:
    with tree(__file__, 3, args=(place,), settings=SETTINGS) as run:
        for rank in (0, 2):
            code, errors = run.ended_one(rank, 40.0)
            assert code == 1
            line = r"commlayer.errors.(PeerLost|DeadlineExceeded): worker 1: .*E-(PEER-LOST|DEADLINE)"
            assert re.match(line, last_line(errors)), errors


if __name__ == "__main__":
    main(sys.argv[1])
