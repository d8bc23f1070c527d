"""A worker as a script, on a host of the lab: steps with the server that its coordinator names, and a digest of the results."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from typing import Any

import torch
from support.workers import job, step

from commlayer import records
from commlayer.cluster.calls import messages
from commlayer.cluster.servers import worker_client
from commlayer.compressors import make_codec
from commlayer.config import read_config
from commlayer.engine.worker.worker import Worker
from commlayer.planner import default_plan
from commlayer.records import Plan


def plan() -> Plan:
    return default_plan(job(), codec="topk(ratio=0.1)", path="service", servers=1, ranks_per_node=1, fuse_nbytes=2048,
                        cut_nbytes=4096)


def gradients(rank: int, number: int) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(1000 * number + rank)
    return [torch.randn(info.shape, generator=generator) for info in job().tensors]


def digest(results: list[Any]) -> str:
    sums = hashlib.sha256()
    for tensor in (t for targets in results for t in targets if t is not None):
        sums.update(tensor.numpy().tobytes())
    return sums.hexdigest()


def main(rank: int, world: int, steps: int, settings: dict[str, Any]) -> None:
    config, layout = read_config(settings, environ={}, cwd="/nonexistent"), plan()
    request = messages.worker_request(layout.job, rank, world, plan=records.encode(layout))
    up = worker_client.connect(config.join, request, config)
    codecs = {b.id: make_codec(b, rank, layout) for b in layout.buckets}
    worker = Worker(job(), layout, codecs, torch.device("cpu"), rank=rank, members=world, transport=up.transport,
                    recycle=up.recycle)
    up.subscribe(worker.latch, worker.stalled, lambda *_: None, 1)
    replies = []
    for number in range(steps):
        replies.append(step(worker, gradients(rank, number), deadline_s=config.deadline_s))
        print(json.dumps(number), flush=True)
        time.sleep(0.1)
    print(json.dumps({"digest": digest(replies), "reconnects": up.transport.breaks}), flush=True)
    worker.close()
    up.close(flush_s=5.0, exchanges=steps)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
