"""Two unlike cards share a batch, for example 24 GB at home and 12 GB at a friend's:

    torchrun --standalone --nproc-per-node 2 examples/two_cards.py
    commlayer join --keys DIR HOST:PORT examples/two_cards.py              # on each machine

The profile before the first step finds each card's speed and the largest batch that its memory holds. Then the load balancer
gives each card the share of the batch that it computes in the same time. `--slow-ms` stands for a slower card on CPUs.
"""

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import commlayer
from commlayer.demo.problem import accuracy, digits, mlp

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch", type=int, default=96, help="of both cards together")
parser.add_argument("--slow-ms", type=float, default=0.4, help="ms that rank 1 sleeps for each sample; rank 0: half of it")
options = parser.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
data, model = digits(seed=1), mlp(48, seed=1).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
with commlayer.attach(model, optimizer) as session:

    def loss_of(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        x, y = (part.to(device) for part in batch)
        if device.type == "cpu":
            time.sleep(options.slow_ms / 2e3 * (1 + session.rank) * len(x))
        return nn.functional.cross_entropy(model(x), y)

    sampler = commlayer.balance.Sampler(len(data.train[0]), options.batch, seed=1)
    loader = DataLoader(TensorDataset(*data.train), batch_sampler=sampler)
    balancer = commlayer.LoadBalancer(session, sampler)
    balancer.profile(model, loss_of, loader, limit_s=5.0)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for batch in balancer.follow(loader):
            (loss_of(model, batch) * sampler.fraction).backward()  # a share above the card's memory comes in micro-batches
            if sampler.last:
                optimizer.step()
                optimizer.zero_grad()
        if session.rank == 0:
            shares = " and ".join(str(share) for _, share in sorted(balancer.shares.items()))
            reached = accuracy(model, [part.to(device) for part in data.test])
            print(f"epoch {epoch + 1}: shares {shares} of {options.batch}, accuracy {reached:.3f}", flush=True)
