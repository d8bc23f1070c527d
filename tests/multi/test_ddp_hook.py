"""DDP's communication hook: averages equal those of torch's hooks, DDP options, saved states, refusals. Real ranks."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support.attached import Branches, assert_refused, coordinators, data, mlp, outcome, plan_of, same
from support.rank_pool import pool, quick, ranks_first
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import commlayer

WORLD, STEPS = 2, 5
_ranks = ranks_first(WORLD)
Gradients = list[torch.Tensor | None]
Wrap = Callable[..., DistributedDataParallel]

HOOKS: dict[str, tuple[str, torch.dtype, float]] = {
    "allreduce_hook": ("identity()", torch.float32, 1e-6),
    "fp16_compress_hook": ("fp16()", torch.float16, 2.0**-11),
    "bf16_compress_hook": ("bf16()", torch.bfloat16, 2.0**-8),
}
"""Hooks of torch's own tests: our equivalent codec, the type on the wire, and the relative error of one rounding to it."""
ROUNDINGS = 2
"""Both round the gradients and their sum; torch halves before it adds."""


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Gradients:
    gradients = [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    return gradients


def train(rank: int, wrap: Wrap, how: str = "", dtype: torch.dtype = torch.float32, **ddp: Any) -> list[Gradients]:
    model = mlp().to(dtype)
    wrapped, optimizer, rows = wrap(model, **ddp), torch.optim.SGD(model.parameters(), lr=0.05), []

    def loss(number: int) -> torch.Tensor:
        x, y = data(rank, number)
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            return nn.functional.mse_loss(wrapped(x.to(dtype)).to(torch.float32 if how == "autocast" else dtype), y.to(dtype))

    for number in range(STEPS):
        if how == "no_sync":
            for micro in range(3):
                with wrapped.no_sync() if micro < 2 else contextlib.nullcontext():
                    loss(3 * number + micro).backward()
        elif how == "several forward passes":
            torch.stack([loss(2 * number), loss(2 * number + 1)]).sum().backward()
        elif how == "several backward passes":  # each averages what has accumulated in `.grad`
            for micro in range(2):
                loss(2 * number + micro).backward()
        else:
            loss(number).backward()
        rows.append(step(model, optimizer))
    return rows


def unused_parameters(rank: int, wrap: Wrap) -> list[Gradients]:
    """Unused on one rank, on the other, on both."""
    torch.manual_seed(0)
    model = Branches()
    wrapped, rows = wrap(model, find_unused_parameters=True), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for number, branches in enumerate([("l", "l"), ("l", "r"), ("lr", "l"), ("r", "r"), ("r", "lr")]):
        x, y = data(rank, number)
        nn.functional.mse_loss(wrapped(x, branches[rank]), y).backward()
        rows.append(step(model, optimizer))
    return rows


CASES: dict[str, Callable[..., list[Gradients]]] = {
    "plain": train, "gradient_as_bucket_view": partial(train, gradient_as_bucket_view=True),
    "static_graph": partial(train, static_graph=True), "one bucket": partial(train, bucket_cap_mb=25),
    "unused parameters": unused_parameters, "in bfloat16": partial(train, dtype=torch.bfloat16),
} | {how: partial(train, how=how) for how in ("no_sync", "several forward passes", "several backward passes", "autocast")}


def bf16_compress(group: Any, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """By another name: by its own name DDP asks for NCCL."""
    return default_hooks.bf16_compress_hook(group, bucket)


# DDP looks at the annotations of a hook, which are text in this file.
bf16_compress.__annotations__ = {"bucket": torch.distributed.GradBucket, "return": torch.futures.Future[torch.Tensor]}
TORCHS = {name: bf16_compress if name == "bf16_compress_hook" else getattr(default_hooks, name) for name in HOOKS}


class Hooked:
    """Wraps models in DDP, with torch's hook or with ours."""

    def __init__(self, hook: Callable[..., Any], state: Any = None) -> None:
        self.hook, self.state = hook, state

    def __call__(self, model: nn.Module, **ddp: Any) -> DistributedDataParallel:
        wrapped = DistributedDataParallel(model, **{"bucket_cap_mb": 0.002} | ddp)
        wrapped.register_comm_hook(self.state, self.hook)
        return wrapped


def ours(codec: str, address: str, **fields: Any) -> Hooked:
    state = commlayer.HookState(compression=commlayer.compressors.parse(codec), config=quick(join=address) | fields)
    return Hooked(commlayer.comm_hook, state)


def both(rank: int, case: str, hook: str, codec: str, address: str) -> tuple[list[Gradients], list[Gradients]]:
    theirs, mine = Hooked(TORCHS[hook]), ours(codec, address)
    try:
        return CASES[case](rank, theirs), CASES[case](rank, mine)
    finally:
        mine.state.context.close()


@pytest.mark.commit(5)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("hook", HOOKS)
def test_averages_equal_those_of_the_torch_hook(hook: str, case: str) -> None:
    codec, wire, rounding = HOOKS[hook]
    if case in ("autocast", "in bfloat16"):
        rounding = max(rounding, 2.0**-8)  # of the computation, or of the gradients themselves
    with coordinators(1, WORLD, 1) as jobs:
        results = pool(WORLD).call(both, case, hook, codec, jobs[0].address)
    for number in range(STEPS):
        theirs, mine = results[0][0][number], results[0][1][number]
        assert [g is None for g in mine] == [g is None for g in theirs], f"step {number}"
        for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            if a is not None:
                largest, apart = float(b.abs().max()), float((a.float() - b.float()).abs().max())
                assert apart <= ROUNDINGS * rounding * largest, f"step {number}, tensor {i}"
                assert largest > 0 or case == "unused parameters"
                assert case != "plain" or torch.equal(a, (WORLD * a).to(wire).float() / WORLD), "it was coded"
                assert torch.equal(a, results[1][1][number][i]), "ranks differ"


class Given(nn.Module):
    """A matrix and a vector, whose gradients are the arguments of the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.vector = nn.Parameter(torch.zeros(48, 40)), nn.Parameter(torch.zeros(40))

    def forward(self, matrix: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
        return (self.matrix * matrix).sum() + (self.vector * vector).sum()


def gradient(rank: int, number: int, of_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(10 * number + rank)
    matrix = torch.randn(48, of_rank, generator=draw) @ torch.randn(of_rank, 40, generator=draw)
    return matrix, torch.randn(40, generator=draw)


def factored(rank: int, of_rank: int, steps: int, change: bool, address: str) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """Averages of each step, by torch's powersgd and by ours."""
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1)
    hooks = [Hooked(powerSGD_hook.powerSGD_hook, state),
             ours("powersgd(rank=2)", address, fuse_nbytes=256, cut_nbytes=1 << 20)]
    results = []
    for hook in hooks:
        model, rows = Given(), []
        wrapped = hook(model, bucket_cap_mb=25)
        for number in range(steps):
            model.zero_grad()
            wrapped(*gradient(rank, number if change else 0, of_rank)).backward()
            rows.append((model.matrix.grad.clone(), model.vector.grad.clone()))
        results.append(rows)
    hooks[1].state.context.close()
    return results


def mean_of(of_rank: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [gradient(rank, number, of_rank) for rank in range(WORLD)]
    return sum(p[0] for p in parts) / WORLD, sum(p[1] for p in parts) / WORLD


def test_powersgd_is_exact_for_gradients_of_its_rank_as_in_torch() -> None:
    """In the first compressed steps, torch's third; then rounding errors in the residuals grow in both."""
    with coordinators(1, WORLD, 1) as jobs:
        theirs, mine = pool(WORLD).call(factored, 1, 5, True, jobs[0].address)[0]
    for rows, coded in ((theirs, range(2, 5)), (mine, range(3))):
        for number in coded:
            for got, mean in zip(rows[number], mean_of(1, number), strict=True):
                assert float((got - mean).norm() / mean.norm()) < 1e-3


def test_powersgd_applies_residuals_of_other_gradients_as_in_torch() -> None:
    """The mean of the averages of one gradient over many steps converges to that gradient."""
    with coordinators(1, WORLD, 1) as jobs:
        theirs, mine = pool(WORLD).call(factored, 12, 40, False, jobs[0].address)[0]
    wanted = mean_of(12, 0)[0]
    first, *errors = (float((torch.stack([row[0] for row in rows]).mean(0) - wanted).norm() / wanted.norm())
                      for rows in (mine[:1], theirs, mine))
    assert first > 0.5, "one step sends a part"
    assert errors[0] < 0.2
    assert errors[1] < 1.2 * errors[0]


def closed(rank: int, address: str) -> tuple[bool, list[bool], list[str], float]:
    """Whether the optimizer, the module and its wrapper outlive the session and their names; threads; steps."""
    threads = {thread.ident for thread in threading.enumerate()}
    model = mlp()
    wrapped, optimizer = DistributedDataParallel(model), torch.optim.AdamW(model.parameters())
    session = commlayer.attach(wrapped, optimizer, compression="topk(ratio=0.1)", config=quick(join=address))
    for number in range(3):
        optimizer.zero_grad()
        wrapped(data(rank, number)[0]).sum().backward()
        optimizer.step()
    session.close()
    steps = session.metrics()["steps"]
    left = [thread.name for thread in threading.enumerate() if thread.ident not in threads and thread.name == "commlayer-ddp"]
    kept = weakref.ref(optimizer)
    del session, optimizer
    gc.collect()
    optimizer_left = kept() is not None
    wrapped(data(rank, 3)[0]).sum().backward()
    parts = weakref.ref(model), weakref.ref(wrapped)
    del model, wrapped
    gc.collect()
    return optimizer_left, [part() is not None for part in parts], left, steps


def test_closed_session_releases_threads_model_and_optimizer() -> None:
    with coordinators(1, WORLD, 1) as jobs:
        assert pool(WORLD).call(closed, jobs[0].address) == [(False, [False, False], [], 3)] * WORLD


def residuals(state: commlayer.HookState) -> list[torch.Tensor]:
    return [t.clone() for name, t in sorted(state.__getstate__()["state"]["tensors"].items()) if name.startswith("residual.")]


def resumed(rank: int, how: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Residuals after a third step: of the state of the first two, and of a state that replaces it afterwards."""
    plan = plan_of(mlp(), "error_feedback(topk(ratio=0.1))", "encode@cpu all.allgather decode@cpu", ranks_per_node=WORLD)

    def wrapped(state: commlayer.HookState) -> DistributedDataParallel:
        ddp = DistributedDataParallel(mlp())
        ddp.register_comm_hook(state, commlayer.comm_hook)
        return ddp

    def trained(ddp: DistributedDataParallel, *numbers: int) -> None:
        for number in numbers:
            ddp.zero_grad()
            ddp(data(rank, number)[0]).sum().backward()

    state = commlayer.HookState(plan=plan, config=quick(ranks_per_node=WORLD))
    ddp = wrapped(state)
    trained(ddp, 0, 1)
    pickled, copied = pickle.dumps(state), copy.deepcopy(state)
    trained(ddp, 2)
    expected = residuals(state)
    state.context.close()
    new = {"pickle": lambda: pickle.loads(pickled), "a copy": lambda: copied}.get(
        how, lambda: commlayer.HookState(plan=plan, config=quick(ranks_per_node=WORLD)))()
    trained(wrapped(new), 2)
    got = residuals(new)
    new.context.close()
    return expected, got


@pytest.mark.commit(2)
@pytest.mark.parametrize("how", ["pickle", "a copy", "nothing"])
def test_saved_hook_state_keeps_its_residuals(how: str) -> None:
    for expected, got in pool(WORLD).call(resumed, how):
        assert expected
        assert same(expected, got) == (how != "nothing")


def first_backward(rank: int, plan: str, dtype: str) -> list[str]:
    """Two backward passes of a hook that cannot connect."""
    model = DistributedDataParallel(nn.Linear(4, 2, dtype=getattr(torch, dtype)))
    plan_file = None if plan == "auto" else plan
    model.register_comm_hook(commlayer.HookState(plan=plan_file, config=quick()), commlayer.comm_hook)
    return [outcome(lambda: model(torch.ones(1, 4, dtype=getattr(torch, dtype))).abs().sum().backward()) for _ in range(2)]


@pytest.mark.parametrize(("plan", "dtype", "code", "name"), [
    ("missing.json", "float32", "E-PLAN-FILE", "missing.json"), ("auto", "complex64", "E-MODEL-UNSUPPORTED", "complex64"),
])
def test_user_error_is_raised_in_the_first_backward(plan: str, dtype: str, code: str, name: str) -> None:
    for first, second in pool(WORLD).call(first_backward, plan, dtype):
        assert_refused(first, code, "InvalidInput: ", name)
        assert second


def unsupported(rank: int) -> list[str]:
    ddp = DistributedDataParallel(mlp())
    with commlayer.attach(ddp, config=quick()), ddp.join():
        return [outcome(lambda: ddp(data(rank, 0)[0]))]


def test_ddp_join_is_refused() -> None:
    for (line,) in pool(WORLD).call(unsupported):
        assert_refused(line, "E-DDP-UNSUPPORTED", "session.join()")


def shared(rank: int, later: bool) -> str:
    """One state for two models, both from the start or the second one later."""
    state = commlayer.HookState(config=quick())
    models = [DistributedDataParallel(mlp(seed)) for seed in range(2)]
    for model in models[: 2 - later]:
        model.register_comm_hook(state, commlayer.comm_hook)
    line = outcome(lambda: models[0](data(0, 0)[0]).sum().backward())
    if later:
        assert line == ""
        models[1].register_comm_hook(state, commlayer.comm_hook)
        line = outcome(lambda: models[1](data(0, 0)[0]).sum().backward())
    state.context.close()
    return line


@pytest.mark.parametrize("later", [False, True])
def test_hook_state_serves_one_model(later: bool) -> None:
    for line in pool(WORLD).call(shared, later):
        assert_refused(line, "E-DDP-HOOK", *([] if later else ["2 DistributedDataParallel modules"]))
