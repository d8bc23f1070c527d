"""The start of a job: ranks that were started differently fail at once; ranks, nodes and process groups. Real ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.arguments import plan_or_codec
from support.attached import assert_refused, data, mlp, outcome, plan_of
from support.rank_pool import Servers, pool, quick, rank_environment
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.cluster import messages
from commlayer.config import read_launch
from commlayer.engine.start import RankRow, problem_of, ranks_per_node

WORLD = 3
AT_ONCE_S = 45.0
"""Far below any deadline that a rank could wait for, far above what a loaded machine takes."""


def timed(act: Callable[[], Any]) -> tuple[str, float]:
    """What act() raised, and how long it took."""
    begin_s = time.monotonic()
    line = outcome(lambda: act().close())
    return line, time.monotonic() - begin_s


# ---- ranks that were started differently

def attach(rank: int, **how: Any) -> Any:
    return commlayer.attach(mlp(), config=quick() | how.pop("config", {}), **how)


def setting(rank: int, name: str, value: Any) -> Any:
    """Rank 1 has it."""
    return attach(rank, config={name: value} if rank == 1 else {})


def optimizer_on_some(rank: int) -> Any:
    model = mlp()
    return commlayer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1) if rank else None, config=quick())


def ddp_on_one(rank: int) -> Any:
    """The others wait in attach() while this rank comes to its first backward pass."""
    model = mlp()
    ddp = DistributedDataParallel(model)
    wrapped = ddp if rank == 0 else model
    session = commlayer.attach(wrapped, config=quick())
    wrapped(data(0, 0)[0]).sum().backward()
    return session


def other_version(rank: int) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages, "PROTOCOL", messages.PROTOCOL + (rank == 1))
        return attach(rank)


def other_python(rank: int) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr("platform.python_version_tuple", lambda: ("3", "99", "0"))
        return attach(rank)


ROWS: dict[str, tuple[Callable[[int], Any], str, tuple[str, ...]]] = {
    "batch": (lambda rank: setting(rank, "batch", 8.0), "E-RANKS-DIFFER", ("batch: 1.0 on rank 0, 2 (", "8.0 on rank 1 ")),
    "join": (lambda rank: setting(rank, "join", "127.0.0.1:9"), "E-RANKS-DIFFER",
             ("join: not set on rank 0, 2 ", "set on rank 1 ")),
    "loss": (lambda rank: setting(rank, "loss", "/nowhere/loss.json"), "E-RANKS-DIFFER",
             ("loss: not set on rank 0, 2 ", "set on rank 1 ")),
    "guard": (lambda rank: setting(rank, "guard", "warn"), "E-RANKS-DIFFER", ("guard: auto on rank 0, 2 ", "warn on rank 1")),
    "unknown setting": (lambda rank: setting(rank, "deadlin_s", 3), "E-SETTING", ("deadlin_s: ",)),
    "plain text": (lambda rank: setting(rank, "bind", "10.0.0.9"), "E-PLAIN-TEXT", ("bind: 10.0.0.9 ",)),
    "plan": (lambda rank: attach(rank, compression=None if rank else "fp16"), "E-RANKS-DIFFER",
             ("plan: fp16 on rank 0 (", "auto on rank 1-2 (")),
    "optimizer": (optimizer_on_some, "E-RANKS-DIFFER", ("optimizer: not given on rank 0 (", "given on rank 1-2")),
    "wrapper": (ddp_on_one, "E-RANKS-DIFFER", ("wrapper: DistributedDataParallel on rank 0 (", "none on rank 1-2")),
    "sync": (lambda rank: attach(rank, sync="never" if rank == 2 else "step"), "E-SYNC-MODE", ("sync: got 'never'",)),
    "Python": (other_python, "E-RANKS-DIFFER", ("version of Python: 3.", "on rank 0, 2 (", "3.99 on rank 1")),
    "protocol": (other_version, "E-RANKS-DIFFER", ("protocol of commlayer: ", "on rank 0, 2 (", "on rank 1")),
}


def started(rank: int, name: str) -> tuple[str, float]:
    return timed(lambda: ROWS[name][0](rank))


@pytest.mark.parametrize("name", ROWS)
def test_what_is_wrong_on_one_rank_fails_all_ranks_at_once(name: str) -> None:
    _, code, names = ROWS[name]
    for line, elapsed_s in pool(WORLD).call(started, name):
        assert_refused(line, code, *names)
        assert elapsed_s < AT_ONCE_S


def absent(rank: int) -> tuple[str, float]:
    return ("", 0.0) if rank == 1 else timed(lambda: commlayer.attach(mlp(), config=quick(join_deadline_s=1.0)))


def test_a_rank_that_does_not_come_is_named_within_the_join_deadline() -> None:
    results = pool(WORLD).call(absent)
    pool(WORLD).kill()  # rank 1 counts one start less than the others
    for line, elapsed_s in (results[0], results[2]):
        assert_refused(line, "E-DEADLINE", "DeadlineExceeded: rank 1: start: ", " 1 s")
        assert elapsed_s < AT_ONCE_S


@pytest.mark.parametrize(("store", "code", "name"), [
    (True, "E-DEADLINE", "DeadlineExceeded: rank 1: start: "),
    (False, "E-COMM", "CommError: MASTER_ADDR 127.0.0.1: start: rank 0 "),
], ids=["no other rank", "no store"])
def test_a_rank_that_reaches_no_other_before_there_is_a_group_fails_once(
        store: bool, code: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To send the error to the others, the rank would have to wait for them once more."""
    assert not torch.distributed.is_initialized()
    listener = torch.distributed.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    port = listener.port
    if not store:
        del listener
    for variable, value in (rank_environment(0, 2, port) | {"LOCAL_WORLD_SIZE": "2"}).items():
        monkeypatch.setenv(variable, value)
    line, elapsed_s = timed(lambda: commlayer.attach(mlp(), config=quick(join_deadline_s=1.0)))
    assert_refused(line, code, name)
    assert elapsed_s < AT_ONCE_S
    assert not torch.distributed.is_initialized()


HOSTS = [RankRow("a", "a", insecure=True, address="10.0.0.1"), RankRow("b", "b", insecure=True, address="10.0.0.2")]


@pytest.mark.parametrize(("rows", "code", "names"), [
    (HOSTS, "", ()),
    ([HOSTS[0], HOSTS[1]._replace(insecure=False)], "E-PLAIN-TEXT",
     ("insecure: ", "rank 1 (b); ", " 2 ", "COMMLAYER_INSECURE")),
    ([row._replace(insecure=False) for row in HOSTS], "E-PLAIN-TEXT", ("insecure: not set on rank 0-1 (a, b)",)),
    ([HOSTS[0]._replace(insecure=False)], "", ()),
    ([row._replace(insecure=False, keys=True) for row in HOSTS], "", ()),
    ([HOSTS[0], HOSTS[1]._replace(keys=True)], "E-KEYS", ("keys: not set on rank 0 (a); ", "COMMLAYER_KEYS")),
    ([row._replace(address="127.0.0.1") for row in HOSTS], "E-ADDRESS", ("bind: ", " 2 machines, ", "MASTER_ADDR")),
    ([HOSTS[0]._replace(address="127.0.0.1"), HOSTS[1]], "", ()),
])
def test_several_machines_use_plain_text_only_where_all_ranks_allow_it(
    rows: list[RankRow], code: str, names: tuple[str, ...],
) -> None:
    line = problem_of(rows, range(len(rows)))
    assert bool(line) == bool(code)
    assert not code or assert_refused(line, code, *names) is None
    assert problem_of(rows, range(len(rows)), own_servers=False) == "", "`join` decides about plain text"


@pytest.mark.parametrize(("machines", "agents", "expected"), [
    ("aaaa", [-1] * 4, 4), ("aabb", [-1] * 4, 2), ("abcd", [-1] * 4, 1), ("aabb", [0, 0, 1, 1], 2),
    ("aaaa", [0, 0, 1, 1], 2), ("aab", [0, 0, 1], -1), ("aaaabb", [-1] * 6, -2), ("abab", [-1] * 4, -1),
])
def test_a_node_is_what_shares_a_machine_and_an_agent(machines: str, agents: list[int], expected: int) -> None:
    """A negative number: nodes are uneven, which is logged."""
    per_node, note = ranks_per_node([RankRow(m, m, agent) for m, agent in zip(machines, agents, strict=True)])
    assert per_node == abs(expected)
    assert bool(note) == (expected < 0)
    assert not note or f"nodes of {per_node}" in note


# ---- this process's rank

def under(changes: dict[str, str | None]) -> tuple[int, int, int]:
    """Rank, world and ranks per node of a job that starts with these variables of the environment."""
    before = dict(os.environ)
    for name, value in changes.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    try:
        with commlayer.attach(mlp(), config=quick()) as session:
            context = session.inspect.connection
            assert session.inspect.plan is not None
            return context.rank, context.world, session.inspect.plan.ranks_per_node
    finally:
        os.environ.clear()
        os.environ.update(before)


def as_spawned(rank: int) -> tuple[int, int, int]:
    return under(dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")))


def as_lightning_does(rank: int) -> tuple[int, int, int]:
    changes: dict[str, str | None] = dict.fromkeys(("RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"))
    return under(changes | {"WORLD_SIZE": "3", "LOCAL_RANK": str(rank), "NODE_RANK": "0"})


@pytest.mark.commit(1)
@pytest.mark.parametrize("act", [as_spawned, as_lightning_does], ids=lambda f: f.__name__)
def test_ranks_come_from_the_process_group_and_one_machine_is_one_node(act: Callable[[int], Any]) -> None:
    assert pool(WORLD).call(act) == [(rank, WORLD, WORLD) for rank in range(WORLD)]


SLURM = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1"}


def test_ranks_come_from_slurm_if_it_names_the_master() -> None:
    meeting = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    assert read_launch(SLURM | meeting)[:2] == (1, 2)
    assert read_launch(SLURM | meeting | {"RANK": "5", "WORLD_SIZE": "8"})[:2] == (5, 8), "torchrun under Slurm"
    assert read_launch({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"})[:2] == (0, 1)
    assert_refused(outcome(lambda: read_launch(SLURM)), "E-LAUNCH-ENVIRONMENT", "1 of 2, ", "MASTER_ADDR=", "SLURM_PROCID")


# ---- some ranks of the world

def gradient(model: nn.Module, wrapped: Any, rank: int, step: int) -> torch.Tensor:
    model.zero_grad()
    x, y = data(rank, step)
    nn.functional.mse_loss(wrapped(x), y).backward()
    return torch.cat([p.grad.view(-1) for p in model.parameters() if p.grad is not None])


def some_ranks(rank: int, how: str, path: str, addresses: list[str]) -> dict[str, Any]:
    """Ranks 1 and 2 train, and once more; rank 0 does not. What they got, and what it should be."""
    group = torch.distributed.new_group([1, 2])
    if rank == 0:
        return {}
    if rank == 2:  # so members are in unequal numbers of groups
        torch.distributed.new_group([2], use_local_synchronization=True)
    got = []
    for address in addresses:
        model, config = mlp(seed=rank), quick(join=address)
        if how == "module":
            session = commlayer.attach(model, **plan_or_codec(plan_of(model, path=path)), process_group=group, config=config)
            got.append(gradient(model, model, rank, 0))
            place = session.inspect.connection
            close: Callable[[], None] = session.close
        else:
            wrapped = DistributedDataParallel(model, process_group=group)
            if how == "ddp":
                session = commlayer.attach(wrapped, **plan_or_codec(plan_of(model, path=path)), config=config)
                got.append(gradient(model, wrapped, rank, 0))
                place, close = session.inspect.connection, session.close
            else:
                state = commlayer.HookState(**plan_or_codec(plan_of(model, path=path)), config=config)
                wrapped.register_comm_hook(state, commlayer.comm_hook)
                got.append(gradient(model, wrapped, rank, 0))
                place, close = state.connection, state.connection.close
        who = place.rank, place.world
        close()
    alone = mlp(seed=1)
    return {"got": got, "mean": (gradient(alone, alone, 1, 0) + gradient(alone, alone, 2, 0)) / 2, "who": who}


STAGED = "encode@cpu all.alltoall decode@cpu encode@cpu all.allgather decode@cpu"


@pytest.mark.commit(2)
@pytest.mark.parametrize(("how", "path"), [
    ("module", "service"), ("module", "allreduce"), ("module", STAGED), ("ddp", "service"), ("hook", "allreduce"),
], ids=["service", "all-reduce", "staged", "ddp", "hook"])
def test_a_process_group_is_what_is_averaged_over(how: str, path: str) -> None:
    with Servers(2, int(path == "service")) as first, Servers(2, int(path == "service")) as second:
        results = pool(WORLD).call(some_ranks, how, path, [first.address, second.address])
    for number, result in enumerate(results[1:]):
        assert result["who"] == (number, 2)
        for got in result["got"]:
            torch.testing.assert_close(got, result["mean"])


def meshes(rank: int, address: str) -> tuple[int, str]:
    one, two = init_device_mesh("cpu", (WORLD,)), init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("dp", "tp"))
    refused = outcome(lambda: commlayer.attach(mlp(), process_group=two, config=quick(join=address)))
    session = commlayer.attach(mlp(), process_group=one, config=quick(join=address))
    world = session.world_size
    session.close()
    return world, refused


def test_a_device_mesh_of_one_dimension_is_a_process_group() -> None:
    with Servers(WORLD, 1) as servers:
        for world, refused in pool(WORLD).call(meshes, servers.address):
            assert world == WORLD
            assert_refused(refused, "E-PROCESS-GROUP", "process_group: got ", "DeviceMesh")


def outside(rank: int) -> str:
    group = torch.distributed.new_group([1, 2])
    return "" if rank else outcome(lambda: commlayer.attach(mlp(), process_group=group, config=quick()))


def test_a_rank_that_is_not_in_the_process_group_is_refused() -> None:
    assert_refused(pool(WORLD).call(outside)[0], "E-PROCESS-GROUP", "InvalidInput: process_group: ", "not in it")
