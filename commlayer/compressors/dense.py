"""Codecs that send every element: float32 unchanged, or cast to 16 bits. They keep no state."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from commlayer.compressors import kernels, payload
from commlayer.compressors.codec import NAN, Codec, OneRound, Round, State
from commlayer.compressors.payload import Buffer, Out
from commlayer.records import Spec

if TYPE_CHECKING:
    import torch
else:
    from commlayer.compressors import tensors as torch

HEADER = payload.HEADER_NBYTES


class Identity(OneRound, frozen=True):
    """Sends float32 unchanged. The input may be stored in its own payload, after the 16-byte header. An all-reduce could add
    these payloads."""

    name: ClassVar[str] = "identity"
    rounds: ClassVar[tuple[Round, ...]] = (Round.SUM,)
    in_place: ClassVar[bool] = True

    def bound(self, spec: Spec) -> int:
        return HEADER + 4 * spec.numel

    def start(self, x: torch.Tensor, state: State, out: Out) -> int:
        n = x.numel()
        if not kernels.all_finite(x):
            return payload.write_flagged(out, self.id, n)
        payload.write(out, self.id, n, n)
        kernels.store_f32(out[HEADER : HEADER + 4 * n], x)
        return HEADER + 4 * n

    def check(self, head: payload.Head, numel: int) -> tuple[Any, ...]:
        check_dense(head, numel, 4 * numel)
        return (head.body,)

    def apply(self, parts: tuple[Any, ...], out: torch.Tensor, *, assign: bool) -> None:
        (kernels.copy_f32 if assign else kernels.add_f32)(out, parts[0])

    def decode(self, result: Buffer, state: State, out: torch.Tensor) -> bool:
        return finite_or_nan(super().decode(result, state, out), out)


class _Cast(NamedTuple):
    """Kernels of one 16-bit format: cast to it, cast from it, and add to float32."""

    encode: Callable[[Buffer, torch.Tensor], bool]
    decode: Callable[[torch.Tensor, Buffer], None]
    add: Callable[[torch.Tensor, Buffer], None]


CASTS = {
    "fp16": _Cast(kernels.f32_to_f16, kernels.f16_to_f32, kernels.add_f16),
    "bf16": _Cast(kernels.f32_to_bf16, kernels.bf16_to_f32, kernels.add_bf16),
}


class _Half(OneRound, frozen=True):
    """Base class of the 16-bit casts, which round each element to the nearest number of the format.

    The rounds are GATHER, not SUM: payloads are added in float32, and only the result is rounded. An all-reduce of the payloads
    would round after each addition and could overflow. The codec counts as unbiased, since its error is a rounding error
    relative to the element. If the cast makes an element infinite, the payload is flagged as not finite.
    """

    def bound(self, spec: Spec) -> int:
        return HEADER + 2 * spec.numel

    def start(self, x: torch.Tensor, state: State, out: Out) -> int:
        n = x.numel()
        if not CASTS[self.name].encode(out[HEADER : HEADER + 2 * n], x):
            return payload.write_flagged(out, self.id, n)
        payload.write(out, self.id, n, n)
        return HEADER + 2 * n

    def check(self, head: payload.Head, numel: int) -> tuple[Any, ...]:
        check_dense(head, numel, 2 * numel)
        return (head.body,)

    def apply(self, parts: tuple[Any, ...], out: torch.Tensor, *, assign: bool) -> None:
        cast = CASTS[self.name]
        (cast.decode if assign else cast.add)(out, parts[0])

    def decode(self, result: Buffer, state: State, out: torch.Tensor) -> bool:
        return finite_or_nan(super().decode(result, state, out), out)


class Fp16(_Half, frozen=True):
    name: ClassVar[str] = "fp16"
    most: ClassVar[float] = kernels.MOST["fp16"]


class Bf16(_Half, frozen=True):
    name: ClassVar[str] = "bf16"
    most: ClassVar[float] = kernels.MOST["bf16"]


def finite_or_nan(decoded: bool, out: torch.Tensor) -> bool:
    """Replaces a decoded tensor by NaN and returns False if it contains non-finite values although the payload is not flagged.
    Otherwise returns `decoded`.

    A server's sum needs no such test: the values stay in the sum, and emit flags the sum.
    """
    if decoded and not kernels.all_finite(out):
        out.fill_(NAN)
        return False
    return decoded


def check_dense(head: payload.Head, numel: int, nbytes: int) -> None:
    """Checks the header fields that all dense payloads share. `nbytes`: size of the body."""
    payload.expect("aux", head.aux, 0)
    payload.expect("seed", head.seed, 0)
    payload.expect("count", head.entries, numel)
    payload.expect("bytes of body", head.body.nbytes, nbytes)


def of_means(codec: Codec) -> bool:
    """Returns whether servers average model buffers that are sent with this codec. With other codecs, buffers are sent as parts
    of a sum."""
    return isinstance(codec, Identity)


def identity() -> Identity:
    return Identity()


def fp16() -> Fp16:
    return Fp16()


def bf16() -> Bf16:
    return Bf16()
