"""Gradients that are not finite on some ranks: rare steps are skipped and reported, persistent ones end the job."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest
import torch
from support.attached import assert_refused, data, mlp, outcome, parameters, plan_of, plan_or_codec, same, sync_of
from support.jobs import distributed_job
from support.rank_pool import pool, quick
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlayer
from commlayer.engine.guards.finite_steps import COUNTS, MOST, FiniteSteps
from commlayer.engine.job.job import JoinedState
from commlayer.engine.model.optimizers import HeldParameters

WORLD, STEPS = 2, 12
NAN = float("nan")
INT4 = "error_feedback(int4())"
SYNC: dict[str, dict[str, Any]] = {"local": {"every": 2}, "updates": {"codes": "updates"}, "forward": {"overlap": "forward"}}
MODES = [("module", "identity()"), ("ddp", "identity()"), ("module", INT4), ("ddp", "fp16()"),
         ("forward", "error_feedback(topk(ratio=0.3))"), ("forward plan", INT4), ("local", "identity()"), ("updates", INT4)]
LOCAL = ("local", "updates")


class Script:
    """On one rank. In `bad` steps the ranks `where` get a gradient of 2.weight that is not finite."""

    def __init__(self, rank: int, how: str, codec: str, bad: list[int], where: tuple[int, ...], kind: str) -> None:
        self.rank, self.bad, self.where, self.kind, self.number = rank, bad, where, kind, 0
        self.model = mlp()
        weights = [*self.model.parameters()]
        self.optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(weights, lr=0.01)]
        if kind == "sgd":
            self.optimizers = [torch.optim.SGD(weights, lr=0.05)]
        elif kind == "two optimizers":
            self.optimizers = [torch.optim.SGD(part, lr=0.05) for part in (weights[2:4], weights[:2])]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=kind == "scaler")
        self.wrapped: Any = DistributedDataParallel(self.model) if how == "ddp" else self.model
        plan: Any = codec
        if how in ("forward plan", "stale", "allreduce"):
            plan = plan_of(self.model, codec, "allreduce" if how == "allreduce" else "service", nbytes=(4096, 4096),
                           bucket={"stale": how == "stale"}, overlap="forward" if how == "forward plan" else "")
        self.session = commlayer.attach(self.wrapped, self.optimizers[0], **plan_or_codec(plan),
                                        config=quick(ranks_per_node=1, drift="end"), sync=sync_of(**SYNC.get(how, {})))
        if kind == "whole" and rank == 0:  # it waits for all of a step, the other rank does not
            self.model[0].weight.register_post_accumulate_grad_hook(lambda _: None)
        self.model[2].weight.register_hook(self.spoil)

    def spoil(self, gradient: torch.Tensor) -> torch.Tensor:
        if self.number in self.bad and self.rank in self.where:
            gradient = gradient.clone()
            gradient.view(-1)[3] = NAN
        return gradient

    def backward(self) -> torch.Tensor:
        self.optimizers[0].zero_grad()
        x, y = data(self.rank, self.number)
        loss = nn.functional.mse_loss(self.wrapped(x), y)
        self.scaler.scale(loss).backward()
        return loss

    def step(self) -> None:
        if self.kind == "closure":
            self.optimizers[0].step(self.backward)
            return
        self.backward()
        if self.kind == "scaler":
            self.scaler.step(self.optimizers[0])
            self.scaler.update()
        elif self.kind != "careful" or all(bool(p.grad.isfinite().all()) for p in self.model.parameters()):
            for optimizer in self.optimizers:
                optimizer.step()


class Result(NamedTuple):
    error: str
    steps: int
    decisions: list[str]
    weights: list[torch.Tensor]
    scale: float


def run(rank: int, how: str, codec: str, bad: list[int], where: tuple[int, ...], kind: str = "adamw") -> Result:
    script = Script(rank, how, codec, bad, where, kind)

    def train() -> None:
        for script.number in range(STEPS):
            script.step()
        script.session.flush()
        if "forward" in how and kind != "whole":
            script.session.synchronize()

    error = outcome(train)
    decisions = [line for line in script.session.inspect.decisions() if "not finite" in line]
    script.session.close()
    return Result(error, script.number, decisions, parameters(script.model), script.scaler.get_scale())


def counted(rank: int, how: str) -> tuple[str, str]:
    """What a joining rank receives after three bad steps of rank 1, and what that rank would send then."""
    script = Script(rank, how, "identity()", [1, 2, 3], (1,), "adamw")
    for script.number in range(4):
        script.step()
    script.session.flush()
    context, weights = distributed_job(script.session), [*script.model.parameters()]
    received = context.followers[COUNTS]()
    context.joined = JoinedState({}, list, {COUNTS: received}, 0)
    FiniteSteps(context, weights, HeldParameters(weights))
    sent = context.followers[COUNTS]()
    script.session.close()
    return received, sent


@pytest.mark.parametrize(("how", "counts"), [("module", '[0,{"0":3}]'), ("local", "[0,{}]")])
def test_joining_rank_counts_dropped_steps_like_the_others(how: str, counts: str) -> None:
    """Under local steps each rank drops its own steps."""
    assert pool(WORLD).call(counted, how) == [(counts, counts)] * WORLD


def completed(results: list[Result]) -> None:
    """All ranks trained to the end, with equal weights that are finite."""
    assert [r.error for r in results] == [""] * len(results)
    assert same(results[0].weights, results[-1].weights)
    assert all(bool(p.isfinite().all()) for p in results[0].weights)


@pytest.mark.commit(5)
@pytest.mark.parametrize(("how", "codec", "kind"), [
    *((how, codec, "adamw") for how, codec in MODES), ("stale", "identity()", "adamw"), ("stale", INT4, "adamw"),
    ("module", "identity()", "careful"), ("module", INT4, "careful"), ("module", "identity()", "closure"),
    ("module", INT4, "closure"), ("module", "identity()", "sgd"), ("module", INT4, "sgd"), ("local", "identity()", "closure"),
    ("local", INT4, "closure"), ("forward plan", INT4, "whole"),
])
def test_one_non_finite_step_of_a_rank_is_skipped_and_named(how: str, codec: str, kind: str) -> None:
    """A careful script checks for itself and skips the step. "whole": one rank waits for the whole step, the other does not."""
    results = pool(WORLD).call(run, how, codec, [5], (1,), kind)
    completed(results)
    for result in results:
        assert len(result.decisions) == (kind != "careful")  # other ranks log a local step after a later exchange
        assert all("gradients of rank 1, first in 2.weight" in line for line in result.decisions)
        assert all(re.search(rf"\b{MOST} in a row", line) for line in result.decisions)


@pytest.mark.parametrize("codec", ["identity()", INT4])
def test_rare_non_finite_steps_do_not_end_the_job(codec: str) -> None:
    completed(pool(WORLD).call(run, "module", codec, [1, 2, 3, 4, 6, 7, 8, 9], (1,)))


@pytest.mark.commit(4)
@pytest.mark.parametrize(("how", "codec", "where", "kind"), [
    *((how, codec, (1,), "adamw") for how, codec in MODES), *((how, codec, (0, 1), "adamw") for how, codec in MODES[:3]),
    ("local", "identity()", (1,), "two optimizers"), ("module", "identity()", (1,), "two optimizers"),
])
def test_persistent_non_finite_gradients_end_the_job_and_name_the_ranks(
    how: str, codec: str, where: tuple[int, ...], kind: str,
) -> None:
    """The other optimizer's gradients are finite, which does not hide the others."""
    for result in pool(WORLD).call(run, how, codec, [*range(3, STEPS)], where, kind):
        who = "rank 1, first in 2.weight" if where == (1,) else "all ranks, first in 2.weight"
        assert_refused(result.error, "E-NOT-FINITE", who, *([f"{MOST} times"] if where == (1,) else ["diverged"]))
        assert result.steps <= 3 + MOST + 2
        assert all(bool(p.isfinite().all()) for p in result.weights)


@pytest.mark.parametrize(("how", "codec"), [
    ("module", "identity()"), ("ddp", "identity()"), ("module", INT4), ("forward plan", INT4)])
def test_grad_scaler_skips_non_finite_steps(how: str, codec: str) -> None:
    """attach() was not given the scaler. Its scale falls any number of times, and nothing is logged."""
    results = pool(WORLD).call(run, how, codec, [*range(3, 11)], (1,), "scaler")
    completed(results)
    assert [(r.decisions, r.scale) for r in results] == [([], 4.0 / 2**8)] * WORLD


def with_residuals(rank: int) -> list[bool]:
    """All-reduced buckets; rank 0 has residuals of an earlier plan."""
    script = Script(rank, "allreduce", "identity()", [3], (1,), "adamw")
    worker = distributed_job(script.session).worker
    assert worker is not None
    rows = []
    for script.number in range(2, 5):
        for bucket in worker.buckets if rank == 0 else ():
            bucket.ledger.inherited = torch.zeros(bucket.numel)
        script.backward()
        rows.append(worker.tentative)
    script.session.close()
    return rows


def test_ranks_agree_whether_a_step_is_finite_for_any_residuals() -> None:
    """A rank that decided alone would wait for the others."""
    first, second = pool(WORLD).call(with_residuals)
    assert first == second
