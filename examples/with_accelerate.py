"""Accelerate, with gradient accumulation and its own checkpoints: torchrun --standalone --nproc-per-node 2 FILE

The line that commlayer adds is marked. `save_state` and `load_state` include residuals.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from commlayer.integrations.accelerate import attach


def main(arguments: list[str] | None = None) -> nn.Module:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batches", type=int, default=120)
    parser.add_argument("--save-at", type=int, default=60)
    parser.add_argument("--out", default="out")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    model: nn.Module = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(16 * options.batches * accelerator.num_processes, 32)
    loader = DataLoader(TensorDataset(x, x[:, :8].argmax(1)), batch_size=16)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    session = attach(accelerator, model, optimizer, compression="topk(ratio=0.05)")  # commlayer
    first = 0
    if options.resume:
        accelerator.load_state(options.out)
        first, loader = options.save_at, accelerator.skip_first_batches(loader, options.save_at)
    for number, (x, y) in enumerate(loader, first + 1):
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if number == options.save_at and not options.resume:
            accelerator.save_state(options.out)
    accelerator.print(f"batch {options.batches}: loss {loss.item():.3f}, {session.metrics()['sent_nbytes']:.0f} bytes sent")
    session.close()
    return accelerator.unwrap_model(model)


if __name__ == "__main__":
    main()
