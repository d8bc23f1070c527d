"""Sign and power of two, by random numbers, with an exponent per block. Knows its body only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from commlayer.codec_name import checked
from commlayer.compressors import kernels
from commlayer.compressors.blockwise import Dithered, check_padding
from commlayer.compressors.codec import Buffer, Out
from commlayer.errors import CorruptFrame

if TYPE_CHECKING:
    import torch

TOP_EXPONENT = 254


class Natural(Dithered, frozen=True):
    """Horvath, Ho, Horvath, Sahu, Canini, Richtarik: Natural Compression for Distributed Deep Learning (2019)."""

    name: ClassVar[str] = "natural"
    scale_nbytes: ClassVar[int] = 1

    bits: int

    def codes_nbytes(self, numel: int) -> int:
        return (numel * self.bits + 7) // 8

    def draw(
        self, codes: Out, scales: Out, x: torch.Tensor, residual: torch.Tensor | None, random: tuple[int, int]
    ) -> bool:
        return kernels.natural_encode(codes, scales, x, residual, self.block, self.bits, random=random)

    def check_body(self, codes: Buffer, scales: Buffer, numel: int) -> None:
        levels = (1 << (self.bits - 1)) - 1
        if kernels.largest(scales, np.uint8) > TOP_EXPONENT - levels:
            raise CorruptFrame("natural payload with an exponent whose uppermost level is not finite")
        check_padding(self.name, codes, numel, self.bits)

    def apply(self, parts: tuple[Any, ...], out: torch.Tensor, *, assign: bool) -> None:
        codes, scales = parts
        kernels.natural_decode(out, codes, scales, self.block, self.bits, assign=assign)


def natural(block: int = 512, bits: int = 4) -> Natural:
    """2^(bits-1) - 1 powers of two, the uppermost at the largest magnitude of `block` elements, and zero.

    Unbiased. The variance of an element is at most 1/8 of its square, but for elements below the lowest power; with bits=8
    there are 127 powers and hardly any such elements.
    """
    checked("natural", block=block, bits=bits)
    return Natural(block, bits)
