"""A plain PyTorch loop plus one line: torchrun --standalone --nproc-per-node 2 examples/train.py"""

import torch
import torch.distributed as dist
from torch import nn

import commlayer

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
codec = commlayer.compressors.topk(ratio=0.01, values="int8")
with commlayer.attach(model, optimizer, plan=codec) as session:
    torch.manual_seed(dist.get_rank())  # every worker has its own data
    for step in range(1, 201):
        x = torch.randn(64, 64)
        loss = nn.functional.cross_entropy(model(x), x[:, :10].argmax(1))
        optimizer.zero_grad()
        loss.backward()  # on return, .grad is the average over all workers
        optimizer.step()
        if step % 50 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}, {session.stats()['sent_nbytes'] / step:.0f} bytes sent a step")
