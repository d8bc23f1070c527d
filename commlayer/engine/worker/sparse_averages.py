"""Makes gradients sparse if their average has few nonzero elements, for optimizers that update only those elements.

Averages that arrive as sparse entries become the gradient, without dense memory. All other averages are scanned once, whatever
their codec and sync mode, with the same result. The entries are the same on all ranks, bit for bit. All ranks therefore make
the same choice, as replicas of a lazy optimizer must.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from commlayer.compressors import kernels
from commlayer.compressors.plan_codecs import sparse_result_codec
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


def join_parts(parts: Sequence[tuple[torch.Tensor, torch.Tensor]], shape: torch.Size) -> torch.Tensor | None:
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


class SparseGradients:
    """Handles parameters whose `.grad` is sparse COO: those with sparse gradients, as nn.Embedding(sparse=True) creates them,
    and those of a lazy optimizer.

    Their gradients are averaged as dense tensors. Afterwards `.grad` is sparse again: with the rows in which the average is not
    zero, the same rows on every rank; for a lazy optimizer with the elements that are not zero, if they are few. A rank without
    a gradient recognizes such a parameter by its module.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter], optimizer: Any) -> None:
        weights = sparse_weights(model)
        self._parameters, self._lazily = parameters, stepped_lazily(optimizer, parameters)
        self._numbers = {number for number, p in enumerate(parameters) if id(p) in weights or number in self._lazily}
        self._dense: dict[int, torch.Tensor] = {}
        """Maps a parameter's number to the dense gradient that was sent in this step."""

    def follow(self, worker: Worker) -> None:
        """Makes buckets of a new plan keep their results as sparse entries, if a lazy optimizer steps all large tensors in
        them."""
        plan, tensors = worker.plan, worker.job.tensors
        if not self._lazily or plan.steps_locally or not worker.alone:
            return
        for bucket in worker.buckets:
            # Entries of a codec with a higher ratio would be made dense anyway, which costs more than decoding.
            if isinstance(bucket, EncodedBucket) and getattr(sparse_result_codec(bucket.codec), "ratio", 0.0) <= 1 / MOST:
                numbers = {s.tensor for s in bucket.slices}
                if numbers & self._lazily.keys() and all(n in self._lazily or tensors[n].numel < LEAST for n in numbers):
                    bucket.keep_entries()

    def arrived(self, worker: Worker) -> dict[int, torch.Tensor]:
        """Returns the averages that arrived as few sparse entries, as sparse gradients by parameter number. Call it after
        Worker.finish."""
        used = worker.used() if self._lazily else []
        entries = {number: parts for number in self._lazily if used[number] and (parts := worker.entries(number)) is not None}
        gradients = {number: join_parts(parts, self._parameters[number].shape) for number, parts in entries.items()}
        return {number: gradient for number, gradient in gradients.items() if gradient is not None}

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
            if p.grad is not None and p.grad.is_sparse:
                p.grad = self._dense.get(number, p.grad).to_dense()
        self._dense.clear()

    def make_sparse(self) -> None:
        for number in self._numbers:
            p = self._parameters[number]
            if p.grad is not None and not p.grad.is_sparse:
                p.grad = with_few_elements(p.grad) if number in self._lazily else with_rows(p.grad)


def with_rows(grad: torch.Tensor) -> torch.Tensor:
    """Returns a gradient as sparse COO, with the rows that are not zero."""
    if not grad.dim():
        return grad
    rows = (grad != 0).flatten(1).any(1) if grad.dim() > 1 else grad != 0
    at = rows.nonzero().t()
    return torch.sparse_coo_tensor(at, grad[at[0]], grad.shape, is_coalesced=True, check_invariants=False)


def with_few_elements(grad: torch.Tensor) -> torch.Tensor:
    """Returns a gradient as sparse COO if it is finite and has few nonzero elements; otherwise unchanged."""
    if not grad.is_contiguous():
        return grad
    room = grad.numel() // MOST
    idx, values = torch.empty(room, dtype=torch.int32), torch.empty(room)
    count, beyond, finite = kernels.host().select(grad.view(-1), None, SMALLEST, 0, idx, values)
    return sparse_gradient(idx[:count], values[:count], grad.shape) if finite and not beyond else grad


def sparse_weights(model: nn.Module) -> set[int]:
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    return {id(table.weight) for table in tables if table.sparse}
