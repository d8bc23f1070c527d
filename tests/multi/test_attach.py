"""Training scripts under attach() and under DDP's hook train like a single process on the union of the batches."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo  # else its first import comes where it lacks a name
from support.attached import (
    Branches,
    Run,
    Setting,
    assert_refused,
    coordinators,
    data,
    mlp,
    outcome,
    parameters,
    plan_of,
    play,
    same,
    train_step,
    weights,
)
from support.jobs import distributed_job
from support.rank_pool import Servers, pool, quick
from torch import nn
from torch.utils.checkpoint import checkpoint

import commlayer
from commlayer.engine.hooks.callbacks import uncompiled
from commlayer.engine.job.job import end_dropped

WORLD, STEPS = 2, 5
FAR_S = 300.0
"""The deadline: an error within a test did not wait for it."""
Script = Callable[[Run], dict[str, Any]]
Loss = Callable[[int, int], torch.Tensor]
"""Of a rank's part of a step."""


def trained(run: Run, model: nn.Module, loss: Loss, optimizer: Any = None, *, steps: int = STEPS, micro: int = 1,
            before: Callable[[int], Any] = lambda _: None, after: Callable[[int], Any] = lambda _: None,
            apart: Any = None, to_none: bool = True) -> dict[str, Any]:
    """The mean of each step over this run's parts; in a single process, over all.

    `micro`: passes per step, all but the last inside no_sync() of `apart`, if given. `before`, `after`: the optimizer's step.
    """
    optimizers = optimizer if isinstance(optimizer, list) else [optimizer or torch.optim.SGD(model.parameters(), lr=0.1)]
    for step in range(steps):
        for each in optimizers:
            each.zero_grad(set_to_none=to_none)
        for pass_ in range(micro):
            with run.no_sync(apart) if apart is not None and pass_ < micro - 1 else contextlib.nullcontext():
                number = micro * step + pass_
                (torch.stack([loss(part, number) for part in run.parts]).mean() / micro).backward()
        before(step)
        for each in optimizers:
            each.step()
        after(step)
    return weights(model)


def fits(called: Callable[..., torch.Tensor], **how: Any) -> Loss:
    def loss(part: int, step: int) -> torch.Tensor:
        x, y = data(part, step, **how)
        return nn.functional.mse_loss(called(x), y)

    return loss


def sgd(model: nn.Module, lr: float = 0.1, **how: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, **how)


def initial_parameters_that_differ(run: Run) -> dict[str, Any]:
    model = mlp(seed=run.rank)
    return trained(run, model, fits(run.wrap(model)), sgd(model, momentum=0.9))


def accumulation(run: Run, *, no_sync: bool) -> dict[str, Any]:
    model = mlp()
    wrapped = run.wrap(model)
    return trained(run, model, fits(wrapped), micro=3, apart=wrapped if no_sync else None)


def clipping_and_evaluation_between_steps(run: Run) -> dict[str, Any]:
    model, norms, seen = mlp(), list[torch.Tensor](), list[torch.Tensor]()
    wrapped = run.wrap(model)

    def evaluate(step: int) -> None:
        model.eval()
        with torch.no_grad():
            seen.append(wrapped(data(99, step)[0]).clone())
        model.train()

    result = trained(run, model, fits(wrapped), sgd(model, 0.5), after=evaluate,
                     before=lambda _: norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
    assert all(norm > 0.1 for norm in norms)
    return result | {"norms": torch.stack(norms), "seen": torch.stack(seen)}


def grad_scaler_with_infs_on_one_rank(run: Run) -> dict[str, Any]:
    model = mlp()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
    loss, optimizer = fits(run.wrap(model, scaler=scaler)), sgd(model)
    scales, skipped = [], []
    for step in range(14):
        optimizer.zero_grad()
        total = scaler.scale(torch.stack([loss(part, step) for part in run.parts]).mean())
        (total * float("inf") if step in (2, 3, 9) and step % WORLD in run.parts else total).backward()
        before = model[0].weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        skipped.append(torch.equal(before, model[0].weight))
        scales.append(scaler.get_scale())
    assert [s for s, skip in enumerate(skipped) if skip] == [2, 3, 9]
    assert scales[3] == 64.0 < scales[6]
    return weights(model) | {"scales": torch.tensor(scales)}


def frozen_parameters(run: Run) -> dict[str, Any]:
    model = mlp()
    model[0].weight.requires_grad = model[4].bias.requires_grad = False
    result = trained(run, model, fits(run.wrap(model)), sgd(model, momentum=0.9))
    assert model[0].weight.grad is None
    assert model[4].bias.grad is None
    return result


def unused_parameters(run: Run) -> dict[str, Any]:
    """Branches of each rank per step: all, none of "r" on one rank, no "r" on any, a different one on each rank."""
    torch.manual_seed(0)
    model, uses = Branches(), [("lr", "lr"), ("lr", "l"), ("l", "l"), ("l", "r"), ("r", "r"), ("lr", "lr")]
    wrapped = run.wrap(model, find_unused_parameters=True)

    def check(step: int) -> None:
        assert (model.right.weight.grad is None) == ("r" not in "".join(uses[step]))
        assert (model.left.weight.grad is None) == ("l" not in "".join(uses[step]))

    return trained(run, model, lambda part, step: fits(lambda x: wrapped(x, uses[step][part]))(part, step), steps=len(uses),
                   before=check)


def param_groups_and_schedule(run: Run) -> dict[str, Any]:
    model = mlp()
    biases, others = ([p for p in model.parameters() if (p.dim() == 1) is one] for one in (True, False))
    optimizer = torch.optim.SGD([{"params": biases, "lr": 0.2}, {"params": others, "weight_decay": 0.1}], lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return trained(run, model, fits(run.wrap(model)), optimizer, after=lambda _: schedule.step(), to_none=False)


def compiled_then_wrapped(run: Run) -> dict[str, Any]:
    model = mlp()
    # Splitting graphs by DDP's buckets asserts that the first bucket is the smallest, which 2 kB buckets are not.
    with torch._dynamo.config.patch(optimize_ddp=False):
        return trained(run, model, fits(run.wrap(torch.compile(model, backend="aot_eager"))), steps=3)


def wrapped_then_compiled(run: Run) -> dict[str, Any]:
    model = mlp()
    return trained(run, model, fits(torch.compile(run.wrap(model, bucket_cap_mb=25), backend="aot_eager")), steps=3)


def scripted(run: Run) -> dict[str, Any]:
    model = torch.jit.script(mlp())
    return trained(run, model, fits(run.wrap(model)))


def traced(run: Run) -> dict[str, Any]:
    model = torch.jit.trace(mlp(), data(0, 0)[0])
    return trained(run, model, fits(run.wrap(model)))


def a_scripted_layer(run: Run) -> dict[str, Any]:
    model = mlp()
    model[2] = torch.jit.script(model[2])
    return trained(run, model, fits(run.wrap(model)))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(30, 50), nn.Linear(50, 30, bias=False)
        self.out.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(self.words(words).mean(1))


def tied_weights(run: Run) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Tied()
    wrapped = run.wrap(model)

    def loss(part: int, step: int) -> torch.Tensor:
        words = torch.randint(30, (8, 5), generator=torch.Generator().manual_seed(10 * step + part))
        return nn.functional.cross_entropy(wrapped(words[:, :4]), words[:, 4])

    result = trained(run, model, loss, sgd(model, 1.0))
    assert model.out.weight is model.words.weight
    return result


class Layouts(nn.Module):
    """A channels-last convolution and a transposed weight, both too big for one bucket; a scalar and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 32, 3)
        self.turned = nn.Parameter(torch.randn(40, 32).t() / 6)
        self.gain, self.none = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.empty(0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x).mean((2, 3)).matmul(self.turned) * self.gain + self.none.sum()


def odd_layouts(run: Run) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Layouts().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    assert not model.turned.is_contiguous()
    wrapped = run.wrap(model)

    def loss(part: int, step: int) -> torch.Tensor:
        x = torch.randn(2, 16, 5, 5, generator=torch.Generator().manual_seed(10 * step + part))
        return wrapped(x.to(memory_format=torch.channels_last)).square().mean()

    def check(_: int) -> None:
        assert model.conv.weight.grad is not None
        assert model.conv.weight.grad.is_contiguous(memory_format=torch.channels_last)

    return trained(run, model, loss, sgd(model, 0.5), before=check)


def bf16_parameters(run: Run) -> dict[str, Any]:
    model = mlp().bfloat16()
    wrapped = run.wrap(model)

    def check(_: int) -> None:
        assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in model.parameters())

    return trained(run, model, fits(lambda x: wrapped(x.bfloat16()).float()), before=check)


def bf16_autocast(run: Run) -> dict[str, Any]:
    model = mlp()
    wrapped = run.wrap(model)

    def called(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = wrapped(x)
        assert y.dtype == torch.bfloat16
        return y.float()

    return trained(run, model, fits(called))


class Adapted(nn.Module):
    """LoRA: a frozen layer and the trained product of two low-rank matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(12, 3), nn.Linear(12, 2, bias=False), nn.Linear(2, 3, bias=False)
        self.base.requires_grad_(False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def adapters(run: Run) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Adapted()
    base = model.base.weight.clone()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.1)
    result = trained(run, model, fits(run.wrap(model)), optimizer)
    assert torch.equal(model.base.weight, base)
    return result


class Experts(nn.Module):
    """A mixture of experts: each sample is routed to its preferred expert, so some experts see no sample of a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(12, 6), nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(12, 8) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share, chosen = self.gate(x).softmax(1).max(1)
        hidden = x.new_zeros(len(x), 8)
        for number, expert in enumerate(self.experts):
            if (mine := chosen == number).any():
                hidden[mine] = share[mine, None] * expert(x[mine])
        return self.out(hidden.tanh())


def mixture_of_experts(run: Run) -> dict[str, Any]:
    torch.manual_seed(0)
    model, idle = Experts(), set[int]()
    wrapped = run.wrap(model, find_unused_parameters=True)

    def note(step: int) -> None:
        for part in run.parts:
            idle.update({*range(6)} - {*model.gate(data(part, step, n=3)[0]).argmax(1).tolist()})

    result = trained(run, model, fits(wrapped, n=3), before=note)
    assert idle
    return result


def uneven_batches(run: Run) -> dict[str, Any]:
    model = mlp()
    wrapped, optimizer = run.wrap(model), sgd(model)
    for step in range(STEPS):
        counts = [3 + step, 8 - step]
        optimizer.zero_grad()
        run.weight(counts[run.rank])
        batches = [data(part, step, n=counts[part]) for part in run.parts]
        x, y = torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])
        nn.functional.mse_loss(wrapped(x), y).backward()
        optimizer.step()
    return weights(model)


def two_models(run: Run) -> dict[str, Any]:
    """A GAN: the generator's loss runs through the discriminator, whose gradients are then discarded."""
    torch.manual_seed(0)
    generator, judge = nn.Linear(12, 6), nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 1))
    make, ask = run.wrap(generator), run.wrap(judge)
    one, other = (sgd(m) for m in (generator, judge))
    for step in range(STEPS):
        other.zero_grad()
        losses = []
        for part in run.parts:
            x, _ = data(part, step)
            losses.append(ask(torch.cat([x[:, :6], make(x).detach()])).tanh()[:6].mean())
        torch.stack(losses).mean().backward()
        other.step()
        one.zero_grad()
        torch.stack([ask(make(data(part, step)[0])).tanh().mean() for part in run.parts]).mean().backward()
        one.step()
    return weights(generator, judge)


class Checkpointed(nn.Module):
    """Activation checkpointing of some layers. Where it is reentrant, each segment is a backward pass inside the outer one."""

    def __init__(self, segments: str = "body", reentrant: bool = False) -> None:
        super().__init__()
        self.body, self.head, self.segments, self.reentrant = mlp()[:4], mlp(1)[4], segments, reentrant

    def segment(self, name: str, module: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        if name not in self.segments:
            return module(x)
        return checkpoint(module, x if x.requires_grad else x.requires_grad_(), use_reentrant=self.reentrant)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.segment("body", lambda x: self.segment("inner", self.body[2:], self.body[:2](x)), x)
        return self.segment("head", self.head, inner)


class Shared(nn.Module):
    """One layer in three reentrant segments, and outside of them closer to the input."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.layer, self.head = nn.Linear(12, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        for number, p in enumerate(self.parameters()):
            nn.init.normal_(p, std=0.3, generator=torch.Generator().manual_seed(number))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.enter(x))
        for _ in range(3):
            x = checkpoint(lambda x: self.layer(x).tanh(), x, use_reentrant=True)
        return self.head(x)


def activation_checkpointing(run: Run, make: Callable[[], nn.Module] = Checkpointed, micro: int = 1) -> dict[str, Any]:
    model = make()
    wrapped = run.wrap(model)
    return trained(run, model, fits(wrapped), micro=micro, apart=wrapped)


CASES: dict[str, Script] = {f.__name__: f for f in (
    initial_parameters_that_differ, clipping_and_evaluation_between_steps, grad_scaler_with_infs_on_one_rank,
    frozen_parameters, unused_parameters, param_groups_and_schedule, compiled_then_wrapped, wrapped_then_compiled, scripted,
    traced, a_scripted_layer, tied_weights, odd_layouts, bf16_parameters, bf16_autocast, adapters, mixture_of_experts,
    activation_checkpointing, uneven_batches, two_models,
)} | {"accumulation in no_sync()": partial(accumulation, no_sync=True), "accumulation": partial(accumulation, no_sync=False)}


def two_losses_in_turn(run: Run) -> dict[str, Any]:
    """Two forward passes, then two backward passes."""
    model = mlp()
    loss, optimizer = fits(run.wrap(model)), sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        for total in [factor * torch.stack([loss(part, number) for part in run.parts]).mean()
                      for factor, number in ((1.0, step), (0.3, 50 + step))]:
            total.backward()
        optimizer.step()
    return weights(model)


def gradient_penalty(run: Run) -> dict[str, Any]:
    """Gradients of gradients: one inner torch.autograd.grad for each backward()."""
    model = mlp()
    wrapped = run.wrap(model)

    def loss(part: int, step: int) -> torch.Tensor:
        x = data(part, step)[0].requires_grad_()
        (slope,) = torch.autograd.grad(wrapped(x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    return trained(run, model, loss)


def out_of_samples(run: Run) -> dict[str, Any]:
    """Rank 1 has half the batches of rank 0; afterwards it takes part with weight 0."""
    model = mlp()
    loss, optimizer = fits(run.wrap(model)), sgd(model)
    for step in range(6):
        optimizer.zero_grad()
        parts = [part for part in run.parts if part == 0 or step < 3]
        run.weight(len(parts))
        if parts:
            torch.stack([loss(part, step) for part in parts]).mean().backward()
        else:
            run.sessions[0].synchronize()
        optimizer.step()
    return weights(model)


def compiled_step(run: Run) -> dict[str, Any]:
    """One function holds forward, backward and optimizer step: hooks run as without torch.compile."""
    model = mlp()
    wrapped, optimizer = run.wrap(model), sgd(model)

    def step(*batches: tuple[torch.Tensor, torch.Tensor]) -> None:
        torch.stack([nn.functional.mse_loss(wrapped(x), y) for x, y in batches]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    call = step if run.alone else torch.compile(step, backend="aot_eager")
    for number in range(3):
        call(*(data(part, number) for part in run.parts))
    torch._dynamo.reset()
    return weights(model)


WORDS = 60


class Tables(nn.Module):
    """Sparse gradients, which are averaged and come back sparse."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(WORDS, 8, sparse=True)
        self.bags = nn.EmbeddingBag(WORDS, 8, sparse=True, mode="sum")
        self.head = nn.Linear(8, 4)

    def forward(self, words: torch.Tensor, *, bags: bool = True) -> torch.Tensor:
        x = self.words(words).mean(1)
        return self.head(x + self.bags(words) if bags else x)


def words_of(part: int, step: int) -> torch.Tensor:
    """Ranks have some words in common, and some twice."""
    return torch.randint(0, WORDS // 3, (5, 3), generator=torch.Generator().manual_seed(10 * step + part)) * (part + 1)


def sparse_tables(run: Run, *, adam: bool = False, micro: int = 1) -> dict[str, Any]:
    """Rank 1 does not use the bags in step 2, and no rank does in step 3."""
    model = Tables()
    wrapped, tables, layouts = run.wrap(model), [model.words.weight, model.bags.weight], list[Any]()
    optimizers = [torch.optim.SGD(model.head.parameters(), lr=0.1),
                  torch.optim.SparseAdam(tables, lr=0.05) if adam else torch.optim.SGD(tables, lr=0.1)]

    def loss(part: int, step: int) -> torch.Tensor:
        return (wrapped(words_of(part, step), bags=step != 3 and (step, part) != (2, 1)) ** 2).mean()

    result = trained(run, model, loss, optimizers, micro=micro, apart=wrapped,
                     before=lambda _: layouts.append([None if p.grad is None else str(p.grad.layout) for p in tables]))
    return result | {"layouts": layouts}


REENTRANT: dict[str, Callable[[], nn.Module]] = {
    "the outer pass begins before it": partial(Checkpointed, "body", True),
    "the outer pass ends after it": partial(Checkpointed, "head", True),
    "segments alone, one inside another": partial(Checkpointed, "body inner head", True), "a shared layer": Shared,
}
ATTACHED: dict[str, Script] = {f.__name__: f for f in (
    two_losses_in_turn, gradient_penalty, out_of_samples, compiled_step)} | {
    "sparse": sparse_tables, "sparse, adam": partial(sparse_tables, adam=True),
    "sparse, micro": partial(sparse_tables, micro=2),
} | {f"reentrant: {name}, {micro}": partial(activation_checkpointing, make=make, micro=micro)
     for name, make in REENTRANT.items() for micro in (1, 2)}

SETTINGS = {
    "service": Setting("module", servers=2),
    "all-reduce": Setting("module", servers=0, plan="auto", ranks_per_node=2),
    "inside the node": Setting("module", ranks_per_node=2),
}


def same_as_alone(name: str, how: str, path: str) -> None:
    setting, script = SETTINGS[path], (CASES | ATTACHED)[name]
    with coordinators(2 if script is two_models else 1, WORLD, setting.servers) as jobs:
        setting = setting._replace(how=how, addresses=tuple(m.address for m in jobs))
        one, other = pool(WORLD).call(play, WORLD, script, setting)
    expected = play(0, WORLD, script, None)
    assert one.pop("layouts", None) == other.pop("layouts", None) == expected.pop("layouts", None)
    # Averages differ from the union's gradient by the order of summation.
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if script is bf16_parameters else {}
    for key, tensor in expected.items():
        torch.testing.assert_close(one[key], tensor, **tolerance, msg=lambda m, n=key: f"{n}: {m}")
        assert torch.equal(one[key], other[key]), f"{key} differs between ranks"


@pytest.mark.commit(12)
@pytest.mark.parametrize("how", ["module", "ddp"])
@pytest.mark.parametrize("path", ["service", "all-reduce"])
@pytest.mark.parametrize("name", CASES)
def test_training_equals_a_single_process_on_the_union(name: str, how: str, path: str) -> None:
    same_as_alone(name, how, path)


@pytest.mark.commit(10)
@pytest.mark.parametrize(("name", "how", "path"), [
    *((name, "module", path) for name in ATTACHED for path in ("service", "all-reduce")),
    *((name, "module", "inside the node") for name in (
        "accumulation in no_sync()", "grad_scaler_with_infs_on_one_rank", "unused_parameters", "odd_layouts",
        "uneven_batches")),
    *((name, "hook", "service") for name in ("accumulation in no_sync()", "uneven_batches", "sparse")),
    ("sparse", "ddp", "service"),
])
def test_training_equals_a_single_process_without_ddp_by_hook_and_inside_a_node(name: str, how: str, path: str) -> None:
    same_as_alone(name, how, path)


def scheduled(run: Run) -> dict[str, Any]:
    """What workers take as the learning rate, step by step, while a schedule changes it."""
    model, rates = mlp(), list[float]()
    optimizer = sgd(model, 0.2)
    loss, schedule = fits(run.wrap(model, optimizer=optimizer)), torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    def note(_: int) -> None:
        schedule.step()
        rates.append(run.sessions[0].inspect.context.worker.units.rate)

    trained(run, model, loss, optimizer, steps=6, after=note)
    return {"rates": rates}


def coded(script: Any, codec: str, *args: Any, how: str = "module") -> list[dict[str, Any]]:
    with coordinators(1, WORLD, 1) as jobs:
        return list(pool(WORLD).call(play, WORLD, script, Setting(how, (jobs[0].address,), codec), *args))


@pytest.mark.commit(1)
@pytest.mark.parametrize("how", ["module", "ddp"])
def test_session_passes_the_learning_rate_to_codecs(how: str) -> None:
    results = coded(scheduled, "error_feedback(int8(), lr_correction=True)", how=how)
    assert [r["rates"] for r in results] == [pytest.approx([0.2, 0.2, 0.1, 0.1, 0.05, 0.05])] * WORLD


def sparse_coded(run: Run, sync: Any) -> dict[str, Any]:
    """With error feedback rows arrive later than they were used; local steps apply this rank's own rows."""
    model, rows = Tables(), set[int]()
    optimizer = sgd(model)
    wrapped = run.wrap(model, optimizer=optimizer, sync=sync)

    def note(_: int) -> None:
        assert model.words.weight.grad is not None
        assert model.words.weight.grad.is_sparse
        rows.add(len(model.words.weight.grad._indices()[0]))

    trained(run, model, lambda part, step: (wrapped(words_of(part, step)) ** 2).mean(), optimizer, before=note)
    run.sessions[0].flush()
    return {"rows": rows} | weights(model)


@pytest.mark.commit(2)
@pytest.mark.parametrize("sync", [None, *(commlayer.LocalSteps(every, overlap=False) for every in (2, 1))], ids=str)
def test_sparse_gradients_keep_replicas_equal_for_other_codecs_and_sync_modes(sync: Any) -> None:
    one, other = coded(sparse_coded, "topk(ratio=0.05)", sync)
    assert max(one.pop("rows")) <= WORDS // 2
    assert all(torch.equal(one[name], other[name]) for name in one)


def aborted_pass(run: Run) -> dict[str, torch.Tensor]:
    """A pass raises once the table has a gradient; in the next one, reentrant, gradients are collected at its end."""
    model = Tables()

    def loss(step: int) -> torch.Tensor:
        x = model.words(words_of(run.rank, step)).mean(1)
        return (checkpoint(model.head, x, use_reentrant=step > 0) ** 2).mean()

    def stop(_: torch.Tensor) -> None:
        raise ArithmeticError

    optimizer, gradients = sgd(model), list[torch.Tensor]()
    run.wrap(model, optimizer=optimizer)
    for step in (1, 0, 1):
        handle = None if step else model.words.weight.register_post_accumulate_grad_hook(stop)
        with pytest.raises(ArithmeticError) if handle else run.no_sync(model) if not gradients else contextlib.nullcontext():
            loss(step).backward()
        if handle:
            handle.remove()
        else:
            assert model.words.weight.grad is not None
            gradients.append(model.words.weight.grad.to_dense().clone())
        optimizer.zero_grad()
    return {"own": gradients[0], "average": gradients[1]}


def test_aborted_pass_leaves_no_sparse_gradient_to_the_next() -> None:
    results = coded(aborted_pass, "identity()")
    mean = torch.stack([r["own"] for r in results]).mean(0)
    for result in results:
        torch.testing.assert_close(result["average"], mean)


def test_hooks_work_without_features_missing_in_torch_2_6(monkeypatch: pytest.MonkeyPatch) -> None:
    def hook(number: int, given: int) -> int:
        return number + given

    monkeypatch.delattr(torch._C._dynamo.eval_frame, "set_code_exec_strategy")
    assert uncompiled(partial(hook, 1))(2) == 3
    assert uncompiled(hook)(1, 2) == 3


def inside_inference_mode(rank: int, inside: bool, address: str) -> dict[str, torch.Tensor]:
    model = mlp()
    with torch.inference_mode(inside), torch.no_grad():
        session = commlayer.attach(model, compression="topk(ratio=0.1)", config=quick(join=address))
    with session:
        return trained(Run(rank, WORLD, Setting("module")), model, fits(model))


def test_attach_works_inside_inference_mode() -> None:
    results = []
    for inside in (False, True):
        with Servers(WORLD, 1) as servers:
            results.append(pool(WORLD).call(inside_inference_mode, inside, servers.address))
    assert all(same(given, expected) for given, expected in zip(*results, strict=True))


def kept() -> tuple[int, int]:
    """Numbers of threads and open descriptors of this process after sessions of deleted models have ended: those that remain
    for half a second, since threads close connections after the end of a session."""
    end_dropped()
    results = [(0, 0)]
    while len(results) < 100 and results[-5:] != [results[-1]] * 5:
        time.sleep(0.1)
        results.append((threading.active_count(), len(os.listdir("/proc/self/fd"))))
    return results[-1]


def never_closed(rank: int, sync: Any, path: str) -> tuple[tuple[int, int], tuple[int, int], bool]:
    """Open threads and descriptors before and after a session that is never closed and that only the model refers to."""
    for _ in range(2):  # the first time, what the process keeps is opened
        before = kept()
        model = mlp()
        optimizer = sgd(model)
        plan = plan_of(model, path=path, ranks_per_node=WORLD if path == "allreduce" else 1)
        session = commlayer.attach(model, optimizer, plan=plan, sync=sync, config=quick())
        del session
        gc.collect()
        trained(Run(rank, WORLD, Setting("module")), model, fits(model), optimizer)
        gone = weakref.ref(model)
        del model, optimizer
    after = kept()
    return before, after, gone() is None


@pytest.mark.commit(2)
@pytest.mark.parametrize(("sync", "path"), [(None, "allreduce"), (None, "service"), ("forward", "service"),
                                            (commlayer.LocalSteps(2), "service")], ids=str)
def test_session_closes_when_its_model_is_deleted(sync: Any, path: str) -> None:
    for before, after, gone in pool(WORLD).call(never_closed, sync, path):
        assert gone
        assert after == before


def forked(rank: int, address: str) -> tuple[str, list[torch.Tensor]]:
    """A child trains the model and a copy of it, and flushes; then its parent trains on."""
    model = mlp()
    optimizer = sgd(model)
    session = commlayer.attach(model, optimizer, compression="identity()", config=quick(join=address, deadline_s=FAR_S))
    train_step(model, optimizer, rank, 0)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        lines = [outcome(lambda: train_step(model, optimizer, rank, 1)), outcome(session.flush)]
        copied = copy.deepcopy(model)
        lines.append(outcome(lambda: train_step(copied, sgd(copied), rank, 1)))
        os.write(write, "\n".join(lines).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    train_step(model, optimizer, rank, 1)
    session.close()
    return text, parameters(model)


def test_forked_child_gets_an_error_and_its_parent_continues() -> None:
    with Servers(WORLD, 1, deadline_s=FAR_S) as servers:
        (text, one), (_, other) = pool(WORLD).call(forked, servers.address)
    backward, flush, copied = text.split("\n")
    assert_refused(backward, "E-FORKED", "InvalidState")
    assert_refused(flush, "E-FORKED")
    assert copied == ""
    assert same(one, other)


def interrupted(rank: int, how: str, address: str) -> list[str]:
    """Ctrl-C on rank 0 while it waits for rank 1, which starts its pass only after that. The script continues."""
    model = mlp()
    optimizer = sgd(model)
    config = quick(join=address, deadline_s=FAR_S, ranks_per_node=WORLD if how == "allreduce" else 1)
    plan = plan_of(model, path=how, ranks_per_node=config["ranks_per_node"])
    session = commlayer.attach(model, optimizer, plan=plan, config=config)
    worker = distributed_job(session).worker
    train_step(model, optimizer, rank, 0)

    def until(reached: Callable[[], object]) -> None:
        while not reached():
            time.sleep(0.01)

    def interrupt() -> None:
        until(lambda: worker.waiting_since)
        # In another thread it interrupts no system call, as if it came just before the main thread's one.
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    lines = []
    if rank == 0:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        thread = threading.Thread(target=interrupt)
        thread.start()
        try:
            train_step(model, optimizer, rank, 1)
        except KeyboardInterrupt as error:
            lines.append(type(error).__name__)
        thread.join()
        signal.signal(signal.SIGINT, before)
    else:
        until(lambda: worker.error)
        lines.append("")
    lines += [outcome(lambda n=step: train_step(model, optimizer, rank, n)) for step in (1, 2)]  # type: ignore[misc]
    session.close()
    return lines


@pytest.mark.parametrize("how", ["service", "allreduce"])
def test_interrupt_is_raised_once_and_peers_fail_immediately(how: str) -> None:
    with Servers(WORLD, int(how == "service"), deadline_s=FAR_S) as servers:
        mine, theirs = pool(WORLD).call(interrupted, how, servers.address)
    assert mine[0] == "KeyboardInterrupt"
    for line in mine[1:]:
        assert_refused(line, "E-SESSION-CLOSED", "CommError", "KeyboardInterrupt")
    for line in theirs[1:]:
        assert_refused(line, "E-PEER-LOST", "worker 0", "KeyboardInterrupt")
