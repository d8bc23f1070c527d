"""A plan that compresses far too much, and the quality guard that corrects it. docs/benchmarks.md has its results.

torchrun --nproc-per-node 2 examples/guarded.py --codec "topk(ratio=0.001)" --guard act --max-loss 0.05
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

import commlayer

CLASSES, INPUTS, LAST = 10, 256, 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--codec", default="topk(ratio=0.001)", help='or "auto"')
    parser.add_argument("--guard", default="act", choices=("auto", "act", "warn", "off"))
    parser.add_argument("--max-loss", type=float, default=0.05)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--width", type=int, default=512)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(INPUTS, options.width), nn.ReLU(), nn.Linear(options.width, options.width), nn.ReLU(),
                          nn.Linear(options.width, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    # One node per rank; within a node nothing is compressed.
    config = {"guard": options.guard, "max_loss": options.max_loss, "ranks_per_node": 1}
    session = commlayer.attach(model, optimizer, compression=None if options.codec == "auto" else options.codec, config=config)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    truth = torch.randn(INPUTS, CLASSES, generator=torch.Generator().manual_seed(1))
    samples = torch.Generator().manual_seed(2 + rank)
    losses = []
    begin = time.perf_counter()
    for _ in range(options.steps):
        x = torch.randn(128, INPUTS, generator=samples)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), (x @ truth).argmax(1))
        loss.backward()
        session.log_loss(loss)
        optimizer.step()
        losses.append(loss.item())
    seconds = time.perf_counter() - begin
    if rank == 0:
        print("\n".join(session.inspect.decisions()))
        last = losses[-LAST:]
        print(f"loss {sum(last) / len(last):.4f}, {1e3 * seconds / options.steps:.1f} ms a step, the guard took "
              f"{session.metrics()['guard_s'] / seconds:.2%} of the time")
    session.close()


if __name__ == "__main__":
    main()
