"""Linear dithering (QSGD): rounds each element at random to one of the two nearest levels of its block's norm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from commlayer.codec_name import LEVEL_BITS, checked
from commlayer.compressors import kernels
from commlayer.compressors.blockwise import MOST16, Dithered, check_padding, check_scales16
from commlayer.compressors.payload import Buffer, Out

if TYPE_CHECKING:
    import torch


class Qsgd(Dithered, frozen=True):
    """Alistarh, Grubic, Li, Tomioka, Vojnovic: QSGD: Communication-Efficient SGD via Gradient Quantization (2017)."""

    name: ClassVar[str] = "qsgd"

    levels: int
    norm: str

    @property
    def bits(self) -> int:
        return LEVEL_BITS[self.levels]

    def codes_nbytes(self, numel: int) -> int:
        return (numel * self.bits + 7) // 8

    def draw(
        self, codes: Out, scales: Out, x: torch.Tensor, residual: torch.Tensor | None, random: tuple[int, int]
    ) -> bool:
        euclidean = self.norm == "l2"
        return kernels.linear_encode(codes, scales, x, residual, self.block, self.bits, euclidean=euclidean, random=random)

    def check_body(self, codes: Buffer, scales: Buffer, numel: int) -> None:
        check_scales16(self.name, scales, MOST16 - ((self.bits - 1) << 7))
        check_padding(self.name, codes, numel, self.bits)

    def apply(self, parts: tuple[Any, ...], out: torch.Tensor, *, assign: bool) -> None:
        codes, scales = parts
        kernels.linear_decode(out, codes, scales, self.block, self.bits, assign=assign)


def qsgd(block: int = 512, levels: int = 7, norm: str = "max") -> Qsgd:
    """`levels` levels on either side of zero, up to the largest magnitude of `block` elements or their Euclidean norm.

    Unbiased, so it needs no error feedback. Where its variance exceeds its input, error feedback is wrong: the residual would
    grow from step to step. That is so for levels=1, and for norm="l2" with blocks much longer than the square of levels.
    """
    checked("qsgd", block=block, levels=levels, norm=norm)
    return Qsgd(block, levels, norm)
