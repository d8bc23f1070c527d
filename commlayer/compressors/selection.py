"""Picks about k entries of largest magnitude out of gradient + residual. Knows thresholds and memory; nothing of payloads.

Small tensors are sorted. Larger ones are scanned once at a tracked threshold that aims a little above k. What the scan finds
above `room` is trimmed to about k by magnitude among the candidates alone; less than ENOUGH * k costs a second scan at a
lower threshold. So the count is within 10 % of k wherever there are as many entries that are not zero.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from commlayer.compressors import kernels, threshold
from commlayer.compressors.codec import State

EXACT_NUMEL = 16384
"""Up to here sorting is as cheap as tracking."""

ENOUGH = 0.9
SPARE = 16
FEW = 4096
"""Of so many candidates a quantile is right to 1 %."""


class Picked(NamedTuple):
    """Positions, increasing, and values of what was taken out of the residual."""

    idx: torch.Tensor
    val: torch.Tensor
    finite: bool


def sorts(n: int, exact: bool) -> bool:
    return exact or n <= EXACT_NUMEL


def room(n: int, k: int, exact: bool) -> int:
    """Most entries that `pick` hands on."""
    return k if sorts(n, exact) else min(n, k + max(1, k // 10))


def scratch(n: int, k: int, exact: bool) -> State:
    """Memory of a step. `kept` is free for the caller once `pick` is done."""
    most, candidates = room(n, k, exact), k if sorts(n, exact) else min(n, k + k // 2 + SPARE)
    return {
        "idx": torch.empty(candidates, dtype=torch.int32),
        "val": torch.empty(candidates),
        "chosen": torch.empty(most, dtype=torch.int32),
        "kept": torch.empty(most),
        "sample": torch.empty(0 if sorts(n, exact) else threshold.sample_room(n, k)),
    }


def pick(k: int, exact: bool, x: torch.Tensor, residual: torch.Tensor | None, state: State) -> Picked:
    """Takes the entries out of x + residual, which the residual keeps otherwise. Not finite: it kept the finite part of x."""
    n, idx, val = x.numel(), state["_scratch"]["idx"], state["_scratch"]["val"]
    start = threshold.rotation(n, state)
    if sorts(n, exact):
        cut = threshold.exact(k, x, residual) if n else threshold.TINY
        count, _, finite = kernels.select(x, residual, cut, start, idx, val)
        state["step"] += finite
        return Picked(idx[:count], val[:count], finite)
    tracked = threshold.begin(k, x, residual, state)
    return mend(k, x, residual, state, tracked, *kernels.select(x, residual, tracked.threshold, start, idx, val))


def mend(
    k: int, x: torch.Tensor, residual: torch.Tensor | None, state: State, tracked: threshold.Cut,
    count: int, overflow: int, finite: bool,
) -> Picked:
    """What `pick` does after the scan of a larger tensor: scans again where too little was found, trims too much."""
    n, idx, val, start = x.numel(), state["_scratch"]["idx"], state["_scratch"]["val"], threshold.rotation(x.numel(), state)
    if finite and count < ENOUGH * k and tracked.threshold > threshold.TINY:
        v = x
        if residual is not None:
            v = residual
            kernels.scatter_add(v, idx[:count], val[:count])
        tracked = threshold.again(k, v, state, tracked, count)
        count, overflow, _ = kernels.select(v, None, tracked.threshold, start, idx, val)
        if residual is not None:
            kernels.scatter_add(residual, idx[:count], -val[:count])
    if not finite:
        return Picked(idx[:count], val[:count], False)
    threshold.end(k, n, count + overflow, tracked, state)
    if count > room(n, k, False):
        count = _trim(count, k, residual, state, start)
    return Picked(idx[:count], val[:count], True)


def _trim(count: int, k: int, residual: torch.Tensor | None, state: State, start: int) -> int:
    """Keeps about the k largest of the first `count` candidates and gives the others back. Of equals, those from `start` on."""
    idx, val, chosen, kept = (state["_scratch"][name] for name in ("idx", "val", "chosen", "kept"))
    places, values = idx[:count].cpu().numpy().view(np.uint32), val[:count].cpu().numpy()
    few = np.abs(values[:: max(1, count // FEW)])
    rank = round(few.size * (count - k) / count)
    least = np.partition(few, rank)[rank]
    left, more, _ = kernels.select(val[:count], None, float(least), 0, chosen, kept)
    if more or left < ENOUGH * k:
        left = k
        keep = _largest(values, k, int(np.searchsorted(places, start)))
    else:
        keep = chosen[:left].cpu().numpy()
    back = np.ones(count, np.bool_)
    back[keep] = False
    if residual is not None:
        given = torch.from_numpy(places[back].view(np.int32)).to(idx.device), torch.from_numpy(values[back]).to(idx.device)
        kernels.scatter_add(residual, *given)
    idx[:left].copy_(torch.from_numpy(places[keep].view(np.int32)))
    val[:left].copy_(torch.from_numpy(values[keep]))
    return left


def _largest(values: npt.NDArray[np.float32], k: int, first: int) -> npt.NDArray[np.intp]:
    """Where the k largest magnitudes are, in order. Of equals, those from `first` on."""
    magnitudes = np.abs(values)
    least = np.partition(magnitudes, values.size - k)[values.size - k]
    keep = magnitudes > least
    equals = np.flatnonzero(magnitudes == least)
    keep[np.roll(equals, -int(np.searchsorted(equals, first)))[: k - np.count_nonzero(keep)]] = True
    return np.flatnonzero(keep)
