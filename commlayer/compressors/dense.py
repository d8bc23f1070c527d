"""Codecs that send every element: float32 unchanged, or cast to 16 bits. These codecs keep no state."""

from __future__ import annotations

from typing import Any, ClassVar

from commlayer.compressors import kernels, payload
from commlayer.compressors.codec import NAN, Codec, OneRound, Reduction, State
from commlayer.compressors.kernels import Array
from commlayer.compressors.payload import Buffer, Out
from commlayer.records import Spec

HEADER = payload.HEADER_NBYTES


class _Dense(OneRound, frozen=True):
    """Base class of the codecs that send every element in one format. `kernel`: the format's name in kernels."""

    kernel: ClassVar[str]
    element_nbytes: ClassVar[int] = 2

    def bound(self, spec: Spec) -> int:
        return HEADER + self.element_nbytes * spec.numel

    def start(self, x: Array, state: State, out: Out) -> int:
        n = len(x)
        if not self.store(out[HEADER : self.element_nbytes * n + HEADER], x):
            return payload.write_flagged(out, self.id, n)
        payload.write(out, self.id, n, n)
        return HEADER + self.element_nbytes * n

    def store(self, body: Out, x: Array) -> bool:
        """Writes the elements. Returns False if an element is not finite in this format."""
        return bool(getattr(kernels.of(body), f"f32_to_{self.kernel}")(body, x))

    def check(self, head: payload.Head, numel: int) -> tuple[Any, ...]:
        check_dense(head, numel, self.element_nbytes * numel)
        return (head.body,)

    def apply(self, parts: tuple[Any, ...], out: Array, *, assign: bool) -> None:
        getattr(kernels.of(parts[0]), f"{self.kernel}_to_f32" if assign else f"add_{self.kernel}")(out, parts[0])

    def decode(self, result: Buffer, state: State, out: Array) -> bool:
        return super().decode(result, state, out) and finite_or_nan(out)


class Identity(_Dense, frozen=True):
    """Sends float32 unchanged. The input may be stored in its own payload, after the 16-byte header. An all-reduce could add
    these payloads."""

    name: ClassVar[str] = "identity"
    rounds: ClassVar[tuple[Reduction, ...]] = (Reduction.SUM,)
    in_place: ClassVar[bool] = True
    kernel: ClassVar[str] = "f32"
    element_nbytes: ClassVar[int] = 4

    def store(self, body: Out, x: Array) -> bool:
        finite = bool(kernels.of(x).all_finite(x))
        if finite:
            kernels.store_f32(body, x)
        return finite

    def decode(self, result: Buffer, state: State, out: Array) -> bool:
        parts = self.unpack(result, len(out))
        finite = parts is not None and kernels.of(parts[0]).scale_f32(out, *parts, 1.0)
        if not finite:
            out[:] = NAN
        return finite

    def apply(self, parts: tuple[Any, ...], out: Array, *, assign: bool) -> None:
        if assign:
            kernels.copy_f32(out, parts[0])
        else:
            super().apply(parts, out, assign=False)


class _Half(_Dense, frozen=True):
    """Base class of the 16-bit casts, which round each element to the nearest number of the format.

    The rounds are GATHER, not SUM: payloads are added in float32, and only the result is rounded. An all-reduce of the payloads
    would round after each addition and could overflow. The codec counts as unbiased, since its error is a rounding error
    relative to the element. If the cast makes an element infinite, the payload is flagged as not finite.
    """


class Fp16(_Half, frozen=True):
    """Casts each element to half precision: magnitudes from 6e-8 to 65504."""

    name: ClassVar[str] = "fp16"
    kernel: ClassVar[str] = "f16"
    most: ClassVar[float] = kernels.MOST["fp16"]


class Bf16(_Half, frozen=True):
    """Casts each element to bfloat16, which has the range of float32."""

    name: ClassVar[str] = "bf16"
    kernel: ClassVar[str] = "bf16"
    most: ClassVar[float] = kernels.MOST["bf16"]


def finite_or_nan(out: Array) -> bool:
    """Returns True if a decoded array is finite; otherwise fills it with NaN. A payload can decode to infinite values although
    it is not flagged.

    A server's sum needs no such test: `emit` flags a sum that is not finite.
    """
    if kernels.of(out).all_finite(out):
        return True
    out[:] = NAN
    return False


def check_dense(head: payload.Head, numel: int, nbytes: int) -> None:
    """Checks the header fields that all dense payloads share. `nbytes`: size of the body."""
    found, expected = (head.aux, head.seed, head.entries, head.body.nbytes), (0, 0, numel, nbytes)
    if found != expected:
        for what, got, wanted in zip(("aux", "seed", "count", "bytes of body"), found, expected, strict=True):
            payload.expect(what, got, wanted)


def averages_buffers(codec: Codec) -> bool:
    """True: servers average model buffers that are sent with this codec. With other codecs, buffers are sent as parts of a
    sum."""
    return isinstance(codec, Identity)


identity, fp16, bf16 = Identity, Fp16, Bf16
