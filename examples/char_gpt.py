"""A character model like nanoGPT's, with micro-batches, clipping, a schedule and checkpoints, on Python's own documentation.

    torchrun --standalone --nproc-per-node 2 examples/char_gpt.py --plot char_gpt.png

It trains twice from the same seed: with uncompressed averages, then with 4-bit ones. The picture shows that the losses agree,
and the bytes that each worker sent. `--resume` continues the last training from its checkpoint, bit for bit.
Lines that commlayer adds are marked.
"""

from __future__ import annotations

import argparse
import math
from contextlib import nullcontext
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from picture import draw
from torch import nn
from torch.nn import functional

import commlayer

SEED, CONTEXT, WIDTH, LAYERS, HEADS = 1, 64, 96, 3, 4
BATCH, MICRO, RATE, EVALUATE = 16, 2, 3e-3, 25
"""Sequences of each worker's micro-batch, micro-batches of a step, learning rate, steps between evaluations."""
TEXT = "\n".join(topics[name] for name in sorted(topics))
LETTERS = sorted(set(TEXT))
DATA = torch.tensor([LETTERS.index(letter) for letter in TEXT[:400_000]])
TRAIN, TEST = DATA[:360_000], DATA[360_000:]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, 2))
        x = x + self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.feed(self.norms[1](x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(len(LETTERS), WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(LETTERS)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.letters(x) + self.places.weight[: x.shape[1]])


def loss_of(model: nn.Module, data: torch.Tensor, seed: int, sequences: int = BATCH) -> torch.Tensor:
    starts = torch.randint(len(data) - CONTEXT, (sequences, 1), generator=torch.Generator().manual_seed(seed))
    rows = data[starts + torch.arange(CONTEXT + 1)]
    return functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def train(compression: str, options: argparse.Namespace) -> tuple[nn.Module, list[tuple[int, float]], float]:
    """The trained model, validation losses by step, and the megabytes that this worker sent."""
    torch.manual_seed(SEED)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * step / options.steps)))
    losses: list[tuple[int, float]] = []
    with commlayer.attach(model, optimizer, compression=compression) as session:  # commlayer
        if options.resume:
            session.resume(options.out, extra={"schedule": schedule})  # commlayer: on all ranks, with residuals
        while session.step < options.steps:
            for micro in range(MICRO):
                number = (session.step * MICRO + micro) * session.world_size + session.rank  # each worker has other sequences
                with session.no_sync() if micro < MICRO - 1 else nullcontext():  # commlayer: averages once in a step
                    (loss_of(model, TRAIN, number) / MICRO).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if session.step % EVALUATE == 0 or session.step == options.steps:
                with torch.no_grad():
                    losses.append((session.step, loss_of(model, TEST, 0, 128).item()))
                if session.rank == 0:
                    print(f"{compression}, step {session.step}: validation loss {losses[-1][1]:.3f}", flush=True)
            if session.step == options.save_at:
                session.checkpoint(options.out, extra={"schedule": schedule})  # commlayer: a crash leaves the last one intact
        return model, losses, session.metrics()["sent_nbytes"] / 1e6


def main(arguments: list[str] | None = None) -> nn.Module:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--compressions", nargs="+", default=["identity()", "int4"], metavar="CODEC")
    parser.add_argument("--save-at", type=int, default=150)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args(arguments)
    results = {name: train(name, options) for name in options.compressions[-1 if options.resume else 0 :]}
    if options.plot and (not dist.is_initialized() or dist.get_rank() == 0):
        draw(options.plot, {name: losses for name, (_, losses, _) in results.items()}, "steps", "validation loss",
             bars={name: sent for name, (_, _, sent) in results.items()}, height="MB sent by each worker")
    return results[options.compressions[-1]][0]


if __name__ == "__main__":
    main()
