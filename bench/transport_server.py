"""Speed of a summation server on dense bodies, against memory speed (`r += g` in place).

Uses the real server without sockets: it checks each body and adds the bodies in member order. Rates count the added bytes.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch

from commlayer.cluster.servers.server_codecs import ops_of, senders_of
from commlayer.cluster.servers.summation import Summation
from commlayer.compressors import codec_of
from commlayer.engine.buckets.bucket import EncodedBucket
from commlayer.engine.model.model_tensors import job_of
from commlayer.planner import default_plan
from commlayer.records import Plan
from commlayer.transport.protocol import Header, Kind, Message

WORLD = 4
FLOATS = 4 << 20
"""Floats in a body, 16 MiB: four bodies are far larger than the caches."""
TIMES, QUICK_TIMES = 25, 7


def run(quick: bool) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """A row and the summary figure `server_add_vs_stream`.

    The first and last body of a step are not timed: the first starts the sum, and after the last the sum is encoded and sent.
    """
    model = torch.nn.Linear(1 << 11, FLOATS >> 11, bias=False)
    plan = default_plan(job_of(model), codec="identity()", path="service", servers=1, ranks_per_node=1, fuse_nbytes=4 * FLOATS,
                        cut_nbytes=4 * FLOATS)
    bodies = [_body(model, plan, rank) for rank in range(WORLD)]
    server = Summation(0, 1, dict(ops_of(plan, 0)), senders_of(plan, WORLD))
    acc, gradient, threads = torch.rand(FLOATS), torch.rand(FLOATS), torch.get_num_threads()
    torch.set_num_threads(1)  # the server adds a bucket on one thread, too
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
    """A body as a worker encodes it: codec id, mask of its slices, and the bytes."""
    (planned,) = plan.buckets
    worker = EncodedBucket(planned, job_of(model), codec_of(planned, plan=plan), torch.device("cpu"), 0, rank=rank)
    worker.sources = [parameter.detach() for parameter in model.parameters()]
    worker.gather(1.0, 1.0)
    return worker.codec.id, worker.ledger.all_slices, worker.coder.payload[: worker.encode()]
