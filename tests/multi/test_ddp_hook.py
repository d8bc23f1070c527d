"""What is peculiar to DDP's hook: its options and regrouped buckets, reentrant checkpoints, errors inside a backward pass."""

from __future__ import annotations

import copy
import functools
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.attached import Run, Setting, coordinators, data, mlp, play
from support.models import Checkpointed, train
from support.rank_pool import Servers, pool, quick
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import commlayer
from commlayer.engine.observers import Observer, ObserverOrder
from commlayer.errors import code_of

WORLD = 2


def gradients_as_views(run: Run) -> dict[str, Any]:
    model = mlp()
    return train(run, model, run.wrap(model, gradient_as_bucket_view=True))


def static_graph(run: Run) -> dict[str, Any]:
    model = mlp()
    return train(run, model, run.wrap(model, static_graph=True))


def one_big_bucket(run: Run) -> dict[str, Any]:
    model = mlp()
    return train(run, model, run.wrap(model, bucket_cap_mb=25))


def reentrant_checkpoint(run: Run) -> dict[str, Any]:
    """DDP allows it: buckets become full in a backward pass inside the backward pass; here the last ones."""
    model = Checkpointed(reentrant=True)
    return train(run, model, run.wrap(model))


class CheckpointedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = mlp()[:2], mlp(1)[2:]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.head, self.body(x), use_reentrant=True)


def reentrant_checkpoint_of_the_head(run: Run) -> dict[str, Any]:
    """The first buckets become full inside, the others after it has ended."""
    model = CheckpointedHead()
    return train(run, model, run.wrap(model))


@pytest.mark.parametrize("script", [gradients_as_views, static_graph, one_big_bucket, reentrant_checkpoint,
                                    reentrant_checkpoint_of_the_head], ids=lambda s: s.__name__)
def test_as_alone(script: Callable[[Run], dict[str, Any]]) -> None:
    with coordinators(1, WORLD, 2) as made:
        results = pool(WORLD).call(play, WORLD, script, Setting("ddp", (made[0].address,), servers=2))
    for name, tensor in play(0, WORLD, script, None).items():
        torch.testing.assert_close(results[0][name], tensor, msg=lambda m, n=name: f"{n}: {m}")
        assert torch.equal(results[0][name], results[1][name]), f"{name} differs between ranks"


def bucket_counts(rank: int, address: str) -> tuple[list[int], int]:
    """How many buckets DDP brings in each step: other ones after the first."""
    counts: list[int] = []

    def counting(state: commlayer.HookState, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 0:
            counts.append(0)
        counts[-1] += 1
        return commlayer.comm_hook(state, bucket)

    # DDP looks at the annotations of a hook, which are text in this file.
    counting.__annotations__ = {"bucket": torch.distributed.GradBucket, "return": torch.futures.Future[torch.Tensor]}
    model = DistributedDataParallel(mlp(), bucket_cap_mb=0.002)
    state = commlayer.HookState(commlayer.compressors.identity(), config=quick(join=address))
    model.register_comm_hook(state, counting)
    for _ in range(3):
        model(torch.ones(2, 12)).sum().backward()
    steps = int(state.connection.stats()["steps"])
    state.connection.close()
    return counts, steps


def test_the_cases_here_see_buckets_regrouped() -> None:
    with coordinators(1, WORLD, 1) as made:
        for counts, steps in pool(WORLD).call(bucket_counts, made[0].address):
            assert steps == 3
            assert counts[0] != counts[1] == counts[2] > 1


def first_backward(rank: int, plan: str, dtype: str) -> list[str]:
    """Two backward passes of a hook that cannot connect; what each raised."""
    model = DistributedDataParallel(nn.Linear(4, 2, dtype=getattr(torch, dtype)))
    model.register_comm_hook(commlayer.HookState(plan, config=quick()), commlayer.comm_hook)
    said = []
    for _ in range(2):
        try:
            model(torch.ones(1, 4, dtype=getattr(torch, dtype))).abs().sum().backward()
            said.append("nothing")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


@pytest.mark.parametrize(("plan", "dtype", "value", "code"), [
    ("missing.json", "float32", "missing.json", "E-PLAN-NAME"), ("auto", "complex64", "complex64", "E-MODEL-UNSUPPORTED"),
])
def test_a_mistake_shows_in_the_first_backward(plan: str, dtype: str, value: str, code: str) -> None:
    for first, second in pool(WORLD).call(first_backward, plan, dtype):
        assert first.startswith("InvalidInput: ")
        assert value in first
        assert first.endswith(f"[{code}]")
        assert second != "nothing"


def no_samples(rank: int, address: str) -> str:
    """A latched error is raised by backward, with its own type, and again by the next one."""
    model = DistributedDataParallel(mlp(), bucket_cap_mb=0.002)
    with commlayer.attach(model, plan=commlayer.compressors.identity(), config=quick(join=address)) as session:
        model(torch.ones(2, 12)).sum().backward()
        session.weight(0)
        with pytest.raises(ValueError, match=r"step 1\b.*weight 0\b.*E-WEIGHT") as raised:
            model(torch.ones(2, 12)).sum().backward()
        with pytest.raises((ValueError, RuntimeError)):
            model(torch.ones(2, 12)).sum().backward()
    return str(raised.value)


def watched(run: Run) -> Any:
    """Steps of which the stopwatch tells, when a watcher behind each has stopped it."""
    model = mlp()
    wrapped = run.wrap(model)
    session = run.sessions[0]
    for step in range(4):
        wrapped(torch.ones(2, 12)).sum().backward()
        if step == 0:
            worker = session.inspect.connection.worker
            session.inspect.observers.add(Observer(ObserverOrder.OTHER, run, functools.partial(worker.stopwatch.stop, -1)))
    return [lap.step for lap in session.inspect.laps() if lap.step >= 0]


@pytest.mark.parametrize("how", ["module", "ddp"])
def test_what_runs_behind_a_step_is_no_computing(how: str) -> None:
    with coordinators(1, WORLD, 1) as made:
        assert pool(WORLD).call(play, WORLD, watched, Setting(how, (made[0].address,))) == [[1, 2, 3]] * WORLD


def test_an_error_in_a_step_is_raised_by_backward() -> None:
    with coordinators(1, WORLD, 1) as made:
        assert len(set(pool(WORLD).call(no_samples, made[0].address))) == 1


# ---- gradients that a hook takes away, and the end of a session

def stepped_by_hand(rank: int, how: str, before: bool, address: str) -> str:
    """Updates of the script's own in hooks of parameters, with what this rank has."""
    model = mlp()
    wrapped: Any = DistributedDataParallel(model) if how == "ddp" else model

    def update(p: torch.Tensor) -> None:
        assert p.grad is not None
        p.data.add_(p.grad, alpha=-0.1)
        p.grad = None

    def hook() -> None:
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(update)

    hook() if before else None
    session = commlayer.attach(wrapped, plan="identity()", config=quick(join=address))
    None if before else hook()
    said = ""
    try:
        for step in range(3):
            wrapped(data(rank, step)[0]).sum().backward()
    except (RuntimeError, commlayer.CommError) as error:
        said = str(error)
    session.close(said)
    return said


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("how", ["ddp", "module"])
def test_updates_inside_backward_are_refused(how: str, before: bool) -> None:
    with coordinators(1, WORLD, 1) as made:
        for said in pool(WORLD).call(stepped_by_hand, how, before, made[0].address):
            assert code_of(said) == "E-HOOKS-TAKEN", said


def closed(rank: int, address: str) -> tuple[list[bool], list[str], float, bool]:
    """Which of module, wrapper and optimizer are left, threads, the steps that were counted, and torch's own average after."""
    threads = {thread.ident for thread in threading.enumerate()}
    model = mlp()
    wrapped, optimizer = DistributedDataParallel(model), torch.optim.AdamW(model.parameters())
    session = commlayer.attach(wrapped, optimizer, plan="topk(ratio=0.1)", config=quick(join=address))
    for step in range(3):
        optimizer.zero_grad()
        wrapped(data(rank, step)[0]).sum().backward()
        optimizer.step()
    session.close()
    steps = session.stats()["steps"]
    left = [thread.name for thread in threading.enumerate() if thread.ident not in threads and thread.name == "commlayer-ddp"]
    kept = weakref.ref(optimizer)
    del session, optimizer
    gc.collect()
    alone = kept() is not None
    wrapped(data(rank, 3)[0]).sum().backward()
    parts = weakref.ref(model), weakref.ref(wrapped)
    del model, wrapped
    gc.collect()
    return [part() is not None for part in parts], left, steps, alone


def test_a_closed_session_leaves_no_thread_and_keeps_neither_model_nor_optimizer() -> None:
    with coordinators(1, WORLD, 1) as made:
        for parts, threads, steps, optimizer in pool(WORLD).call(closed, made[0].address):
            assert threads == []
            assert steps == 3
            assert not optimizer, "while the module is still in use"
            assert parts == [False, False]


class Counting(nn.Module):
    """Has a buffer that is no float, and one that is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(12)
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("flag", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("nothing", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.sum().long()
        self.flag = self.flag ^ (x.sum() > 0)  # another tensor
        return self.norm(x)


def with_buffers(rank: int, address: str, own: bool) -> tuple[dict[str, torch.Tensor], bool]:
    """The state after some steps, one of them with a pass in no_sync(). And whether a copy of the module works alone."""
    model = nn.Sequential(Counting(), *mlp())
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.002)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    state = commlayer.HookState(commlayer.compressors.identity(), config=quick(join=address))
    if own:
        ddp.register_comm_hook(state, commlayer.comm_hook)
    for step in range(5):
        optimizer.zero_grad()
        if step == 3:
            with ddp.no_sync():
                nn.functional.mse_loss(ddp(data(rank, 10)[0]), data(rank, 10)[1]).backward()
        nn.functional.mse_loss(ddp(data(rank, step)[0]), data(rank, step)[1]).backward()
        optimizer.step()
    works = bool(copy.deepcopy(ddp).module(data(rank, 0)[0]).isfinite().all())
    held = {name: t.clone() for name, t in model.state_dict().items()}
    state.connection.close()
    return held, works


def test_buffers_are_those_of_rank_0_before_each_pass_as_with_ddp_alone() -> None:
    with Servers(WORLD, 1) as servers:
        ours = pool(WORLD).call(with_buffers, servers.address, True)
    for (got, works), (expected, _) in zip(ours, pool(WORLD).call(with_buffers, "", False), strict=True):
        assert works
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(got[name], value), name
