"""One training of `bench learning`: bench/virtual_training.py on the bench's tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from bench.learning.tasks import TASKS, Task
from bench.virtual_training import LOOKS, STEPS, Make, TrainingTask, Variant
from bench.virtual_training import train as train_virtually
from commlayer.errors import InvalidInput

MOMENTUM = 0.9


def train(variant: Variant, *, steps: int = STEPS, looks: int = LOOKS) -> list[float]:
    """Validation losses at `looks` evenly spaced steps; NaN once weights are NaN."""
    return train_virtually(variant, maker(TASKS, variant), steps=steps, looks=looks)


def maker(tasks: Mapping[str, Callable[[int], Task]], variant: Variant) -> Make:
    """Creates the variant's task from a seed, with its optimizer."""
    if variant.task not in tasks:
        raise InvalidInput("E-USER-CODE", f"no task is called {variant.task!r}; there are: {', '.join(tasks)}")

    def make(seed: int) -> TrainingTask:
        task = tasks[variant.task](seed)
        rate = variant.rate or task.rates[variant.optimizer]
        return TrainingTask(task.model, lambda model: optimizer_of(variant, model, rate), task.batches, task.loss,
                            task.validation)

    return make


def optimizer_of(variant: Variant, model: nn.Module, rate: float) -> torch.optim.Optimizer:
    if variant.optimizer == "adam":
        return torch.optim.AdamW(model.parameters(), rate, fused=True)
    return torch.optim.SGD(model.parameters(), rate, momentum=MOMENTUM, fused=True)
