"""Averages with few entries as sparse gradients, for optimizers that step only those. Knows parameters and buckets, no codecs.

Where results come as entries, these are the gradient, and no dense memory is written. Other averages are looked through once,
whatever codec and way they took: what is found is the same. It is the same on all ranks to the last bit, too, so all choose
alike, as replicas of a lazy optimizer must.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from commlayer.compressors import kernels
from commlayer.compressors.sparse_results import reader_of
from commlayer.engine.worker import Worker
from commlayer.optim.entries import sparse_gradient
from commlayer.optim.lazy import Lazy

LEAST = 4096
"""Elements below which a dense step is as fast."""
MOST = 8
"""One element in so many may be an entry: beyond, a dense step is as fast."""
SMALLEST = 2.0**-126
"""What is below all normal numbers counts as nothing."""


def stepped_lazily(optimizer: Any, parameters: Sequence[nn.Parameter]) -> dict[int, nn.Parameter]:
    """By number, those of the parameters whose averages are worth handing over as entries."""
    if not isinstance(optimizer, Lazy):
        return {}
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return {number: p for number, p in enumerate(parameters)
            if id(p) in held and p.numel() >= LEAST and p.device.type == "cpu" and p.is_contiguous()}


def keep_entries(worker: Worker, lazily: Mapping[int, nn.Parameter]) -> None:
    """A plan has come into force: results of buckets with nothing large but these parameters are wanted as entries."""
    plan, tensors = worker.plan, worker.job.tensors
    if not lazily or plan.steps_locally or plan.ranks_per_node > 1:
        return
    for bucket in worker.buckets:
        if getattr(reader_of(bucket.codec), "ratio", 0.0) > 1 / MOST:
            continue  # results would be spread after all, at more cost than they are decoded at
        numbers = {s.tensor for s in bucket.slices}
        if numbers & lazily.keys() and all(n in lazily or tensors[n].numel < LEAST for n in numbers):
            bucket.keep_entries()


def sparse_averages(worker: Worker, lazily: Mapping[int, nn.Parameter]) -> dict[int, torch.Tensor]:
    """After `finish`: by number, the averages that are few entries and came as that."""
    found = {}
    used = worker.used() if lazily else []
    for number, p in lazily.items():
        parts = worker.entries(number) if used[number] else None
        if parts is None:
            continue
        if (gradient := joined(parts, p.shape)) is not None:
            found[number] = gradient
    return found


def joined(parts: Sequence[tuple[torch.Tensor, torch.Tensor]], shape: torch.Size) -> torch.Tensor | None:
    """The gradient whose entries are those of all parts, in order; None where they are many or not all finite."""
    room = shape.numel() // MOST
    if sum(len(idx) for idx, _ in parts) > room:
        return None
    idx, values = (torch.cat(part) for part in zip(*parts, strict=True))
    there = values.abs() >= SMALLEST
    if not bool(there.all()):
        idx, values = idx[there], values[there]
    return sparse_gradient(idx, values, shape) if bool(values.isfinite().all()) else None


class SparseRows:
    """Parameters whose gradients are sparse COO, as nn.Embedding(sparse=True) makes them.

    They are averaged as dense ones. Then `.grad` is sparse again, of the rows in which the average is not zero: the same rows
    on every rank. A rank without a gradient knows such a parameter by its module.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter], lazily: Mapping[int, nn.Parameter]) -> None:
        """`lazily`: those of a lazy optimizer, for which averages become sparse by elements."""
        weights = sparse_weights(model)
        self._parameters, self._lazily = parameters, lazily
        self._numbers = {number for number, p in enumerate(parameters) if id(p) in weights}
        self._dense: dict[int, torch.Tensor] = {}
        """What was sent of this step."""

    def dense(self, number: int, gradient: torch.Tensor) -> torch.Tensor:
        """That sparse gradient as a dense one."""
        self._numbers.add(number)
        self._dense[number] = made = gradient.to_dense()
        return made

    def forget(self) -> None:
        """The backward pass has raised: its step is none."""
        self._dense.clear()

    def make_dense(self) -> None:
        """Before an exchange ends: averages are written into `.grad`."""
        for number in self._numbers:
            p = self._parameters[number]
            if p.grad is not None and p.grad.layout is torch.sparse_coo:
                p.grad = self._dense.get(number, p.grad).to_dense()
        self._dense.clear()

    def make_sparse(self) -> None:
        """After it."""
        for number in self._numbers - self._lazily.keys():
            p = self._parameters[number]
            if p.grad is not None and p.grad.layout is torch.strided and p.dim():
                rows = (p.grad != 0).flatten(1).any(1) if p.dim() > 1 else p.grad != 0
                at = rows.nonzero().t()
                p.grad = torch.sparse_coo_tensor(at, p.grad[at[0]], p.shape, is_coalesced=True, check_invariants=False)


def sparse_weights(model: nn.Module) -> set[int]:
    """The ids of weights whose modules make sparse gradients."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    return {id(table.weight) for table in tables if table.sparse}


def make_sparse(parameters: Iterable[nn.Parameter]) -> None:
    """`.grad` becomes sparse COO where it has few entries and is finite."""
    for p in parameters:
        if p.grad is None or p.grad.is_sparse or not p.grad.is_contiguous():
            continue
        room = p.numel() // MOST
        idx, values = torch.empty(room, dtype=torch.int32), torch.empty(room)
        count, beyond, finite = kernels.select(p.grad.view(-1), None, SMALLEST, 0, idx, values)
        if finite and not beyond:
            p.grad = sparse_gradient(idx[:count], values[:count], p.shape)


def make_dense(parameters: Iterable[nn.Parameter]) -> None:
    """Ahead of an exchange: what is left of the last one's, to which this backward pass has added nothing."""
    for p in parameters:
        if p.grad is not None and p.grad.is_sparse:
            p.grad = p.grad.to_dense()
