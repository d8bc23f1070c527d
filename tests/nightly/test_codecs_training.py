"""Every codec, wrapped as in plans, trains the digits to within one percent of dense: three workers and a server, two-way."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from support import codecs as kit

from commlayer.compressors import Codec, parse, seed, wrap
from commlayer.demo.problem import Batch, batches, digits
from commlayer.records import Spec

WORKERS, BATCH, WIDTH, STEPS = 3, 32, 48, 300
TOLERANCE = 0.01
"""Of accuracy, in the mean over the seeds: 360 images each."""
SEEDS = (0, 1)
RATE, MOMENTUM = 0.2, 0.8
HOW = {
    "momentum": ("momentum(topk(ratio=0.05), beta=0.8)", RATE, 0.0),
    "randomk": (kit.NAMED["randomk"], 0.5, 0.0),
}
"""Those that hold the momentum themselves leave none to the optimizer; what delays gradients bears less of it."""


def gradients(weights: list[torch.Tensor], batch: Batch) -> list[torch.Tensor]:
    """Of the cross entropy of a layer of ReLUs and one of logits: by hand, which is several times as fast here."""
    x, y = batch
    hidden = torch.relu(x @ weights[0].T)
    wrong = torch.softmax(hidden @ weights[1].T, 1)
    wrong[torch.arange(len(y)), y] -= 1
    wrong /= len(y)
    below = (wrong @ weights[1]) * (hidden > 0)
    return [(below.T @ x).view(-1), (wrong.T @ hidden).view(-1)]


def train(codec: Codec, rate: float, momentum: float, number: int) -> float:
    """Test accuracy. The rate falls to zero, so residuals are small at the end."""
    data = digits(number)
    weights = [kit.noise(WIDTH * 64, number).view(WIDTH, 64) / 8, kit.noise(10 * WIDTH, number + 9).view(10, WIDTH) / 7]
    clusters = [kit.Cluster(codec, Spec(tuple(w.shape)), WORKERS) for w in weights]
    for bucket, cluster in enumerate(clusters):
        for rank, state in enumerate([*cluster.states, cluster.server]):
            seed(state, f"training {number}", bucket, rank)
    optimizer = torch.optim.SGD(weights, lr=rate, momentum=momentum)
    shares = [batches(data.train, BATCH, rank=rank, world=WORKERS, seed=number) for rank in range(WORKERS)]
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = rate * (1 - step / STEPS)
        mine = [gradients(weights, next(share)) for share in shares]
        for weight, cluster, bucket in zip(weights, clusters, zip(*mine, strict=True), strict=True):
            weight.grad = cluster.step(bucket)[0].view(weight.shape) / WORKERS
        optimizer.step()
    x, y = data.test
    return float(((torch.relu(x @ weights[0].T) @ weights[1].T).argmax(1) == y).float().mean())


@cache
def reached(text: str, rate: float, momentum: float) -> float:
    return sum(train(wrap(parse(text)), rate, momentum, number) for number in SEEDS) / len(SEEDS)


@pytest.mark.parametrize("name", [name for name in kit.NAMED if name != "identity"])
def test_every_codec_reaches_the_dense_accuracy(name: str) -> None:
    dense = reached(kit.NAMED["identity"], RATE, MOMENTUM)
    assert dense > 0.95, "the reference must have learned"
    assert reached(*HOW.get(name, (kit.NAMED[name], RATE, MOMENTUM))) > dense - TOLERANCE
