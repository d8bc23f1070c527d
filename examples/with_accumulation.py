"""A loop like nanoGPT's, with micro-batches, clipping and a checkpoint: torchrun --standalone --nproc-per-node 2 FILE

Lines that commlayer adds are marked. `--resume` continues from the checkpoint bit for bit, with residuals.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlayer

MICRO = 4


def batch(step: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Every rank has its own data, the same in every run."""
    draw = torch.Generator().manual_seed((step * MICRO + micro) * dist.get_world_size() + dist.get_rank())
    x = torch.randn(16, 32, generator=draw)
    return x, x[:, :8].argmax(1)


def main(arguments: list[str] | None = None) -> nn.Module:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-at", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args(arguments)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    session = commlayer.attach(model, optimizer, compression="topk(ratio=0.05)")  # commlayer
    if options.resume:
        session.resume(options.out)  # commlayer: model, optimizer and residuals; on all ranks
    for step in range(session.step, options.steps):
        for micro in range(MICRO):
            model.require_backward_grad_sync = micro == MICRO - 1
            x, y = batch(step, micro)
            loss = nn.functional.cross_entropy(model(x), y) / MICRO
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == options.save_at:
            session.checkpoint(options.out)  # commlayer: on all ranks; a crash leaves the last complete one intact
    if dist.get_rank() == 0:
        print(f"step {options.steps}: loss {MICRO * loss.item():.3f}, {session.metrics()['sent_nbytes']:.0f} bytes sent")
    session.close()  # commlayer
    return model.module


if __name__ == "__main__":
    main()
