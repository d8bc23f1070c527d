"""Trains a task with virtual workers in one thread, to measure how many steps a sync mode and codec cost.

Everything that affects weights is the package's own code: codecs, residuals, buckets, the server's sums, local steps,
overlap and the outer optimizer. Only the transport is missing. A test trains the same over loopback.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Literal, NamedTuple, cast

import torch
from msgspec import structs
from torch import nn

from commlayer import planner
from commlayer.cluster.processes.channels import node_ranks
from commlayer.cluster.servers.bucket_sum import Reply
from commlayer.cluster.servers.server_codecs import contributing_ranks, make_codec_ops
from commlayer.cluster.servers.summation import Summation
from commlayer.compressors import make_codec, parse
from commlayer.compressors.feedback import wrap
from commlayer.engine.buckets.bucket import BucketExchange, EncodedBucket
from commlayer.engine.buckets.entries_sent import allot_entries
from commlayer.engine.buckets.units import Units
from commlayer.engine.model.model_tensors import describe_model
from commlayer.engine.sync.local_steps import OuterSteps, StepWeights
from commlayer.engine.worker.worker import Worker
from commlayer.errors import InvalidInput
from commlayer.observe.noise_scale import NoiseScale
from commlayer.optim import OuterSGD, default_outer
from commlayer.planner.buckets import divide_into_fragments
from commlayer.records import Job, Plan, Record
from commlayer.transport.protocol import Header, Kind, Message

STEPS, LOOKS = 240, 30
WARMUP = 20
"""Warm-up steps of the learning rate. It then stays constant: factors are read from the second half of a curve."""
CUT_NBYTES = 1 << 16
OUTERS = {"plain": OuterSGD(), "diloco": OuterSGD(lr=0.7, momentum=0.9)}
"""Plain averaging, and DiLoCo's outer optimizer with Nesterov momentum. Without a name: see `outer_of`."""


class Variant(Record, frozen=True):
    """One configuration of a training."""

    task: str
    optimizer: str
    codec: str = "identity()"
    """As in plans, without error feedback, which is added as in plans."""
    codes: str = "gradients"
    every: int = 1
    overlap: str = ""
    late: bool = False
    workers: int = 4
    seed: int = 0
    ratio_over: Literal["bucket", "plan"] = "bucket"
    fragments: int = 1
    rate: float = 0.0
    """Learning rate of the optimizer; 0 means the task's own."""
    outer: str = ""
    """Outer optimizer of an exchange: one of `OUTERS`, or "" for the default of the optimizer."""
    batches: int = 1
    """Task batches per worker and step; they act as one larger batch."""

    @property
    def dense(self) -> Variant:
        """The reference configuration."""
        return Variant(self.task, self.optimizer, workers=self.workers, seed=self.seed, batches=self.batches)

    @property
    def updates(self) -> bool:
        return self.codes == "updates" or self.every > 1 or self.overlap == "round" or bool(self.outer)


def outer_of(variant: Variant) -> OuterSGD:
    """Without a name the default of attach(). Raises InvalidInput for an unknown name."""
    if not variant.outer:
        return default_outer("sgd" if variant.optimizer == "sgd" else "adam")
    if variant.outer not in OUTERS:
        raise InvalidInput("E-USER-CODE",
                           f"outer: got {variant.outer!r}, allowed: {', '.join(map(repr, OUTERS))}, or '' for the optimizer's "
                           "own")
    return OUTERS[variant.outer]


class TrainingTask(NamedTuple):
    """A task to train. Equal seeds give equal tasks; created once per worker."""

    model: nn.Module
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    """Creates the optimizer for a model like this one, at the user's learning rate."""
    batches: Callable[[int, int], Iterator[Any]]
    """Endless batches for a rank and a number of workers."""
    loss: Callable[[nn.Module, Any], torch.Tensor]
    validation: Callable[[nn.Module], float]


Make = Callable[[int], TrainingTask]
"""Creates a task from a seed."""


def warm(step: int) -> float:
    return min(1.0, step / WARMUP)


def train(
    variant: Variant, make: Make, *, steps: int = STEPS, looks: int = LOOKS, rate: Callable[[int], float] = warm,
    noise: list[float] | None = None,
) -> list[float]:
    """Returns the validation loss at `looks` points; NaN after weights have become non-finite. `rate` gives a step's learning
    rate as a fraction of the task's. `noise` receives the gradient noise scale at each point, in batches of one worker, if
    exact gradients are averaged; 0 in the first steps. Raises InvalidInput for a task that cannot be trained."""
    task = make(variant.seed)
    if buffers := [info.name for info in describe_model(task.model).tensors if info.buffer]:
        raise InvalidInput("E-USER-CODE",
                           f"task {variant.task}: its model has running statistics ({buffers[0]}), which virtual workers do "
                           "not average; take a model without, such as one with LayerNorm or GroupNorm")
    trainer = (_Local if variant.updates else _Averaged)(variant, task, make)
    feeds = [task.batches(rank, variant.workers) for rank in range(variant.workers)]
    curve: list[float] = []
    for step in range(1, steps + 1):
        trainer.step([_drawn(variant, feed, rank, step) for rank, feed in enumerate(feeds)], rate(step))
        if step * looks % steps < looks:
            curve.append(_validated(variant, task.validation(trainer.trained_model())))
            if noise is not None and isinstance(trainer, _Averaged) and variant.codec == variant.dense.codec:
                noise.append(trainer.noise.known)
            if not math.isfinite(curve[-1]):
                return curve + [math.nan] * (looks - len(curve))
    return curve


def _drawn(variant: Variant, feed: Iterator[Any], rank: int, step: int) -> list[Any]:
    batches = list(islice(feed, variant.batches))
    if len(batches) == variant.batches:
        return batches
    raise InvalidInput("E-USER-CODE",
                       f"task {variant.task}: the batches of rank {rank} ended after {step - 1}, needed are batches without "
                       "end")


def _validated(variant: Variant, value: Any) -> float:
    """Converts a validation result to a number, or raises a one-line error."""
    try:
        return float(value)
    except (TypeError, ValueError):
        what = f"Tensor of {value.numel()}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise InvalidInput("E-USER-CODE", f"task {variant.task}: validation returned {what}, needed is one number") from None


def losses(task: TrainingTask, variant: Variant, model: nn.Module, batches: Sequence[Any]) -> torch.Tensor:
    return torch.stack([_loss(task, variant, model, batch) for batch in batches]).mean()


def _loss(task: TrainingTask, variant: Variant, model: nn.Module, batch: Any) -> torch.Tensor:
    """The loss of a batch; raises a one-line error if the task returns none."""
    loss: Any = task.loss(model, batch)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise InvalidInput("E-USER-CODE",
                           f"task {variant.task} returned {type(loss).__name__} as its loss, needed is one number with a "
                           "gradient")
    return loss


def _step(optimizer: torch.optim.Optimizer, part: float) -> None:
    """A step at that part of the optimizer's learning rates."""
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * part
    optimizer.step()


def plan_of(variant: Variant, model: nn.Module) -> Plan:
    """The plan, with buckets of 64 KiB on one server."""
    codec = parse(variant.codec)
    plan = planner.default_plan(describe_model(model), codec=str(wrap(codec)), path="service", servers=1, ranks_per_node=1,
                                fuse_nbytes=CUT_NBYTES, cut_nbytes=CUT_NBYTES)
    return structs.replace(plan, ratio_over=variant.ratio_over)


class _Averaged:
    """Averaged gradients: all workers take the same step, so one model represents all."""

    def __init__(self, variant: Variant, task: TrainingTask, make: Make) -> None:
        del make
        self._variant, self._task, self._model = variant, task, task.model
        self._optimizer = task.optimizer(self._model)
        self._workers = VirtualWorkers(describe_model(self._model), plan_of(variant, self._model), variant.workers)
        self._late: list[torch.Tensor] | None = None
        self.noise = NoiseScale()

    def step(self, batches: Sequence[Sequence[Any]], part: float) -> None:
        """`batches`: of each worker."""
        parameters = list(self._model.parameters())
        gradients = [torch.autograd.grad(losses(self._task, self._variant, self._model, each), parameters) for each in batches]
        average = self._workers.average(gradients)[0]
        if self._workers.world > 1:
            self.noise = self.noise.plus([_square(each) for each in gradients], _square(average))
        mean: list[torch.Tensor] | None = average
        if self._variant.late:
            mean, self._late = self._late, mean
        for i, parameter in enumerate(parameters):
            parameter.grad = None if mean is None else mean[i]
        _step(self._optimizer, part)

    def trained_model(self) -> nn.Module:
        return self._model


def _square(tensors: Iterable[torch.Tensor]) -> float:
    return sum(float(tensor.square().sum()) for tensor in tensors)


class _Local:
    """Local steps: each worker has its own model and optimizer, and their changes are averaged."""

    def __init__(self, variant: Variant, task: TrainingTask, make: Make) -> None:
        self._variant, self._task = variant, task
        self._models = [make(variant.seed).model for _ in range(variant.workers)]
        self._optimizers = [task.optimizer(model) for model in self._models]
        plan = plan_of(variant, task.model)
        self._sums = _Sums(VirtualWorkers(describe_model(task.model), plan, variant.workers), plan, variant.fragments)
        self._ranks = [_Rank(self._sums, rank) for rank in range(variant.workers)]
        # Without overlap, an exchange is completed directly after its start.
        self._locals = [OuterSteps(list(model.parameters()), variant.every, outer_of(variant), StepWeights(1.0),
                                   fragments=variant.fragments, overlap=True, norms=rank)
                        for model, rank in zip(self._models, self._ranks, strict=True)]

    def step(self, batches: Sequence[Sequence[Any]], part: float) -> None:
        """`batches`: of each worker."""
        for model, optimizer, local, mine in zip(self._models, self._optimizers, self._locals, batches, strict=True):
            optimizer.zero_grad()
            losses(self._task, self._variant, model, mine).backward()
            local.count()
            _step(optimizer, part)
        if self._locals[0].exchange_is_due:
            for rank, local in zip(self._ranks, self._locals, strict=True):
                local.exchange(cast(Worker, rank), [], 0.0)
            if not self._variant.overlap:
                for rank, local in zip(self._ranks, self._locals, strict=True):
                    local.complete(cast(Worker, rank), [], 0.0)

    def trained_model(self) -> nn.Module:
        """The mean of all workers' weights."""
        with torch.no_grad():
            for mine, each in zip(self._task.model.parameters(), zip(*(m.parameters() for m in self._models), strict=True),
                                  strict=True):
                mine.copy_(torch.stack(each).mean(0))
        return self._task.model


class _Sums:
    """What all workers have sent. Norms and a fragment's changes are exchanged when the last worker has sent its own."""

    def __init__(self, virtual: VirtualWorkers, plan: Plan, fragments: int) -> None:
        self.virtual, self._places = virtual, divide_into_fragments(plan.buckets, fragments)
        self.fragments = [[plan.buckets[place] for place in places] for places in self._places]
        self._changes: dict[int, Mapping[int, torch.Tensor]] = {}
        """By rank, of the fragment being summed."""
        self.mean: dict[int, torch.Tensor] = {}
        self._pending_norms: dict[int, tuple[float, float]] = {}
        self.norms: list[tuple[float, float]] = []
        """Weight and squared norm by rank, of the fragment being summed."""

    def add_norm(self, rank: int, weight: float, square: float) -> None:
        self._pending_norms[rank] = weight, square
        if len(self._pending_norms) == self.virtual.world:
            self.norms = [self._pending_norms.pop(each) for each in range(self.virtual.world)]

    def add(self, rank: int, changes: Mapping[int, torch.Tensor], fragment: int) -> None:
        self._changes[rank] = changes
        if len(self._changes) == self.virtual.world:
            all_changes = [self._changes.pop(each) for each in range(self.virtual.world)]
            self.mean = {t: torch.empty_like(change) for t, change in changes.items()}
            for place in self._places[fragment]:
                self.virtual.exchange(place, all_changes, self.mean)
            if fragment == len(self.fragments) - 1:
                self.virtual.end()


class _Rank:
    """Stands in for engine.worker.Worker, and for the exchange of norms, of one worker, as its OuterSteps sees them."""

    def __init__(self, sums: _Sums, rank: int) -> None:
        self._sums, self._rank, self.fragments = sums, rank, sums.fragments
        self.units = Units(sums.virtual.world)  # all batches weigh the same
        self.not_finite = -1

    def start(self, weight: float, square: float) -> None:
        self._sums.add_norm(self._rank, weight, square)

    def read(self) -> list[tuple[float, float]]:
        return self._sums.norms

    def observe(self, rows: Sequence[Sequence[float]], square: float) -> None:
        """Virtual workers do not report the agreement of their changes."""

    def send(self, changes: Mapping[int, torch.Tensor], fragment: int = 0) -> None:
        self._sums.add(self._rank, changes, fragment)

    def write(self, targets: Sequence[torch.Tensor | None], fragment: int = 0) -> bool:
        del fragment  # only the last summed fragment is available
        for tensor, mean in self._sums.mean.items():
            target = targets[tensor]
            assert target is not None
            target.copy_(mean)
        return True

    def has_weight(self, fragment: int) -> bool:
        return True

    withdrawn = False

    def sum_in_site(self, value: float, deadline_s: float) -> float:
        return value

    def complete(self, leftovers: Sequence[torch.Tensor | None]) -> None:
        """No action: sums are complete at once."""

    def wait(self, deadline_s: float, fragment: int = 0) -> None:
        """No action: results are available at once."""

    def end(self, applied: Sequence[bool]) -> None:
        """No action: nothing is rolled back."""


class VirtualWorkers:
    """`world` workers and a server, under a plan whose buckets are all summed by one server."""

    def __init__(self, job: Job, plan: Plan, world: int) -> None:
        self.world, self._step = world, 0
        self._server = Summation(0, 1, dict(make_codec_ops(plan, 0)), contributing_ranks(plan, node_ranks(world, 1)))
        self._buckets = [
            [EncodedBucket(bucket, job, make_codec(bucket, plan=plan), torch.device("cpu"), order, rank=rank)
             for rank in range(world)]
            for order, bucket in enumerate(plan.buckets)
        ]
        for of_worker in zip(*self._buckets, strict=True):
            allot_entries(of_worker)

    def average(self, gradients: Sequence[Sequence[torch.Tensor]]) -> tuple[list[torch.Tensor], int]:
        """Returns the mean of all workers' gradients, as each worker gets it, and the bytes of one worker in the busier
        direction.

        `gradients`: by worker, in the order of the job's tensors.
        """
        mean = [torch.empty_like(tensor) for tensor in gradients[0]]
        nbytes = [self.exchange(place, gradients, mean) for place in range(len(self._buckets))]
        self.end()
        return mean, max(map(sum, zip(*nbytes, strict=True)))

    def exchange(self, place: int, gradients: Sequence[Any], mean: Any) -> tuple[int, int]:
        """One bucket's part of a step: writes its slices of `mean`. Returns the bytes that worker 0 sends and receives.

        Gradients and mean are indexed by tensor number; only the bucket's own tensors are needed.
        """
        bucket = self._buckets[place]
        sent_nbytes, received_nbytes, answers = 0, 0, [memoryview(b"")] * self.world
        for worker, own in zip(bucket, gradients, strict=True):
            worker.exchange = BucketExchange(self._step)
            worker.sources = [own[s.tensor].contiguous() for s in worker.slices]
            worker.gather(1.0, 1.0)
        for r in range(len(bucket[0].codec.rounds)):
            replies: list[Reply] = []
            for rank, worker in enumerate(bucket):
                body = worker.coder.payload[: worker.coder.next(r - 1, answers[rank]) if r else worker.encode()]
                sent_nbytes += 0 if rank else len(body)
                header = Header(Kind.PUSH, 1, self._step, worker.id, round=r, codec=worker.codec.id, sender=rank, weight=1.0,
                                used=worker.ledger.all_slices, total=float(self.world) if worker.in_means else 0.0)
                replies += self._server.push(Message(rank, header, body), now=0.0)
            for reply in replies:
                answers[reply.peer] = memoryview(reply.body)
            received_nbytes += len(answers[0])
        for worker, answer in zip(bucket, answers, strict=True):
            worker.decode(answer)
        bucket[0].commit(1.0 / self.world, [mean[s.tensor] for s in bucket[0].slices])
        return sent_nbytes, received_nbytes

    def end(self) -> None:
        self._step += 1
