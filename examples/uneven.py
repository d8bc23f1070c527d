"""Four uneven workers share a batch as their speeds allow: torchrun --standalone --nproc-per-node 4 examples/uneven.py

Each worker takes so many milliseconds to begin a step and for each sample, as GPUs of different age would; here it sleeps them.
In the second third worker 0 slows down. With --equal the shares stay equal, to compare with.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import commlayer
from commlayer.balance import Sampler
from commlayer.demo.problem import accuracy, digits, mlp

SPEED_MS = [(3.0, 0.4), (3.0, 0.4), (3.0, 0.8), (6.0, 2.4)]  # to begin a step, for each sample
SLOWER = 2.5  # worker 0, in the second third

parser = argparse.ArgumentParser()
parser.add_argument("--equal", action="store_true", help="leave the shares equal")
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--batch", type=int, default=96)
parser.add_argument("--seed", type=int, default=1)
args = parser.parse_args()

torch.set_num_threads(1)
data = digits(args.seed)
model = mlp(48, args.seed)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
with commlayer.attach(model, optimizer) as session:
    sampler = Sampler(len(data.train[0]), args.batch, seed=args.seed)
    loader = DataLoader(TensorDataset(*data.train), batch_sampler=sampler)
    controller = commlayer.Controller(session, sampler)
    begin_ms, sample_ms = SPEED_MS[dist.get_rank() % len(SPEED_MS)]
    told, begin = 0, time.perf_counter()
    mark = begin
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        slower = SLOWER if dist.get_rank() == 0 and args.epochs <= 3 * epoch < 2 * args.epochs else 1.0
        for x, y in sampler.follow(loader, session) if args.equal else controller.follow(loader):
            time.sleep(slower * (begin_ms + sample_ms * len(x)) / 1e3)
            (nn.functional.cross_entropy(model(x), y) * sampler.fraction).backward()
            if sampler.last:
                optimizer.step()
                optimizer.zero_grad()
            if dist.get_rank() == 0:
                for line in session.decisions()[told:]:
                    print(line, flush=True)
                told = len(session.decisions())
        if dist.get_rank() == 0:
            now = time.perf_counter()
            shares = " ".join(f"{share:3d}" for _, share in sorted(controller.shares.items()))
            print(f"epoch {epoch + 1:2d}: shares {shares}, {sampler.length / (now - mark):.0f} samples a second", flush=True)
            mark = now
    if dist.get_rank() == 0:
        print(f"accuracy {accuracy(model, data.test):.3f} after {time.perf_counter() - begin:.1f} s", flush=True)
