"""A training script that knows nothing of sites: started by `commlayer launch` or as by torchrun."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from typing import Any

from support.rank_pool import Tree, tree

STEPS = 6


def main(how: str, *_: str) -> None:
    """Nothing here knows of homes."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import commlayer
    from support.attached import data, mlp

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(rank)
    model: Any = mlp(seed=rank)  # unequal, as where a script sets no seed
    if how == "ddp":
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    config = {"ranks_per_node": 2 if how == "inside" else 1}
    with commlayer.attach(model, optimizer, plan="topk(ratio=0.1)", config=config) as session:
        step = 0
        while step < STEPS or how == "on and on":
            x, y = data(rank, step)
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if how == "on and on" and step == STEPS:
                print(json.dumps({"rank": rank}), flush=True)
        assert (dist.get_rank(), dist.get_world_size()) == (rank, world)
        losses = torch.tensor([float(rank)])
        dist.all_reduce(losses)
        inspected = session.inspect.connection
        told = {"rank": rank, "world": world, "sum": losses.item(), "nodes": [s.node for s in inspected.uplink.view.servers],
                "local": os.environ["LOCAL_RANK"], "sha": digest(model.parameters())}
    if how == "evaluation":
        time.sleep(2.0 * rank)  # the last one to come has left the job after all others
        losses = torch.tensor([float(rank)])
        dist.all_reduce(losses)
        dist.barrier()
        told["sum"] = 10.0 * losses.item()
    print(json.dumps(told), flush=True)


def digest(tensors: Any) -> str:
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()


def in_a_rack(how: str, world: int) -> list[str]:
    """Digests of the same script as torchrun would start it."""
    with tree(__file__, world, args=(how,)) as run:
        assert isinstance(run, Tree)
        return [json.loads(run.until(rank, "{"))["sha"] for rank in range(world)]


if __name__ == "__main__":
    main(*sys.argv[1:])
