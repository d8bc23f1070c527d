"""Measures costs on this machine and cluster: codecs and collectives. Fits lines to the times."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

import numpy as np
import torch

from commlayer.balance.time_models import fit_relative
from commlayer.cluster.processes.bounded_calls import PendingCollective
from commlayer.cluster.processes.collectives import Groups
from commlayer.compressors import Codec, parse, wrap
from commlayer.compressors.plan_codecs import ReducedAccumulator, is_summable
from commlayer.engine.job.plan_checks import codec_promise
from commlayer.planner.costs import collective_traffic
from commlayer.planner.model import ZERO, CodecCost, LinearCost
from commlayer.records import Spec

CODEC_NUMEL = (1 << 12, 1 << 16, 1 << 20)
"""Numbers of elements for which codecs are measured: from 16 KiB, where calls cost more than bytes, to 4 MiB, more than the
cache of one core."""
REPEATS = 5


def measure_codecs(codecs: Sequence[str], sizes: Sequence[int] = CODEC_NUMEL, repeats: int = REPEATS) -> tuple[CodecCost, ...]:
    """Measures the costs of each codec on the CPU, in the form that plans use: with error feedback if the codec is biased."""
    return tuple(_cost(text, sizes, repeats) for text in codecs)


def _cost(text: str, sizes: Sequence[int], repeats: int) -> CodecCost:
    codec = wrap(parse(text))
    rows = [_times(codec, numel, repeats) for numel in sizes]
    encode, decode, nbytes = (fit(sizes, [row[i] for row in rows]) for i in range(3))
    promise = codec_promise(codec)
    reduced = fit(sizes, [row[3] for row in rows]) if promise.sums else ZERO
    return CodecCost(text, "cpu", encode, decode, nbytes, rounds=len(codec.rounds), sums=promise.sums, alone=promise.alone,
                     answers=promise.answers, reduced=reduced)


def _times(codec: Codec, numel: int, repeats: int) -> tuple[float, float, float, float]:
    """Returns seconds to compress, seconds to add to a sum, bytes of a payload, and bytes that an all-reduce sums; each for
    all rounds together."""
    spec = Spec((numel,))
    state, server = codec.init(spec), codec.init_server(spec)
    out, result = (memoryview(bytearray(codec.bound(spec))) for _ in range(2))
    accs = [codec.new_accumulator(spec, r) for r in range(len(codec.rounds))]
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
    reduced = sum(ReducedAccumulator(acc).nbytes for acc in accs) if is_summable(codec) else 0
    return median(encodes), median(adds), float(nbytes), float(reduced)


def fit(sizes: Sequence[float], values: Sequence[float]) -> LinearCost:
    """Returns the line of least relative error through the values. Neither its value at 0 (floor) nor its slope is negative."""
    x, y = np.asarray(sizes, float), np.maximum(np.asarray(values, float), 1e-12)
    slope, floor = fit_relative(x, y)
    return LinearCost(floor, slope, float(np.abs((floor + slope * x) / y - 1.0).max()))


FIRST_NBYTES, LAST_NBYTES, GROWTH = 1 << 10, 16 << 20, 16
COLLECTIVE_REPEATS = 3
FLOAT_NBYTES = 4
LEAST_BYTE_S = 1e-12
"""Lower limit of the seconds per byte, whatever a noisy fit gives."""
Collective = Callable[[torch.Tensor], PendingCollective]


class CollectiveCosts(NamedTuple):
    """Costs of collectives: seconds per message (the floor) and seconds per byte on a member's link (the slope). Zeros for a
    level that the cluster does not have."""

    inside: LinearCost = ZERO
    across: LinearCost = ZERO


FREE_INSIDE = CollectiveCosts(LinearCost(0.0, LEAST_BYTE_S))
"""Costs of a sharded model, whose gradients FSDP sums inside of each site, as a part of the measured backward pass."""


def measure_collectives(groups: Groups, budget_s: float) -> CollectiveCosts:
    """Measures, in about `budget_s`, a reduce inside all nodes at once, and an all-reduce over ranks that can reach each
    other."""
    nodes, ranks = len(groups.sites), groups.ranks_per_node
    inside = across = ZERO
    if ranks > 1:
        run = partial(groups.inside.out.reduce, root=0) if len(groups.site) > 1 else _no_collective
        inside = _measure_collective(groups, run, "reduce", ranks, budget_s / (2 if nodes > 1 else 1))
    if nodes > 1 and groups.members.reachable:
        across = _measure_collective(groups, groups.allreduce, "allreduce", groups.world, budget_s / (2 if ranks > 1 else 1))
    return CollectiveCosts(inside, across)


def _no_collective(x: torch.Tensor) -> PendingCollective:
    return PendingCollective(None, "reduce", on_device=x.is_cuda)


def _measure_collective(groups: Groups, run: Collective, name: str, members: int, budget_s: float) -> LinearCost:
    """Measures one collective and returns its cost: seconds per message and per byte. The fitted line's floor is divided by the
    number of sequential messages, the slope by the number of times that the collective moves the data."""
    times_s = _timed(groups, run, budget_s)
    traffic = collective_traffic(name, members)
    line = fit(list(times_s), list(times_s.values())) if len(times_s) > 1 else LinearCost(next(iter(times_s.values())))
    return LinearCost(line.floor_s / traffic.messages, max(line.slope_s / traffic.passes, LEAST_BYTE_S), line.error)


def _timed(groups: Groups, run: Collective, budget_s: float) -> dict[float, float]:
    """Returns the slowest rank's seconds by number of bytes. Measures at least one size; more sizes and repetitions while time
    remains."""
    times_s: dict[float, float] = {}
    left_s, nbytes = budget_s, FIRST_NBYTES
    while True:
        x = torch.zeros(nbytes // FLOAT_NBYTES, device=groups.device)
        once = partial(_once, groups, run, x)
        groups.barrier()
        seconds = _slowest(groups, once())
        left_s -= seconds
        if COLLECTIVE_REPEATS * seconds < left_s / 2:
            best_s = _slowest(groups, min(once() for _ in range(COLLECTIVE_REPEATS)))
            left_s, seconds = left_s - COLLECTIVE_REPEATS * best_s, min(seconds, best_s)
        times_s[nbytes] = seconds
        # At the first size most of the time is message latency, which does not grow.
        likely_s = seconds if len(times_s) == 1 else seconds * GROWTH
        if nbytes >= LAST_NBYTES or likely_s > left_s / 2:
            return times_s
        nbytes *= GROWTH


def _slowest(groups: Groups, seconds: float) -> float:
    return float(groups.gather_all(torch.tensor([seconds], dtype=torch.float64, device=groups.device)).max())


def _once(groups: Groups, run: Collective, x: torch.Tensor) -> float:
    begin = time.perf_counter()
    run(x).wait(time.monotonic() + groups.timeout_s)
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter() - begin
