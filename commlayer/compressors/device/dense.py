"""The dense kernels on a device: sums, casts, int8. Names and results as on the host.

Payload bytes are uint8 tensors on the device of the other arguments, with floats at multiples of 4. A function that returns a
value waits for the device; the others only queue work.
"""

from __future__ import annotations

import torch

from commlayer.gpu.launch import MOST_BLOCKS, THREADS, each, start

SEGMENT = 1024
"""As in cuda/int8.cu."""


def yes(like: torch.Tensor) -> torch.Tensor:
    """A flag of 1 that a kernel may clear."""
    return torch.ones(1, dtype=torch.int64, device=like.device)


def add_f32(acc: torch.Tensor, x: torch.Tensor, w: float = 1.0) -> None:
    each("dense", "add_f32", acc.numel(), acc, x, acc.numel(), float(w))


def add_f16(acc: torch.Tensor, x: torch.Tensor, w: float = 1.0) -> None:
    each("dense", "add_f16", acc.numel(), acc, x, acc.numel(), float(w))


def add_bf16(acc: torch.Tensor, x: torch.Tensor, w: float = 1.0) -> None:
    each("dense", "add_bf16", acc.numel(), acc, x, acc.numel(), float(w))


def _narrow(kernel: str, dst: torch.Tensor, src: torch.Tensor) -> bool:
    finite = yes(src)
    each("dense", kernel, src.numel(), dst, src, src.numel(), finite)
    return bool(finite.item())


def f32_to_f16(dst: torch.Tensor, src: torch.Tensor) -> bool:
    return _narrow("f32_to_f16", dst, src)


def f32_to_bf16(dst: torch.Tensor, src: torch.Tensor) -> bool:
    return _narrow("f32_to_bf16", dst, src)


def f16_to_f32(dst: torch.Tensor, src: torch.Tensor) -> None:
    each("dense", "f16_to_f32", dst.numel(), dst, src, dst.numel())


def bf16_to_f32(dst: torch.Tensor, src: torch.Tensor) -> None:
    each("dense", "bf16_to_f32", dst.numel(), dst, src, dst.numel())


def all_finite(x: torch.Tensor, residual: torch.Tensor | None = None) -> bool:
    finite = yes(x)
    each("dense", "all_finite", x.numel(), x, residual, x.numel(), finite)
    return bool(finite.item())


def within(scales: torch.Tensor, most: float) -> bool:
    """Whether every float32 in these bytes is from 0 to `most`."""
    valid = yes(scales)
    each("dense", "within", scales.nbytes // 4, scales, scales.nbytes // 4, float(most), valid)
    return bool(valid.item())


def largest(src: torch.Tensor, width: int) -> int:
    """The largest of the unsigned numbers of `width` bytes (1 or 2), or 0 if there are none."""
    if src.numel() == 0:
        return 0
    return int((src if width == 1 else src.view(torch.int16).to(torch.int32) & 0xFFFF).max())


def finite_or_absorbed(finite: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None) -> bool:
    """The return value of an encode. If x is not finite, nothing was encoded and the residual takes the finite part of x."""
    if finite.item():
        return True
    if residual is not None:
        v = residual + x
        torch.where(torch.isfinite(v), v, residual, out=residual)
    return False


def int8_encode(q: torch.Tensor, scale: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None, block: int) -> bool:
    n = x.numel()
    if n == 0:
        return True
    blocks, finite = -(-n // block), yes(x)
    most = torch.zeros(blocks, dtype=torch.int32, device=x.device)
    warps = blocks * -(-block // SEGMENT)
    start("int8", "int8_most", min(-(-warps * 32 // THREADS), MOST_BLOCKS), most, x, residual, n, block, finite)
    each("int8", "int8_code", n, q, scale, most, x, residual, n, block, finite)
    return finite_or_absorbed(finite, x, residual)


def int8_decode(acc: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, block: int, assign: bool = False) -> None:
    each("int8", "int8_decode", acc.numel(), acc, q, scale, acc.numel(), block, int(assign))
