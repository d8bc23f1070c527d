"""The linear algebra of low-rank codecs, with the same bits on every machine.

All members compute these results on their own, so no sum may depend on a library's order of additions.
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
"""If less than this share of a row's squared length remains, the remainder is float32 rounding error."""


def orthonormal(p: torch.Tensor) -> torch.Tensor:
    """Makes the rows of p (float32) orthonormal in order, by Gram-Schmidt, twice. A dependent row becomes zeros."""
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
    """n random numbers +-1, the same for all members with that key."""
    digest = hashlib.shake_256(f"{key} {step} {row}".encode()).digest((n + 7) // 8)
    bits = np.unpackbits(np.frombuffer(digest, np.uint8), count=n)
    return torch.from_numpy(bits.astype(np.float32) * 2 - 1)


def _dot(x: Rows, y: Rows) -> float:
    """Sums by halves, with elementwise additions only: the order of additions is fixed here."""
    v = x * y
    while v.size > 1:
        half = v.size // 2
        rest = v[2 * half :]
        v = v[:half] + v[half : 2 * half]
        v[: rest.size] += rest
    return float(v[0]) if v.size else 0.0
