"""Selects about k entries of largest magnitude from gradient + residual, and defines the protocols of codecs that select.

Small tensors are sorted. Larger ones are scanned once at a tracked threshold that aims slightly above k. More than `room`
entries are trimmed to the k largest of them; fewer than ENOUGH * k cost a second scan at a lower threshold. So the count is
within 10 % of k, if there are as many non-zero entries.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from commlayer.compressors import kernels, tracked_threshold
from commlayer.compressors.codec import State
from commlayer.compressors.payload import Buffer

if TYPE_CHECKING:
    import torch
else:
    from commlayer.compressors import tensors as torch

EXACT_NUMEL = 16384
"""Up to this size sorting is as cheap as tracking."""

ENOUGH = 0.9
SPARE = 16


class Picked(NamedTuple):
    """Positions, increasing, and values of the entries taken from the residual, and whether all of x + residual is finite."""

    idx: torch.Tensor
    val: torch.Tensor
    finite: bool


def sorts(n: int, exact: bool) -> bool:
    return exact or n <= EXACT_NUMEL


def room(n: int, k: int, exact: bool) -> int:
    """The most entries that `pick` returns."""
    return k if sorts(n, exact) else min(n, k + max(1, k // 10))


def scratch(n: int, k: int, exact: bool) -> State:
    """Memory of one step. The caller may use `kept` after `pick`."""
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
    """Takes entries out of x + residual; the residual keeps the others. If not finite, it holds the finite part of x."""
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
    """Completes `pick` after the scan of a larger tensor: scans again if there are too few entries, trims if too many."""
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
    """A codec that can return the entries it would send, as float32, instead of encoding them."""

    def capacity(self, numel: int) -> int:
        """The most entries that `pick` returns."""
        ...

    def pick(self, x: torch.Tensor, residual: torch.Tensor | None, state: State) -> Picked:
        """Takes entries out of x + residual; the residual keeps the others. If not finite, it holds the finite part of x.

        Positions increase and values are exact. The result is valid until the next call.
        """
        ...


@runtime_checkable
class Placed(Protocol):
    """A codec of one round that sends only some entries."""

    def places(self, payload_: Buffer, numel: int) -> torch.Tensor:
        """int32 positions of the entries in a payload; none if it is flagged."""
        ...
