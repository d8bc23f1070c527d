"""Arguments, plans and models that attach() refuses: one line with a code and the names at fault, on every rank."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from msgspec import structs
from support.attached import Run, Setting, assert_refused, coordinators, data, loss_of, mlp, outcome, plan_of
from support.forward import Net
from support.rank_pool import Servers, pool, quick
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer import LocalSteps, records
from commlayer.errors import find_error_code
from commlayer.optim import OuterSGD
from commlayer.transport.protocol import SERVER_BASE, Header, Kind

WORLD = 2


class Row(NamedTuple):
    act: Callable[..., object]
    code: str
    names: tuple[str, ...]
    """Names and values that the error contains."""


def row(act: Callable[..., object], code: str, *names: str) -> Row:
    return Row(act, code, names)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))


class Lookahead:
    """Around an optimizer, without being one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


class WithGroups(Lookahead):
    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups


def made_in_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return mlp()


class CountsItself(torch.optim.SGD):
    taken = 0

    def step(self, closure: Any = None) -> Any:
        self.taken += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.taken
        return super().step(closure)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters())


def replaced(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = sgd(model)
    optimizer.step = lambda: None  # type: ignore[method-assign, assignment]
    return optimizer


def attach(model: nn.Module | None = None, optimizer: Callable[[nn.Module], Any] = lambda _: None, **how: Any) -> None:
    """Nothing of a refused call is kept: the model can be attached again."""
    model = model or mlp()
    try:
        commlayer.attach(model, optimizer(model), **how).close()
    except Exception:
        commlayer.attach(mlp()).close()
        raise


def forward(optimizer: Callable[[nn.Module], Any], **how: Any) -> None:
    attach(Net(), optimizer, **{"sync": "forward"} | how)


def with_buckets(**bucket: Any) -> Any:
    return plan_of(mlp(), bucket=bucket)


def without_a_bucket() -> Any:
    plan = plan_of(mlp())
    return structs.replace(plan, buckets=plan.buckets[:-1])


def weight(n: float) -> None:
    with commlayer.attach(mlp()) as session:
        session.weight(n)


def trace(steps: int) -> None:
    with commlayer.attach(mlp()) as session:
        session.inspect.trace("t.json", steps=steps)


ALONE: dict[str, Row] = {
    "setting": row(lambda: attach(config={"deadlin_s": 3}), "E-SETTING", "deadlin_s: ", "deadline_s?"),
    "drift": row(lambda: attach(config={"drift": "ignore"}), "E-SETTING", "drift: got 'ignore'"),
    "drift_steps": row(lambda: attach(config={"drift_steps": -2}), "E-SETTING", "drift_steps: got -2"),
    "many drift_steps": row(lambda: attach(config={"drift_steps": 1 << 17}), "E-SETTING", "drift_steps: got 131072"),
    "sync": row(lambda: attach(sync="never"), "E-SYNC-MODE", "sync: got 'never'"),
    "plan's type": row(lambda: attach(plan=17), "E-PLAN-NAME", "plan: got 17"),
    "another model's plan": row(lambda: attach(plan=plan_of(mlp(width=8))), "E-PLAN-REFUSED", "plan: ", "job "),
    "plan with a gap": row(lambda: attach(plan=without_a_bucket()), "E-PLAN-REFUSED", "0.weight: "),
    "plan's codec": row(lambda: attach(plan=with_buckets(codec="topq()")), "E-CODEC-NAME", "bucket 0: ", "'topq'"),
    "complex": row(lambda: attach(Complex()), "E-MODEL-UNSUPPORTED", "phase is complex64"),
    "lazy linear": row(lambda: attach(nn.Sequential(nn.LazyLinear(8))), "E-MODEL-UNSUPPORTED", "0.weight has no shape"),
    "lazy norm": row(lambda: attach(nn.Sequential(nn.LazyBatchNorm1d())), "E-MODEL-UNSUPPORTED", "0.weight has no shape"),
    "inference tensors": row(lambda: attach(made_in_inference_mode()), "E-MODEL-UNSUPPORTED", "0.weight", "inference_mode()"),
    "plain wrapper": row(lambda: attach(None, lambda m: Lookahead(sgd(m))), "E-ARGUMENT", "Lookahead", "no param_groups"),
    "no state": row(lambda: attach(None, lambda m: WithGroups(sgd(m))), "E-ARGUMENT", "WithGroups", "no state_dict"),
    "hook's setting": row(lambda: commlayer.HookState(config={"deadlin_s": 3}), "E-SETTING", "deadlin_s: "),
    "negative weight": row(lambda: weight(-1.0), "E-WEIGHT", "weight: got -1.0"),
    "weight nan": row(lambda: weight(float("nan")), "E-WEIGHT", "weight: got nan"),
    "weight inf": row(lambda: weight(float("inf")), "E-WEIGHT", "weight: got inf"),
    "trace alone": row(lambda: trace(3), "E-TRACE", "alone"),
    "trace of 0": row(lambda: trace(0), "E-TRACE", "steps: got 0"),
    "clip": row(lambda: forward(sgd, clip_grad_norm=-1.0), "E-CLIP", "clip_grad_norm", "-1.0"),
    "clip alone": row(lambda: attach(clip_grad_norm=1.0), "E-CLIP", "attach(model, optimizer, clip_grad_norm"),
    "outer lr": row(lambda: OuterSGD(lr=0.0), "E-OPTIM-ARGUMENT", "OuterSGD: lr is 0"),
    "outer lr nan": row(lambda: OuterSGD(lr=float("nan")), "E-OPTIM-ARGUMENT", "OuterSGD: lr is nan"),
    "outer momentum": row(lambda: OuterSGD(momentum=1.0), "E-OPTIM-ARGUMENT", "OuterSGD: momentum is 1"),
    "forward, no optimizer": row(lambda: forward(lambda m: None), "E-SYNC-FORWARD", "attach(model, optimizer"),
    "forward, lbfgs": row(lambda: forward(lbfgs), "E-SYNC-FORWARD", "LBFGS", "closure"),
    "forward, own step": row(lambda: forward(lambda m: CountsItself(m.parameters(), lr=0.1)), "E-SYNC-FORWARD",
                             "CountsItself"),
    "forward, graphs": row(lambda: forward(lambda m: torch.optim.Adam(m.parameters(), capturable=True)), "E-SYNC-FORWARD",
                           "Adam", "capturable"),
    "forward, replaced step": row(lambda: forward(replaced), "E-SYNC-FORWARD", "SGD.step"),
    "forward, no torch": row(lambda: forward(lambda m: object()), "E-SYNC-FORWARD", "object ", "torch.optim.Optimizer"),
    "forward, a part": row(lambda: forward(lambda m: torch.optim.SGD([m.scale], lr=0.1)), "E-SYNC-FORWARD", "10 ",
                           "words.weight"),
    "forward, sparse": row(lambda: attach(nn.Sequential(nn.Embedding(9, 4, sparse=True)), sgd, sync="forward"),
                           "E-SYNC-FORWARD", "0.weight"),
    "every=0": row(lambda: LocalSteps(0), "E-SYNC-EVERY", "every is 0"),
    "every=2.5": row(lambda: LocalSteps(2.5), "E-SYNC-EVERY", "every is 2.5"),
    "every, no optimizer": row(lambda: attach(sync=LocalSteps(4)), "E-SYNC-OPTIMIZER", "NoneType"),
    "updates, no optimizer": row(lambda: attach(sync=LocalSteps(1)), "E-SYNC-OPTIMIZER", "NoneType"),
    "every, lbfgs": row(lambda: attach(None, lbfgs, sync=LocalSteps(4)), "E-SYNC-OPTIMIZER", "LBFGS"),
    "overlap always": row(lambda: LocalSteps(4, overlap="always"), "E-SYNC-MODE", "'always'"),
    "fragments > every": row(lambda: LocalSteps(2, fragments=4), "E-SYNC-FRAGMENTS", "fragments is 4",
                             "every=2"),
    "fragments=3": row(lambda: LocalSteps(4, fragments=3), "E-SYNC-FRAGMENTS", "fragments is 3"),
    "fragments=0": row(lambda: LocalSteps(4, fragments=0), "E-SYNC-FRAGMENTS", "fragments is 0"),
}


@pytest.mark.parametrize("name", ALONE)
def test_invalid_arguments_are_named_in_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    act, code, names = ALONE[name]
    assert_refused(outcome(act), code, *names)


@pytest.mark.parametrize(("text", "name"), [
    ("", "JSON"), ("{", "JSON"), ("x", "JSON"), ("[]", "`list`"), ('{"job": 3}', "`$.job`"),
    ('{"job": "0", "buckets": [], "colour": 1}', "`colour`"),
])
def test_malformed_plan_file_is_named(text: str, name: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    assert_refused(outcome(lambda: attach(plan=path)), "E-PLAN-FILE", f"plan {path}: ", name)


def test_matching_plan_file_and_initialized_lazy_model_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(records.encode(plan_of(mlp())))
    with commlayer.attach(mlp(), plan=str(path)) as session:
        assert session.world_size == 1
    model = nn.Sequential(nn.LazyLinear(8))
    model(torch.ones(4, 5))
    with commlayer.attach(model) as session:
        assert session.world_size == 1


def sharded(how: str) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor import Shard, distribute_module, init_device_mesh

    model: Any = mlp()
    if how == "FSDP1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    elif how == "FSDP1 inside":
        model[0] = FullyShardedDataParallel(model[0], device_id=torch.device("cpu"))
    elif how == "all ranks":
        fully_shard(model)
    elif how == "HSDP":
        fully_shard(model, mesh=init_device_mesh("cpu", (WORLD, 1), mesh_dim_names=("site", "shard")))
    elif how == "dimension":
        fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)), shard_placement_fn=lambda p: Shard(p.dim() - 1))
    else:
        distribute_module(model[0], init_device_mesh("cpu", (WORLD,)))
    commlayer.attach(model, config=quick())


def hooked() -> nn.Module:
    model = DistributedDataParallel(mlp(), find_unused_parameters=True)
    model.register_comm_hook(None, commlayer.comm_hook)
    return model


def served(address: str, optimizer: Callable[[nn.Module], Any] = sgd, **how: Any) -> None:
    model = mlp()
    commlayer.attach(model, optimizer(model), config=quick(join=address), **how)


def many(**how: Any) -> Any:
    return plan_of(mlp(), "int4()", **how)


RANKS: dict[str, Row] = {
    "models": row(lambda rank, _: commlayer.attach(mlp(width=8 + rank), config=quick()), "E-RANKS-DIFFER",
                  "(8, 12) on rank 0 ", "(9, 12) on rank 1 "),
    "no plan file": row(lambda rank, _: commlayer.attach(mlp(), plan="elsewhere.json" if rank else "missing.json",
                                                         config=quick()),
                        "E-PLAN-FILE", "plan missing.json"),  # on rank 1 no file is looked for
    "other nodes": row(lambda _, __: commlayer.attach(mlp(), plan=plan_of(mlp(), ranks_per_node=2), config=quick()),
                       "E-PLAN-REFUSED", "plan: ", "2 ranks per node", " 1: "),
    "ranks per node": row(lambda _, __: commlayer.attach(mlp(), config=quick(ranks_per_node=3)), "E-PROCESS-GROUP",
                          "ranks_per_node 3 ", "2 ranks"),
    "plan of local steps": row(lambda _, a: served(a, lambda m: None, plan=many(local_steps=8)), "E-SYNC-OPTIMIZER"),
    "every=4": row(lambda _, a: served(a, plan=many(local_steps=8), sync=LocalSteps(4)), "E-SYNC-PLAN", "every=4", "8"),
    "stale and updates": row(lambda _, a: served(a, plan=many(bucket={"stale": True}), sync=LocalSteps(1)), "E-SYNC-MODE"),
    "every": row(lambda rank, a: served(a, compression="int4", sync=LocalSteps(2 + rank)), "E-RANKS-DIFFER", "every=2",
                 "rank 0"),
    "hooked": row(lambda _, __: attach(hooked(), sgd, sync=LocalSteps(4)), "E-DDP-UNSUPPORTED", "communication hook"),
    "forward, DDP": row(lambda _, a: attach(DistributedDataParallel(mlp()), sgd, plan=many(), sync="forward",
                                            config=quick(join=a)), "E-SYNC-FORWARD", "DistributedDataParallel"),
    "forward, local steps": row(lambda _, a: served(a, plan=many(local_steps=4), sync="forward"), "E-SYNC-PLAN",
                                "4 local steps", "sync='forward'"),
    "forward, stale": row(lambda _, a: served(a, plan=many(bucket={"stale": True}), sync="forward"), "E-SYNC-PLAN",
                          "late results", "sync='forward'"),
}


def refused(rank: int, address: str) -> dict[str, str]:
    """All rows, one after the other, and changes of plan in running jobs."""
    lines = {name: outcome(lambda act=act: act(rank, address)) for name, (act, _, _) in RANKS.items()}
    model = mlp()
    with commlayer.attach(model, sgd(model), compression="int4", sync=LocalSteps(2),
                          config=quick(join=address)) as session:
        session.switch(many())
        assert session.inspect.plan is not None
        assert session.inspect.plan.local_steps == 2, "the script's value stays"
        return lines | {"switch": outcome(lambda: session.switch(many(local_steps=8)))}


def refused_by_forward(rank: int, address: str) -> list[str]:
    model = mlp()
    with commlayer.attach(model, sgd(model), plan=many(), sync="forward", config=quick(join=address)) as session:
        lines = [outcome(lambda plan=plan: session.switch(plan))
                 for plan in (many(local_steps=4), many(bucket={"stale": True}))]
        model(data(rank, 0)[0]).sum().backward()
        return lines


def test_inconsistent_arguments_of_ranks_are_refused_on_each_rank() -> None:
    with Servers(WORLD, 1) as servers:
        for lines in pool(WORLD).call(refused, servers.address):
            assert_refused(lines.pop("switch"), "E-SYNC-PLAN", "every=2", "8")
            for name, line in lines.items():
                assert_refused(line, RANKS[name].code, *RANKS[name].names)
    with Servers(WORLD, 1) as servers:
        for local, stale in pool(WORLD).call(refused_by_forward, servers.address):
            assert_refused(local, "E-SYNC-PLAN", "4 local steps", "sync='forward'")
            assert_refused(stale, "E-SYNC-PLAN", "late results", "sync='forward'")


def sharding(rank: int, how: str) -> str:
    return outcome(lambda: sharded(how))


@pytest.mark.commit(1)
@pytest.mark.parametrize(("how", "name"), [
    ("FSDP1", "the model is under FullyShardedDataParallel"), ("FSDP1 inside", "0 is under FullyShardedDataParallel"),
    ("all ranks", "all 2 ranks"), ("HSDP", "mesh of 2 dimensions"), ("dimension", "0.weight has placements"),
    ("tensor parallelism", "0.weight has placements"),
])
def test_unsupported_sharding_is_refused_by_name(how: str, name: str) -> None:
    for line in pool(WORLD).call(sharding, how):
        assert_refused(line, "E-SHARDED", name)


def twice(rank: int) -> list[str]:
    model = mlp()
    ddp = DistributedDataParallel(model)
    with commlayer.attach(model, config=quick()):
        lines = [outcome(lambda m=m: commlayer.attach(m, config=quick())) for m in (model, ddp, nn.Sequential(model))]
        lines.append(outcome(lambda: ddp(data(0, 0)[0])))
    with commlayer.attach(ddp, config=quick()):
        lines += [outcome(lambda m=m: commlayer.attach(m, config=quick())) for m in (model, ddp)]
    commlayer.attach(model, config=quick()).close()
    return lines


def test_model_is_attached_once_and_again_after_close() -> None:
    for lines in pool(WORLD).call(twice):
        assert [find_error_code(line) for line in lines] == ["E-ATTACHED-TWICE"] * 6


def join(rank: int, address: str) -> str:
    return outcome(lambda: commlayer.attach(mlp(), plan=plan_of(mlp()), config=quick(join=address)))


def test_servers_refuse_a_different_number_of_workers() -> None:
    with Servers(3, 1) as servers:
        for rank, line in enumerate(pool(WORLD).call(join, servers.address)):
            assert_refused(line, "E-WORKERS", f"Refused: coordinator {servers.address}: ", f"worker {rank} on ", " 2 ", " 3")


def test_plan_for_more_servers_than_the_job_has_is_refused() -> None:
    with Servers(WORLD, 0) as servers:
        for line in pool(WORLD).call(join, servers.address):
            assert_refused(line, "E-PLAN-REFUSED", "plan: ", " 1 servers", " 0: ", "--no-server")


def weightless(rank: int, setting: Setting) -> list[str]:
    """On both ranks; then one more step, which must end, too."""
    run, model = Run(rank, WORLD, setting), mlp()
    wrapped = run.wrap(model)
    run.weight(0)
    lines = [outcome(lambda: loss_of(run, wrapped, 0).backward()), outcome(lambda: wrapped(data(0, 0)[0]).sum().backward())]
    run.close()
    return lines


@pytest.mark.parametrize("setting", [Setting("module"), Setting("ddp"),
                                     Setting("module", servers=0, plan="auto", ranks_per_node=2)],
                         ids=["service", "ddp", "all-reduce"])
def test_zero_weight_on_every_rank_raises_on_every_rank(setting: Setting) -> None:
    with coordinators(1, WORLD, setting.servers, deadline_s=2.0) as jobs:
        setting = setting._replace(addresses=tuple(job.address for job in jobs), fields=(("deadline_s", 4.0),))
        for first, again in pool(WORLD).call(weightless, setting):
            assert_refused(first, "E-WEIGHT", "InvalidInput: step 0: ")
            assert again != "", "a step after an error must not pass as if all were well"


def flooded(rank: int, address: str) -> str:
    model, end_s, line = mlp(), time.monotonic() + 20.0, ""
    session = commlayer.attach(model, plan=plan_of(model), config=quick(join=address, dead_after_s=1.5))
    while not line and time.monotonic() < end_s:
        line = outcome(lambda: model(data(rank, 0)[0]).sum().backward())
    session.close()
    return line


def test_server_that_exceeds_the_plan_is_disconnected() -> None:
    """As soon as it has sent a sum, because from then on its workers check sizes against the plan."""
    pool(WORLD).ready(__name__)
    with Servers(WORLD, 1, dead_after_s=1.5) as servers, ThreadPoolExecutor(1) as thread:
        lines = thread.submit(pool(WORLD).call, flooded, servers.address)
        while not lines.done():
            time.sleep(0.01)
            if servers.has_results():
                for rank in range(WORLD):
                    servers.send(rank, Header(Kind.RESULT, 9, sender=SERVER_BASE), bytes(20 << 20))
                break
        for line in lines.result():
            assert_refused(line, "E-FRAME", "server 0: ")
            assert re.search(r"\b16\d{6}\b", line)
