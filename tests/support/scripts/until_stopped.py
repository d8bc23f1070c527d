"""Trains, with a checkpoint every five steps in the current folder, until a file named `stop` is there for one worker."""

import os
import time

import torch
import torch.distributed as dist

import commlayer

torch.manual_seed(0)
model = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
with commlayer.attach(model, optimizer) as session:
    session.resume("checkpoint")
    print(f"first {session.step} of {session.world_size}", flush=True)
    stop = torch.zeros(1)
    while not stop.item():
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        if session.step % 5 == 0:
            session.checkpoint("checkpoint")
            print(f"saved {session.step} of {session.world_size}", flush=True)
        time.sleep(0.05)
        stop.fill_(os.path.exists("stop"))
        dist.all_reduce(stop)
