"""Small training tasks of several kinds, on data from installed packages.

    task = TASKS["chars"](); model = task.model(seed=0)
    task.loss(model, task.batch(rank, step)).backward()      # a batch is a function of rank and step
    task.validation(model)                                   # on held-out data

To train with the batches of all ranks at once, join them: `together([task.batch(rank, step) for rank in range(4)])`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from bench.tasks_models import GPT, LENGTH, Classifier, conv
from bench.tasks_text import Passages, handbook

Batch = tuple[torch.Tensor, torch.Tensor]
CANVAS, NOISE = 10, 0.2
"""Pixels per side, and standard deviation of the noise; a digit's 8 x 8 pixels lie somewhere in the canvas."""
WORDS = 4096
"""Word ids, assigned by hash; some words share one."""


class Task(NamedTuple):
    """A model, its data and its usual optimizer."""

    model: Callable[[int], nn.Module]
    """Builds the model from a seed. `layers_of(model)` are its layers in order."""
    draw: Callable[[torch.Generator], Batch]
    """A rank's samples of one step."""
    held: Batch
    """Validation data."""
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    targets: tuple[float, float, float]
    """Validation losses, from easy to hard: between what one rank's data reaches and what four reach in about 200 steps (of
    "text" in 1,000)."""

    def batch(self, rank: int, step: int, seed: int = 0) -> Batch:
        return self.draw(torch.Generator().manual_seed(1_000_003 * step + 101 * seed + rank))

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        logits = model(batch[0])
        return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[1].reshape(-1))

    @torch.no_grad()
    def validation(self, model: nn.Module) -> float:
        return float(self.loss(model.eval(), self.held))

    def digest(self) -> str:
        """Hash of the data: results with another digest are not comparable."""
        parts = [*self.held, *self.batch(0, 0)]
        return hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()[:12]


def concatenate(batches: Sequence[Batch]) -> Batch:
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


def characters(text: str, width: int, sequences: int, layers: int = 4, lr: float = 5e-4) -> Task:
    """A transformer that predicts the next character of a text, with AdamW."""
    alphabet = sorted(set(text))
    places = {c: i for i, c in enumerate(alphabet)}
    ids = torch.tensor([places[c] for c in text])
    edge = len(ids) * 9 // 10
    training, held = ids[:edge], ids[edge:]

    def rows(source: torch.Tensor, starts: torch.Tensor) -> Batch:
        windows = torch.stack([source[s : s + LENGTH + 1] for s in starts.tolist()])
        return windows[:, :-1], windows[:, 1:]

    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return GPT(len(alphabet), width, layers)

    def draw(chosen: torch.Generator) -> Batch:
        return rows(training, torch.randint(len(training) - LENGTH, (sequences,), generator=chosen))

    return Task(model, draw, rows(held, torch.linspace(0, len(held) - LENGTH - 1, 64).long()),
                lambda p: torch.optim.AdamW(p, lr=lr), (2.85, 2.65, 2.5))


def chars(width: int = 192, sequences: int = 2) -> Task:
    """Characters of Python's handbook; 1.8 million parameters."""
    return characters(handbook(), width, sequences)


def text(width: int = 96, sequences: int = 8) -> Task:
    """A smaller transformer with larger batches, for races of ten minutes; 0.36 million parameters."""
    return characters(handbook(), width, sequences, layers=3, lr=1e-3)._replace(targets=(1.6, 1.5, 1.4))


def digits(hidden: int = 640, images: int = 4) -> Task:
    """A convolutional network for handwritten digits with random shift, contrast and noise, with SGD and momentum; 1.1 million
    parameters."""
    from sklearn.datasets import load_digits

    loaded = load_digits()
    x, y = torch.tensor(loaded.images, dtype=torch.float32) / 16, torch.tensor(loaded.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    held, training = order[:360], order[360:]

    def rendered(which: torch.Tensor, chosen: torch.Generator) -> Batch:
        canvas = NOISE * torch.randn(len(which), CANVAS, CANVAS, generator=chosen)
        corners = torch.randint(CANVAS - 7, (len(which), 2), generator=chosen)
        contrast = 0.5 + torch.rand(len(which), generator=chosen)
        for i, (top, left) in enumerate(corners.tolist()):
            canvas[i, top : top + 8, left : left + 8] += contrast[i] * x[which[i]]
        return canvas - 0.2, y[which]

    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return conv(CANVAS, hidden)

    def draw(chosen: torch.Generator) -> Batch:
        return rendered(training[torch.randint(len(training), (images,), generator=chosen)], chosen)

    return Task(model, draw, rendered(held.repeat(2), torch.Generator().manual_seed(1)),
                lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9), (1.7, 1.3, 1.0))


def passages(width: int = 256, samples: int = 4) -> Task:
    """A GRU that classifies 24 words by their page of Python's handbook, with AdamW; 1.2 million parameters."""
    source = Passages(WORDS, 24)

    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return Classifier(WORDS, source.pages, width)

    return Task(model, lambda chosen: source.draw(samples, chosen), source.held(256),
                lambda p: torch.optim.AdamW(p, lr=2e-3), (3.0, 2.7, 2.45))


TASKS: dict[str, Callable[[], Task]] = {"chars": chars, "digits": digits, "passages": passages, "text": text}
