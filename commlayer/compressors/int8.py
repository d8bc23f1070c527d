"""Blockwise int8: one float32 scale per block, one byte per element."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from commlayer.codec_name import checked
from commlayer.compressors import kernels
from commlayer.compressors.blockwise import Blockwise
from commlayer.compressors.codec import State
from commlayer.compressors.payload import Buffer, Out
from commlayer.errors import CorruptPayload

if TYPE_CHECKING:
    import torch


class Int8(Blockwise, frozen=True):
    """Rounds to the nearest of 255 levels of the block's largest magnitude. This is biased: use error feedback."""

    name: ClassVar[str] = "int8"
    biased: ClassVar[bool] = True
    scale_nbytes: ClassVar[int] = 4

    def codes_nbytes(self, numel: int) -> int:
        return numel

    def encode(
        self, codes: Out, scales: Out, x: torch.Tensor, residual: torch.Tensor | None, state: State
    ) -> bool:
        return kernels.int8_encode(codes, scales, x, residual, self.block)

    def check_body(self, codes: Buffer, scales: Buffer, numel: int) -> None:
        if not kernels.scales_valid(scales):
            raise CorruptPayload("int8 payload with a scale that is negative, not finite or too large")

    def apply(self, parts: tuple[Any, ...], out: torch.Tensor, *, assign: bool) -> None:
        codes, scales = parts
        kernels.int8_decode(out, codes, scales, self.block, assign=assign)


def int8(block: int = 1024) -> Int8:
    """One scale per `block` elements: smaller blocks follow the values better and cost 32 / block bits per element."""
    checked("int8", block=block)
    return Int8(block)
