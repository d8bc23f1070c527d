"""Blockwise int4: two elements per byte, one bfloat16 scale per block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from commlayer.codec_name import checked
from commlayer.compressors import kernels
from commlayer.compressors.blockwise import MOST16, Blockwise, check_padding, check_scales16
from commlayer.compressors.codec import State
from commlayer.compressors.payload import Buffer, Out

if TYPE_CHECKING:
    import torch

INT4_BITS = 4
INT4_MOST_SCALE = MOST16 - ((INT4_BITS - 1) << 7)
"""The largest scale whose 2^(INT4_BITS-1)-fold is finite."""


class Int4(Blockwise, frozen=True):
    """Rounds to the nearest of 15 levels of the block's largest magnitude. This is biased: use error feedback.

    Dettmers, Lewis, Shleifer, Zettlemoyer: 8-bit Optimizers via Block-wise Quantization (2022), with fewer bits.
    """

    name: ClassVar[str] = "int4"
    biased: ClassVar[bool] = True

    def codes_nbytes(self, numel: int) -> int:
        return (numel * INT4_BITS + 7) // 8

    def encode(
        self, codes: Out, scales: Out, x: torch.Tensor, residual: torch.Tensor | None, state: State
    ) -> bool:
        return kernels.linear_encode(codes, scales, x, residual, self.block, INT4_BITS, euclidean=False, random=None)

    def check_body(self, codes: Buffer, scales: Buffer, numel: int) -> None:
        check_scales16(self.name, scales, INT4_MOST_SCALE)
        check_padding(self.name, codes, numel, INT4_BITS)

    def apply(self, parts: tuple[Any, ...], out: torch.Tensor, *, assign: bool) -> None:
        codes, scales = parts
        kernels.linear_decode(out, codes, scales, self.block, INT4_BITS, assign=assign)


def int4(block: int = 64) -> Int4:
    """One scale per `block` elements: 4 + 16 / block bits per element."""
    checked("int4", block=block)
    return Int4(block)
