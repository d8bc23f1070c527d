"""Codec costs on this machine: measures codecs and fits lines to the times."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import numpy as np
import torch

from commlayer.compressors import Codec, parse, wrap
from commlayer.compressors.reducing import Reduced, adds_up
from commlayer.engine.plan_check import promise_of
from commlayer.planner.model.cluster import CodecCost, Line
from commlayer.planner.pricing.lines import ZERO
from commlayer.records import Spec

SIZES = (1 << 12, 1 << 16, 1 << 20)
"""Elements: from 16 KiB, where calls cost more than bytes, to 4 MiB, which exceeds the cache of one core."""
COPIED_NBYTES = (1 << 12, 1 << 18, 1 << 22, 1 << 25)
REPEATS = 5
MEMBERS = 8
"""Members whose sum an all-reduce must have room for; similar numbers need as many bytes."""


def measure(codecs: Sequence[str], sizes: Sequence[int] = SIZES, repeats: int = REPEATS) -> tuple[CodecCost, ...]:
    """Costs of each codec on the CPU, as in plans: with error feedback if it is biased."""
    return tuple(_cost(text, sizes, repeats) for text in codecs)


def _cost(text: str, sizes: Sequence[int], repeats: int) -> CodecCost:
    codec = wrap(parse(text))
    rows = [_times(codec, numel, repeats) for numel in sizes]
    encode, decode, nbytes = (fit(sizes, [row[i] for row in rows]) for i in range(3))
    promise = promise_of(codec)
    reduced = fit(sizes, [row[3] for row in rows]) if promise.sums else ZERO
    return CodecCost(text, "cpu", encode, decode, nbytes, rounds=len(codec.rounds), sums=promise.sums, alone=promise.alone,
                     answers=promise.answers, reduced=reduced)


def _times(codec: Codec, numel: int, repeats: int) -> tuple[float, float, float, float]:
    """Seconds to encode, seconds to add to a sum, bytes, and bytes that an all-reduce sums; each for all rounds together."""
    spec = Spec((numel,))
    state, server = codec.init(spec), codec.init_server(spec)
    out, result = (memoryview(bytearray(codec.bound(spec))) for _ in range(2))
    accs = [codec.zeros(spec, r) for r in range(len(codec.rounds))]
    x, total = torch.randn(numel, generator=torch.Generator().manual_seed(numel)), torch.empty(numel)
    encodes, adds, nbytes = [], [], 0
    for number in range(repeats + 1):
        encode_s = add_s = 0.0
        nbytes = received = 0
        for r, acc in enumerate(accs):
            begin = time.perf_counter()
            sent = codec.start(x, state, out) if r == 0 else codec.next(r - 1, result[:received], state, out)
            encode_s += time.perf_counter() - begin
            codec.add(r, out[:sent], acc, first=True)
            begin = time.perf_counter()
            codec.add(r, out[:sent], acc, first=False)
            add_s += time.perf_counter() - begin
            nbytes += sent
            if len(accs) > 1:
                received = codec.emit(r, acc, server, result)
        if len(accs) > 1:  # the result is not one of the payloads
            begin = time.perf_counter()
            codec.decode(result[:received], state, total)
            add_s = max(add_s, time.perf_counter() - begin)
        if number:  # the first call warms caches and determines the threshold
            encodes.append(encode_s)
            adds.append(add_s)
    reduced = sum(Reduced(acc).nbytes for acc in accs) if adds_up(codec) else 0
    return median(encodes), median(adds), float(nbytes), float(reduced)


def copies(sizes: Sequence[int] = COPIED_NBYTES, repeats: int = REPEATS) -> Line | None:
    """Seconds per bytes of one copy between a GPU and pinned memory; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    rows = []
    for nbytes in sizes:
        cuda, host = torch.zeros(nbytes, dtype=torch.uint8, device="cuda"), torch.zeros(nbytes, dtype=torch.uint8).pin_memory()
        seconds = []
        for _ in range(repeats + 1):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            host.copy_(cuda, non_blocking=True)
            cuda.copy_(host, non_blocking=True)
            torch.cuda.synchronize()
            seconds.append((time.perf_counter() - begin) / 2)
        rows.append(median(seconds[1:]))
    return fit(sizes, rows)


def fit(sizes: Sequence[float], values: Sequence[float]) -> Line:
    """Fits the line of least relative error; neither floor nor slope is below 0."""
    x, y = np.asarray(sizes, float), np.maximum(np.asarray(values, float), 1e-12)
    weighted = np.stack([1.0 / y, x / y], axis=1)
    floor, slope = np.linalg.lstsq(weighted, np.ones_like(y), rcond=None)[0]
    if floor < 0 or slope < 0:
        # The best line with one of them at 0.
        only_slope = float((x / y).sum() / ((x / y) ** 2).sum())
        only_floor = float((1.0 / y).sum() / ((1.0 / y) ** 2).sum())
        floor, slope = (0.0, only_slope) if floor < 0 else (only_floor, 0.0)
    error = float(np.abs((floor + slope * x) / y - 1.0).max())
    return Line(float(floor), float(slope), error)
