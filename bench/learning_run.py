"""One training of `bench learning`: a task, an optimizer and a way, by virtual workers in one thread. Knows no store, no table.

What a way does to weights is the package's own: codecs, residuals, buckets and the server's sums (virtual_workers.py), local
steps, overlapped rounds and the outer optimizer (runtime/local_steps.py). A test trains the same over loopback.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from msgspec import structs
from torch import nn

from bench import Unmeasurable
from bench.learning_tasks import TASKS, Batch, Task
from bench.virtual_workers import VirtualWorkers
from commlayer import planner
from commlayer.codec_name import named
from commlayer.compressors import parse
from commlayer.compressors.feedback import wrap
from commlayer.optim import Outer
from commlayer.records import Plan, Record
from commlayer.runtime.fragments import fragments_of
from commlayer.runtime.local_steps import LocalSteps, StepWeights
from commlayer.runtime.model_job import job_of

STEPS, LOOKS = 240, 30
WARMUP = 20
"""Steps over which the rate rises from nothing; from then on it stays, so that each step of a curve
means the same: factors are read from the second half."""
CUT_NBYTES = 1 << 16
MOMENTUM = 0.9
OUTERS = {"": Outer(), "diloco": Outer(lr=0.7, momentum=0.9)}
"""Plain averaging; and what DiLoCo takes, with Nesterov's momentum."""


class Way(Record, frozen=True):
    """What is trained, and how."""

    task: str
    optimizer: str
    codec: str = "identity()"
    """As plans spell it, without error feedback, which it gets where plans add it."""
    codes: str = "gradients"
    every: int = 1
    overlap: str = ""
    late: bool = False
    workers: int = 4
    seed: int = 0
    ratio_over: Literal["bucket", "plan"] = "bucket"
    fragments: int = 1
    rate: float = 0.0
    """The optimizer's; 0: the task's own."""
    outer: str = ""
    """What an exchange does with the mean change: one of `OUTERS`."""

    @property
    def dense(self) -> Way:
        """What it is compared with."""
        return Way(self.task, self.optimizer, workers=self.workers, seed=self.seed)

    @property
    def updates(self) -> bool:
        return self.codes == "updates" or self.every > 1 or self.overlap == "round" or bool(self.outer)


def train(way: Way, *, steps: int = STEPS, looks: int = LOOKS) -> list[float]:
    """The validation loss at `looks` places. NaN where weights are no numbers."""
    if way.task not in TASKS:
        raise Unmeasurable(f"no task is called {way.task!r}; there are: {', '.join(TASKS)}")
    task = TASKS[way.task](way.seed)
    rate = way.rate or task.rates[way.optimizer]
    made = (_Local if way.updates else _Averaged)(way, task, rate)
    feeds = [task.batches(rank, way.workers) for rank in range(way.workers)]
    curve = []
    for step in range(1, steps + 1):
        made.step([next(feed) for feed in feeds], min(1.0, step / WARMUP))
        if step * looks % steps < looks:
            curve.append(task.validation(made.learnt()))
            if not math.isfinite(curve[-1]):
                return curve + [math.nan] * (looks - len(curve))
    return curve


def losses(task: Task, way: Way, model: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss of that batch; one line if the task gives none."""
    found: Any = task.loss(model, batch)
    if not isinstance(found, torch.Tensor) or found.numel() != 1 or not found.requires_grad:
        raise Unmeasurable(f"task {way.task} returned {type(found).__name__} as its loss, needed is one number with a gradient")
    return found


def plan_of(way: Way, model: nn.Module) -> Plan:
    """Buckets of 64 kB over one server."""
    codec = parse(way.codec)
    made = planner.default_plan(job_of(model), codec=str(wrap(codec)), path="service", servers=1, ranks_per_node=1,
                                fuse_nbytes=CUT_NBYTES, cut_nbytes=CUT_NBYTES)
    return structs.replace(made, ratio_over=way.ratio_over)


def optimizer_of(way: Way, model: nn.Module, rate: float) -> torch.optim.Optimizer:
    if way.optimizer == "adam":
        return torch.optim.AdamW(model.parameters(), rate, fused=True)
    momentum = 0.0 if named(way.codec).family == "dgc" else MOMENTUM  # which has the momentum inside
    return torch.optim.SGD(model.parameters(), rate, momentum=momentum, fused=True)


class _Averaged:
    """Gradients are averaged, and every worker takes the same step: one model stands for all."""

    def __init__(self, way: Way, task: Task, rate: float) -> None:
        self._way, self._task, self._model, self._rate = way, task, task.model, rate
        self._optimizer = optimizer_of(way, self._model, rate)
        self._workers = VirtualWorkers(job_of(self._model), plan_of(way, self._model), way.workers)
        self._late: list[torch.Tensor] | None = None

    def step(self, batches: Sequence[Batch], part: float) -> None:
        parameters = list(self._model.parameters())
        gradients = [torch.autograd.grad(losses(self._task, self._way, self._model, batch), parameters) for batch in batches]
        mean: list[torch.Tensor] | None = self._workers.average(gradients)[0]
        if self._way.late:
            mean, self._late = self._late, mean
        for i, parameter in enumerate(parameters):
            parameter.grad = None if mean is None else mean[i]
        self._optimizer.param_groups[0]["lr"] = self._rate * part
        self._optimizer.step()

    def learnt(self) -> nn.Module:
        return self._model


class _Local:
    """Each worker has a model and an optimizer of its own, and their changes are averaged."""

    def __init__(self, way: Way, task: Task, rate: float) -> None:
        self._way, self._task, self._rate = way, task, rate
        self._models = [TASKS[way.task](way.seed).model for _ in range(way.workers)]
        self._optimizers = [optimizer_of(way, model, rate) for model in self._models]
        plan = plan_of(way, task.model)
        self._sums = _Sums(VirtualWorkers(job_of(task.model), plan, way.workers), plan, way.fragments)
        # An exchange that is brought in right behind its beginning is one that does not overlap with steps.
        self._locals = [LocalSteps(list(model.parameters()), way.every, OUTERS[way.outer], StepWeights(1.0, None),
                                   fragments=way.fragments, overlap=True) for model in self._models]

    def step(self, batches: Sequence[Batch], part: float) -> None:
        for model, optimizer, local, batch in zip(self._models, self._optimizers, self._locals, batches, strict=True):
            optimizer.zero_grad()
            losses(self._task, self._way, model, batch).backward()
            local.count()
            optimizer.param_groups[0]["lr"] = self._rate * part
            optimizer.step()
        if self._locals[0].due:
            for rank, local in enumerate(self._locals):
                local.exchange(self._sums.worker(rank), [], 0.0)
            if not self._way.overlap:
                for rank, local in enumerate(self._locals):
                    local.settle(self._sums.worker(rank), [], 0.0)

    def learnt(self) -> nn.Module:
        """The mean of all workers' weights."""
        with torch.no_grad():
            for mine, each in zip(self._task.model.parameters(), zip(*(m.parameters() for m in self._models), strict=True),
                                  strict=True):
                mine.copy_(torch.stack(each).mean(0))
        return self._task.model


class _Sums:
    """What local steps ask of runtime.worker.Worker, of all workers in one thread: a turn is summed when the last begins it."""

    def __init__(self, virtual: VirtualWorkers, plan: Plan, fragments: int) -> None:
        self._virtual = virtual
        self._places = fragments_of(plan.buckets, fragments)
        self.turns = [[plan.buckets[place] for place in places] for places in self._places]
        self._tensors = [{s.tensor for bucket in turn for s in bucket.slices} for turn in self.turns]
        self._given: list[dict[int, torch.Tensor]] = [{} for _ in range(virtual.world)]
        self._mean: dict[int, torch.Tensor] = {}

    def worker(self, rank: int) -> Any:
        return _Rank(self, rank)

    def give(self, rank: int, tensor: int, change: torch.Tensor) -> None:
        self._given[rank][tensor] = change.clone()
        for turn, (places, tensors) in enumerate(zip(self._places, self._tensors, strict=True)):
            if all(tensors <= given.keys() for given in self._given):
                for t in tensors:
                    self._mean[t] = torch.empty_like(change if t == tensor else self._given[0][t])
                for place in places:
                    self._virtual.exchange(place, self._given, self._mean)
                for given in self._given:
                    for t in tensors:
                        del given[t]
                if turn == len(self.turns) - 1:
                    self._virtual.end()

    def write(self, targets: Sequence[torch.Tensor | None], turn: int) -> None:
        for tensor in self._tensors[turn]:
            target = targets[tensor]
            assert target is not None
            target.copy_(self._mean[tensor])


class _Rank:
    """One worker, as local steps see it."""

    def __init__(self, sums: _Sums, rank: int) -> None:
        self._sums, self._rank, self.turns = sums, rank, sums.turns
        self.scale = self.rate = 1.0

    def ready(self, tensor: int, change: torch.Tensor) -> None:
        self._sums.give(self._rank, tensor, change)

    def write(self, targets: Sequence[torch.Tensor | None], turn: int = 0) -> bool:
        self._sums.write(targets, turn)
        return True

    def weigh(self, weight: float, total: float | None) -> None:
        """All batches weigh the same."""

    def complete(self, leftovers: Sequence[torch.Tensor | None]) -> None:
        """A round has begun."""

    def wait(self, deadline_s: float, turn: int = 0) -> None:
        """It is here."""

    def end(self, *, finite: bool) -> None:
        """Nothing is taken back."""

    def applied(self, numbers: Sequence[int]) -> None:
        """All of it."""
