"""The campaign of small trainings trains as the engine does."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from msgspec import structs
from support.workers import Rig, SharedRows, on_ranks, step
from torch import nn

from bench import virtual_training as learning_steps
from bench.learning import tasks as learning_tasks
from bench.learning.tasks import TASKS
from bench.learning.training import optimizer_of, train
from bench.virtual_training import WARMUP, TrainingTask, Variant, outer_of, plan_of
from commlayer.engine.model.model_tensors import describe_model
from commlayer.engine.sync.local_steps import OuterSteps, StepWeights
from commlayer.errors import InvalidInput

RATE, STEPS, WORKERS = 0.01, 10, 2


def over_loopback(variant: Variant) -> list[torch.Tensor]:
    """The mean of all ranks' weights after the same steps, by real workers and a real server."""
    job = describe_model(TASKS[variant.task](variant.seed).model)
    plan = plan_of(variant, TASKS[variant.task](variant.seed).model)
    if variant.late:
        plan = structs.replace(plan, buckets=tuple(structs.replace(bucket, stale=True) for bucket in plan.buckets))
    tasks, rows = [TASKS[variant.task](variant.seed) for _ in range(variant.workers)], SharedRows(variant.workers)
    with Rig(variant.workers, "", plan=plan, of=job) as rig:
        def body(rank: int) -> list[torch.Tensor]:
            task, worker = tasks[rank], rig.workers[rank]
            parameters = list(task.model.parameters())
            optimizer, feed = optimizer_of(variant, task.model, RATE), task.batches(rank, variant.workers)
            local = OuterSteps(parameters, variant.every, outer_of(variant), StepWeights(1.0),
                               overlap=variant.overlap == "round", norms=rows.of(rank))
            for i in range(STEPS):
                optimizer.param_groups[0]["lr"] = RATE * min(1.0, (i + 1) / WARMUP)
                loss = task.loss(task.model, next(feed))
                if variant.updates:
                    optimizer.zero_grad()
                    loss.backward()
                    local.count()
                    optimizer.step()
                    if local.exchange_is_due:
                        local.exchange(worker, [], 20.0)
                else:
                    for p, mean in zip(parameters, step(worker, list(torch.autograd.grad(loss, parameters))), strict=True):
                        p.grad = mean
                    optimizer.step()
            return [p.detach().clone() for p in parameters]

        weights = on_ranks(variant.workers, body)
    return [torch.stack(each).mean(0) for each in zip(*weights, strict=True)]


def virtual(variant: Variant, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The same by `train`."""
    results: list[torch.Tensor] = []

    def look(task: Any, model: torch.nn.Module) -> float:
        results[:] = [p.detach().clone() for p in model.parameters()]
        return 0.0

    with monkeypatch.context() as patch:
        patch.setattr(learning_tasks.Task, "validation", look)
        train(structs.replace(variant, rate=RATE), steps=STEPS, looks=1)
    return results


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("fields", [
    {"codec": "topk(ratio=0.05)"},
    {"codec": "powersgd(rank=2)"},
    {"codec": "int4()", "late": True},
    {"codec": "topk(ratio=0.05)", "codes": "updates"},
    {"codec": "int4()", "every": 4},
    {"codec": "topk(ratio=0.05)", "every": 2, "overlap": "round"},
    {"codec": "int4()", "every": 4, "outer": "diloco"},
    {"codec": "int4()", "every": 4, "outer": "plain"},
], ids=lambda fields: " ".join(map(str, fields.values())))
def test_what_it_trains_is_what_workers_train(
    fields: dict[str, Any], optimizer: str, monkeypatch: pytest.MonkeyPatch,
) -> None:
    variant = Variant("mlp", optimizer, workers=WORKERS, **fields)
    mine, theirs = virtual(variant, monkeypatch), over_loopback(variant)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    begin = TASKS["mlp"](0).model.parameters()
    assert not any(torch.equal(a, b) for a, b in zip(mine, begin, strict=True))


def test_the_mean_of_changes_is_matched_under_adam_alone() -> None:
    """Under SGD what an exchange makes of the mean is what it always was, bit for bit."""
    for optimizer, same in (("sgd", True), ("adam", False)):
        variant = Variant("mlp", optimizer, "int4()", every=4)
        assert (train(variant, steps=12, looks=3) == train(structs.replace(variant, outer="plain"), steps=12, looks=3)) is same
    with pytest.raises(InvalidInput, match="outer: .*'none'.*'plain', 'diloco'.*E-USER-CODE"):
        train(structs.replace(variant, outer="none"))


def numbered(seed: int) -> TrainingTask:
    """One line through numbers that all workers together draw in order."""
    torch.manual_seed(seed)
    model = nn.Linear(1, 1)

    def loss(model: nn.Module, x: float) -> torch.Tensor:
        return (model(torch.tensor([x])) - math.sin(x)).square().sum()

    def batches(rank: int, world: int) -> Iterator[float]:
        return (float(n % 3) for n in itertools.count(rank, world))

    return TrainingTask(model, lambda model: torch.optim.SGD(model.parameters(), 1e-2), batches, loss,
                        lambda model: float(model.weight.detach()))


@pytest.mark.parametrize("fields", [{}, {"every": 4}], ids=["averaged", "local"])
def test_a_worker_with_several_batches_learns_of_all_of_them(fields: dict[str, Any]) -> None:
    """One that has the batches of four takes the steps that the four take together."""
    one = learning_steps.train(Variant("", "sgd", workers=1, batches=4, **fields), numbered, steps=24, looks=24)
    four = learning_steps.train(Variant("", "sgd", workers=4), numbered, steps=24, looks=24)
    assert one == pytest.approx(four, rel=1e-5)
    assert one != pytest.approx(learning_steps.train(Variant("", "sgd", workers=1), numbered, steps=24, looks=24), rel=1e-3)


@pytest.mark.parametrize("task", TASKS)
def test_tasks_are_learnt_and_equal_for_equal_seeds(task: str) -> None:
    variant = Variant(task, "adam", workers=1)
    curve = train(variant, steps=40, looks=2)
    assert curve == train(variant, steps=40, looks=2)
    assert curve != train(structs.replace(variant, seed=1), steps=40, looks=2)
    tasks = TASKS[task](0)
    assert curve[1] < tasks.validation(tasks.model) * 0.99
    assert 10_000 < sum(p.numel() for p in tasks.model.parameters()) < 100_000
