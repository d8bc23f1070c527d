"""Random draws in plain numpy: Philox4x32-10, random words from key, element and step, and the entries drawn.

Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3 (2011). native/src/philox.h specifies which element
uses which word.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from oracle.codec_kernels.memory import MAX_N, Memory, floats, increasing, octets_of, positions, write

from commlayer.errors import CorruptPayload, InvalidInput

Words = npt.NDArray[np.uint64]
ROUNDS = 10
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_ADDENDS = 0x9E3779B9, 0xBB67AE85
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox4x32(key: int, blocks: Words, step: int) -> Words:
    """The four words of each block, one row per block."""
    c0, c1 = blocks & _LOW, blocks >> _HALF
    c2, c3 = np.full_like(blocks, step & MAX_N), np.full_like(blocks, step >> 32)
    k0, k1 = key & MAX_N, key >> 32
    for _ in range(ROUNDS):
        p0, p1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1 = (p1 >> _HALF) ^ c1 ^ np.uint64(k0), p1 & _LOW
        c2, c3 = (p0 >> _HALF) ^ c3 ^ np.uint64(k1), p0 & _LOW
        k0, k1 = (k0 + _ADDENDS[0]) & MAX_N, (k1 + _ADDENDS[1]) & MAX_N
    return np.stack([c0, c1, c2, c3], axis=1)


def words(n: int, first: int, key: int, step: int) -> torch.Tensor:
    """The words of elements first .. first + n - 1, as int64."""
    flat = philox4x32(key, np.arange(first // 4, (first + n + 3) // 4, dtype=np.uint64), step).reshape(-1)
    return torch.from_numpy(flat[first % 4 : first % 4 + n].astype(np.int64))


def uniform(word: torch.Tensor) -> torch.Tensor:
    """Words as float32 in [0, 1)."""
    return (word >> 8).to(torch.float32) * 2.0**-24


def philox(out: Memory, first: int, key: int, step: int) -> None:
    n = octets_of(out).numel() // 4
    if n:
        write(out, words(n, first, key, step).to(torch.int32))


def draw_word(key: int, step: int) -> int:
    return int(words(1, 0, key, step))


def draw_strata(idx: Memory, n: int, seed: int) -> int:
    k = octets_of(idx).numel() // 4
    if not k <= n <= MAX_N:
        raise InvalidInput("E-CODEC-INPUT", f"draw_strata: got {k} strata of {n}, need k <= n < 2^32")
    if k == 0:
        return 0
    begins = np.arange(k + 1, dtype=np.uint64) * np.uint64(n) // np.uint64(k)
    where = begins[:-1] + (words(k, 0, seed, 0).numpy().astype(np.uint64) * np.diff(begins) >> _HALF)
    write(idx, torch.from_numpy(where.astype(np.int64)).to(torch.int32))
    return k


def take(src: Memory, idx: Memory, val: Memory) -> int:
    v, where = floats(src), positions(idx)
    if not increasing(where, v.numel()):
        raise CorruptPayload(f"take: positions do not increase below {v.numel()}")
    write(val, v[where])
    return len(where)
