"""The kernels that codecs are made of, and the one table that chooses who runs them: native where it is built, else reference;
for tensors on a CUDA device the kernels in cuda/.

Tensors are float32, contiguous, one-dimensional; payload bytes are memoryviews of any alignment, or uint8 tensors where the
other tensors are on a device. All backends give the same bytes. native/include/commlayer.h states what each does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import torch

from commlayer import native
from commlayer.compressors import device, reference
from commlayer.compressors.codec import Buffer

MOST_SCALE = np.finfo(np.float32).max / np.float32(128)
"""Any int8 times this is finite."""

BACKENDS: dict[str, ModuleType | None] = {"reference": reference, "native": native.core}

_chosen: list[ModuleType] = [native.core or reference]


def choose(backend: str) -> None:
    """From now on `backend` ("reference", "native", or "auto" for the best there is) runs the kernels of this process."""
    module = native.core or reference if backend == "auto" else BACKENDS.get(backend)
    if module is None:
        raise ValueError(f"backend {backend!r}: available are {', '.join(name for name, m in BACKENDS.items() if m)}")
    _chosen[0] = module


@contextlib.contextmanager
def use(backend: str) -> Iterator[None]:
    """Within it, `backend` runs the kernels. For tests and measurements."""
    before = _chosen[0]
    choose(backend)
    try:
        yield
    finally:
        _chosen[0] = before


def on_device(x: torch.Tensor) -> bool:
    """Whether kernels of a device run on x."""
    return device.serves(x.device)


def _of(x: torch.Tensor, payload: Buffer | None = None) -> ModuleType:
    """Who runs the kernels on x; on x and a payload, if there is one."""
    there = device.serves(x.device) if payload is None else isinstance(payload, torch.Tensor)
    return device if there else _chosen[0]


def all_finite(x: torch.Tensor, residual: torch.Tensor | None = None) -> bool:
    """Whether all of x, or of x + residual, is finite."""
    return bool(_of(x).all_finite(x, residual))


def add_f32(acc: torch.Tensor, x: Buffer) -> None:
    _of(acc, x).add_f32(acc, x)


def add_f16(acc: torch.Tensor, x: Buffer) -> None:
    _of(acc, x).add_f16(acc, x)


def add_bf16(acc: torch.Tensor, x: Buffer) -> None:
    _of(acc, x).add_bf16(acc, x)


def f32_to_f16(dst: Buffer, src: torch.Tensor) -> bool:
    """Whether all results are finite."""
    return bool(_of(src, dst).f32_to_f16(dst, src))


def f32_to_bf16(dst: Buffer, src: torch.Tensor) -> bool:
    """Whether all results are finite."""
    return bool(_of(src, dst).f32_to_bf16(dst, src))


def f16_to_f32(dst: torch.Tensor, src: Buffer) -> None:
    _of(dst, src).f16_to_f32(dst, src)


def bf16_to_f32(dst: torch.Tensor, src: Buffer) -> None:
    _of(dst, src).bf16_to_f32(dst, src)


def int8_encode(quanta: Buffer, scales: Buffer, x: torch.Tensor, residual: torch.Tensor | None, block: int) -> bool:
    """Codes x + residual and writes back what the rounding keeps. False, residual unchanged, if it is not finite."""
    return bool(_of(x, quanta).int8_encode(quanta, scales, x, residual, block))


def int8_decode(acc: torch.Tensor, quanta: Buffer, scales: Buffer, block: int, *, assign: bool) -> None:
    _of(acc, quanta).int8_decode(acc, quanta, scales, block, assign)


def select(
    g: torch.Tensor, residual: torch.Tensor | None, threshold: float, start: int, idx: torch.Tensor, val: torch.Tensor
) -> tuple[int, int, bool]:
    """(entries selected, entries that reached the threshold but did not fit, whether all of g + residual is finite)."""
    count, overflow, finite = _of(g).select(g, residual, threshold, start, idx, val)
    return int(count), int(overflow), bool(finite)


def sample_abs(g: torch.Tensor, residual: torch.Tensor | None, offset: int, out: torch.Tensor) -> None:
    _of(g).sample_abs(g, residual, offset, out)


def scatter_add(acc: torch.Tensor, idx: torch.Tensor, val: torch.Tensor) -> None:
    """idx must have been made by `select` or checked by a decode."""
    _of(acc).scatter_add(acc, idx, val)


def scatter_add_int8(acc: torch.Tensor, idx: torch.Tensor, quanta: Buffer, scales: Buffer, block: int) -> None:
    """As scatter_add, with values scale * q."""
    _of(acc, quanta).scatter_add_int8(acc, idx, quanta, scales, block)


def ef_encode(out: Buffer, idx: torch.Tensor, n: int) -> int:
    return int(_of(idx, out).ef_encode(out, idx, n))


def ef_decode(idx: torch.Tensor, n: int, src: Buffer) -> None:
    """CorruptFrame for bytes that are not exactly idx.numel() positions below n."""
    _of(idx, src).ef_decode(idx, n, src)


def bitmap_encode(out: Buffer, idx: torch.Tensor, n: int) -> int:
    return int(_of(idx, out).bitmap_encode(out, idx, n))


def bitmap_decode(idx: torch.Tensor, n: int, src: Buffer) -> None:
    """As ef_decode."""
    _of(idx, src).bitmap_decode(idx, n, src)


def copy_f32(dst: torch.Tensor, src: Buffer) -> None:
    """dst = the floats in src, whatever its alignment."""
    if isinstance(src, torch.Tensor):
        dst.copy_(src.view(torch.float32))
    else:
        np.copyto(dst.numpy(), np.frombuffer(src, np.float32))


def store_f32(dst: Buffer, src: torch.Tensor) -> None:
    """The floats of src as bytes. Nothing is done where they lie there already."""
    if isinstance(dst, torch.Tensor):
        dst.view(torch.float32).copy_(src)
    else:
        floats = np.frombuffer(dst, np.float32)
        if floats.ctypes.data != src.data_ptr():
            np.copyto(floats, src.numpy())


def scales_valid(src: Buffer) -> bool:
    """Whether every float32 scale in src is from 0 to MOST_SCALE."""
    if isinstance(src, torch.Tensor):
        return device.within(src, float(MOST_SCALE))
    scales = np.frombuffer(src, np.float32)
    return scales.size == 0 or bool(scales.min() >= 0 and scales.max() <= MOST_SCALE)


def absorb(residual: torch.Tensor, x: torch.Tensor) -> None:
    """residual += x where the sum is finite; elsewhere residual stays. For input that is not finite as a whole: not fast."""
    v = residual + x
    torch.where(torch.isfinite(v), v, residual, out=residual)
