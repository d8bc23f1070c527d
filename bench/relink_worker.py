"""One rank that trains with plan "auto" until a stop file appears: `python -m bench.relink_worker --folder DIR`.

Rank 0 appends a line of JSON to DIR/steps after each step. All ranks stop after the number of steps in DIR/stop.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from bench.as_rank import as_rank
from bench.worker import MODELS, build, commlayer_service
from commlayer.records import digest


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.relink_worker")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--model", choices=MODELS, default="mlp_big")
    parser.add_argument("--batch", type=int, default=32)
    args = parser.parse_args()
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    model = build(args.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trained = commlayer_service(model, optimizer, "auto")
    session = trained.close.__self__  # type: ignore[attr-defined]
    generator, loss_of = torch.Generator().manual_seed(1000 + rank), nn.CrossEntropyLoss()
    stop = args.folder / "stop"
    steps, written = 0, 0
    with open(args.folder / "steps", "a") if rank == 0 else open(os.devnull, "w") as log:
        while not (stop.exists() and (word := stop.read_text()) and steps >= int(word)):
            begin = time.monotonic()
            x = torch.randn(args.batch, MODELS[args.model][0], generator=generator)
            optimizer.zero_grad()
            loss_of(model(x), torch.randint(0, 10, (args.batch,), generator=generator)).backward()
            optimizer.step()
            steps += 1
            end, decisions = time.monotonic(), trained.decisions()
            print(json.dumps({"step": steps, "at_s": end, "step_s": end - begin, "plan": digest(session.inspect.plan),
                              "said": decisions[written:]}), file=log, flush=True)
            written = len(decisions)
    print(json.dumps({"rank": rank, "steps": steps, "decisions": trained.decisions()}), flush=True)
    dist.barrier()
    trained.close()


if __name__ == "__main__":
    as_rank(main)
