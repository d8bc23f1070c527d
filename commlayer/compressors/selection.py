"""Picks about k entries of largest magnitude out of gradient + residual, and who offers that to wrappers. Knows no payloads.

Small tensors are sorted. Larger ones are scanned once at a tracked threshold that aims a little above k. What the scan finds
above `room` is trimmed to the k largest of the candidates; less than ENOUGH * k costs a second scan at a
lower threshold. So the count is within 10 % of k wherever there are as many entries that are not zero.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from commlayer.compressors import kernels, tracked_threshold
from commlayer.compressors.codec import Buffer, State

if TYPE_CHECKING:
    import torch
else:
    from commlayer.compressors import tensors as torch

EXACT_NUMEL = 16384
"""Up to here sorting is as cheap as tracking."""

ENOUGH = 0.9
SPARE = 16


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
    sorting = sorts(n, exact)
    candidates = k if sorting else min(n, k + k // 2 + SPARE)
    sample = 0 if sorting else tracked_threshold.sample_room(n, k)
    return {
        "idx": torch.empty(candidates, dtype=torch.int32),
        "val": torch.empty(candidates),
        "kept": torch.empty(room(n, k, exact)),
        "sample": torch.empty(sample),
        "words": torch.empty(n if sorting else max(sample, candidates), dtype=torch.int32),
    }


def pick(k: int, exact: bool, x: torch.Tensor, residual: torch.Tensor | None, state: State) -> Picked:
    """Takes the entries out of x + residual, which the residual keeps otherwise. Not finite: it kept the finite part of x."""
    n, memory = x.numel(), state["_scratch"]
    idx, val = memory["idx"], memory["val"]
    start = tracked_threshold.rotation(n, state)
    if sorts(n, exact):
        cut = tracked_threshold.exact(k, x, residual, memory["words"]) if n else tracked_threshold.TINY
        count, _, finite = kernels.select(x, residual, cut, start, idx, val)
        state["step"] += finite
        return Picked(idx[:count], val[:count], finite)
    tracked = tracked_threshold.begin(k, n, partial(kernels.sample_abs, x, residual), state)
    return mend(k, x, residual, state, tracked, *kernels.select(x, residual, tracked.threshold, start, idx, val))


def mend(
    k: int, x: torch.Tensor, residual: torch.Tensor | None, state: State, tracked: tracked_threshold.Cut,
    count: int, overflow: int, finite: bool,
) -> Picked:
    """What `pick` does after the scan of a larger tensor: scans again where too little was found, trims too much."""
    n, memory = x.numel(), state["_scratch"]
    idx, val, start = memory["idx"], memory["val"], tracked_threshold.rotation(n, state)
    if finite and count < ENOUGH * k and tracked.threshold > tracked_threshold.TINY:
        v = x
        if residual is not None:
            v = residual
            kernels.scatter_add(v, idx[:count], val[:count])
        tracked = tracked_threshold.again(k, n, partial(kernels.sample_abs, v, None), state, tracked, count)
        count, overflow, _ = kernels.select(v, None, tracked.threshold, start, idx, val)
        if residual is not None:
            kernels.scatter_add(residual, idx[:count], -val[:count])
    if not finite:
        return Picked(idx[:count], val[:count], False)
    tracked_threshold.end(k, n, count + overflow, tracked, state)
    if count > room(n, k, False):
        count = kernels.trim(residual, n, idx, val, count, k, start, memory["words"])
    return Picked(idx[:count], val[:count], True)


if TYPE_CHECKING:
    import torch


@runtime_checkable
class Picks(Protocol):
    """A codec that can hand on the entries it would send, as float32, instead of coding them."""

    def capacity(self, numel: int) -> int:
        """Most entries that `pick` hands on."""
        ...

    def pick(self, x: torch.Tensor, residual: torch.Tensor | None, state: State) -> Picked:
        """Takes entries out of x + residual; the residual keeps the others. Not finite: it took the finite part of x.

        Positions increase and values are exact. What it returns stays as it is until the next call.
        """
        ...


@runtime_checkable
class Placed(Protocol):
    """A codec of one round that sends some entries and not others."""

    def places(self, payload_: Buffer, numel: int) -> torch.Tensor:
        """int32 positions of the entries in a payload; none in a flagged one."""
        ...
