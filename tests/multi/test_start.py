"""How a job starts: ranks that were started differently all hear of it at once, in a line; who takes part, on which nodes."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.arguments import plan_or_codec
from support.attached import data, mlp
from support.rank_pool import Servers, pool, quick, rank_environment
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer import planner
from commlayer.config import read_launch
from commlayer.engine.optimizers import job_of
from commlayer.engine.start import RankRow, problem_of, ranks_per_node
from commlayer.errors import RecordError

WORLD = 3
AT_ONCE_S = 10.0
"""Far below any deadline that a rank could wait for, far above what a loaded machine takes."""


def said_by(act: Callable[[], Any]) -> tuple[str, float]:
    """What act() raised, and how long it took."""
    begin = time.monotonic()
    try:
        act().close()
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - begin
    return "nothing", time.monotonic() - begin


# ---- settings that differ

def settings(rank: int, odd: dict[str, Any]) -> tuple[str, float]:
    return said_by(lambda: commlayer.attach(mlp(), config=quick(join_deadline_s=60.0) | (odd if rank == 1 else {})))


def another_plan(rank: int) -> tuple[str, float]:
    return said_by(lambda: commlayer.attach(mlp(), compression=None if rank else "fp16", config=quick()))


def an_optimizer_on_one(rank: int) -> tuple[str, float]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if rank else None
    return said_by(lambda: commlayer.attach(model, optimizer, config=quick()))


def ddp_on_one(rank: int) -> tuple[str, float]:
    """The others wait in attach() while this one comes to its first backward pass."""
    model = mlp()
    ddp = DistributedDataParallel(model)
    wrapped = ddp if rank == 0 else model

    def act() -> Any:
        session = commlayer.attach(wrapped, config=quick())
        wrapped(data(0, 0)[0]).sum().backward()
        return session

    return said_by(act)


def a_mistake_on_one(rank: int) -> tuple[str, float]:
    return said_by(lambda: commlayer.attach(mlp(), sync="never" if rank == 2 else "step", config=quick(join_deadline_s=60.0)))


def another_version(rank: int) -> tuple[str, float]:
    from commlayer.cluster import messages

    theirs, messages.PROTOCOL = messages.PROTOCOL, messages.PROTOCOL + (rank == 1)
    try:
        return said_by(lambda: commlayer.attach(mlp(), config=quick()))
    finally:
        messages.PROTOCOL = theirs


def another_python(rank: int) -> tuple[str, float]:
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr("platform.python_version_tuple", lambda: ("3", "99", "0"))
        return said_by(lambda: commlayer.attach(mlp(), config=quick()))


ALIKE: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "batch": (settings, ({"batch": 8.0},), r"batch: 1.0 on rank 0, 2 \(\w+\), 8.0 on rank 1 .*E-RANKS-DIFFER"),
    "join": (settings, ({"join": "127.0.0.1:9"},), r"join: not set on rank 0, 2 .*, set on rank 1 .*E-RANKS-DIFFER"),
    "loss": (settings, ({"loss": "/nowhere/loss.json"},), r"loss: not set on rank 0, 2 .*, set on rank 1 .*E-RANKS-DIFFER"),
    "guard": (settings, ({"guard": "warn"},), r"guard: auto on rank 0, 2 .*, warn on rank 1.*E-RANKS-DIFFER"),
    "a setting that is none": (settings, ({"deadlin_s": 3},), r"(rank 1 \(\w+\): )?deadlin_s: .*E-SETTING"),
    "plain text": (settings, ({"bind": "10.0.0.9"},), r"(rank 1 \(\w+\): )?bind: 10.0.0.9 .*E-PLAIN-TEXT"),
    "plan": (another_plan, (), r"plan: fp16 on rank 0 \(\w+\), auto on rank 1-2 \(\w+\).*E-RANKS-DIFFER"),
    "optimizer": (an_optimizer_on_one, (), r"optimizer: not given on rank 0 \(\w+\), given on rank 1-2.*E-RANKS-DIFFER"),
    "wrapper": (ddp_on_one, (), r"wrapper: DistributedDataParallel on rank 0 \(\w+\), none on rank 1-2.*E-RANKS-DIFFER"),
    "sync": (a_mistake_on_one, (), r"(rank 2 \(\w+\): )?sync: got 'never'.*E-SYNC-MODE"),
    "Python": (another_python, (), r"version of Python: 3.\d+ on rank 0, 2 \(\w+\), 3.99 on rank 1.*E-RANKS-DIFFER"),
    "protocol": (another_version, (), r"protocol of commlayer: \d+ on rank 0, 2 \(\w+\), \d+ on rank 1.*E-RANKS-DIFFER"),
}


@pytest.mark.parametrize("name", ALIKE)
def test_what_is_wrong_on_one_rank_is_a_line_on_all_of_them_at_once(name: str) -> None:
    act, args, line = ALIKE[name]
    for said, seconds in pool(WORLD).call(act, *args):
        assert re.match(rf"(InvalidInput|RecordError): {line}\]$", said), said
        assert "\n" not in said
        assert seconds < AT_ONCE_S


def absent(rank: int) -> tuple[str, float]:
    if rank == 1:
        return "nothing", 0.0
    return said_by(lambda: commlayer.attach(mlp(), config=quick(join_deadline_s=1.0)))


def test_a_rank_that_does_not_come_is_named_within_the_join_deadline() -> None:
    got = pool(WORLD).call(absent)
    pool(WORLD).kill()  # rank 1 counts one start less than the others
    for said, seconds in (got[0], got[2]):
        assert re.match(r"DeadlineExceeded: rank 1: start: .* 1 s\b.*E-DEADLINE", said), said
        assert seconds < AT_ONCE_S


@pytest.mark.parametrize(("store", "line"), [
    (True, r"DeadlineExceeded: rank 1: start: .* 1 s\b.*E-DEADLINE"),
    (False, "CommError: MASTER_ADDR 127.0.0.1: start: rank 0 .*E-COMM"),
], ids=["nobody comes", "no store"])
def test_who_has_no_group_yet_and_reaches_nobody_does_not_try_again(
        store: bool, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To tell the others of the error it would have to wait for them once more, as long as they may take to come."""
    assert not torch.distributed.is_initialized()
    made = torch.distributed.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    port = made.port
    if not store:
        del made  # what listened there listens no more
    for name, value in (rank_environment(0, 2, port) | {"LOCAL_WORLD_SIZE": "2"}).items():
        monkeypatch.setenv(name, value)
    said, seconds = said_by(lambda: commlayer.attach(mlp(), config=quick(join_deadline_s=1.0)))
    assert re.match(line, said), said
    assert seconds < AT_ONCE_S
    assert not torch.distributed.is_initialized()


HOSTS = [RankRow("a", "a", insecure=True, address="10.0.0.1"), RankRow("b", "b", insecure=True, address="10.0.0.2")]


@pytest.mark.parametrize(("rows", "line"), [
    (HOSTS, ""),
    ([HOSTS[0], HOSTS[1]._replace(insecure=False)], r"insecure: .*rank 1 \(b\); .* 2 .*COMMLAYER_INSECURE.*E-PLAIN-TEXT"),
    ([row._replace(insecure=False) for row in HOSTS], r"insecure: not set on rank 0-1 \(a, b\).*E-PLAIN-TEXT"),
    ([HOSTS[0]._replace(insecure=False)], ""),
    ([row._replace(insecure=False, keys=True) for row in HOSTS], ""),
    ([HOSTS[0], HOSTS[1]._replace(keys=True)], r"keys: not set on rank 0 \(a\); .*COMMLAYER_KEYS.*E-KEYS"),
    ([row._replace(address="127.0.0.1") for row in HOSTS], r"bind: .* 2 machines, .*MASTER_ADDR.*E-ADDRESS"),
    ([HOSTS[0]._replace(address="127.0.0.1"), HOSTS[1]], ""),
])
def test_several_machines_talk_in_plain_text_only_where_all_were_told_so(rows: list[RankRow], line: str) -> None:
    assert re.match(line + ("" if line else "$"), problem_of(rows, range(len(rows))))
    assert problem_of(rows, range(len(rows)), own_servers=False) == "", "`join` says where plain text may go"


@pytest.mark.parametrize(("machines", "agents", "expected"), [
    ("aaaa", [-1] * 4, 4), ("aabb", [-1] * 4, 2), ("abcd", [-1] * 4, 1), ("aabb", [0, 0, 1, 1], 2),
    ("aaaa", [0, 0, 1, 1], 2), ("aab", [0, 0, 1], -1), ("aaaabb", [-1] * 6, -2), ("abab", [-1] * 4, -1),
])
def test_a_node_is_what_shares_a_machine_and_an_agent(machines: str, agents: list[int], expected: int) -> None:
    """A negative number: it does not come out even, and that is said."""
    per_node, note = ranks_per_node([RankRow(m, m, agent) for m, agent in zip(machines, agents, strict=True)])
    assert per_node == abs(expected)
    assert bool(note) == (expected < 0)
    assert not note or f"nodes of {per_node}" in note


# ---- who one is

def under(changes: dict[str, str | None]) -> tuple[int, int, int]:
    """Rank, world and ranks per node of a job that starts with these variables of the environment."""
    before = dict(os.environ)
    for name, value in changes.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    try:
        with commlayer.attach(mlp(), config=quick()) as session:
            made = session.inspect.connection
            assert session.inspect.plan is not None
            return made.rank, made.world, session.inspect.plan.ranks_per_node
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
def test_a_process_group_says_who_one_is_and_one_machine_is_one_node(act: Callable[[int], Any]) -> None:
    assert pool(WORLD).call(act) == [(rank, WORLD, WORLD) for rank in range(WORLD)]


SLURM = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1"}


def test_slurm_says_who_one_is_where_it_says_where_ranks_meet() -> None:
    meeting = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    assert read_launch(SLURM | meeting)[:2] == (1, 2)
    assert read_launch(SLURM | meeting | {"RANK": "5", "WORLD_SIZE": "8"})[:2] == (5, 8), "torchrun under Slurm"
    assert read_launch({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"})[:2] == (0, 1)
    with pytest.raises(RecordError, match=r"Slurm .*1 of 2, .*MASTER_ADDR=.* SLURM_PROCID \[E-LAUNCH-ENVIRONMENT"):
        read_launch(SLURM)


# ---- some ranks of the world

def gradient(model: nn.Module, wrapped: Any, rank: int, step: int) -> torch.Tensor:
    model.zero_grad()
    x, y = data(rank, step)
    nn.functional.mse_loss(wrapped(x), y).backward()
    return torch.cat([p.grad.view(-1) for p in model.parameters() if p.grad is not None])


def plan_of(model: nn.Module, path: str) -> Any:
    if path == "service":
        return commlayer.compressors.identity()
    import msgspec

    made = planner.default_plan(job_of(model), codec="identity()", path="service", servers=1, ranks_per_node=1,
                                fuse_nbytes=2048, cut_nbytes=4096)
    buckets = tuple(msgspec.structs.replace(b, path=path) for b in made.buckets)
    return msgspec.structs.replace(made, buckets=buckets, servers=0)


def some_ranks(rank: int, how: str, path: str, addresses: list[str]) -> dict[str, Any]:
    """Ranks 1 and 2 train, and once more; rank 0 does not. What they got, and what it should be."""
    group = torch.distributed.new_group([1, 2])
    if rank == 0:
        return {}
    if rank == 2:  # a group that others know nothing of, so members are in unequal numbers of groups
        torch.distributed.new_group([2], use_local_synchronization=True)
    got = []
    for address in addresses:
        model, config = mlp(seed=rank), quick(join=address)
        if how == "module":
            session = commlayer.attach(model, **plan_or_codec(plan_of(model, path)), process_group=group, config=config)
            got.append(gradient(model, model, rank, 0))
            place = session.inspect.connection
            close: Callable[[], None] = session.close
        else:
            wrapped = DistributedDataParallel(model, process_group=group)
            if how == "ddp":
                session = commlayer.attach(wrapped, **plan_or_codec(plan_of(model, path)), config=config)
                got.append(gradient(model, wrapped, rank, 0))
                place, close = session.inspect.connection, session.close
            else:
                state = commlayer.HookState(**plan_or_codec(plan_of(model, path)), config=config)
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
    refused = said_by(lambda: commlayer.attach(mlp(), process_group=two, config=quick(join=address)))[0]
    session = commlayer.attach(mlp(), process_group=one, config=quick(join=address))
    world = session.world_size
    session.close()
    return world, refused


def test_a_device_mesh_of_one_dimension_is_a_process_group() -> None:
    with Servers(WORLD, 1) as servers:
        for world, refused in pool(WORLD).call(meshes, servers.address):
            assert world == WORLD
            assert re.search("process_group: got .*DeviceMesh.*E-PROCESS-GROUP", refused), refused


def outside(rank: int) -> str:
    group = torch.distributed.new_group([1, 2])
    return "" if rank else said_by(lambda: commlayer.attach(mlp(), process_group=group, config=quick()))[0]


def test_who_is_not_in_the_process_group_hears_so() -> None:
    assert re.match("InvalidInput: process_group: .*not in it.*E-PROCESS-GROUP", pool(WORLD).call(outside)[0])
