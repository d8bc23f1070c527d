"""The same through DDP's communication hook: torchrun --standalone --nproc-per-node 2 examples/train_ddp.py"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import commlayer

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
state = commlayer.HookState(optimizer, compression="topk(ratio=0.01)")
model.register_comm_hook(state, commlayer.comm_hook)
torch.manual_seed(dist.get_rank())  # every worker has its own data
for step in range(1, 201):
    x = torch.randn(64, 64)
    loss = nn.functional.cross_entropy(model(x), x[:, :10].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0 and dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.3f}, {state.session.metrics()['sent_nbytes'] / step:.0f} bytes sent a step")
state.session.close()
