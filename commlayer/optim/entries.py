"""Converts a sparse gradient (torch's COO layout) to flat positions and values, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from commlayer.errors import CorruptFrame, InvalidInput
from commlayer.optim import kernels

MOST = 2**32 - 1
KNOWN = "_commlayer_positions"
"""Attribute of gradients made here: their flat positions and its version. Converting coordinates costs more than a step."""


class Entries(NamedTuple):
    """Entries of a tensor in row-major order: each element at most once, positions increasing."""

    idx: torch.Tensor
    """int32 that stores uint32."""
    values: torch.Tensor


def entries_of(parameter: torch.Tensor, what: str) -> Entries:
    """The entries of `parameter.grad`, which is COO. Raises a one-line error that begins with `what` if they do not fit."""
    grad = parameter.grad
    assert grad is not None
    known: torch.Tensor | None
    known, version = getattr(grad, KNOWN, (None, 0))
    if parameter.numel() > MOST:
        raise InvalidInput("E-OPTIM-PARAMETER",
                           f"{what}: {parameter.numel()} elements, with a sparse gradient at most {MOST}: split the parameter")
    if not parameter.is_contiguous():
        raise InvalidInput("E-OPTIM-PARAMETER",
                           f"{what}: its memory has strides {tuple(parameter.stride())}, and a sparse gradient counts elements "
                           "row by row: make the parameter contiguous()")
    if known is not None and grad._version == version and grad.shape == parameter.shape:
        return Entries(known, grad._values().contiguous())
    if not grad.is_coalesced():
        _check_range(grad, what)
        grad = grad.coalesce()
    at, values, sparse = grad._indices(), grad._values(), grad.sparse_dim()
    block = math.prod(parameter.shape[sparse:])
    idx = (torch.empty if sparse else torch.zeros)(at.shape[1], dtype=torch.int32, device=at.device)
    if sparse:
        try:
            kernels.kernels_of(at).flat_positions(idx, at.contiguous(), tuple(parameter.shape[:sparse]))
        except CorruptFrame:
            _check_range(grad, what)
            raise InvalidInput("E-OPTIM-GRADIENT",
                               f"{what}: the positions of its sparse gradient do not increase, though it says that it is "
                               "coalesced: build it without is_coalesced=True") from None
    if block != 1:  # whole rows, as from nn.Embedding(sparse=True)
        rows = (idx.to(torch.int64) & MOST) * block
        idx = (rows[:, None] + torch.arange(block, device=rows.device)).view(-1).to(torch.int32)
    return Entries(idx, values.contiguous().view(-1))


def _check_range(grad: torch.Tensor, what: str) -> None:
    at, shape = grad._indices(), grad.shape
    for d in range(at.shape[0]):
        low, high = (int(x) for x in at[d].aminmax()) if at.shape[1] else (0, -1)
        if low < 0 or high >= shape[d]:
            got = low if low < 0 else high
            raise InvalidInput("E-OPTIM-GRADIENT",
                               f"{what}: its sparse gradient has index {got} in dimension {d}, allowed: 0 to {shape[d] - 1}")


def sparse_gradient(idx: torch.Tensor, values: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A COO gradient of entries with increasing positions within the shape."""
    shape = tuple(shape)
    at = torch.empty((len(shape), idx.numel()), dtype=torch.int64, device=idx.device)
    if shape:
        kernels.kernels_of(idx).coordinates(at, idx, shape)
    gradient = torch.sparse_coo_tensor(at, values, shape, is_coalesced=True, check_invariants=False)
    setattr(gradient, KNOWN, (idx, gradient._version))
    return gradient
