"""Random draws in plain numpy, and the entries drawn. Knows no headers and no codecs."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from commlayer.compressors.reference.memory import MAX_N, Memory, floats, increasing, octets_of, positions, write
from commlayer.errors import CorruptFrame

Words = npt.NDArray[np.uint64]
_LOW, _HIGH = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox(key: int, blocks: Words, step: int) -> Words:
    """Philox4x32-10: the four words of each block, one row a block."""
    k0, k1 = key & MAX_N, key >> 32
    c: list[Any] = [blocks & _LOW, blocks >> _HIGH, *(np.full_like(blocks, half) for half in (step & MAX_N, step >> 32))]
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [(b >> _HIGH) ^ c[1] ^ np.uint64(k0), b & _LOW, (a >> _HIGH) ^ c[3] ^ np.uint64(k1), a & _LOW]
        k0, k1 = (k0 + 0x9E3779B9) & MAX_N, (k1 + 0xBB67AE85) & MAX_N
    return np.stack(c, 1)


def draw_word(key: int, step: int) -> int:
    return int(philox(key, np.zeros(1, np.uint64), step)[0, 0])


def draw_strata(idx: Memory, n: int, seed: int) -> int:
    k = octets_of(idx).numel() // 4
    if not k <= n <= MAX_N:
        raise ValueError(f"draw_strata: got {k} strata of {n}, need k <= n < 2^32")
    if k == 0:
        return 0
    words = philox(seed, np.arange((k + 3) // 4, dtype=np.uint64), 0).reshape(-1)[:k]
    begins = np.arange(k + 1, dtype=np.uint64) * np.uint64(n) // np.uint64(k)
    where = begins[:-1] + (words * np.diff(begins) >> _HIGH)
    write(idx, torch.from_numpy(where.astype(np.int64)).to(torch.int32))
    return k


def take(src: Memory, idx: Memory, val: Memory) -> int:
    v, where = floats(src), positions(idx)
    if not increasing(where, v.numel()):
        raise CorruptFrame(f"take: positions do not increase below {v.numel()}")
    write(val, v[where])
    return len(where)
