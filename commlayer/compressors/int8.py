"""Blockwise int8: one float32 scale per block, one byte per element. Knows its body; the residual is the caller's."""


from __future__ import annotations

from typing import Any, ClassVar

import torch

from commlayer.compressors import kernels, payload
from commlayer.compressors.codec import Out, State
from commlayer.compressors.dense import check_dense
from commlayer.compressors.oneround import OneRound
from commlayer.errors import CorruptFrame
from commlayer.records import Spec

HEADER = payload.HEADER_NBYTES


class Int8(OneRound, frozen=True):
    """Rounds to the nearest of 255 steps of the block's largest magnitude. Nearest rounding is biased: wants error feedback."""

    name: ClassVar[str] = "int8"
    biased: ClassVar[bool] = True

    block: int

    def bound(self, spec: Spec) -> int:
        return HEADER + self._scales_nbytes(spec.numel) + spec.numel

    def start(self, x: torch.Tensor, state: State, out: Out) -> int:
        return self.start_fed(x, None, state, out)

    def start_fed(self, x: torch.Tensor, residual: torch.Tensor | None, state: State, out: Out) -> int:
        """`start` of x + residual, writing back what the rounding keeps. Flagged: the residual took the finite part of x."""
        n = x.numel()
        middle = HEADER + self._scales_nbytes(n)
        quanta, scales = out[middle : middle + n], out[HEADER:middle]
        if not kernels.int8_encode(quanta, scales, x, residual, self.block):
            if residual is not None:
                kernels.absorb(residual, x)
            return payload.write_flagged(out, self.id, n)
        payload.write(out, self.id, n, n)
        return middle + n

    def check(self, head: payload.Head, numel: int) -> tuple[Any, ...]:
        middle = self._scales_nbytes(numel)
        check_dense(head, numel, middle + numel)
        scales = head.body[:middle]
        if not kernels.scales_valid(scales):
            raise CorruptFrame("int8 payload with a scale that is negative, not finite or too large")
        return head.body[middle:], scales

    def apply(self, parts: tuple[Any, ...], out: torch.Tensor, *, assign: bool) -> None:
        quanta, scales = parts
        kernels.int8_decode(out, quanta, scales, self.block, assign=assign)

    def _scales_nbytes(self, numel: int) -> int:
        return 4 * -(-numel // self.block)


def int8(block: int = 1024) -> Int8:
    """One scale per `block` elements: smaller blocks follow the values better and cost 32 / block bits per element."""
    if not isinstance(block, int) or isinstance(block, bool) or not 1 <= block <= 1 << 20:
        raise ValueError(f"int8: block is {block!r}, allowed is a whole number from 1 to {1 << 20}")
    return Int8(block)
