"""A seeded permutation of 0 to length - 1, readable at any range and the same on every machine.

It uses its own integer arithmetic, because numpy guarantees no stable streams across versions and workers may have different
ones. Up to TABLE entries it is an argsort of keyed hashes. Above, it is a Feistel network with cycle walking, which needs no
memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

TABLE = 1 << 20
"""8 MB and about 0.1 s per epoch. A Feistel network over few bits would be far from random; above this size it has at
least 20."""
ROUNDS = 6
MASK = (1 << 64) - 1

Array = npt.NDArray[np.uint64]


def mix(x: Array) -> Array:
    """The finalizer of splitmix64: each bit of the result depends on all bits of x."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Permutation:
    """Position in the stream -> index of a sample."""

    def __init__(self, length: int, seed: int, epoch: int, *, longest_table: int = TABLE) -> None:
        """Up to `longest_table` positions the order is kept in memory, above it is computed. Must be the same on all
        members."""
        self.length = length
        key = mix(np.array([seed & MASK], dtype=np.uint64)) + np.uint64(epoch)
        ids = np.arange(1, ROUNDS + 1, dtype=np.uint64)
        self._keys = mix(mix(key) + ids * np.uint64(0x9E3779B97F4A7C15))
        self._half = np.uint64((max(length - 1, 1).bit_length() + 1) // 2)
        self._table: npt.NDArray[Any] | None = None
        if length <= longest_table:
            self._table = np.argsort(mix(np.arange(length, dtype=np.uint64) + self._keys[0]), kind="stable")

    def at(self, ranges: Sequence[tuple[int, int]]) -> list[int]:
        parts = [self._at(np.arange(start, stop, dtype=np.uint64)) for start, stop in ranges]
        return [int(index) for part in parts for index in part]

    def _at(self, positions: Array) -> npt.NDArray[Any]:
        if self._table is not None:
            return self._table[positions.astype(np.int64)]
        result = self._feistel(positions)
        # The network permutes a power of four, at most four times the length, so few results are outside.
        while (outside := result >= self.length).any():
            result[outside] = self._feistel(result[outside])
        return result

    def _feistel(self, x: Array) -> Array:
        low = (np.uint64(1) << self._half) - np.uint64(1)
        left, right = x >> self._half, x & low
        for key in self._keys:
            left, right = right, left ^ (mix(right + key) & low)
        return (left << self._half) | right
