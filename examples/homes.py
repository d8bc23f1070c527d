"""A script for several homes, or for one machine: its own GPU, its own part of the data, a checkpoint that it resumes from.

    python examples/homes.py                                           # alone
    torchrun --standalone --nproc-per-node 2 examples/homes.py         # two workers on one machine
    commlayer join --keys DIR HOST:PORT examples/homes.py     # in each home: docs/tutorials/first-evening.md

Lines that commlayer adds are marked. `commlayer plan create examples/homes.py` calls `make`, too.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import commlayer

BATCH = 32
"""Per worker: three workers take steps of 96 samples, so choose the learning rate for that."""
SAMPLES, EPOCH = 4096, 40
"""Steps per epoch: a fixed number, so that homes stay in step when one leaves or joins."""
CHECKPOINT = Path("checkpoint.pt")


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


def save(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    unfinished = CHECKPOINT.with_suffix(".unfinished")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, unfinished)
    os.replace(unfinished, CHECKPOINT)  # a crash leaves the old file intact


def read(content: bytes) -> dict[str, Any]:
    saved = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    if missing := {"model", "optimizer", "step"} - saved.keys():
        sys.exit(f"{CHECKPOINT} has no {sorted(missing)[0]!r}: it is of another script; move it away to start from step 0")
    return saved


def farthest(rank: int, world: int, device: torch.device) -> bytes:
    """The checkpoint of the highest step, from the home that has it. Rank 0 came first, and may have an older one."""
    own = CHECKPOINT.read_bytes() if CHECKPOINT.exists() else b""
    if world == 1:
        return own
    step = read(own)["step"] if own else 0
    checkpoints = [torch.zeros(2, dtype=torch.int64, device=device) for _ in range(world)]
    dist.all_gather(checkpoints, torch.tensor([step, len(own)], device=device))
    best = max(range(world), key=lambda place: int(checkpoints[place][0]))
    if not (nbytes := int(checkpoints[best][1])):
        return b""
    content = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(device) if rank == best else \
        torch.empty(nbytes, dtype=torch.uint8, device=device)
    dist.broadcast(content, best)
    return content.cpu().numpy().tobytes()


def main(epochs: int) -> None:
    model, _ = make()
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer.param_groups[0]["before"] = 0  # steps of earlier runs; joining homes receive it with the optimizer's state
    samples = data()
    with commlayer.attach(model, optimizer) as session:  # commlayer
        if not session.joined and (content := farthest(session.rank, session.world, device)):  # a joining home receives all
            saved = read(content)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            optimizer.param_groups[0]["before"] = saved["step"]
            print(f"continuing from step {saved['step']}", flush=True)
        first = optimizer.param_groups[0]["before"]
        step = session.step  # commlayer: 0, except in a home that joined a running job
        while step < epochs * EPOCH:
            # A new sampler for each epoch: it divides the data among the workers that are left.
            sampler = DistributedSampler(samples, session.world, session.rank)  # commlayer: these two
            sampler.set_epoch((first + step) // EPOCH)
            for x, y in DataLoader(samples, BATCH, sampler=sampler, drop_last=True):
                loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
                optimizer.zero_grad()
                loss.backward()  # on return, .grad is the average over all workers
                optimizer.step()
                step += 1
                if step % EPOCH == 0:
                    break
            if step % EPOCH == 0:
                session.drain()  # commlayer: exchanges local steps, on all workers
                first = optimizer.param_groups[0]["before"]
                if int(os.environ.get("LOCAL_RANK", 0)) == 0:  # in each home, since another may be rank 0 next time
                    save(model, optimizer, first + step)
                if session.rank == 0:
                    stats = session.stats()
                    print(f"epoch {(first + step) // EPOCH}: loss {loss.item():.3f}, {stats['sent_nbytes'] / 1e6:.1f} MB sent, "
                          f"{stats['exposed_s']:.1f} s waited for others", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
