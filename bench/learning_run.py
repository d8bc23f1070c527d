"""One training of `bench learning`: bench/virtual_training.py on the bench's tasks."""

from __future__ import annotations

import torch
from torch import nn

from bench import Unmeasurable, virtual_training
from bench.learning_tasks import TASKS, Task
from bench.virtual_training import LOOKS, OUTERS, STEPS, WARMUP, Variant, plan_of

__all__ = ["LOOKS", "OUTERS", "STEPS", "WARMUP", "Task", "Variant", "optimizer_of", "plan_of", "train"]

MOMENTUM = 0.9


def train(way: Variant, *, steps: int = STEPS, looks: int = LOOKS) -> list[float]:
    """The validation loss at `looks` evenly spaced steps; NaN once weights are NaN."""
    if way.task not in TASKS:
        raise Unmeasurable(f"no task is called {way.task!r}; there are: {', '.join(TASKS)}")

    def make(seed: int) -> virtual_training.TrainingTask:
        task = TASKS[way.task](seed)
        rate = way.rate or task.rates[way.optimizer]
        return virtual_training.TrainingTask(task.model, lambda model: optimizer_of(way, model, rate), task.batches, task.loss,
                                     task.validation)

    try:
        return virtual_training.train(way, make, steps=steps, looks=looks)
    except ValueError as error:
        raise Unmeasurable(str(error)) from None


def optimizer_of(way: Variant, model: nn.Module, rate: float) -> torch.optim.Optimizer:
    if way.optimizer == "adam":
        return torch.optim.AdamW(model.parameters(), rate, fused=True)
    return torch.optim.SGD(model.parameters(), rate, momentum=MOMENTUM, fused=True)
