"""The small linear algebra of low-rank codecs, the same bits on every machine. Knows matrices as rows; nothing of payloads.

Members take these results as common knowledge, so no sum may depend on how a library orders it.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch
else:
    from commlayer.compressors import tensors as torch

Rows = npt.NDArray[np.float64]

NOISE = 1e-12
"""Share of a vector's squared length below which what is left of it is rounding error of float32."""


def orthonormal(p: torch.Tensor) -> torch.Tensor:
    """The rows of p, float32, made orthonormal in order (Gram-Schmidt, twice). A row that adds no direction becomes zeros."""
    rows = p.numpy().astype(np.float64)
    for j, row in enumerate(rows):
        before = _dot(row, row)
        for _ in range(2):
            for other in rows[:j]:
                row -= _dot(other, row) * other
        after = _dot(row, row)
        row[:] = row / np.sqrt(after) if after > NOISE * before else 0.0
    return torch.from_numpy(rows.astype(np.float32))


def signs(n: int, key: int, step: int, row: int) -> torch.Tensor:
    """n random numbers +-1, the same for all who share the key."""
    digest = hashlib.shake_256(f"{key} {step} {row}".encode()).digest((n + 7) // 8)
    bits = np.unpackbits(np.frombuffer(digest, np.uint8), count=n)
    return torch.from_numpy(bits.astype(np.float32) * 2 - 1)


def _dot(x: Rows, y: Rows) -> float:
    """Sums by halves: elementwise additions alone, whose order is this code's."""
    v = x * y
    while v.size > 1:
        half = v.size // 2
        rest = v[2 * half :]
        v = v[:half] + v[half : 2 * half]
        v[: rest.size] += rest
    return float(v[0]) if v.size else 0.0
