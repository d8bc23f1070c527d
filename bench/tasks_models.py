"""Models of benches: those of bench.tasks (a small GPT, a convolutional network, a GRU over words), and stacks of layers."""

from __future__ import annotations

import itertools

import torch
from torch import nn
from torch.nn import functional

LENGTH, LAYERS, HEADS = 64, 4, 4
"""Of the GPT; LENGTH is its context length in characters."""


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Layers with parameters, in order of the forward pass."""
    layers = getattr(model, "layers", model)
    assert isinstance(layers, nn.Sequential)
    return [layer for layer in layers if any(True for _ in layer.parameters())]


def mlp(*widths: int) -> nn.Sequential:
    """Linear layers with ReLUs between them, with equal weights in every process."""
    torch.manual_seed(7)
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Block(nn.Module):
    """Causal attention, then a feed-forward layer for each character."""

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
    """Predicts the next character."""

    def __init__(self, characters: int, width: int, layers: int = LAYERS, heads: int = HEADS) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(characters, width), nn.Embedding(LENGTH, width)
        self.layers = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(self.layers(self.characters(x) + self.places.weight[: x.shape[1]])))
        return logits


def conv(side: int, hidden: int) -> nn.Sequential:
    net = nn.Sequential(
        nn.Unflatten(1, (1, side)), nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64 * (side // 2) ** 2, hidden),
        nn.ReLU(), nn.Linear(hidden, 10),
    )
    for layer in net:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu" if layer.weight.shape[0] > 10 else "linear")
    return net


class _States(nn.Module):
    """A GRU that returns only the state at each word."""

    def __init__(self, fan_in: int, width: int) -> None:
        super().__init__()
        self.gru = nn.GRU(fan_in, width, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.gru(x)[0]
        return states


class _Most(nn.Module):
    """Max pooling over words."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.amax(1)


class Classifier(nn.Module):
    """Classifies word sequences by source."""

    def __init__(self, words: int, classes: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Embedding(words, width // 2), _States(width // 2, width), _States(width, width), _Most(),
            nn.Linear(width, classes),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(x)
        return logits
