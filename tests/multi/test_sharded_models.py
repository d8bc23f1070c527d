"""FSDP2 inside of each site, averages across sites: as one FSDP2 job of all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from msgspec import structs
from support.attached import assert_refused, coordinators, data, outcome, plan_of
from support.rank_pool import pool, quick
from torch import nn

import commlayer
from commlayer.engine.model.model_tensors import describe_model
from commlayer.errors import StepAbandoned
from commlayer.planner.shards import Shards
from commlayer.records import Plan

SITES, RANKS, STEPS = 2, 2, 4
WORLD = SITES * RANKS


class Run:
    """The environment of a script: one FSDP2 job of all ranks, or commlayer between sites of two ranks."""

    def __init__(self, rank: int, address: str, **how: Any) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (SITES, RANKS), mesh_dim_names=("site", "shard"))
        self.rank, self.address, self.how = rank, address, how
        self.site, self.mesh = rank // RANKS, mesh["shard"] if address else mesh
        """In one job, the mesh sums inside of each site first (HSDP), so that all sums have the same order."""
        self.session: Any = None

    def shard(self, model: nn.Module, **how: Any) -> Any:
        from torch.distributed.fsdp import fully_shard

        for layer in model.children():
            if any(p.requires_grad for p in layer.parameters()):
                fully_shard(layer, mesh=self.mesh, **how)
        return fully_shard(model, mesh=self.mesh, **how)

    @contextlib.contextmanager
    def attached(self, model: nn.Module, optimizer: Any = None, **how: Any) -> Iterator[None]:
        if not self.address:
            yield
            return
        how = {"compression": "identity()", "config": quick(join=self.address)} | self.how | how
        with commlayer.attach(model, optimizer, **how) as self.session:
            yield


def layers(*sizes: int) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*[layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.Tanh())][:-1])


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: t.full_tensor() if hasattr(t, "full_tensor") else t.detach().clone() for name, t in named}


def loss(model: Any, rank: int, step: int) -> torch.Tensor:
    x, y = data(rank, step)
    return nn.functional.mse_loss(model(x), y)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def trained(
    run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int = STEPS, before_step: Callable[[], Any] = int,
    **how: Any,
) -> dict[str, torch.Tensor]:
    with run.attached(model, optimizer, **how):
        for step in range(steps):
            optimizer.zero_grad()
            loss(model, run.rank, step).backward()
            before_step()
            optimizer.step()
    return whole(model)


def plain(run: Run, make: Callable[[nn.Module], torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    model = run.shard(layers(12, 40, 7, 3))
    return trained(run, model, make(model))


def with_sgd(run: Run) -> dict[str, torch.Tensor]:
    return plain(run, sgd)


def with_adamw(run: Run) -> dict[str, torch.Tensor]:
    return plain(run, adamw)


def empty_shards(run: Run) -> dict[str, torch.Tensor]:
    """Shards of 3 and 2 rows, and of 1 and none."""
    model = run.shard(layers(12, 5, 1, 3))
    return trained(run, model, adamw(model))


def root_only(run: Run) -> dict[str, torch.Tensor]:
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(layers(12, 9, 3), mesh=run.mesh)
    return trained(run, model, adamw(model))


def unequal_start(run: Run) -> dict[str, torch.Tensor]:
    """All sites begin with the weights of the first one."""
    model = layers(12, 5, 1, 3)
    if run.address and run.site:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1.0)
    model = run.shard(model)
    return trained(run, model, adamw(model))


def mixed_precision(run: Run) -> dict[str, torch.Tensor]:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    model = run.shard(layers(12, 40, 3), mp_policy=policy)
    return trained(run, model, adamw(model))


def cpu_offload(run: Run) -> dict[str, torch.Tensor]:
    from torch.distributed.fsdp import CPUOffloadPolicy

    model = run.shard(layers(12, 40, 3), offload_policy=CPUOffloadPolicy(pin_memory=False))
    return trained(run, model, adamw(model))


def clipped(run: Run) -> dict[str, torch.Tensor]:
    model = run.shard(layers(12, 40, 3))
    return trained(run, model, sgd(model), before_step=lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.05))


def clipped_by_attach(run: Run) -> dict[str, torch.Tensor]:
    model = run.shard(layers(12, 40, 3))
    if run.address:
        return trained(run, model, sgd(model), clip_grad_norm=0.05)
    return trained(run, model, sgd(model), before_step=lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.05))


def accumulated(run: Run) -> dict[str, torch.Tensor]:
    """By FSDP's own switches."""
    model = run.shard(layers(12, 40, 3))
    optimizer = sgd(model)
    with run.attached(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            for part in range(3):
                model.set_requires_gradient_sync(part == 2)
                model.set_is_last_backward(part == 2)
                loss(model, run.rank, 3 * step + part).backward()
            optimizer.step()
    return whole(model)


def accumulated_in_site(run: Run) -> dict[str, torch.Tensor]:
    """Inside no_sync(), or with set_requires_all_reduce(False), each pass sums in the site, and the last one across sites."""
    model = run.shard(layers(12, 40, 3))
    optimizer = sgd(model)
    with run.attached(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            for part in range(3):
                model.set_requires_all_reduce(part == 2)
                quiet = step % 2 and part < 2 and run.address
                with run.session.no_sync() if quiet else contextlib.nullcontext():
                    loss(model, run.rank, 3 * step + part).backward()
            optimizer.step()
        assert not run.address or run.session.metrics()["exchanges"] == STEPS
    return whole(model)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.words, self.body, self.out = nn.Embedding(11, 6), nn.Linear(6, 6), nn.Linear(6, 11, bias=False)
        self.out.weight = self.words.weight
        self.unused = nn.Linear(4, 4)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = (x[:, :4].abs() * 10).long() % 11
        return self.out(self.frozen(torch.tanh(self.body(self.words(words))))).mean(1)[:, :3]


def tied_and_unused(run: Run) -> dict[str, torch.Tensor]:
    from torch.distributed.fsdp import fully_shard

    model = Tied()
    for layer in (model.body, model.unused):
        fully_shard(layer, mesh=run.mesh)
    fully_shard(model, mesh=run.mesh)
    return trained(run, model, adamw(model))


class Branches(nn.Module):
    """Site 1 uses a layer of which its second rank has no elements."""

    def __init__(self, site: int, *, zero: bool) -> None:
        super().__init__()
        self.site, self.zero, self.first, self.second = site, zero, layers(12, 3), layers(12, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.site or not self.zero:
            return self.first(x) + self.second(x) * (1.0 if self.site else 0.0)
        return self.first(x)


def used_in_one_site(run: Run) -> dict[str, torch.Tensor]:
    model = run.shard(Branches(run.site, zero=bool(run.address)))
    return trained(run, model, adamw(model), before_step=lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))


def scaled(run: Run) -> dict[str, torch.Tensor]:
    """Infinities on one rank skip the step on all."""
    model = run.shard(layers(12, 40, 3))
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=1024.0)
    with run.attached(model, optimizer, grad_scaler=scaler):
        for step in range(STEPS):
            optimizer.zero_grad()
            factor = float("inf") if (run.rank, step) == (1, 2) else 1.0
            scaler.scale(loss(model, run.rank, step) * factor).backward()
            scaler.step(optimizer)
            scaler.update()
    return whole(model) | {"scale": torch.tensor(scaler.get_scale())}


def spoil(p: Any) -> None:
    p.grad.to_local().fill_(float("nan"))


def not_finite(run: Run) -> dict[str, torch.Tensor]:
    """NaN in one shard of one rank: all ranks drop the step."""
    model = run.shard(layers(12, 40, 3))
    optimizer = sgd(model)
    with run.attached(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            if step != 2 or run.address:
                spoilt = (run.rank, step) == (1, 2)
                handle = model[2].bias.register_post_accumulate_grad_hook(spoil) if spoilt else None
                loss(model, run.rank, step).backward()
                if handle is not None:
                    handle.remove()
            optimizer.step()
    return whole(model)


class WithOwnScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.scale = layers(12, 8, 3), nn.BatchNorm1d(12), nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.norm(x)) * self.scale


def ignored_parameters(run: Run) -> dict[str, torch.Tensor]:
    """Parameters that FSDP ignores, and buffers, are averaged over all ranks."""
    from torch.distributed.fsdp import fully_shard

    model = WithOwnScale()
    fully_shard(model, mesh=run.mesh, ignored_params={model.scale})

    def average() -> None:
        if not run.address:
            dist.all_reduce(model.scale.grad)
            model.scale.grad.div_(WORLD)  # type: ignore[union-attr]

    result = trained(run, model, sgd(model), before_step=average)
    assert run.address or result.pop("norm.running_mean") is not None
    return {name: t for name, t in result.items() if "running" not in name}


class Row(NamedTuple):
    script: Callable[[Run], dict[str, torch.Tensor]]
    exact: bool = True
    """False: sums have another order than in one job, or norms have."""


ROWS = {row.script.__name__: row for row in (
    Row(with_sgd), Row(with_adamw), Row(empty_shards), Row(unequal_start), Row(root_only), Row(mixed_precision),
    Row(cpu_offload), Row(clipped, exact=False), Row(clipped_by_attach, exact=False), Row(accumulated),
    Row(accumulated_in_site, exact=False),
    Row(tied_and_unused), Row(used_in_one_site, exact=False), Row(scaled), Row(not_finite),
    Row(ignored_parameters, exact=False))}


def play(rank: int, name: str, address: str) -> dict[str, torch.Tensor]:
    return ROWS[name].script(Run(rank, address))


@pytest.mark.commit(6)
@pytest.mark.parametrize("name", ROWS)
def test_sites_train_as_one_fsdp_job(name: str) -> None:
    wanted = pool(WORLD).call(play, name, "")[0]
    with coordinators(1, WORLD, 1) as jobs:
        results = pool(WORLD).call(play, name, jobs[0].address)
    for result in results:
        assert result.keys() == wanted.keys()
        for key, value in wanted.items():
            assert torch.equal(result[key], results[0][key]), key
            if ROWS[name].exact:
                assert torch.equal(result[key], value), key
            torch.testing.assert_close(result[key], value, rtol=1e-4, atol=1e-6)


def refused(rank: int, address: str) -> dict[str, str]:
    def attach(*, double: bool = False, **how: Any) -> Any:
        model = Run(rank, address).shard(layers(12, 8, 3).double() if double else layers(12, 8, 3))
        return commlayer.attach(model, sgd(model), config=quick(join=address), **how)

    def joined() -> None:
        with attach(compression="int8()") as session, session.join():
            pass

    model = layers(12, 8, 3)
    return {
        "forward": outcome(lambda: attach(sync="forward")),
        "late": outcome(lambda: attach(plan=plan_of(model, bucket={"stale": True}))),
        "staged": outcome(lambda: attach(plan=plan_of(model, path="encode@cpu net.allgather decode@cpu"))),
        "double": outcome(lambda: attach(double=True, compression="int8()")),
        "join": outcome(joined),
    }


def test_what_sharded_models_cannot_have_is_refused_in_one_line() -> None:
    codes = {"forward": "E-SYNC-FORWARD", "late": "E-PLAN-REFUSED", "staged": "E-PLAN-REFUSED", "double": "E-PLAN-REFUSED",
             "join": "E-UNEVEN-INPUTS"}
    with coordinators(1, WORLD, 1) as jobs:
        for lines in pool(WORLD).call(refused, jobs[0].address):
            for name, code in codes.items():
                assert_refused(lines[name], code)


def failing(rank: int, address: str, how: str) -> str:
    """Rank 1 fails in its second step, or a script does something that all ranks notice."""
    model = Run(rank, address).shard(layers(12, 8, 3))
    optimizer = sgd(model)

    def fail(_p: Any) -> None:
        raise ValueError("a hook of the script has failed")

    def train() -> None:
        config = quick(join=address, drift_steps=1)
        with commlayer.attach(model, optimizer, compression="int8()", config=config) as session:
            for step in range(4):
                if step and how == "hook" and rank == 1:
                    model[0].bias.register_post_accumulate_grad_hook(fail)
                if step and how == "weights":
                    session.weight(1.0 + rank % 2)
                if step and how == "assign":
                    model.load_state_dict(model.state_dict(), assign=True)
                if step and how == "weight" and rank == 3:
                    model[2].weight.detach().to_local().add_(0.5)
                loss(model, rank, step).backward()
                optimizer.step()

    return outcome(train)


@pytest.mark.parametrize(("how", "named"), [
    ("hook", ["a hook of the script has failed"]), ("weights", ["E-WEIGHT"]), ("assign", ["E-MODEL-CHANGED", "0.weight"]),
    ("weight", ["E-REPLICAS", "the weights of rank 3 ", "2.weight"])])
def test_a_failing_rank_ends_the_job_on_all_ranks(how: str, named: list[str]) -> None:
    with coordinators(1, WORLD, 1) as jobs:
        for line in pool(WORLD).call(failing, jobs[0].address, how):
            assert all(name in line for name in named), line


def aborting(rank: int, address: str) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The ranks of one site break off a backward pass, and continue. The step is dropped in all sites."""
    model = Run(rank, address).shard(layers(12, 8, 3))
    optimizer, errors = sgd(model), []

    def fail(_p: Any) -> None:
        raise ValueError("broken off")

    with commlayer.attach(model, optimizer, compression="int8()", config=quick(join=address)):
        for step in range(STEPS):
            optimizer.zero_grad()
            handle = model[0].bias.register_post_accumulate_grad_hook(fail) if (step, rank // RANKS) == (1, 1) else None
            try:
                loss(model, rank, step).backward()
                optimizer.step()
            except (ValueError, StepAbandoned) as error:
                errors.append(type(error).__name__)
                model.reset_iter_state()
            if handle is not None:
                handle.remove()
        return whole(model), errors


def test_a_step_that_one_site_breaks_off_is_dropped_in_all() -> None:
    with coordinators(1, WORLD, 1) as jobs:
        results = pool(WORLD).call(aborting, jobs[0].address)
    assert_equal([weights for weights, _ in results], results[0][0])
    assert [errors for _, errors in results] == [["StepAbandoned"]] * RANKS + [["ValueError"]] * RANKS


def cleared(run: Run, model: Any) -> dict[str, torch.Tensor]:
    """Averages that no optimizer applies are not lost: their residuals return."""
    optimizer = sgd(model)
    with run.attached(model, optimizer):
        for step in range(2 * STEPS):
            optimizer.zero_grad()
            loss(model, run.rank, step).backward()
            if step % 3 != 1:
                optimizer.step()
    return whole(model)


def switched(run: Run, model: Any) -> dict[str, torch.Tensor]:
    """Residuals of one plan are sent under the next one."""
    optimizer = sgd(model)
    with run.attached(model, optimizer):
        for step in range(2 * STEPS):
            if step == STEPS:
                run.session.switch(cut(layers(12, 40, 7, 3), "error_feedback(int4())", (1024, 4096)))
            optimizer.zero_grad()
            loss(model, run.rank, step).backward()
            if step != STEPS - 1:
                optimizer.step()
    return whole(model)


def cut(model: nn.Module, codec: str, nbytes: tuple[int, int] = (512, 1024)) -> Plan:
    """A plan whose buckets are cut where shards end."""
    job = describe_model(model)
    return Shards(RANKS, 0, frozenset(range(len(job.tensors)))).cut(plan_of(model, codec, nbytes=nbytes), job)


def coded(rank: int, codec: str, address: str, how: str, shards: bool) -> dict[str, torch.Tensor]:
    """Runs one plan with a sharded model, or with whole models on nodes of two ranks."""
    model: Any = layers(12, 40, 7, 3)
    plan = cut(model, codec)
    run = Run(rank, address, plan=plan, compression=None, config=quick(join=address, ranks_per_node=RANKS))
    model = run.shard(model) if shards else model
    if how:
        return {"cleared": cleared, "switched": switched}[how](run, model)
    return trained(run, model, sgd(model), steps=2 * STEPS)


@pytest.mark.commit(2)
@pytest.mark.parametrize(("codec", "how"), [
    ("int8()", ""), ("error_feedback(int4())", ""), ("error_feedback(topk(ratio=0.1))", ""),
    ("error_feedback(topk(ratio=0.1))", "cleared"), ("error_feedback(topk(ratio=0.1))", "switched"),
    ("error_feedback(randomk(ratio=0.2))", ""), ("error_feedback(onebit())", "cleared"),
    ("error_feedback(powersgd(rank=2))", "")])
def test_codecs_and_residuals_are_those_of_whole_models(codec: str, how: str) -> None:
    results = []
    for shards in (False, True):
        with coordinators(1, WORLD, 1) as jobs:
            results.append(pool(WORLD).call(coded, codec, jobs[0].address, how, shards))
    for wanted, result in zip(*results, strict=True):
        assert_equal([result], wanted)


SYNCS: dict[str, tuple[Any, Callable[[nn.Module], torch.optim.Optimizer]]] = {
    "SGD": (commlayer.LocalSteps(2, overlap=False), sgd),
    "fragments": (commlayer.LocalSteps(2, overlap=False, fragments=2), sgd),
    "overlap": (commlayer.LocalSteps(2), sgd),
    "DiLoCo": (commlayer.DiLoCo(2), sgd),
    "AdamW, matched norms": (commlayer.LocalSteps(2), adamw),
    "AdamW, every step": (commlayer.LocalSteps(1, overlap=False), adamw),
}


def local_steps(rank: int, name: str, address: str, sharded: bool) -> dict[str, torch.Tensor]:
    """A site of two ranks, or one worker with the batches of both."""
    sync, make = SYNCS[name]
    model: Any = layers(12, 40, 1, 3)
    plan = cut(model, "identity()")
    if sharded:
        model = Run(rank, address).shard(model)
    else:
        plan = structs.replace(plan, ranks_per_node=1, buckets=tuple(structs.replace(b, owner=0) for b in plan.buckets))
    optimizer = make(model)
    with commlayer.attach(model, optimizer, sync=sync, plan=plan, config=quick(join=address)) as session:
        for step in range(3 * STEPS):
            optimizer.zero_grad()
            ranks = [rank] if sharded else [RANKS * rank + local for local in range(RANKS)]
            (sum(loss(model, each, step) for each in ranks) / len(ranks)).backward()  # type: ignore[union-attr]
            optimizer.step()
        with session.averaged():
            model(data(rank, 0)[0])
        session.flush()
        return whole(model)


@pytest.mark.commit(2)
@pytest.mark.parametrize("name", SYNCS)
def test_local_steps_of_a_site_are_those_of_one_worker(name: str) -> None:
    with coordinators(1, SITES, 1) as jobs:
        wanted = pool(SITES).call(local_steps, name, jobs[0].address, False)[0]
    with coordinators(1, WORLD, 1) as jobs:
        results = pool(WORLD).call(local_steps, name, jobs[0].address, True)
    for result in results:
        for key, value in wanted.items():
            assert torch.equal(result[key], results[0][key]), key
            torch.testing.assert_close(result[key], value, rtol=1e-4, atol=1e-6)


def resumable(rank: int, address: str, folder: str, begin: int, end: int, sync: Any, ranks: int) -> dict[str, torch.Tensor]:
    """Trains from step `begin` to `end` with sites of so many ranks; 0: not sharded. The training from step 0 saves on its way,
    and others resume there."""
    from torch.distributed.device_mesh import init_device_mesh

    model: Any = layers(12, 40, 1, 3)
    if ranks:
        run = Run(rank, address)
        run.mesh = init_device_mesh("cpu", (dist.get_world_size() // ranks, ranks), mesh_dim_names=("site", "shard"))["shard"]
        model = run.shard(model)
    optimizer = adamw(model)
    how: dict[str, Any] = {"sync": sync, "plan": plan_of(model, "error_feedback(topk(ratio=0.2))", nbytes=(512, 1024))}
    with commlayer.attach(model, optimizer, **how, config=quick(join=address)) as session:
        assert not begin or session.resume(folder)
        for step in range(begin, end):
            if not begin and step == STEPS:
                session.checkpoint(folder)
            optimizer.zero_grad()
            loss(model, rank, step).backward()
            optimizer.step()
        session.flush()
        assert session.step == end
        return whole(model)


@pytest.mark.parametrize("sync", [None, commlayer.LocalSteps(2, overlap=False)], ids=["step", "local steps"])
def test_resumed_sites_continue_bit_for_bit(sync: Any, tmp_path: Path) -> None:
    def run(begin: int, end: int, ranks: int) -> list[dict[str, torch.Tensor]]:
        with coordinators(1, WORLD, 1) as jobs:
            return pool(WORLD).call(resumable, jobs[0].address, str(tmp_path), begin, end, sync, ranks)

    wanted = run(0, 2 * STEPS, RANKS)
    assert_equal(run(STEPS, 2 * STEPS, RANKS), wanted[0])
    # Sites of one rank, and a job without shards, have the same weights.
    saved = run(STEPS, STEPS, RANKS)
    for ranks in (1, 0):
        assert_equal(run(STEPS, STEPS, ranks), saved[0])
    run(STEPS, 2 * STEPS, 1)


def assert_equal(results: list[dict[str, torch.Tensor]], wanted: dict[str, torch.Tensor]) -> None:
    for result in results:
        assert [key for key, value in wanted.items() if not torch.equal(result[key], value)] == []


def reshard(rank: int, address: str, folder: str, shards: bool, loads: bool) -> dict[str, torch.Tensor]:
    """Loads with torch.distributed.checkpoint what another number of ranks has saved, and saves some steps later. Returns
    weights and the sum of all residuals, as loaded (or as saved by the first job)."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    model: Any = layers(12, 40, 1, 3)
    model = Run(rank, address).shard(model) if shards else model
    optimizer = sgd(model)
    how = {"compression": "error_feedback(topk(ratio=0.2))", "config": quick(join=address)} if address else {}
    with commlayer.attach(model, optimizer, **how) as session:
        def contents() -> dict[str, Any]:
            return {"model": get_model_state_dict(model), "commlayer": session}

        def now() -> dict[str, torch.Tensor]:
            state = {name: value for name, value in session.state_dict().items() if name.startswith("residual")}
            return whole(model) | {name: getattr(x, "full_tensor", lambda x=x: x)() for name, x in state.items()} | {
                "step": torch.tensor(session.step)}

        if loads:
            dcp.load(contents(), checkpoint_id=folder, no_dist=not address)
        loaded = now()
        for step in range(session.step, session.step + STEPS):
            optimizer.zero_grad()
            loss(model, rank, step).backward()
            optimizer.step()
        dcp.save(contents(), checkpoint_id=folder, no_dist=not address)
        return loaded | {f"saved.{name}": x for name, x in now().items()}


def test_residuals_survive_another_number_of_ranks(tmp_path: Path) -> None:
    former: dict[str, torch.Tensor] = {}
    for world, shards in ((WORLD, True), (3, False), (WORLD, True), (1, False)):
        if world > 1:
            with coordinators(1, world, 1) as jobs:
                results = pool(world).call(reshard, jobs[0].address, str(tmp_path), shards, bool(former))
        else:
            results = [reshard(0, "", str(tmp_path), False, True)]
        for result in results:
            for name in former:
                if name.startswith("saved.") and (world > 1 or "residual" not in name):
                    assert torch.equal(result[name.removeprefix("saved.")], former[name]), (world, name)
        former = results[0]
        assert world == 1 or any(x.any() for name, x in former.items() if name.startswith("saved.residual"))


class Sums(nn.Module):
    """Its gradients are small integers that do not depend on the weights, so sums are exact in any order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.free = nn.Linear(12, 10), nn.Linear(12, 3), nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).sum() + self.second(x[:, :12]).sum() * 2 + (self.free * x[0, :3]).sum()


def unlike(rank: int, sizes: tuple[int, ...], codec: str, address: str, how: str, exact: bool) -> dict[str, torch.Tensor]:
    """Sites of these numbers of ranks. `how`: "shards", or "plain" if a site of one rank has whole tensors, or "workers": one
    worker for each site, with the batches of its ranks."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    sites = [[*range(end - size, end)] for size, end in zip(sizes, accumulate(sizes), strict=True)]
    model: Any = Sums() if exact else layers(12, 40, 7, 3)
    job = describe_model(model)
    sharded = frozenset(n for n, tensor in enumerate(job.tensors) if tensor.name != "free")
    plan = Shards(max(sizes), 0, sharded).cut(plan_of(model, codec, nbytes=(64, 256)), job, sizes)
    if how == "workers":
        mine, weight = sites[rank], len(sites[rank])
        of_one = tuple(structs.replace(bucket, owner=0, rows=()) for bucket in plan.buckets)
        plan = structs.replace(plan, ranks_per_node=1, buckets=of_one)
    else:
        mine, weight = [rank], 1
        group, _ = dist.new_subgroups_by_enumeration(sites)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(float(next(n for n, site in enumerate(sites) if rank in site)))  # all begin with those of the first site
        if how == "shards" or dist.get_world_size(group) > 1:
            fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"), ignored_params={model.free} if exact else set())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5) if exact else adamw(model)
    with commlayer.attach(model, optimizer, plan=plan, config=quick(join=address, drift_steps=3)) as session:
        if rank == 0:
            named = any(f"sites have {[*sizes]} ranks" in line for line in session.inspect.decisions())
            assert named == (how != "workers" and 1 in sizes), "in case its script has forgotten fully_shard()"
        for step in range(2 * STEPS):
            optimizer.zero_grad()
            session.weight(weight)
            (sum(model((data(each, step)[0] * 4).round()) if exact else loss(model, each, step) for each in mine)
             / len(mine)).backward()  # type: ignore[union-attr]
            optimizer.step()
    return whole(model)


@pytest.mark.commit(2)
@pytest.mark.parametrize(("sizes", "codec", "how"), [
    ((2, 1), "identity()", "shards"), ((2, 1), "int4()", "plain"), ((4, 2, 1), "identity()", "plain"),
    ((2, 3), "identity()", "shards"), ((4, 2, 1), "error_feedback(int4())", "shards")], ids=str)
def test_sites_of_unlike_sizes_train_as_one_worker_each(sizes: tuple[int, ...], codec: str, how: str) -> None:
    exact = sizes == (4, 2, 1)
    with coordinators(1, len(sizes), 1) as jobs:
        wanted = pool(len(sizes)).call(unlike, sizes, codec, jobs[0].address, "workers", exact)[0]
    with coordinators(1, sum(sizes), 1) as jobs:
        results = pool(sum(sizes)).call(unlike, sizes, codec, jobs[0].address, how, exact)
    for result in results:
        assert_equal([result], results[0])
        for key, value in wanted.items() if codec == "identity()" else ():
            assert 3 in sizes or torch.equal(result[key], value), key  # a mean of three is rounded
            torch.testing.assert_close(result[key], value, rtol=1e-4, atol=1e-6)


def norms_of_unlike_sites(rank: int, address: str) -> list[str]:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    group, _ = dist.new_subgroups_by_enumeration([[0, 1], [2]])
    model: Any = fully_shard(layers(12, 10, 3), mesh=DeviceMesh.from_group(group, "cpu"))
    return [outcome(lambda: commlayer.attach(model, adamw(model), config=quick(join=address), **wrong))  # noqa: B023
            for wrong in ({"clip_grad_norm": 1.0}, {"sync": commlayer.LocalSteps(2)})]


def test_norms_of_unlike_sites_are_refused() -> None:
    with coordinators(1, 2, 1) as jobs:
        for lines in pool(3).call(norms_of_unlike_sites, jobs[0].address):
            for line in lines:
                assert_refused(line, "E-SHARDED")


def continued(rank: int, sizes: tuple[int, ...], address: str, folder: str, resumes: bool) -> dict[str, torch.Tensor]:
    """Trains and saves, or resumes, with sites of these sizes. Returns weights and the sum of all residuals."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    group, _ = dist.new_subgroups_by_enumeration(
        [[*range(end - size, end)] for size, end in zip(sizes, accumulate(sizes), strict=True)])
    model: Any = fully_shard(layers(12, 10, 3), mesh=DeviceMesh.from_group(group, "cpu"))
    optimizer = sgd(model)
    codec = "error_feedback(topk(ratio=0.2))"
    with commlayer.attach(model, optimizer, compression=codec, config=quick(join=address)) as session:
        assert not resumes or session.resume(folder)
        for step in range(0 if resumes else STEPS):
            optimizer.zero_grad()
            loss(model, rank, step).backward()
            optimizer.step()
        if not resumes:
            session.checkpoint(folder)
        state = {name: x.full_tensor() for name, x in session.state_dict().items() if name.startswith("residual")}
        return whole(model) | state


def test_residuals_of_unlike_sites_resume_in_sites_of_other_sizes(tmp_path: Path) -> None:
    def run(sizes: tuple[int, ...], resumes: bool) -> list[dict[str, torch.Tensor]]:
        with coordinators(1, sum(sizes), 1) as jobs:
            return pool(sum(sizes)).call(continued, sizes, jobs[0].address, str(tmp_path), resumes)

    saved = run((3, 1), False)[0]
    assert any(x.any() for name, x in saved.items() if name.startswith("residual"))
    for sizes in ((2, 1), (1, 3), (2, 2)):
        for result in run(sizes, True):
            torch.testing.assert_close(result, saved, rtol=1e-5, atol=1e-6)
