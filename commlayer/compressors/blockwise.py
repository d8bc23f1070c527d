"""Blockwise quantizers: int8, int4, qsgd and onebit. A payload's body is the scales of all blocks, followed by the quantized
elements (codes)."""

from __future__ import annotations

from typing import Any, ClassVar

from commlayer.codec_spec import LEVEL_BITS
from commlayer.compressors import kernels, payload
from commlayer.compressors.codec import FusedCodec, State, check_numel
from commlayer.compressors.dense import check_dense
from commlayer.compressors.kernels import Array
from commlayer.compressors.payload import Buffer, Out
from commlayer.errors import CorruptPayload
from commlayer.records import Spec

HEADER = payload.HEADER_NBYTES

MOST16 = 0x7F7F
"""Bit pattern of the largest finite bfloat16, as an integer. Bit patterns of non-negative numbers have the same order as the
numbers."""


class Blockwise(FusedCodec, frozen=True):
    """Base class of codecs that quantize blocks of elements. Scales are bfloat16 unless a subclass overrides `scale_nbytes`."""

    scale_nbytes: ClassVar[int] = 2

    block: int

    @property
    def bits(self) -> int:
        """Bits per element, without the scale."""
        raise NotImplementedError

    def encode(self, codes: Out, scales: Out, x: Array, residual: Array | None, state: State) -> bool:
        """Quantizes x + residual into `codes` and `scales`; the residual becomes the rounding error. Returns False if x +
        residual is not finite; the residual then becomes the finite part of x + residual."""
        raise NotImplementedError

    def scales_valid(self, scales: Buffer) -> bool:
        """Returns True if each scale is a non-negative number so small that every code times the scale is finite."""
        return kernels.largest(scales) <= MOST16 - ((self.bits - 1) << 7)

    def scales_nbytes(self, numel: int) -> int:
        return self.scale_nbytes * -(-numel // self.block)

    def codes_nbytes(self, numel: int) -> int:
        return (numel * self.bits + 7) // 8

    def bound(self, spec: Spec) -> int:
        return HEADER + self.scales_nbytes(spec.numel) + self.codes_nbytes(spec.numel)

    def start_fused(self, x: Array, residual: Array | None, state: State, out: Out) -> int:
        n = len(x)
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
        if not self.scales_valid(scales):
            raise CorruptPayload(f"{self.name} payload contains a scale that is negative, not finite or too large")
        used = numel * self.bits % 8
        if used and int(codes[-1]) >> used:
            raise CorruptPayload(f"{self.name} payload has nonzero bits after its last element")
        return codes, scales

    def apply(self, parts: tuple[Any, ...], out: Array, *, assign: bool) -> None:
        codes, scales = parts
        kernels.of(codes).linear_decode(out, codes, scales, self.block, self.bits, assign)


class Int8(Blockwise, frozen=True):
    """Rounds each element to the nearest of 255 levels, scaled by the largest magnitude of its block. The rounding is biased,
    so use error feedback. Smaller blocks are more accurate and cost 32 / block bits per element."""

    name: ClassVar[str] = "int8"
    biased: ClassVar[bool] = True
    scale_nbytes: ClassVar[int] = 4
    bits: ClassVar[int] = 8

    block: int = 1024

    def encode(self, codes: Out, scales: Out, x: Array, residual: Array | None, state: State) -> bool:
        return bool(kernels.of(codes).int8_encode(codes, scales, x, residual, self.block))

    def scales_valid(self, scales: Buffer) -> bool:
        return kernels.scales_valid(scales)

    def apply(self, parts: tuple[Any, ...], out: Array, *, assign: bool) -> None:
        codes, scales = parts
        kernels.of(codes).int8_decode(out, codes, scales, self.block, assign)


class Int4(Blockwise, frozen=True):
    """Rounds each element to the nearest of 15 levels, scaled by the largest magnitude of its block. The rounding is biased, so
    use error feedback. A payload has 4 + 16 / block bits per element.

    Dettmers, Lewis, Shleifer, Zettlemoyer: 8-bit Optimizers via Block-wise Quantization (2022), with fewer bits.
    """

    name: ClassVar[str] = "int4"
    biased: ClassVar[bool] = True
    bits: ClassVar[int] = 4

    block: int = 64

    def encode(self, codes: Out, scales: Out, x: Array, residual: Array | None, state: State) -> bool:
        return bool(kernels.of(codes).linear_encode(codes, scales, x, residual, self.block, self.bits, False, False))


class Qsgd(Blockwise, frozen=True):
    """Rounds each element up or down at random, so the expected value of the result equals the input: unbiased.

    There are `levels` levels on each side of zero. The highest one is the largest magnitude of `block` elements (norm="max") or
    their Euclidean norm ("l2"). The codec needs no error feedback. If its variance exceeds its input, error feedback must not
    be used, because the residual would grow from step to step. This is the case for levels=1, and for norm="l2" with blocks
    much longer than the square of `levels`.

    If the input is not finite, nothing is sent, no random numbers are used and the step counter stays. Alistarh, Grubic, Li,
    Tomioka, Vojnovic: QSGD: Communication-Efficient SGD via Gradient Quantization (2017).
    """

    name: ClassVar[str] = "qsgd"

    block: int = 512
    levels: int = 7
    norm: str = "max"

    @property
    def bits(self) -> int:
        return LEVEL_BITS[self.levels]

    def init(self, spec: Spec) -> State:
        check_numel(spec)
        return {"own": 0, "step": 0}

    def encode(self, codes: Out, scales: Out, x: Array, residual: Array | None, state: State) -> bool:
        finite = kernels.of(codes).linear_encode(codes, scales, x, residual, self.block, self.bits, self.norm == "l2", True,
                                                 state["own"], state["step"])
        state["step"] += finite
        return bool(finite)


class OneBit(Blockwise, frozen=True):
    """Sends the sign of each element, and the mean magnitude of each block: 1 + 16 / block bits per element. The codec is
    biased, so use error feedback.

    Karimireddy, Rebjock, Stich, Jaggi: Error Feedback Fixes SignSGD and other Gradient Compression Schemes (2019); blocks:
    Zheng, Huang, Kwok: Communication-Efficient Distributed Blockwise Momentum SGD with Error-Feedback (2019).
    """

    name: ClassVar[str] = "onebit"
    biased: ClassVar[bool] = True
    bits: ClassVar[int] = 1

    block: int = 512

    def encode(self, codes: Out, scales: Out, x: Array, residual: Array | None, state: State) -> bool:
        return bool(kernels.of(codes).onebit_encode(codes, scales, x, residual, self.block))

    def apply(self, parts: tuple[Any, ...], out: Array, *, assign: bool) -> None:
        codes, scales = parts
        kernels.of(codes).onebit_decode(out, codes, scales, self.block, assign)


int8, int4, qsgd, onebit = Int8, Int4, Qsgd, OneBit
