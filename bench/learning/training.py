"""One training of `bench learning`: bench/virtual_training.py on the bench's tasks."""

from __future__ import annotations

import torch
from torch import nn

from bench.learning.tasks import TASKS
from bench.virtual_training import LOOKS, STEPS, TrainingTask, Variant
from bench.virtual_training import train as train_virtually
from commlayer.errors import InvalidInput

MOMENTUM = 0.9


def train(variant: Variant, *, steps: int = STEPS, looks: int = LOOKS) -> list[float]:
    """Validation losses at `looks` evenly spaced steps; NaN once weights are NaN."""
    if variant.task not in TASKS:
        raise InvalidInput("E-USER-CODE", f"no task is called {variant.task!r}; there are: {', '.join(TASKS)}")

    def make(seed: int) -> TrainingTask:
        task = TASKS[variant.task](seed)
        rate = variant.rate or task.rates[variant.optimizer]
        return TrainingTask(task.model, lambda model: optimizer_of(variant, model, rate), task.batches, task.loss,
                            task.validation)

    return train_virtually(variant, make, steps=steps, looks=looks)


def optimizer_of(variant: Variant, model: nn.Module, rate: float) -> torch.optim.Optimizer:
    if variant.optimizer == "muon":
        return MuonAdamW(model, rate)
    if variant.optimizer == "adam":
        return torch.optim.AdamW(model.parameters(), rate, fused=True)
    return torch.optim.SGD(model.parameters(), rate, momentum=MOMENTUM, fused=True)


class MuonAdamW(torch.optim.Optimizer):
    """Muon for the matrices inside the model; AdamW for embeddings, the last layer, biases and norms, as its authors advise."""

    def __init__(self, model: nn.Module, rate: float) -> None:
        ends = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        ends |= {id(m.weight) for m in [*(m for m in model.modules() if isinstance(m, nn.Linear))][-1:]}
        matrices = [p for p in model.parameters() if p.ndim == 2 and id(p) not in ends]
        inside = {id(p) for p in matrices}
        self._muon = torch.optim.Muon(matrices, lr=rate, adjust_lr_fn="match_rms_adamw")
        self._adamw = torch.optim.AdamW([p for p in model.parameters() if id(p) not in inside], rate, fused=True)
        super().__init__(model.parameters(), {"lr": rate})
        self.param_groups = [*self._muon.param_groups, *self._adamw.param_groups]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self._muon.step(closure)
        self._adamw.step(closure)
