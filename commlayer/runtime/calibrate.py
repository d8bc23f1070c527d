"""What codecs cost on this machine: measured, and fitted to lines. Knows codecs and a clock; no plan and no network."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import numpy as np
import torch

from commlayer.compressors import Codec, Round, parse, wrap
from commlayer.planner.model import CodecCost, Line
from commlayer.records import Spec

SIZES = (1 << 12, 1 << 16, 1 << 20)
"""Elements: 16 KiB, where calls cost more than bytes, to 4 MiB, which no cache of one core holds."""
REPEATS = 5


def measure(codecs: Sequence[str], sizes: Sequence[int] = SIZES, repeats: int = REPEATS) -> tuple[CodecCost, ...]:
    """Costs of each codec on the CPU, as a plan would run it: with error feedback where it is biased."""
    return tuple(_cost(text, sizes, repeats) for text in codecs)


def _cost(text: str, sizes: Sequence[int], repeats: int) -> CodecCost:
    codec = wrap(parse(text))
    rows = [_times(codec, numel, repeats) for numel in sizes]
    encode, decode, nbytes = (fit(sizes, [row[i] for row in rows]) for i in range(3))
    return CodecCost(text, "cpu", encode, decode, nbytes, rounds=len(codec.rounds),
                     sums=all(r is not Round.GATHER for r in codec.rounds))


def _times(codec: Codec, numel: int, repeats: int) -> tuple[float, float, float]:
    """Seconds to encode, seconds to add to a sum, bytes."""
    spec = Spec((numel,))
    state, out = codec.init(spec), memoryview(bytearray(codec.bound(spec)))
    acc = codec.zeros(spec, 0)
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    encodes, adds, nbytes = [], [], 0
    for number in range(repeats + 1):
        begin = time.perf_counter()
        nbytes = codec.start(x, state, out)
        middle = time.perf_counter()
        codec.add(0, out[:nbytes], acc, first=number == 0)
        end = time.perf_counter()
        if number:  # the first call warms caches and finds its threshold
            encodes.append(middle - begin)
            adds.append(end - middle)
    return median(encodes), median(adds), float(nbytes)


def fit(sizes: Sequence[float], values: Sequence[float]) -> Line:
    """The line with the least relative error through the points, neither floor nor slope below 0."""
    x, y = np.asarray(sizes, float), np.maximum(np.asarray(values, float), 1e-12)
    weighted = np.stack([1.0 / y, x / y], axis=1)
    floor, slope = np.linalg.lstsq(weighted, np.ones_like(y), rcond=None)[0]
    if floor < 0 or slope < 0:
        # The best with one of them at 0.
        only_slope = float((x / y).sum() / ((x / y) ** 2).sum())
        only_floor = float((1.0 / y).sum() / ((1.0 / y) ** 2).sum())
        floor, slope = (0.0, only_slope) if floor < 0 else (only_floor, 0.0)
    error = float(np.abs((floor + slope * x) / y - 1.0).max())
    return Line(float(floor), float(slope), error)
