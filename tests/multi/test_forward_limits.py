"""overlap="forward" at its edges: what it waits for as a whole, what it refuses, and what is left when somebody is gone."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from support import rank_pool
from support.forward import Held, Net, Training, batch, loss_of
from support.rank_pool import pool
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.engine.optimizers import job_of
from commlayer.errors import CommError
from commlayer.planner import default_plan

WORLD = 2
_ranks = rank_pool.ranks_first(WORLD)


def both(function: Callable[..., Any], *args: Any) -> list[list[Any]]:
    """function(rank, address, overlap, ...) on all ranks, waiting and overlapped."""
    results = []
    for overlap in (None, "forward"):
        with rank_pool.Servers(WORLD, 1) as servers:
            results.append(pool(WORLD).call(function, servers.address, overlap, *args))
    return results


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ---- what needs all gradients of a step

def clipped(rank: int, address: str, overlap: str | None, by: str) -> dict[str, torch.Tensor]:
    training = Training(rank, address, overlap, max_norm=0.3 if by == "attach" else None)
    for step in range(8):
        training.optimizer.zero_grad()
        training.backward(step)
        if by == "hand":
            nn.utils.clip_grad_norm_(training.model.parameters(), 0.3)
        training.step()
    kept = training.state()
    training.session.close()
    return kept


def test_max_norm_clips_as_a_script_would() -> None:
    with rank_pool.Servers(WORLD, 1) as servers:
        wanted = pool(WORLD).call(clipped, servers.address, None, "hand")
    for results in both(clipped, "attach"):
        assert [same(a, b) for a, b in zip(wanted, results, strict=True)] == [True, True]


def scaled(rank: int, address: str, overlap: str | None) -> tuple[dict[str, torch.Tensor], bool]:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=4)
    training, waited = Training(rank, address, overlap, scaler=scaler, max_norm=0.3), True
    for step in range(8):
        training.optimizer.zero_grad()
        loss = loss_of(training.model, rank, step)
        if step == 3 and rank:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        waited = waited and (training.overlap is None or training.overlap._out is None)
        scaler.step(training.optimizer)
        scaler.update()
    kept = training.state()
    training.session.close()
    return kept, waited


def test_a_loss_scaler_that_was_named_has_all_gradients_waited_for() -> None:
    plain, overlapped = both(scaled)
    assert [same(a, b) for (a, _), (b, _) in zip(plain, overlapped, strict=True)] == [True, True]
    assert all(waited for _, waited in overlapped)


# ---- routes, compiled models, saves

def routed(
    rank: int, _address: str, overlap: str | None, codec: str, per_node: int, steps: int = 12,
) -> dict[str, torch.Tensor]:
    training = Training(rank, "", overlap, codec=codec, ranks_per_node=per_node)
    training.train(0, steps)
    kept = training.state()
    training.session.close()
    return kept


@pytest.mark.commit(1)
@pytest.mark.parametrize(("codec", "per_node"), [("auto", 2), ("int8()", 2)])
def test_all_reduces_and_sums_inside_a_node_come_in_the_same_way(codec: str, per_node: int) -> None:
    """All ranks of one node: one all-reduce for each bucket, or sums inside it and a server behind."""
    plain, overlapped = both(routed, codec, per_node)
    assert [same(a, b) for a, b in zip(plain, overlapped, strict=True)] == [True, True]


# ---- what is refused

class CountsItself(torch.optim.SGD):
    taken = 0

    def step(self, closure: Any = None) -> Any:
        self.taken += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.taken
        return super().step(closure)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def replaced(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = sgd(model)
    optimizer.step = lambda: None  # type: ignore[method-assign, assignment]
    return optimizer


MISTAKES: dict[str, tuple[Callable[[nn.Module], Any], dict[str, Any], str]] = {
    "a word": (sgd, {"overlap": "both"},
               "overlap: .*'both'.*E-SYNC-MODE"),
    "no optimizer": (lambda m: None, {}, "attach.model, optimizer.*E-SYNC-FORWARD"),
    "lbfgs": (lambda m: torch.optim.LBFGS(m.parameters()), {}, "LBFGS.step.*closure.*E-SYNC-FORWARD"),
    "mixes": (lambda m: CountsItself(m.parameters(), lr=0.1), {}, "CountsItself.*E-SYNC-FORWARD"),
    "graphs": (lambda m: torch.optim.Adam(m.parameters(), capturable=True), {}, "Adam.*capturable.*E-SYNC-FORWARD"),
    "replaced": (replaced, {}, r"SGD\.step.*E-SYNC-FORWARD"),
    "no torch": (lambda m: object(), {}, r"object .*torch\.optim\.Optimizer.*E-SYNC-FORWARD"),
    "some": (lambda m: torch.optim.SGD([m.scale], lr=0.1), {}, r"\b10 .*words\.weight.*E-SYNC-FORWARD"),
    "norm": (sgd, {"max_norm": -1.0}, r"max_norm.*-1\.0\b.*E-CLIP"),
    "norm alone": (lambda m: None, {"max_norm": 1.0, "overlap": None}, "attach.model, optimizer, max_norm.*E-CLIP"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_cannot_be_overlapped_is_refused_in_one_line(name: str) -> None:
    make, arguments, said = MISTAKES[name]
    model = Net()
    with pytest.raises(ValueError, match=said) as raised:
        commlayer.attach(model, make(model), **({"overlap": "forward"} | arguments))
    assert "\n" not in str(raised.value)
    commlayer.attach(model).close()  # nothing was kept of it


def converted(rank: int, address: str) -> str:
    training = Training(rank, address, "forward")
    training.train(0, 2)
    training.model.double()
    with pytest.raises(ValueError) as raised:
        training.backward(2)
    training.session.close()
    return str(raised.value)


def test_a_model_of_another_type_than_was_attached_is_refused_by_name() -> None:
    with rank_pool.Servers(WORLD, 1) as servers:
        for said in pool(WORLD).call(converted, servers.address):
            assert re.search(r"\bscale .*torch\.float64, .*torch\.float32 .*E-MODEL-CHANGED", said), said


def refused(rank: int, address: str) -> list[str]:
    """DDP, and plans of other ways, at the start and later."""
    said, model = [], Net()
    late = default_plan(job_of(model), codec="identity()", path="service", servers=1, ranks_per_node=1, fuse_nbytes=2048,
                        cut_nbytes=4096)
    plans = [msgspec.structs.replace(late, local_steps=4),
             msgspec.structs.replace(late, buckets=tuple(msgspec.structs.replace(b, stale=True) for b in late.buckets))]
    wrapped = DistributedDataParallel(Net())
    cases: list[tuple[nn.Module, Any]] = [(wrapped, late), *((model, plan) for plan in plans)]
    for each, plan in cases:
        with pytest.raises(ValueError) as raised:
            commlayer.attach(each, sgd(each), plan=plan, overlap="forward", config=rank_pool.quick(join=address))
        said.append(str(raised.value))
    training = Training(rank, address, "forward")
    training.train(0, 2)
    for plan in plans:
        with pytest.raises(ValueError) as raised:
            commlayer.switch(training.session, plan)
        said.append(str(raised.value))
    training.train(2, 4)
    training.session.close()
    return said


def test_other_ways_are_refused_beside_it() -> None:
    with rank_pool.Servers(WORLD, 1) as servers:
        for said in pool(WORLD).call(refused, servers.address):
            assert re.search(r"DistributedDataParallel.*E-SYNC-FORWARD", said[0])
            for first, line in zip(("4 local steps", "a step late") * 2, said[1:], strict=True):
                assert re.search(f"{first}.*overlap='forward'.*E-PLAN-REFUSED", line)


# ---- when somebody is gone


def main(how: str) -> None:
    """Rank 1 waits to be killed; rank 0 has results of that step still to come, and goes on. Or both end behind a step."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    training = Training(rank, "", "forward", codec="int8()", deadline_s=20.0, heartbeat_s=0.5, dead_after_s=2.5)
    training.train(0, 3)
    if how == "ends":
        if rank == 0:
            Held(training.worker, until_awaited=True)
        training.train(3, 4)
        return
    training.session.drain()
    held = Held(training.worker, ["hidden.2.weight"])
    training.train(3, 4)
    for name, p in training.model.named_parameters():
        if name != "hidden.2.weight":
            p.detach()  # comes in with that
    print("ready", flush=True)
    if rank == 1:
        signal.pause()
    print(json.dumps([outcome(lambda: training.model(batch(0, 9)[0])), outcome(training.model.state_dict),
                      outcome(training.session.drain), len(held.buckets)]), flush=True)
    training.session.close("it is over")
    print(json.dumps([type(training.model.hidden[2].weight).__name__, outcome(training.model.state_dict)]), flush=True)


def outcome(act: Callable[[], Any]) -> str:
    try:
        act()
    except CommError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_peer_that_dies_with_results_to_come_is_named_and_what_was_applied_is_said() -> None:
    with rank_pool.tree(__file__, WORLD, args=("dies",)) as run:
        for rank in range(WORLD):
            run.until(rank, "ready")
        os.kill(run.processes[1].pid, signal.SIGKILL)
        code, errors = run.ended_one(0, 60.0)
        assert code == 0, errors
        *said, held = json.loads(run.until(0, "["))
        after = json.loads(run.until(0, "["))
    assert held == 1
    for line in said:
        assert line.startswith("PeerLost: worker 1: ")
        assert re.search(r"; step 3 updated 10 of 11 parameters.*\[E-PEER-LOST\]$", line)
        assert line.count("step 3 updated") == 1
    assert after == ["Parameter", "nothing"]


@pytest.mark.nightly
def test_a_script_may_end_with_results_to_come() -> None:
    with rank_pool.tree(__file__, WORLD, args=("ends",)) as run:
        assert run.ended(60.0) == [(0, ""), (0, "")]


if __name__ == "__main__":
    main(sys.argv[1])
