"""Two small training tasks: handwritten digits, and a character model. One process computes all workers and compresses their
gradients.

    commlayer tune examples/tuning_tasks.py:chars --trials 20

Losses are measured. Seconds are computed from a `SimulatedCluster`, so all machines give the same result.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from commlayer.compressors import Codec, parse, wrap
from commlayer.demo import problem
from commlayer.records import Spec


class SimulatedCluster(NamedTuple):
    """The simulated workers and their link, from which training seconds are computed."""

    workers: int = 4
    bps: float = 10e6
    """Rate of each worker's link in bit/s, up and down."""
    rtt_s: float = 0.005
    launch_s: float = 0.004
    sample_s: float = 0.0005
    """Seconds per sample; a worker's step takes launch_s plus sample_s per sample."""


Batch = Callable[[int, torch.Generator], problem.Batch]
"""A function that draws a given number of random samples."""


def picker(x: torch.Tensor, y: torch.Tensor) -> Batch:

    def batch(n: int, generator: torch.Generator) -> problem.Batch:
        picked = torch.randint(len(x), (n,), generator=generator)
        return x[picked], y[picked]

    return batch


class TuningTask(NamedTuple):
    """A training task. The total number of samples does not depend on the batch size."""

    model: nn.Module
    batch: Batch
    test: problem.Batch
    samples: int
    rate: float
    """Learning rate for a batch of 64. The rate used is proportional to the square root of the batch size."""


def digits(settings: dict[str, Any]) -> dict[str, float]:
    """Trains a small MLP on handwritten digits; returns seconds and loss."""
    return train(digits_task(0), settings)


def digits_task(seed: int) -> TuningTask:
    """The digits task. `seed` sets the split and the initial weights."""
    data = problem.digits(seed)
    return TuningTask(problem.mlp(64, seed), picker(*data.train), data.test, 12800, 0.12)


LETTERS, CONTEXT = 27, 6


class Letters(nn.Module):
    """A model that predicts the next letter (of 27) from the last six."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(LETTERS, 12)
        self.body = nn.Sequential(nn.Linear(12 * CONTEXT, 96), nn.Tanh(), nn.Linear(96, LETTERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(self.table(x).flatten(1))
        return out


def chars(settings: dict[str, Any]) -> dict[str, float]:
    """Trains a character language model on the descriptions of scikit-learn's data sets; returns seconds and loss."""
    return train(chars_task(0), settings)


def chars_task(seed: int) -> TuningTask:
    """The characters task. `seed` sets the initial weights."""
    text = letters()

    def windows(part: torch.Tensor) -> problem.Batch:
        rows = part.unfold(0, CONTEXT + 1, 1)
        return rows[:, :-1], rows[:, -1]

    x, y = windows(text)
    held = torch.arange(len(x)) // 200 % 5 == 0
    test, (x, y) = (x[held], y[held]), (x[~held], y[~held])

    torch.manual_seed(seed)
    return TuningTask(Letters(), picker(x, y), test, 25600, 0.5)


def letters() -> torch.Tensor:
    """The training text as numbers: a to z as 1 to 26, and the space between words as 0."""
    from sklearn import datasets

    loads = (datasets.load_breast_cancer, datasets.load_diabetes, datasets.load_iris, datasets.load_wine)
    texts = [load().DESCR for load in loads]
    words = re.findall("[a-z]+", " ".join(texts).lower())
    return torch.tensor([string.ascii_lowercase.find(c) + 1 for c in " ".join(words)])


def train(task: TuningTask, settings: dict[str, Any], cluster: SimulatedCluster | None = None) -> dict[str, float]:
    """Trains on a fixed number of samples; returns the test loss and the simulated seconds of the training.

    docs/how-to/wait-less.md describes local steps and one-step-late averages ("local_steps", "stale").
    """
    torch.set_num_threads(1)  # a model this small gains nothing from more
    cluster = cluster or SimulatedCluster()
    size = int(settings["batch"]) // cluster.workers
    generator = torch.Generator().manual_seed(0)
    parameters = list(task.model.parameters())
    exchange = Exchange(wrap(parse(str(settings["codec"]))), sum(p.numel() for p in parameters), cluster.workers)
    rate = task.rate * (int(settings["batch"]) / 64) ** 0.5
    weights = nn.utils.parameters_to_vector(parameters).detach().clone()

    def worked(steps: int) -> torch.Tensor:
        """The sum of one worker's gradients over local steps, which is its weight change divided by the learning rate (plain
        SGD)."""
        nn.utils.vector_to_parameters(own := weights.clone(), parameters)
        total = torch.zeros_like(own)
        for _ in range(steps):
            x, y = task.batch(size, generator)
            loss = nn.functional.cross_entropy(task.model(x), y)
            gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
            total += gradient
            own.add_(gradient, alpha=-rate)  # the parameters are views of `own`
        return total

    seconds = under_way_s = 0.0
    late = torch.zeros_like(weights)
    left = task.samples // int(settings["batch"])
    while left:
        steps = min(left, int(settings.get("local_steps", 1)))
        left -= steps
        mean, nbytes = exchange.mean([worked(steps) for _ in range(cluster.workers)])
        seconds += max(steps * (cluster.launch_s + cluster.sample_s * size), under_way_s)
        under_way_s = cluster.rtt_s + 8 * nbytes / cluster.bps
        if settings.get("stale"):
            weights.sub_(late, alpha=rate)
            late = mean
        else:
            seconds, under_way_s = seconds + under_way_s, 0.0
            weights.sub_(mean, alpha=rate)
    seconds += under_way_s
    weights.sub_(late, alpha=rate)
    nn.utils.vector_to_parameters(weights, parameters)
    with torch.no_grad():
        return {"seconds": seconds, "loss": float(nn.functional.cross_entropy(task.model(task.test[0]), task.test[1]))}


class Exchange:
    """Runs the codec calls of all workers and the server for one bucket, in sequence."""

    def __init__(self, codec: Codec, numel: int, workers: int) -> None:
        self.codec, spec = codec, Spec((numel,))
        self._states = [codec.init(spec) for _ in range(workers)]
        self._outs = [memoryview(bytearray(codec.bound(spec))) for _ in range(workers)]
        self._server, self._result = codec.init_server(spec), memoryview(bytearray(codec.bound(spec)))
        self._accs = [codec.new_accumulator(spec, r) for r in range(len(codec.rounds))]
        self._sum = torch.empty(numel)

    def mean(self, gradients: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
        """The mean of the workers' gradients after decoding, and the bytes of the busier direction (up or down) per worker."""
        pairs = zip(gradients, self._states, self._outs, strict=True)
        sizes = [self.codec.start(g, state, out) for g, state, out in pairs]
        total = 0
        for r, acc in enumerate(self._accs):
            for i, (out, n) in enumerate(zip(self._outs, sizes, strict=True)):
                self.codec.add(r, out[:n], acc, first=i == 0)
            result = self._result[: self.codec.emit(r, acc, self._server, self._result)]
            total += max(*sizes, len(result))
            if r + 1 < len(self._accs):
                sizes = [self.codec.next(r, result, s, out) for s, out in zip(self._states, self._outs, strict=True)]
        for state in self._states[1:]:
            self.codec.decode(result, state, self._sum)
        self.codec.decode(result, self._states[0], self._sum)
        return self._sum / len(gradients), total
