"""A small thing to learn: a character GPT of 0.8 M parameters on the project's own docs. Knows no ways of training.

    task = Task(); model = task.model()
    for step in range(n):
        loss = task.loss(model, rank, step)          # this rank's sequences of that step, a function of both numbers
    task.validation(model)                           # on text that no step sees
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

DOCS = Path(__file__).resolve().parent.parent / "docs"
LENGTH, WIDTH, LAYERS, HEADS = 64, 128, 4, 4
SEQUENCES = 2
"""Of a rank in a step."""
RATE = 5e-4


class Block(nn.Module):
    """Attention to what came before, then a step of its own for each character."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, width = x.shape
        q, k, v = (part.view(n, length, self.heads, -1).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, 2))
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(n, length, width))
        update: torch.Tensor = self.down(functional.gelu(self.up(self.between(x))))
        return x + update


class GPT(nn.Module):
    """From characters to what the next one is."""

    def __init__(self, characters: int, width: int = WIDTH, layers: int = LAYERS, heads: int = HEADS) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(characters, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(self.blocks(self.characters(x) + self.places.weight[: x.shape[1]])))
        return logits


class Task:
    """The text, and what is asked of a model of it."""

    def __init__(self) -> None:
        text = "".join(path.read_text("utf-8") for path in sorted(DOCS.rglob("*.md")))
        found = sorted(set(text))
        self.characters, places = len(found), {c: i for i, c in enumerate(found)}
        ids = torch.tensor([places[c] for c in text])
        edge = len(ids) * 9 // 10
        self._learnt, self._held = ids[:edge], ids[edge:]

    def model(self, seed: int = 0, *, width: int = WIDTH) -> GPT:
        torch.manual_seed(seed)
        return GPT(self.characters, width)

    def loss(self, model: nn.Module, rank: int, step: int, sequences: int = SEQUENCES) -> torch.Tensor:
        chosen = torch.Generator().manual_seed(1_000_003 * step + rank)
        return _loss(model, self._learnt, torch.randint(len(self._learnt) - LENGTH, (sequences,), generator=chosen))

    def validation(self, model: nn.Module, sequences: int = 64) -> float:
        starts = torch.linspace(0, len(self._held) - LENGTH - 1, sequences).long()
        with torch.no_grad():
            return float(_loss(model, self._held, starts))


def _loss(model: nn.Module, text: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    rows = torch.stack([text[s : s + LENGTH + 1] for s in starts.tolist()])
    return functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
