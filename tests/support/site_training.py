"""A training script that knows nothing of sites: `commlayer join` starts it, or torchrun."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from support.jobs import distributed_job
from support.rank_pool import tree

STEPS, SLOW_STEP = 6, 3


def main(how: str, *arguments: str) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    import commlayer
    from support.attached import data, mlp
    from support.site_job import digest

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if how == "mistaken" and rank == 1:
        raise LookupError("a mistake in the script")
    torch.manual_seed(rank)
    model: Any = mlp(seed=rank)  # unequal, as in a script that sets no seed
    if how == "ddp":
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02 if how == "rate" and rank == 1 else 0.01)
    config = {"ranks_per_node": 2 if how == "inside" else 1}
    with commlayer.attach(model, optimizer, compression="topk(ratio=0.1)", config=config,
                          sync="never" if how == "refused" else None) as session:
        if how == "resumed":  # as if each site had loaded its own state
            for p in model.parameters():
                optimizer.state[p] = {"step": torch.tensor(9.0), "exp_avg": torch.full_like(p, 0.01 * rank),
                                      "exp_avg_sq": torch.full_like(p, 0.5)}
        step = 0
        while step < STEPS or how in ("endless", "slow"):
            x, y = data(rank, step)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            while how == "slow" and rank == 1 and step == SLOW_STEP and not Path(arguments[0]).exists():
                time.sleep(0.1)
            (loss * float("nan") if how == "nan" and rank == 1 and step == 2 else loss).backward()
            optimizer.step()
            step += 1
            if how == "endless" and step == STEPS:
                print(json.dumps({"rank": rank}), flush=True)
        assert (dist.get_rank(), dist.get_world_size()) == (rank, world)
        total = torch.tensor([float(rank)])
        dist.all_reduce(total)
        connection = distributed_job(session)
        report = {"rank": rank, "world": world, "sum": total.item(), "local": os.environ["LOCAL_RANK"],
                  "nodes": [server.node for server in connection.uplink.epoch.servers],
                  "sha": digest([*model.parameters(), *(t for p in model.parameters() for t in optimizer.state[p].values())]),
                  "decisions": session.inspect.decisions()}
    if how == "evaluation":
        time.sleep(2.0 * rank)  # the last rank leaves the job after all others
        total = torch.tensor([float(rank)])
        dist.all_reduce(total)
        dist.barrier()
        report["sum"] = 10.0 * total.item()
    print(json.dumps(report), flush=True)


def torchrun_digests(how: str, world: int) -> list[str]:
    """Digests of the same script's weights under torchrun."""
    with tree(__file__, world, args=(how,)) as run:
        return [json.loads(run.until(rank, "{"))["sha"] for rank in range(world)]


if __name__ == "__main__":
    main(*sys.argv[1:])
