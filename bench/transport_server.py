"""What a summation server does with a dense body, beside memory's own speed: `r += g` in place. Knows no connection.

The server is the real one without sockets: it checks a body, and adds it in member order. Bytes are those of what is added.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch

from commlayer.cluster.server_codecs import ops_of, senders_of
from commlayer.cluster.summation import Summation
from commlayer.compressors import codec_of
from commlayer.engine.buckets import WorkerBucket
from commlayer.engine.optimizers import job_of
from commlayer.planner import default_plan
from commlayer.records import Plan
from commlayer.transport.protocol import Header, Kind, Message

WORLD = 4
FLOATS = 4 << 20
"""Of a body, 16 MiB: far larger than caches hold of four of them."""
TIMES, QUICK_TIMES = 25, 7


def run(quick: bool) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """A row, and `server_add_vs_stream`: of a step's bodies without the first, which the sum begins with, and the last, behind
    which it is coded and sent."""
    model = torch.nn.Linear(1 << 11, FLOATS >> 11, bias=False)
    plan = default_plan(job_of(model), codec="identity()", path="service", servers=1, ranks_per_node=1, fuse_nbytes=4 * FLOATS,
                        cut_nbytes=4 * FLOATS)
    bodies = [_body(model, plan, rank) for rank in range(WORLD)]
    server = Summation(0, 1, dict(ops_of(plan, 0)), senders_of(plan, WORLD))
    acc, gradient, threads = torch.rand(FLOATS), torch.rand(FLOATS), torch.get_num_threads()
    torch.set_num_threads(1)  # as many as add a bucket
    rates: list[float] = []
    streams: list[float] = []
    for step in range(QUICK_TIMES if quick else TIMES):
        messages = [Message(rank, Header(Kind.PUSH, 1, step, 0, codec=codec, sender=rank, weight=1.0, used=used), body)
                    for rank, (codec, used, body) in enumerate(bodies)]
        server.push(messages[0], now=0.0)
        begin = time.perf_counter()
        for message in messages[1:-1]:
            server.push(message, now=0.0)
        added = time.perf_counter()
        server.push(messages[-1], now=0.0)
        again = time.perf_counter()
        for _ in messages[1:-1]:
            acc.add_(gradient)
        rates.append((WORLD - 2) * 4 * FLOATS / (added - begin))
        streams.append((WORLD - 2) * 4 * FLOATS / (time.perf_counter() - again))
    torch.set_num_threads(threads)
    ratio = median(mine / its for mine, its in zip(rates, streams, strict=True))
    row = {"where": "a server's sums", "body": "16 MiB", "server_gb_s": median(rates) / 1e9,
           "stream_gb_s": median(streams) / 1e9}
    return [row], {"server_add_vs_stream": ratio}


def _body(model: torch.nn.Module, plan: Plan, rank: int) -> tuple[int, int, memoryview]:
    """As a worker codes it: its codec, which slices are in it, and the bytes."""
    (planned,) = plan.buckets
    worker = WorkerBucket(planned, job_of(model), codec_of(planned, plan=plan), torch.device("cpu"), 0, rank=rank)
    worker.rewind()
    worker.sources = [parameter.detach() for parameter in model.parameters()]
    worker.gather(1.0, 1.0)
    return worker.codec.id, worker.all_slices, worker.payload[: worker.encode()]
