"""Low-rank products in plain torch."""

from __future__ import annotations

from oracle.codec_kernels.memory import Memory, floats


def outer(out: Memory, p: Memory, q: Memory, rank: int) -> None:
    left, right = floats(p).view(rank, -1, 1), floats(q).view(rank, 1, -1)
    total = left[0] * right[0]
    for k in range(1, rank):
        total = total + left[k] * right[k]
    floats(out).copy_(total.view(-1))
