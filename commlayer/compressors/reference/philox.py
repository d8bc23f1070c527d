"""Philox4x32-10 in plain numpy: random words as a function of key, element and step. Knows no codecs.

Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3 (2011). native/src/philox.h says which element takes
which word.
"""

from __future__ import annotations

import numpy as np
import torch

from commlayer.compressors.reference.memory import Memory, octets_of, write

ROUNDS = 10
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_ADDENDS = 0x9E3779B9, 0xBB67AE85
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


def words(n: int, first: int, key: int, step: int) -> torch.Tensor:
    """The words of elements first .. first + n - 1, as int64."""
    blocks = np.arange(first // 4, (first + n + 3) // 4, dtype=np.uint64)
    c0, c1 = blocks & _LOW, blocks >> _HALF
    c2, c3 = np.full_like(blocks, step & 0xFFFFFFFF), np.full_like(blocks, step >> 32)
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(ROUNDS):
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1 = (p1 >> _HALF) ^ c1 ^ np.uint64(k0), p1 & _LOW
        c2, c3 = (p0 >> _HALF) ^ c3 ^ np.uint64(k1), p0 & _LOW
        k0, k1 = (k0 + _ADDENDS[0]) & 0xFFFFFFFF, (k1 + _ADDENDS[1]) & 0xFFFFFFFF
    flat = np.stack([c0, c1, c2, c3], axis=1).reshape(-1)
    return torch.from_numpy(flat[first % 4 : first % 4 + n].astype(np.int64))


def uniform(word: torch.Tensor) -> torch.Tensor:
    """Words as float32 in [0, 1)."""
    return (word >> 8).to(torch.float32) * 2.0**-24


def philox(out: Memory, first: int, key: int, step: int) -> None:
    n = octets_of(out).numel() // 4
    if n:
        write(out, words(n, first, key, step).to(torch.int32))
