"""-1, 0 or 1 times a scale per block, by random numbers, five elements a byte. Knows its body only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from commlayer.codec_name import checked
from commlayer.compressors import kernels
from commlayer.compressors.blockwise import MOST16, Dithered, check_scales16
from commlayer.compressors.codec import Buffer, Out
from commlayer.errors import CorruptFrame

if TYPE_CHECKING:
    import torch

GROUP, DIGITS = 160, 5


class Terngrad(Dithered, frozen=True):
    """Wen, Xu, Yan, Wu, Wang, Chen, Li: TernGrad: Ternary Gradients to Reduce Communication (2017)."""

    name: ClassVar[str] = "terngrad"

    clip: float | None

    @property
    def biased(self) -> bool:  # type: ignore[override]
        """What is cut is missing in the mean, too."""
        return self.clip is not None

    def codes_nbytes(self, numel: int) -> int:
        return -(-numel // DIGITS)

    def draw(
        self, codes: Out, scales: Out, x: torch.Tensor, residual: torch.Tensor | None, random: tuple[int, int]
    ) -> bool:
        return kernels.ternary_encode(codes, scales, x, residual, self.block, self.clip or 0.0, random=random)

    def check_body(self, codes: Buffer, scales: Buffer, numel: int) -> None:
        check_scales16(self.name, scales, MOST16)
        if kernels.largest(codes, np.uint8) >= 3**DIGITS:
            raise CorruptFrame("terngrad payload with a byte that is no five ternaries")
        count = numel % GROUP
        width = -(-count // DIGITS)
        last = kernels.octets(codes[self.codes_nbytes(numel) - width :])
        for byte in range(width):
            digits = -(-(count - byte) // width)
            if last[byte] >= 3**digits:
                raise CorruptFrame("terngrad payload with ternaries past its last element")

    def apply(self, parts: tuple[Any, ...], out: torch.Tensor, *, assign: bool) -> None:
        codes, scales = parts
        kernels.ternary_decode(out, codes, scales, self.block, assign=assign)


def terngrad(block: int = 640, clip: float | None = None) -> Terngrad:
    """1.6 + 16 / block bits per element. What exceeds `clip` root mean squares of its block is cut there; None cuts nothing.

    Unbiased without `clip`: its variance is then more than what it codes, and error feedback around it would not settle. With
    it, what is cut is kept as of any biased codec: a residual of 1.4 gradients' norms for clip=2, of 8 for the paper's 2.5.
    """
    checked("terngrad", block=block, clip=clip)
    return Terngrad(block, None if clip is None else float(clip))
