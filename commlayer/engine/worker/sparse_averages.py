"""Makes gradients sparse if their average has few nonzero elements, for optimizers that update only those elements.

Averages that arrive as sparse entries become the gradient, without dense memory. All other averages are scanned once, whatever
their codec and sync mode, with the same result. The entries are the same on all ranks, bit for bit. All ranks therefore make
the same choice, as replicas of a lazy optimizer must.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from commlayer.compressors import kernels
from commlayer.compressors.plan_codecs import reader_of
from commlayer.engine.buckets.bucket import EncodedBucket
from commlayer.engine.worker.worker import Worker
from commlayer.optim.lazy import LazyOptimizer
from commlayer.optim.sparse_gradients import sparse_gradient

LEAST = 4096
"""Number of elements below which an optimizer's dense step is as fast as its sparse step."""
MOST = 8
"""Number of elements per nonzero element: below it, an optimizer's dense step is as fast as its sparse step, so the gradient
stays dense."""
SMALLEST = 2.0**-126
"""Smallest magnitude that counts as nonzero: smaller numbers are not normal float32 numbers."""


def stepped_lazily(optimizer: Any, parameters: Sequence[nn.Parameter]) -> dict[int, nn.Parameter]:
    """Returns the parameters for which sparse averages save time, by their number: large CPU parameters of a lazy optimizer."""
    if not isinstance(optimizer, LazyOptimizer):
        return {}
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return {number: p for number, p in enumerate(parameters)
            if id(p) in held and p.numel() >= LEAST and p.device.type == "cpu" and p.is_contiguous()}


def keep_entries(worker: Worker, lazily: Mapping[int, nn.Parameter]) -> None:
    """Makes buckets of a new plan keep their results as sparse entries, if all large tensors in them are in `lazily`."""
    plan, tensors = worker.plan, worker.job.tensors
    if not lazily or plan.steps_locally or not worker.alone:
        return
    for bucket in worker.buckets:
        if not isinstance(bucket, EncodedBucket):
            continue
        if getattr(reader_of(bucket.codec), "ratio", 0.0) > 1 / MOST:
            continue  # results would be made dense anyway, at a higher cost than decoding
        numbers = {s.tensor for s in bucket.slices}
        if numbers & lazily.keys() and all(n in lazily or tensors[n].numel < LEAST for n in numbers):
            bucket.keep_entries()


def sparse_averages(worker: Worker, lazily: Mapping[int, nn.Parameter]) -> dict[int, torch.Tensor]:
    """Returns the averages that arrived as few sparse entries, as sparse gradients by parameter number. Call it after
    Worker.finish."""
    gradients = {}
    used = worker.used() if lazily else []
    for number, p in lazily.items():
        parts = worker.entries(number) if used[number] else None
        if parts is None:
            continue
        if (gradient := joined(parts, p.shape)) is not None:
            gradients[number] = gradient
    return gradients


def joined(parts: Sequence[tuple[torch.Tensor, torch.Tensor]], shape: torch.Size) -> torch.Tensor | None:
    """Returns one gradient that joins the sparse entries of a tensor's parts, in order. Returns None if there are too many
    entries, or if some entries are not finite."""
    room = shape.numel() // MOST
    if sum(len(idx) for idx, _ in parts) > room:
        return None
    idx, values = (torch.cat(part) for part in zip(*parts, strict=True))
    nonzero = values.abs() >= SMALLEST
    if not bool(nonzero.all()):
        idx, values = idx[nonzero], values[nonzero]
    return sparse_gradient(idx, values, shape) if bool(values.isfinite().all()) else None


class SparseRows:
    """Handles parameters with sparse COO gradients, as nn.Embedding(sparse=True) creates them.

    These gradients are averaged as dense tensors. Afterwards `.grad` is sparse again, with the rows in which the average is not
    zero: the same rows on every rank. A rank without a gradient recognizes such a parameter by its module.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter], lazily: Mapping[int, nn.Parameter]) -> None:
        """`lazily`: parameters of a lazy optimizer, by number; `make_sparse` in this module handles the averages of these
        parameters, by elements instead of rows."""
        weights = sparse_weights(model)
        self._parameters, self._lazily = parameters, lazily
        self._numbers = {number for number, p in enumerate(parameters) if id(p) in weights}
        self._dense: dict[int, torch.Tensor] = {}
        """Maps a parameter's number to the dense gradient that was sent in this step."""

    def dense(self, number: int, gradient: torch.Tensor) -> torch.Tensor:
        self._numbers.add(number)
        self._dense[number] = dense = gradient.to_dense()
        return dense

    def forget(self) -> None:
        """Drops the dense gradients of a step whose backward pass has raised an exception."""
        self._dense.clear()

    def make_dense(self) -> None:
        """Makes `.grad` of these parameters dense before an exchange ends, because averages are written into `.grad`."""
        for number in self._numbers:
            p = self._parameters[number]
            if p.grad is not None and p.grad.layout is torch.sparse_coo:
                p.grad = self._dense.get(number, p.grad).to_dense()
        self._dense.clear()

    def make_sparse(self) -> None:
        for number in self._numbers - self._lazily.keys():
            p = self._parameters[number]
            if p.grad is not None and p.grad.layout is torch.strided and p.dim():
                rows = (p.grad != 0).flatten(1).any(1) if p.dim() > 1 else p.grad != 0
                at = rows.nonzero().t()
                p.grad = torch.sparse_coo_tensor(at, p.grad[at[0]], p.shape, is_coalesced=True, check_invariants=False)


def sparse_weights(model: nn.Module) -> set[int]:
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    return {id(table.weight) for table in tables if table.sparse}


def make_sparse(parameters: Iterable[nn.Parameter]) -> None:
    """Converts `.grad` to sparse COO for each parameter whose gradient is finite and has few nonzero elements."""
    for p in parameters:
        if p.grad is None or p.grad.is_sparse or not p.grad.is_contiguous():
            continue
        room = p.numel() // MOST
        idx, values = torch.empty(room, dtype=torch.int32), torch.empty(room)
        count, beyond, finite = kernels.host().select(p.grad.view(-1), None, SMALLEST, 0, idx, values)
        if finite and not beyond:
            p.grad = sparse_gradient(idx[:count], values[:count], p.shape)


def make_dense(parameters: Iterable[nn.Parameter]) -> None:
    """Makes `.grad` dense before an exchange, if the last exchange left it sparse and this backward pass did not change it."""
    for p in parameters:
        if p.grad is not None and p.grad.is_sparse:
            p.grad = p.grad.to_dense()
