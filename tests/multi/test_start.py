"""Job start: ranks that were started, loaded or configured differently are named on all; ranks, nodes and process groups.

Real ranks.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from support.attached import assert_refused, data, mlp, outcome, parameters, plan_of, plan_or_codec, same, sync_of, train_step
from support.rank_pool import Servers, pool, quick, rank_environment
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.cluster.calls import messages
from commlayer.config import read_launch
from commlayer.engine.model.optimizer_settings import differences, read_optimizer_settings
from commlayer.engine.start.rendezvous import RankRow, find_mismatch, ranks_per_node

WORLD = 3
AT_ONCE_S = 45.0
"""Far below any deadline of a rank, far above the time on a loaded machine."""


def timed(act: Callable[[], Any]) -> tuple[str, float]:
    """What act() raised, and how long it took."""
    begin_s = time.monotonic()
    line = outcome(lambda: act().close())
    return line, time.monotonic() - begin_s


def attach(rank: int, **how: Any) -> Any:
    return commlayer.attach(mlp(), config=quick() | how.pop("config", {}), **how)


def setting(rank: int, name: str, value: Any) -> Any:
    """Rank 1 has it."""
    return attach(rank, config={name: value} if rank == 1 else {})


def optimizer_on_some(rank: int) -> Any:
    model = mlp()
    return commlayer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1) if rank else None, config=quick())


def clipped_on_some(rank: int) -> Any:
    model = mlp()
    return commlayer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), clip_grad_norm=None if rank else 0.5,
                            config=quick())


def other_version(rank: int) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages, "PROTOCOL", messages.PROTOCOL + (rank == 1))
        return attach(rank)


def other_python(rank: int) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr("platform.python_version_tuple", lambda: ("3", "99", "0"))
        return attach(rank)


def other_model(rank: int, change: Callable[[nn.Sequential], Any]) -> Any:
    """On rank 1."""
    model = mlp()
    if rank == 1:
        change(model)
    return commlayer.attach(model, config=quick())


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
    "clip_grad_norm": (clipped_on_some, "E-RANKS-DIFFER",
                       ("clip_grad_norm: 0.5 on rank 0 (", "not given on rank 1-2 (")),
    "grad_scaler": (lambda rank: attach(rank, grad_scaler=torch.amp.GradScaler("cpu", enabled=rank < 2)), "E-RANKS-DIFFER",
                    ("grad_scaler: scale x 2 every 2000 steps, x 0.5 after inf or NaN on rank 0-1 (", "disabled on rank 2 (")),
    "loss scale": (lambda rank: attach(rank, grad_scaler=torch.amp.GradScaler("cpu", init_scale=2.0 ** rank)),
                   "E-RANKS-DIFFER", ("loss scale of the GradScaler: 1 on rank 0 (", "4 on rank 2 (")),
    "sync": (lambda rank: attach(rank, sync="never" if rank == 2 else "step"), "E-SYNC-MODE", ("sync: got 'never'",)),
    "Python": (other_python, "E-RANKS-DIFFER", ("version of Python: 3.", "on rank 0, 2 (", "3.99 on rank 1")),
    "a layer": (lambda rank: other_model(rank, lambda model: model.append(nn.Linear(3, 3))), "E-RANKS-DIFFER",
                ("model: 6 tensors with 2283 elements on rank 0, 2 (", "8 tensors with 2295 elements on rank 1 (",
                 "tensor 6: none on rank 0, 2 (", "5.weight of shape (3, 3) on rank 1 (")),
    "a dtype": (lambda rank: other_model(rank, lambda model: model[2].double()), "E-RANKS-DIFFER",
                ("model: 6 tensors with 2283 elements on rank 0-2 (", "tensor 2: 2.weight of shape (40, 40) on rank 0, 2 (",
                 "2.weight of shape (40, 40) and dtype float64 on rank 1 (")),
    "protocol": (other_version, "E-RANKS-DIFFER", ("protocol of commlayer: ", "on rank 0, 2 (", "on rank 1")),
}


def started(rank: int, name: str) -> tuple[str, float]:
    return timed(lambda: ROWS[name][0](rank))


@pytest.mark.commit(9)
@pytest.mark.parametrize("name", ROWS)
def test_error_on_one_rank_fails_all_ranks_immediately(name: str) -> None:
    _, code, names = ROWS[name]
    for line, elapsed_s in pool(WORLD).call(started, name):
        assert_refused(line, code, *names)
        assert elapsed_s < AT_ONCE_S


def absent(rank: int) -> tuple[str, float]:
    return ("", 0.0) if rank == 1 else timed(lambda: commlayer.attach(mlp(), config=quick(join_deadline_s=1.0)))


def test_missing_rank_is_named_within_the_join_deadline() -> None:
    results = pool(WORLD).call(absent)
    pool(WORLD).kill()  # rank 1 counts one start less than the others
    for line, elapsed_s in (results[0], results[2]):
        assert_refused(line, "E-DEADLINE", "DeadlineExceeded: rank 1: start: ", " 1 s")
        assert elapsed_s < AT_ONCE_S


@pytest.mark.parametrize(("store", "code", "name"), [
    (True, "E-DEADLINE", "DeadlineExceeded: rank 1: start: "),
    (False, "E-COMM", "CommError: MASTER_ADDR 127.0.0.1: start: rank 0 "),
], ids=["no other rank", "no store"])
def test_rank_that_reaches_no_peer_before_the_group_exists_fails_once(
        store: bool, code: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To send the error to the others, the rank would have to wait for them again."""
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
def test_machines_use_plain_text_only_if_all_ranks_allow_it(
    rows: list[RankRow], code: str, names: tuple[str, ...],
) -> None:
    line = find_mismatch(rows, range(len(rows)))
    assert bool(line) == bool(code)
    assert not code or assert_refused(line, code, *names) is None
    assert find_mismatch(rows, range(len(rows)), own_servers=False) == "", "`join` decides about plain text"


@pytest.mark.parametrize(("machines", "agents", "expected"), [
    ("aaaa", [-1] * 4, 4), ("aabb", [-1] * 4, 2), ("abcd", [-1] * 4, 1), ("aabb", [0, 0, 1, 1], 2),
    ("aaaa", [0, 0, 1, 1], 2), ("aab", [0, 0, 1], -1), ("aaaabb", [-1] * 6, -2), ("abab", [-1] * 4, -1),
])
def test_node_is_the_ranks_of_one_machine_and_agent(machines: str, agents: list[int], expected: int) -> None:
    """A negative number: nodes are uneven, which is logged."""
    per_node, note = ranks_per_node([RankRow(m, m, agent) for m, agent in zip(machines, agents, strict=True)])
    assert per_node == abs(expected)
    assert bool(note) == (expected < 0)
    assert not note or f"nodes of {per_node}" in note


def under(changes: dict[str, str | None]) -> tuple[int, int, int]:
    """Rank, world and ranks per node of a job that starts with these variables of the environment."""
    before = dict(os.environ)
    for name, value in changes.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    try:
        with commlayer.attach(mlp(), config=quick()) as session:
            context = session.inspect.context
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


def gradient(model: nn.Module, wrapped: Any, rank: int, step: int) -> torch.Tensor:
    model.zero_grad()
    x, y = data(rank, step)
    nn.functional.mse_loss(wrapped(x), y).backward()
    return torch.cat([p.grad.view(-1) for p in model.parameters() if p.grad is not None])


def some_ranks(rank: int, how: str, path: str, addresses: list[str]) -> dict[str, Any]:
    """Ranks 1 and 2 train, and once more; rank 0 does not. Returns their averages and the expected ones."""
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
            place = session.inspect.context
            close: Callable[[], None] = session.close
        else:
            wrapped = DistributedDataParallel(model, process_group=group)
            if how == "ddp":
                session = commlayer.attach(wrapped, **plan_or_codec(plan_of(model, path=path)), config=config)
                got.append(gradient(model, wrapped, rank, 0))
                place, close = session.inspect.context, session.close
            else:
                state = commlayer.HookState(**plan_or_codec(plan_of(model, path=path)), config=config)
                wrapped.register_comm_hook(state, commlayer.comm_hook)
                got.append(gradient(model, wrapped, rank, 0))
                place, close = state.context, state.context.close
        who = place.rank, place.world
        close()
    alone = mlp(seed=1)
    return {"got": got, "mean": (gradient(alone, alone, 1, 0) + gradient(alone, alone, 2, 0)) / 2, "who": who}


STAGED = "encode@cpu all.alltoall decode@cpu encode@cpu all.allgather decode@cpu"


@pytest.mark.commit(2)
@pytest.mark.parametrize(("how", "path"), [
    ("module", "service"), ("module", "allreduce"), ("module", STAGED), ("ddp", "service"), ("hook", "allreduce"),
], ids=["service", "all-reduce", "staged", "ddp", "hook"])
def test_averages_are_over_the_process_group(how: str, path: str) -> None:
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


def test_one_dimensional_device_mesh_is_a_process_group() -> None:
    with Servers(WORLD, 1) as servers:
        for world, refused in pool(WORLD).call(meshes, servers.address):
            assert world == WORLD
            assert_refused(refused, "E-PROCESS-GROUP", "process_group: got ", "DeviceMesh")


def outside(rank: int) -> str:
    group = torch.distributed.new_group([1, 2])
    return "" if rank else outcome(lambda: commlayer.attach(mlp(), process_group=group, config=quick()))


def test_rank_outside_the_process_group_is_refused() -> None:
    assert_refused(pool(WORLD).call(outside)[0], "E-PROCESS-GROUP", "InvalidInput: process_group: ", "not in it")


PAIR = 2


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    weights = [*model.parameters()]
    if kind == "sgd":
        return torch.optim.SGD(weights, lr=0.1)
    if kind == "decayed":
        return torch.optim.AdamW(weights, lr=0.01, weight_decay=0.5)
    if kind == "grouped":
        return torch.optim.AdamW([{"params": weights[:2], "lr": 0.02}, {"params": weights[2:]}], lr=0.01)
    if kind == "tensor lr":
        return torch.optim.AdamW(weights, lr=torch.tensor(0.01), foreach=False)
    stepped = weights[::2] if kind == "half" else weights[::-1] if kind == "reversed" else weights
    return torch.optim.AdamW(stepped, lr=0.02 if kind == "faster" else 0.01)


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [t.clone() for p in model.parameters() for t in optimizer.state[p].values() if isinstance(t, torch.Tensor)]


class Result(NamedTuple):
    error: str
    decisions: list[str]
    weights: list[torch.Tensor]
    moments: list[torch.Tensor]
    rate: float
    """The first group's learning rate at the end."""


def run(rank: int, how: str, what: str, drift: str, kind: str = "adamw") -> Result:
    """Rank 1 has an optimizer of another kind. Or `what` is loaded or set by some ranks, after attach() or from step 5 on."""
    model, other = mlp(), mlp()
    if kind == "frozen" and rank:
        next(model.parameters()).requires_grad_(False)
    optimizer, trained = optimizer_of(model, kind if rank else "adamw"), optimizer_of(other, "adamw")
    for number in range(3):
        train_step(other, trained, rank if what == "own state" else 0, number)
    wrapped: Any = DistributedDataParallel(model) if how == "ddp" else model
    config = quick(ranks_per_node=PAIR, drift=drift, **({"drift_steps": 2} if what == "rate" else {}))
    session: Any = None

    def train() -> None:
        nonlocal session
        session = commlayer.attach(wrapped, optimizer, config=config, sync=sync_of(every=4) if how == "local" else None)
        if what == "lr" and rank:
            optimizer.param_groups[0]["lr"] = 0.02
        elif what == "weights" and rank == 0:
            model.load_state_dict(other.state_dict())
        elif what == "own state" or (what == "state" and rank == 0):
            optimizer.load_state_dict(copy.deepcopy(trained.state_dict()))
        for number in range(14 if what == "rate" else 8):
            if what == "rate" and rank and number > 4:
                optimizer.param_groups[0]["lr"] = 0.05
            train_step(wrapped, optimizer, rank, number)

    error = outcome(train)
    decisions = session.inspect.decisions() if session else []
    if session:
        session.close()
    return Result(error, decisions, parameters(model), moments(model, optimizer), optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize(("how", "kind", "name", "values"), [
    ("module", "sgd", "optimizer", ("AdamW", "SGD")),
    ("ddp", "faster", "lr of the optimizer", ("0.01", "0.02")),  # in the first backward pass
    ("module", "grouped", "number of the optimizer's groups", ("1", "2")),
    ("module", "reversed", "parameters of the optimizer", ("6", "6")), ("module", "frozen", "model", ("6", "5")),
    *(pytest.param("module", *row, marks=pytest.mark.nightly) for row in (
        ("faster", "lr of the optimizer", ("0.01", "0.02")), ("decayed", "weight_decay of the optimizer", ("0.01", "0.5")),
        ("half", "parameters of the optimizer", ("6", "3")))),
])
def test_different_optimizers_are_named_on_all_ranks(how: str, kind: str, name: str, values: tuple[str, str]) -> None:
    lines = [result.error for result in pool(PAIR).call(run, how, "", "resync", kind)]
    assert lines[0] == lines[1]
    assert_refused(lines[0], "E-RANKS-DIFFER", f": {name}: {values[0]} ", f"{values[1]} ", "on rank 0 (", "on rank 1 (")


@pytest.mark.commit(1)
@pytest.mark.parametrize("kind", ["sgd", "faster", "half"])
def test_drift_warn_trains_with_different_optimizers(kind: str) -> None:
    for result in pool(PAIR).call(run, "module", "", "warn", kind):
        assert result.error == ""
        assert any("on rank 0 (" in line and 'drift="warn"' in line for line in result.decisions)


def test_tensor_learning_rate_is_no_difference() -> None:
    assert [result[:2] for result in pool(PAIR).call(run, "module", "", "end", "tensor lr")] == [("", [])] * PAIR


STATES = "the optimizer's state of 0.weight, 0.bias, 2.weight and 3 more differs on rank 1"


@pytest.mark.commit(4)
@pytest.mark.parametrize(("how", "what", "drift", "named"), [
    ("module", "state", "resync", STATES), ("module", "nothing", "end", ""), ("module", "state", "end", STATES),
    ("module", "own state", "resync", STATES), ("ddp", "state", "resync", STATES), ("local", "state", "resync", STATES),
    ("module", "lr", "resync", "lr of the optimizer is 0.01 on rank 0, 0.02 on rank 1"),
    ("module", "weights", "resync", "weights of 0.weight, 0.bias, 2.weight and 3 more"),
    ("local", "own state", "end", ""),  # each rank keeps its own moments
    ("ddp", "state", "end", STATES), ("module", "state", "warn", STATES), ("ddp", "nothing", "end", ""),
    ("local", "nothing", "end", ""),
])
def test_state_loaded_by_some_ranks_is_named_and_handled_as_configured(how: str, what: str, drift: str, named: str) -> None:
    results = pool(PAIR).call(run, how, what, drift)
    steps = [[float(t) for t in result.moments if t.numel() == 1] for result in results]
    for result, counted in zip(results, steps, strict=True):
        lines = [*result.decisions, *filter(None, [result.error])]
        assert all(named in line and "\n" not in line for line in lines)
        assert bool(lines) >= bool(named)
        if named and drift == "end":
            assert_refused(result.error, "E-REPLICAS")
        else:
            assert result.error == ""
        if drift == "resync":
            assert len(result.decisions) == 1
            assert result.rate == 0.01
            assert counted == [8.0 if what in ("lr", "weights") else 11.0] * 6
    if drift == "warn":
        assert steps[0] != steps[1], "states stay as they are"
    elif drift == "resync" and how != "local":
        assert same(results[0].moments, results[1].moments)
        assert same(results[0].weights, results[1].weights)


@pytest.mark.commit(1)
@pytest.mark.parametrize(("drift", "ends"), [("resync", True), ("end", True), ("warn", False)])
def test_learning_rate_changed_repeatedly_on_one_rank_is_named(drift: str, ends: bool) -> None:
    named = "lr of the optimizer is 0.01 on rank 0, 0.05 on rank 1"
    for result in pool(PAIR).call(run, "module", "rate", drift):
        if ends:
            assert_refused(result.error, "E-REPLICAS", named)
        else:
            assert result.error == ""
        assert len([line for line in result.decisions if named in line]) == (drift != "end")


class Adaptive(torch.optim.SGD):
    """Adapts values in its groups, as Prodigy does with `d` and ScheduleFree with `k`, `weight_sum` and `train_mode`."""

    def __init__(self, params: Any, lr: float = 1.0, d0: float = 1e-6, **rest: Any) -> None:
        super().__init__(params, lr=lr, **rest)
        for group in self.param_groups:
            group.update(d0=d0, d=d0, k=0, train_mode=False)


def test_settings_compare_by_value_without_adaptive_ones() -> None:
    model = mlp()
    one, other = (read_optimizer_settings(optimizer_of(model, kind), model.named_parameters())
                  for kind in ("adamw", "tensor lr"))
    assert one == other
    assert read_optimizer_settings(None, model.named_parameters()) == {}
    assert differences([one, {**other, "lr of the optimizer": "0.5"}]) == {"lr of the optimizer": ["0.01", "0.5"]}
    empty = torch.optim.AdamW([{"params": [*model.parameters()]}, {"params": [], "weight_decay": 0.0}])  # as a Trainer of LoRA
    assert read_optimizer_settings(empty, model.named_parameters())["parameters of the optimizer's group 1"] == "none"
    fresh, adapted = (Adaptive(model.parameters(), momentum=0.9) for _ in range(2))
    adapted.param_groups[0].update(d=0.5, k=7, train_mode=True)
    before, after = (read_optimizer_settings(each, model.named_parameters()) for each in (fresh, adapted))
    assert before == after
    assert {"lr of the optimizer", "d0 of the optimizer", "momentum of the optimizer"} <= before.keys()
    adapted.param_groups[0].update(d0=1e-5, momentum=0.8)
    assert differences([before, read_optimizer_settings(adapted, model.named_parameters())]).keys() == {
        "d0 of the optimizer", "momentum of the optimizer"}
