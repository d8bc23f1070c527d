"""Views of buffers and numpy arrays as tensors, for the arguments of the reference kernels. Writable memory is not copied."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from commlayer.compressors.payload import Buffer
from commlayer.errors import InvalidInput

Memory = torch.Tensor | np.ndarray[Any, Any] | Buffer

MAX_N = (1 << 32) - 1
"""Positions are 32-bit."""


def octets_of(memory: Memory, at: int = 0, nbytes: int | None = None) -> torch.Tensor:
    """nbytes bytes from `at` on, as uint8 over the same memory."""
    if isinstance(memory, torch.Tensor):
        octets = memory.detach().reshape(-1).view(torch.uint8)
    else:
        octets = shared(np.frombuffer(memory, dtype=np.uint8))
    end = len(octets) if nbytes is None else at + nbytes
    if not 0 <= at <= end <= len(octets):
        raise InvalidInput("E-CODEC-INPUT", f"bytes [{at}, {end}) are outside of {len(octets)} bytes")
    return octets[at:end]


def shared(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """A tensor over the same memory. Read-only memory is copied: torch has no read-only tensors, and no kernel writes it."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def floats(memory: Memory) -> torch.Tensor:
    """The whole memory as float32."""
    return read(memory, torch.float32, octets_of(memory).numel() // 4)


def read(memory: Memory, dtype: torch.dtype, n: int, at: int = 0) -> torch.Tensor:
    """n elements from byte `at`: a view if aligned, else a copy."""
    if n == 0:
        return torch.empty(0, dtype=dtype)  # an empty buffer may have no strides to view
    octets = octets_of(memory, at, n * dtype.itemsize)
    if octets.data_ptr() % dtype.itemsize:
        octets = octets.clone()
    return octets.view(dtype)


def write(memory: Memory, value: torch.Tensor, at: int = 0) -> None:
    octets = value.contiguous().view(torch.uint8)
    octets_of(memory, at, octets.numel()).copy_(octets)


def positions(idx: Memory) -> torch.Tensor:
    """The whole memory, uint32 or int32, as int64."""
    return read(idx, torch.int32, octets_of(idx).numel() // 4).to(torch.int64) & MAX_N


def increasing(idx: torch.Tensor, n: int) -> bool:
    return bool((idx < n).all() and (idx[1:] > idx[:-1]).all())


def total(g: Memory, residual: Memory | None) -> torch.Tensor:
    return floats(g) if residual is None else floats(g) + floats(residual)
