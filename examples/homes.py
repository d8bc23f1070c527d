"""A script for several homes, or for one machine: its own GPU, its own part of the data, a checkpoint that it resumes from.

    python examples/homes.py                                           # alone
    torchrun --standalone --nproc-per-node 2 examples/homes.py         # two workers on one machine
    commlayer join NAME@HOST:PORT#TOKEN examples/homes.py              # in each home: docs/tutorials/first-evening.md

Lines that commlayer adds are marked. `commlayer plan create examples/homes.py` calls `make`, too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import commlayer

BATCH = 32
"""Per worker: three workers take steps of 96 samples, so choose the learning rate for that."""
SAMPLES, EPOCH = 4096, 40
"""Steps per epoch: a fixed number, so that homes stay in step when one leaves or joins."""
CHECKPOINT = Path("checkpoint")


def make() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    torch.manual_seed(0)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)).to(device)
    batch = torch.randn(BATCH, 64, device=device)
    return model, lambda: model(batch).square().mean()


def data() -> TensorDataset:
    """The same in each home; the sampler gives each worker its part."""
    x = torch.randn(SAMPLES, 64, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x[:, :10].argmax(1))


def main(epochs: int) -> None:
    model, _ = make()
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    samples = data()
    with commlayer.attach(model, optimizer, sync="auto") as session:  # commlayer: local steps where the links are slow
        if session.resume(CHECKPOINT):  # commlayer: from the home that has the newest; a home that joins receives all
            print(f"continuing from step {session.step}", flush=True)
        while session.step < epochs * EPOCH:
            # A new sampler for each epoch: it divides the data among the workers that are left.
            sampler = DistributedSampler(samples, session.world_size, session.rank)  # commlayer: these two
            sampler.set_epoch(session.step // EPOCH)
            for x, y in DataLoader(samples, BATCH, sampler=sampler, drop_last=True):
                loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if session.step % EPOCH == 0:
                    break
            if session.step % EPOCH == 0:
                session.checkpoint(CHECKPOINT)  # commlayer: on all workers; each home keeps a copy
                if session.rank == 0:
                    metrics = session.metrics()
                    print(f"epoch {session.step // EPOCH}: loss {loss.item():.3f}, {metrics['sent_nbytes'] / 1e6:.1f} MB sent, "
                          f"{metrics['exposed_s']:.1f} s waited for others", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
