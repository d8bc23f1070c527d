"""A script for several homes, or for one machine: its own GPU, its own part of the data, a checkpoint that it resumes from.

    python examples/homes.py                                           # alone
    torchrun --standalone --nproc-per-node 2 examples/homes.py         # two workers on one machine
    commlayer launch --join HOST:PORT --keys DIR examples/homes.py     # in each home: docs/first-evening.md

What commlayer adds is marked. `make` is what `commlayer plan make examples/homes.py` asks for, too.
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
"""Of each worker: three of them take steps of 96 samples, so choose the learning rate for that."""
SAMPLES, EPOCH = 4096, 40
"""Steps to an epoch: counted, not a pass through a worker's data, so that homes that leave and come stay in step."""
CHECKPOINT = Path("checkpoint.pt")


def make() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    torch.manual_seed(0)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)).to(device)
    batch = torch.randn(BATCH, 64, device=device)
    return model, lambda: model(batch).square().mean()


def data() -> TensorDataset:
    """The same in each home; the sampler deals it out."""
    x = torch.randn(SAMPLES, 64, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x[:, :10].argmax(1))


def save(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    unfinished = CHECKPOINT.with_suffix(".unfinished")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, unfinished)
    os.replace(unfinished, CHECKPOINT)  # a crash leaves the old one whole


def main(epochs: int) -> None:
    model, _ = make()
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT, map_location=device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        print(f"resumes from {CHECKPOINT}; attach() gives rank 0's weights to all workers", flush=True)
    samples = data()
    with commlayer.attach(model, optimizer) as session:  # commlayer
        step = session.step  # commlayer: 0, but in a home that has joined a running job
        while step < epochs * EPOCH:
            # Made anew for each epoch: where homes leave or come, others have their part from then on.
            sampler = DistributedSampler(samples, session.world, session.rank)  # commlayer: these two
            sampler.set_epoch(step // EPOCH)
            for x, y in DataLoader(samples, BATCH, sampler=sampler, drop_last=True):
                loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
                optimizer.zero_grad()
                loss.backward()  # on return, .grad is the average over all workers
                optimizer.step()
                step += 1
                if step % EPOCH == 0:
                    break
            if step % EPOCH == 0:
                session.drain()  # commlayer: local steps that are not shared yet, where the plan takes any: on all workers
                if int(os.environ.get("LOCAL_RANK", 0)) == 0:  # in each home, since another may be rank 0 next time
                    save(model, optimizer)
                if session.rank == 0:
                    told = session.stats()
                    print(f"epoch {step // EPOCH}: loss {loss.item():.3f}, {told['sent_nbytes'] / 1e6:.1f} MB sent, "
                          f"{told['exposed_s']:.1f} s waited for others", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
