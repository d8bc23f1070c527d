"""Time and memory to turn a server's result into a lazy optimizer's gradient.

Compares sparse entries without a dense copy ("entries") with a dense average that is searched for nonzeros ("dense first").
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn

from commlayer.compressors import parse, wrap
from commlayer.engine.buckets.bucket import EncodedBucket
from commlayer.engine.buckets.results import SparseResult
from commlayer.engine.worker.sparse_averages import joined, make_sparse
from commlayer.records import Bucket, Job, Slice, TensorInfo

CODEC = "topk(ratio=0.01)"
FACTOR = 0.25


class _Way:
    def __init__(self, shape: tuple[int, int], *, entries: bool) -> None:
        n = shape[0] * shape[1]
        self._entries, self._p = entries, nn.Parameter(torch.empty(shape))
        planned = Bucket(0, (Slice(0, 0, n),), "service", CODEC)
        self._bucket = EncodedBucket(planned, Job((TensorInfo("weight", shape),)), wrap(parse(CODEC)), torch.device("cpu"), 0)
        if entries:
            self._bucket.keep_entries()

    def run(self, result: bytes, own: torch.Tensor) -> tuple[float, torch.Tensor]:
        """Returns the seconds and the gradient. `own` is the gradient of the backward pass."""
        p, bucket = self._p, self._bucket
        p.grad = own
        begin = time.perf_counter()
        bucket.decode(memoryview(result))
        if self._entries:
            assert isinstance(bucket.compact, SparseResult)
            idx, values = bucket.compact.entries(0)
            p.grad = joined([(idx, values * FACTOR)], p.shape)
        else:
            bucket.commit(FACTOR, [own])
            make_sparse([p])
        took_s = time.perf_counter() - begin
        assert p.grad is not None
        return took_s, p.grad


def rows(shape: tuple[int, int], rounds: int) -> list[dict[str, Any]]:
    ways = {"dense first": _Way(shape, entries=False), "entries": _Way(shape, entries=True)}
    result, own = _result(shape), torch.empty(shape)
    took: dict[str, list[float]] = {name: [] for name in ways}
    gradients = {}
    for number in range(rounds + 1):
        for name, way in ways.items():
            took_s, gradients[name] = way.run(result, own)
            if number:
                took[name].append(took_s)
    first, second = (gradient.coalesce() for gradient in gradients.values())
    assert torch.equal(first.indices(), second.indices())
    assert torch.equal(first.values(), second.values())
    return [{"optimizer": "handed over", "step": name, "median_ms": round(1e3 * statistics.median(took[name]), 2),
             "best_ms": round(1e3 * min(took[name]), 2), "memory_mb": round(_alone(shape, entries=name == "entries"), 1)}
            for name in ways]


def _alone(shape: tuple[int, int], *, entries: bool) -> float:
    """Memory in a separate process, without memory left by the other method."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(_memory_mb, shape, entries).result()


def _memory_mb(shape: tuple[int, int], entries: bool) -> float:
    """Growth of this process's resident memory over a few results."""
    way, result, own = _Way(shape, entries=entries), _result(shape), torch.empty(shape)
    before = _resident_mb()
    for _ in range(3):
        _, gradient = way.run(result, own)
    taken_mb = _resident_mb() - before
    del gradient
    return taken_mb


def _result(shape: tuple[int, int]) -> bytes:
    """A server's result: a random tensor encoded by CODEC."""
    codec, n = wrap(parse(CODEC)), shape[0] * shape[1]
    job = Job((TensorInfo("weight", shape),))
    bucket = EncodedBucket(Bucket(0, (Slice(0, 0, n),), "service", CODEC), job, codec, torch.device("cpu"), 0)
    bucket.x.normal_(generator=torch.Generator().manual_seed(0))
    return bytes(bucket.coder.payload[: bucket.encode()])


def _resident_mb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) / 1e3
