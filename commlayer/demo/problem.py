"""A small task for examples and benches: handwritten digits, and an MLP.

digits.npz has the 1797 test images of "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak, UCI Machine Learning
Repository, 1998, doi:10.24432/C50P49), licensed under CC BY 4.0. scikit-learn's load_digits has the same images in the same
order.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

PIXELS, CLASSES = 64, 10
TEST = 360
"""Number of test samples: a fifth of all 1797."""

Batch = tuple[torch.Tensor, torch.Tensor]


class Digits(NamedTuple):
    """Images of 8 x 8 pixels, and their labels."""

    train: Batch
    test: Batch


def digits(seed: int) -> Digits:
    """Loads the digits, split into training and test data in the same way on all ranks."""
    with np.load(Path(__file__).with_name("digits.npz")) as loaded:
        x, y = torch.from_numpy(loaded["pixels"]).float(), torch.from_numpy(loaded["labels"]).long()
    x = (x - x.mean()) / x.std()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    test, train = order[:TEST], order[TEST:]
    return Digits((x[train], y[train]), (x[test], y[test]))


def batches(data: Batch, size: int, *, rank: int, world: int, seed: int) -> Iterator[Batch]:
    """Yields random batches of this rank's share of the data without end; equal arguments give equal batches."""
    x, y = data[0][rank::world], data[1][rank::world]
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    while True:
        picked = torch.randint(len(x), (size,), generator=generator)
        yield x[picked], y[picked]


def mlp(width: int, seed: int) -> nn.Sequential:
    """An MLP with two hidden layers; equal arguments give equal weights."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(PIXELS, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, CLASSES),
    )


@torch.no_grad()
def accuracy(model: nn.Module, test: Batch) -> float:
    return float((model(test[0]).argmax(1) == test[1]).float().mean())
