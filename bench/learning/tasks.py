"""Tasks of `bench learning`: six small models of different kinds, on data from installed packages.

    task = TASKS["gru"](seed=0)
    batches = task.batches(rank=1, world=4)     # endless batches of this rank, a function of rank, world and seed
    task.loss(task.model, next(batches)).backward()
    task.validation(task.model)                 # on held-out data

Texts are the docstrings of scikit-learn: real English, installed on every machine, and equal for equal versions.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from commlayer.demo import problem

Batch = tuple[torch.Tensor, torch.Tensor]
Loss = Callable[[nn.Module, Batch], torch.Tensor]

PARTS = ("cluster", "decomposition", "ensemble", "feature_selection", "gaussian_process", "linear_model", "manifold", "metrics",
         "neighbors", "preprocessing")
"""Folders of scikit-learn. Task "words" classifies docstrings by folder."""
HELD = 5
"""Every fifth file is held out for validation."""
LETTERS, LENGTH = 64, 20
WORDS, WINDOW = 1500, 16


class Task(NamedTuple):
    model: nn.Module
    batches: Callable[[int, int], Iterator[Batch]]
    loss: Loss
    held: Batch
    rates: dict[str, float]
    """Learning rate by optimizer: about the best of dense training with 4 workers. The campaign also tries half and double."""

    def validation(self, model: nn.Module) -> float:
        with torch.no_grad():
            return float(self.loss(model, self.held))


def mlp(seed: int) -> Task:
    torch.manual_seed(seed)
    return _digits(problem.mlp(96, seed), class_loss, seed, {"sgd": 0.02, "adam": 2e-3})


def conv(seed: int) -> Task:
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 48), nn.ReLU(), nn.Linear(48, 10),
    )
    return _digits(net, class_loss, seed, {"sgd": 0.01, "adam": 1e-3})


def autoencoder(seed: int) -> Task:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 24), nn.Linear(24, 128), nn.GELU(), nn.Linear(128, 64))
    return _digits(net, _images, seed, {"sgd": 0.2, "adam": 3e-3})


def transformer(seed: int) -> Task:
    torch.manual_seed(seed)
    return _letters(Transformer(40, 2), seed, {"sgd": 0.2, "adam": 4e-3})


def gru(seed: int) -> Task:
    torch.manual_seed(seed)
    return _letters(Recurrent(24, 48), seed, {"sgd": 0.5, "adam": 6e-3})


def words(seed: int) -> Task:
    torch.manual_seed(seed)
    training, held = word_windows()
    known = nn.Embedding(WORDS, 32)
    nn.init.normal_(known.weight, std=0.1)
    net = nn.Sequential(known, _Sum(), nn.Linear(32, len(PARTS)))
    return Task(net, _drawn(training, 8, seed), class_loss, held, {"sgd": 0.03, "adam": 4e-3})


TASKS: dict[str, Callable[[int], Task]] = {
    "mlp": mlp, "conv": conv, "autoencoder": autoencoder, "transformer": transformer, "gru": gru, "words": words,
}


def class_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    logits = model(batch[0])
    return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch[1].reshape(-1))


def _images(model: nn.Module, batch: Batch) -> torch.Tensor:
    return functional.mse_loss(model(batch[0]), batch[0])


def _digits(model: nn.Module, loss: Loss, seed: int, rates: dict[str, float]) -> Task:
    data = problem.digits(0)
    return Task(model, _drawn(data.train, 4, seed), loss, data.test, rates)


def _drawn(data: Batch, size: int, seed: int) -> Callable[[int, int], Iterator[Batch]]:
    return lambda rank, world: problem.batches(data, size, rank=rank, world=world, seed=1 + seed)


def _letters(model: nn.Module, seed: int, rates: dict[str, float]) -> Task:
    return next_character(model, letters(), rates, seed, length=LENGTH, size=2)


def next_character(
    model: nn.Module, texts: tuple[torch.Tensor, torch.Tensor], rates: dict[str, float], seed: int, *, length: int, size: int,
    held_rows: int = 64, loss: Loss = class_loss,
) -> Task:
    """The model predicts the next character of a text. `texts`: character ids, for training and held out; `length`: of a
    sequence; `size`: number of sequences in a batch."""
    training, held = texts

    def rows(text: torch.Tensor, starts: torch.Tensor) -> Batch:
        sequences = text[starts[:, None] + torch.arange(length + 1)]
        return sequences[:, :-1], sequences[:, 1:]

    def batches(rank: int, world: int) -> Iterator[Batch]:
        del world
        generator = torch.Generator().manual_seed(1000 * (1 + seed) + rank)
        while True:
            yield rows(training, torch.randint(len(training) - length - 1, (size,), generator=generator))

    return Task(model, batches, loss, rows(held, torch.linspace(0, len(held) - length - 2, held_rows).long()), rates)


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.after = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.mixed(self.first(x)).chunk(3, -1))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        return x + self.after(self.second(x))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Predicts the next character with attention."""

    def __init__(self, width: int, layers: int, letters: int = LETTERS, length: int = LENGTH) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(letters, width), nn.Parameter(torch.zeros(length, width))
        self.layers = nn.Sequential(*(Layer(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, letters)

    def forward(self, attended: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.layers(self.letters(attended) + self.places)))  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    """Predicts the next character with a GRU."""

    def __init__(self, inner: int, width: int, letters: int = LETTERS) -> None:
        super().__init__()
        self.letters, self.state = nn.Embedding(letters, inner), nn.GRU(inner, width, batch_first=True)
        self.head = nn.Linear(width, letters)

    def forward(self, attended: torch.Tensor) -> torch.Tensor:
        return self.head(self.state(self.letters(attended))[0])  # type: ignore[no-any-return]


class _Sum(nn.Module):
    """Sums the embeddings of a text's words."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(1)


@functools.cache
def texts() -> dict[str, tuple[str, str]]:
    """Docstrings by folder of scikit-learn: for training, and held out."""
    import sklearn

    result = {}
    for part in PARTS:
        divided: tuple[list[str], list[str]] = ([], [])
        files = sorted((Path(sklearn.__file__).parent / part).glob("*.py"))
        for i, file in enumerate(files):
            divided[i % HELD == HELD - 1].append(docstrings(file))
        result[part] = "\n".join(divided[0]), "\n".join(divided[1])
    return result


def docstrings(file: Path) -> str:
    """All docstrings of a Python file."""
    nodes = ast.walk(ast.parse(file.read_text("utf-8")))
    return "\n".join(ast.get_docstring(n) or "" for n in nodes if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef))


def character_ids(texts: Sequence[str], count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two texts as character ids below `count`. Characters that are rare in the first text share one id."""
    ids = {c: i for i, (c, _) in enumerate(Counter(texts[0]).most_common(count - 1))}
    training, held = (torch.tensor([ids.get(c, count - 1) for c in text]) for text in texts)
    return training, held


@functools.cache
def letters() -> tuple[torch.Tensor, torch.Tensor]:
    """All texts as character ids, for training and held out."""
    return character_ids(["".join(pair[held] for pair in texts().values()) for held in (0, 1)], LETTERS)


@functools.cache
def word_windows() -> tuple[Batch, Batch]:
    """Windows of word ids with the number of their folder, for training and held out."""
    each = {part: [re.findall("[a-z]+", text.lower()) for text in pair] for part, pair in texts().items()}
    common = Counter(word for training, _ in each.values() for word in training).most_common(WORDS - 1)
    places = {word: i for i, (word, _) in enumerate(common)}
    return tuple(_windows([pair[held] for pair in each.values()], places) for held in (0, 1))  # type: ignore[return-value]


def _windows(by_part: Sequence[list[str]], places: dict[str, int]) -> Batch:
    rows = [([places.get(word, WORDS - 1) for word in text[i : i + WINDOW]], n)
            for n, text in enumerate(by_part) for i in range(0, len(text) - WINDOW, WINDOW)]
    return torch.tensor([row for row, _ in rows]), torch.tensor([n for _, n in rows])
