"""Sparse gradients: their positions and values, for the native kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple, cast

import torch

from commlayer import native
from commlayer.errors import CorruptFrame, InvalidInput

MOST = 2**32 - 1
POSITIONS_ATTRIBUTE = "_commlayer_positions"
"""Attribute of gradients that sparse_gradient() creates: their flat positions, and the gradient's version. Without it,
coordinates would be converted to positions, which takes longer than a step."""


class SparseEntries(NamedTuple):
    """Entries of a tensor in row-major order: each element at most once, positions increasing."""

    idx: torch.Tensor
    """Flat positions, as uint32 stored in int32."""
    values: torch.Tensor


def gradient_entries(parameter: torch.Tensor, what: str) -> SparseEntries:
    """Returns the entries of `parameter.grad`, which is sparse COO. Raises a one-line error that begins with `what` if the
    entries are invalid."""
    grad = cast(torch.Tensor, parameter.grad)
    if parameter.device.type != "cpu":
        raise InvalidInput("E-OPTIM-PARAMETER", f"{what}: it is on {parameter.device}, but a sparse gradient requires a "
                                                "parameter on the CPU; use torch's optimizer on a GPU")
    known: torch.Tensor | None
    known, version = getattr(grad, POSITIONS_ATTRIBUTE, (None, 0))
    if parameter.numel() > MOST:
        raise InvalidInput("E-OPTIM-PARAMETER",
                           f"{what}: it has {parameter.numel()} elements, allowed with a sparse gradient: {MOST}; split the "
                           "parameter")
    if not parameter.is_contiguous():
        raise InvalidInput("E-OPTIM-PARAMETER",
                           f"{what}: its strides are {tuple(parameter.stride())}, but a sparse gradient requires a row-major "
                           "parameter: make it contiguous()")
    if known is not None and grad._version == version and grad.shape == parameter.shape:
        return SparseEntries(known, grad._values().contiguous())
    if not grad.is_coalesced():
        _check_range(grad, what)
        grad = grad.coalesce()
    at, values, sparse = grad._indices(), grad._values(), grad.sparse_dim()
    block = math.prod(parameter.shape[sparse:])
    idx = (torch.empty if sparse else torch.zeros)(at.shape[1], dtype=torch.int32)
    if sparse:
        try:
            core().flat_positions(idx, at.contiguous(), tuple(parameter.shape[:sparse]))
        except CorruptFrame:
            _check_range(grad, what)
            raise InvalidInput("E-OPTIM-GRADIENT",
                               f"{what}: the positions of its sparse gradient do not increase, although it is marked "
                               "as coalesced: build it without is_coalesced=True") from None
    if block != 1:  # complete rows, as from nn.Embedding(sparse=True)
        rows = (idx.to(torch.int64) & MOST) * block
        idx = (rows[:, None] + torch.arange(block)).view(-1).to(torch.int32)
    return SparseEntries(idx, values.contiguous().view(-1))


def _check_range(grad: torch.Tensor, what: str) -> None:
    at, shape = grad._indices(), grad.shape
    for d in range(at.shape[0]):
        low, high = (int(x) for x in at[d].aminmax()) if at.shape[1] else (0, -1)
        if low < 0 or high >= shape[d]:
            got = low if low < 0 else high
            raise InvalidInput("E-OPTIM-GRADIENT",
                               f"{what}: its sparse gradient has index {got} in dimension {d}, allowed: 0 to {shape[d] - 1}")


def sparse_gradient(idx: torch.Tensor, values: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Returns a sparse COO gradient with these entries. Positions must increase and be inside the shape."""
    shape = tuple(shape)
    at = torch.empty((len(shape), idx.numel()), dtype=torch.int64)
    if shape:
        core().coordinates(at, idx, shape)
    gradient = torch.sparse_coo_tensor(at, values, shape, is_coalesced=True, check_invariants=False)
    setattr(gradient, POSITIONS_ATTRIBUTE, (idx, gradient._version))
    return gradient


def core() -> ModuleType:
    """Returns the native kernels."""
    if native.core is None:
        raise InvalidInput("E-CODEC-BACKEND", "sparse gradients need the native core, which is not installed: install a C++ "
                                              "compiler and reinstall commlayer, or use torch's optimizers")
    return native.core
