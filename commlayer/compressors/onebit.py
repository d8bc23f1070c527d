"""The sign of each element and the mean magnitude of each block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from commlayer.codec_name import checked
from commlayer.compressors import kernels
from commlayer.compressors.blockwise import MOST16, Blockwise, check_padding, check_scales16
from commlayer.compressors.codec import State
from commlayer.compressors.payload import Buffer, Out

if TYPE_CHECKING:
    import torch


class OneBit(Blockwise, frozen=True):
    """Biased: use error feedback.

    Karimireddy, Rebjock, Stich, Jaggi: Error Feedback Fixes SignSGD and other Gradient Compression Schemes (2019); blocks:
    Zheng, Huang, Kwok: Communication-Efficient Distributed Blockwise Momentum SGD with Error-Feedback (2019).
    """

    name: ClassVar[str] = "onebit"
    biased: ClassVar[bool] = True

    def codes_nbytes(self, numel: int) -> int:
        return (numel + 7) // 8

    def encode(
        self, codes: Out, scales: Out, x: torch.Tensor, residual: torch.Tensor | None, state: State
    ) -> bool:
        return kernels.onebit_encode(codes, scales, x, residual, self.block)

    def check_body(self, codes: Buffer, scales: Buffer, numel: int) -> None:
        check_scales16(self.name, scales, MOST16)
        check_padding(self.name, codes, numel, 1)

    def apply(self, parts: tuple[Any, ...], out: torch.Tensor, *, assign: bool) -> None:
        codes, scales = parts
        kernels.onebit_decode(out, codes, scales, self.block, assign=assign)


def onebit(block: int = 512) -> OneBit:
    """1 + 16 / block bits per element: the mean magnitude of `block` elements, with the sign of each."""
    checked("onebit", block=block)
    return OneBit(block)
