"""CLAN: LANS on gradients of one bit, up and down: torchrun --standalone --nproc-per-node 2 examples/clan.py"""

import torch
import torch.distributed as dist
from torch import nn

import commlayer
from commlayer.demo.problem import batches, digits, mlp

STEPS, RATE = 200, 0.03

model = mlp(64, seed=0)
optimizer = commlayer.optim.CLAN(model.parameters(), lr=RATE)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 10, 1 - step / STEPS))
with commlayer.attach(model, optimizer, compression=commlayer.compressors.onebit()) as session:
    data = digits(seed=0)
    mine = batches(data.train, 32, rank=dist.get_rank(), world=dist.get_world_size(), seed=0)
    for _ in range(STEPS):
        x, y = next(mine)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()
    if dist.get_rank() == 0:
        with torch.no_grad():
            loss = nn.functional.cross_entropy(model(data.test[0]), data.test[1])
        stats, dense = session.metrics(), 4 * sum(p.numel() for p in model.parameters())
        print(f"test loss {loss:.3f}; {stats['sent_nbytes'] / STEPS:.0f} bytes up, {stats['received_nbytes'] / STEPS:.0f} down "
              f"a step, of {dense} each way")
