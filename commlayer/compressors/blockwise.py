"""Blockwise quantizers: int8, int4, qsgd and onebit. A payload's body is the scales of all blocks, followed by the quantized
elements (codes)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from commlayer.codec_spec import LEVEL_BITS, check_arguments
from commlayer.compressors import kernels, payload
from commlayer.compressors.codec import OneRound, State, check_numel
from commlayer.compressors.dense import check_dense
from commlayer.compressors.payload import Buffer, Out
from commlayer.errors import CorruptPayload
from commlayer.records import Spec

if TYPE_CHECKING:
    import torch


HEADER = payload.HEADER_NBYTES

MOST16 = 0x7F7F
"""Bits of the largest finite bfloat16, as an integer. The bits of non-negative numbers have the same order as the numbers."""


class Blockwise(OneRound, frozen=True):
    """Base class of codecs that quantize blocks of elements. A subclass defines the size of its codes, its kernels, and the
    checks of its bytes."""

    scale_nbytes: ClassVar[int] = 2

    block: int

    def codes_nbytes(self, numel: int) -> int:
        raise NotImplementedError

    def encode(
        self, codes: Out, scales: Out, x: torch.Tensor, residual: torch.Tensor | None, state: State
    ) -> bool:
        """Quantizes x + residual into `codes` and `scales`; the residual becomes the rounding error. Returns False if x +
        residual is not finite; the residual then becomes its finite part."""
        raise NotImplementedError

    def check_body(self, codes: Buffer, scales: Buffer, numel: int) -> None:
        """Raises CorruptPayload if scales or codes violate the format. The caller has checked their sizes."""
        raise NotImplementedError

    def scales_nbytes(self, numel: int) -> int:
        return self.scale_nbytes * -(-numel // self.block)

    def bound(self, spec: Spec) -> int:
        return HEADER + self.scales_nbytes(spec.numel) + self.codes_nbytes(spec.numel)

    def start(self, x: torch.Tensor, state: State, out: Out) -> int:
        return self.start_fed(x, None, state, out)

    def start_fed(self, x: torch.Tensor, residual: torch.Tensor | None, state: State, out: Out) -> int:
        """Writes the payload of x + residual. The residual becomes the rounding error, or the finite part of x + residual if
        that is not finite."""
        n = x.numel()
        middle = HEADER + self.scales_nbytes(n)
        end = middle + self.codes_nbytes(n)
        if not self.encode(out[middle:end], out[HEADER:middle], x, residual, state):
            return payload.write_flagged(out, self.id, n)
        payload.write(out, self.id, n, n)
        return end

    def check(self, head: payload.Head, numel: int) -> tuple[Any, ...]:
        middle = self.scales_nbytes(numel)
        check_dense(head, numel, middle + self.codes_nbytes(numel))
        scales, codes = head.body[:middle], head.body[middle:]
        self.check_body(codes, scales, numel)
        return codes, scales


def check_scales16(name: str, scales: Buffer, most: int) -> None:
    if kernels.largest(scales, np.uint16) > most:
        raise CorruptPayload(f"{name} payload contains a scale that is negative, not finite or too large")


def check_padding(name: str, codes: Buffer, numel: int, bits: int) -> None:
    used = numel * bits % 8
    if used and int(codes[-1]) >> used:
        raise CorruptPayload(f"{name} payload has nonzero bits after its last element")


class Int8(Blockwise, frozen=True):
    """Rounds each element to the nearest of 255 levels, scaled by the largest magnitude of its block. The rounding is biased,
    so use error feedback."""

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
            raise CorruptPayload("int8 payload contains a scale that is negative, not finite or too large")

    def apply(self, parts: tuple[Any, ...], out: torch.Tensor, *, assign: bool) -> None:
        codes, scales = parts
        kernels.int8_decode(out, codes, scales, self.block, assign=assign)


def int8(block: int = 1024) -> Int8:
    """Creates the int8 codec, with one scale per `block` elements. Smaller blocks are more accurate and cost 32 / block bits
    per element."""
    check_arguments("int8", block=block)
    return Int8(block)


INT4_BITS = 4
INT4_MOST_SCALE = MOST16 - ((INT4_BITS - 1) << 7)
"""Largest scale for which 2**(INT4_BITS - 1) times the scale is finite, as bfloat16 bits."""


class Int4(Blockwise, frozen=True):
    """Rounds each element to the nearest of 15 levels, scaled by the largest magnitude of its block. The rounding is biased, so
    use error feedback.

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
    """Creates the int4 codec, with one scale per `block` elements: 4 + 16 / block bits per element."""
    check_arguments("int4", block=block)
    return Int4(block)


class Qsgd(Blockwise, frozen=True):
    """Rounds each element up or down at random, so the expected value of the result equals the input: unbiased.

    If the input is not finite, nothing is sent, no random numbers are used and the step counter stays. Alistarh, Grubic, Li,
    Tomioka, Vojnovic: QSGD: Communication-Efficient SGD via Gradient Quantization (2017).
    """

    name: ClassVar[str] = "qsgd"

    levels: int
    norm: str

    @property
    def bits(self) -> int:
        return LEVEL_BITS[self.levels]

    def codes_nbytes(self, numel: int) -> int:
        return (numel * self.bits + 7) // 8

    def init(self, spec: Spec) -> State:
        check_numel(spec)
        return {"own": 0, "step": 0}

    def encode(
        self, codes: Out, scales: Out, x: torch.Tensor, residual: torch.Tensor | None, state: State
    ) -> bool:
        finite = kernels.linear_encode(codes, scales, x, residual, self.block, self.bits, euclidean=self.norm == "l2",
                                       random=(state["own"], state["step"]))
        state["step"] += finite
        return finite

    def check_body(self, codes: Buffer, scales: Buffer, numel: int) -> None:
        check_scales16(self.name, scales, MOST16 - ((self.bits - 1) << 7))
        check_padding(self.name, codes, numel, self.bits)

    def apply(self, parts: tuple[Any, ...], out: torch.Tensor, *, assign: bool) -> None:
        codes, scales = parts
        kernels.linear_decode(out, codes, scales, self.block, self.bits, assign=assign)


def qsgd(block: int = 512, levels: int = 7, norm: str = "max") -> Qsgd:
    """Creates the QSGD codec with `levels` levels on each side of zero. The highest level is the largest magnitude of `block`
    elements (norm="max") or their Euclidean norm ("l2").

    The codec is unbiased and needs no error feedback. If its variance exceeds its input, error feedback must not be used,
    because the residual would grow from step to step. This is the case for levels=1, and for norm="l2" with blocks much longer
    than the square of `levels`.
    """
    check_arguments("qsgd", block=block, levels=levels, norm=norm)
    return Qsgd(block, levels, norm)


class OneBit(Blockwise, frozen=True):
    """Sends the sign of each element, and the mean magnitude of each block. The codec is biased, so use error feedback.

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
    """Creates the onebit codec: the mean magnitude of each `block` elements, and one sign per element. It costs 1 + 16 / block
    bits per element."""
    check_arguments("onebit", block=block)
    return OneBit(block)
