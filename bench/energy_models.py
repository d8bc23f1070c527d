"""Models and data for `bench energy`: an MLP and a CNN on handwritten digits, a small transformer on the docs' text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from commlayer.demo import problem

ROOT = Path(__file__).resolve().parent.parent
WORDS, CONTEXT, TESTED = 128, 64, 32


class Task(NamedTuple):
    model: nn.Module
    batches: Callable[[int, int], Iterator[problem.Batch]]
    """Batches for (rank, world size)."""
    test: problem.Batch
    sgd_lr: float
    adamw_lr: float
    steps: int

    def loss(self, batch: problem.Batch) -> torch.Tensor:
        logits = self.model(batch[0])
        return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[1].reshape(-1))


def mlp(seed: int) -> Task:
    return _digits(problem.mlp(256, seed), seed)


def conv(seed: int) -> Task:
    torch.manual_seed(seed)
    return _digits(nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 64), nn.ReLU(),
        nn.Linear(64, 10),
    ), seed)


def transformer(seed: int) -> Task:
    torch.manual_seed(seed)
    text = b"".join(file.read_bytes() for file in sorted((ROOT / "docs").rglob("*.md")))
    data = torch.tensor(list(text)).clamp(max=WORDS - 1)
    cut = len(data) * 9 // 10

    def batches(rank: int, world: int) -> Iterator[problem.Batch]:
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        while True:
            yield _windows(data[:cut], 8, generator)

    test = _windows(data[cut:], TESTED, torch.Generator().manual_seed(1))
    return Task(_Transformer(64, 2), batches, test, 0.1, 1e-3, 120)


MODELS: dict[str, Callable[[int], Task]] = {"mlp": mlp, "conv": conv, "transformer": transformer}


def _digits(model: nn.Module, seed: int) -> Task:
    data = problem.digits(seed)
    return Task(model, lambda rank, world: problem.batches(data.train, 16, rank=rank, world=world, seed=seed), data.test,
                0.01, 2e-3, 120)


def _windows(data: torch.Tensor, count: int, generator: torch.Generator) -> problem.Batch:
    starts = torch.randint(len(data) - CONTEXT, (count,), generator=generator)
    seen = torch.stack([data[start : start + CONTEXT + 1] for start in starts])
    return seen[:, :-1], seen[:, 1:]


class _Transformer(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Parameter(torch.zeros(CONTEXT, width))
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS)

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        x = self.words(seen) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.after = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.mixed(self.first(x)).chunk(3, -1))
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(seen)
        return x + self.after(self.second(x))  # type: ignore[no-any-return]
