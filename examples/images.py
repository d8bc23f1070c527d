"""An image classifier over a slow line: torchrun --standalone --nproc-per-node 2 examples/images.py --plot images.png

A small convolutional network learns handwritten digits three times from the same seed: with the average of all gradients in
every step, with 4-bit averages, and with local steps that exchange 4-bit weight changes every 8 steps. The picture shows that
all come close to the same accuracy, the last one with sixty times fewer bytes. Lines that commlayer adds are marked.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from picture import draw
from torch import nn

import commlayer
from commlayer.demo.problem import accuracy, batches, digits

SEED, BATCH, EVALUATE = 1, 32, 16
WAYS: dict[str, dict[str, Any]] = {
    "every step, 32 bits": {"compression": "identity()"},
    "every step, 4 bits": {"compression": "int4"},
    "every 8 steps, 4 bits": {"compression": "int4", "sync": commlayer.LocalSteps(8)},
}


def network() -> nn.Module:
    torch.manual_seed(SEED)
    return nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(),
                         nn.MaxPool2d(2), nn.Flatten(), nn.Linear(288, 64), nn.ReLU(), nn.Linear(64, 10))


def train(name: str, steps: int) -> list[tuple[float, float]]:
    """Megabytes that this worker has sent, and accuracy on the test images, over time."""
    model, data = network(), digits(SEED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    curve = []
    with commlayer.attach(model, optimizer, **WAYS[name]) as session:  # commlayer
        mine = batches(data.train, BATCH, rank=session.rank, world=session.world_size, seed=SEED)
        while session.step < steps:
            x, y = next(mine)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            if session.step % EVALUATE == 0:
                with session.averaged():  # commlayer: under local steps the weights of the last exchange, equal on all workers
                    curve.append((session.metrics()["sent_nbytes"] / 1e6, accuracy(model, data.test)))
        if session.rank == 0:
            print(f"{name}: accuracy {curve[-1][1]:.3f}, {curve[-1][0]:.2f} MB sent", flush=True)
    return curve


def main(arguments: list[str] | None = None) -> dict[str, list[tuple[float, float]]]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args(arguments)
    curves = {name: train(name, options.steps) for name in WAYS}
    if options.plot and (not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0):
        draw(options.plot, curves, "MB sent by each worker", "accuracy on 360 test images", log=True)
    return curves


if __name__ == "__main__":
    main()
