"""Kernels of codecs, and the choice of their backend.

The backend is native if it is built, otherwise fallback.py; tensors on a CUDA device use the kernels in cuda/. Tensors are
float32, contiguous and one-dimensional. Payload bytes are memoryviews of any alignment, or uint8 tensors on the device of the
other tensors. All backends produce the same bytes. native/include/commlayer.h specifies each kernel.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from commlayer import native
from commlayer.compressors import fallback, tensors
from commlayer.compressors.payload import Buffer
from commlayer.errors import InvalidInput

if TYPE_CHECKING:
    import torch
else:
    from commlayer.compressors import tensors as torch

MOST_SCALE = np.finfo(np.float32).max / np.float32(128)
"""Largest scale for which every int8 number times the scale is finite."""

MOST = {
    "fp16": float(np.finfo(np.float16).max),
    "bf16": float(np.uint32(0x7F7F << 16).view(np.float32)),
    "fp32": float(np.finfo(np.float32).max),
}
"""Largest finite number of each format."""


@functools.cache
def _device() -> ModuleType:
    """Returns the kernels for CUDA. Loads torch."""
    return importlib.import_module("commlayer.compressors.device.kernels")


BACKENDS: Mapping[str, ModuleType] = {"fallback": fallback} | ({} if native.core is None else {"native": native.core})

_chosen: list[ModuleType] = [native.core or fallback]


def choose(backend: str) -> None:
    """Sets the backend of this process: "fallback", "native", or "auto" for the fastest available."""
    if backend not in ("auto", *BACKENDS):
        raise InvalidInput("E-CODEC-BACKEND", f"backend: got {backend!r}, available: {', '.join(BACKENDS)}")
    _chosen[0] = (native.core or fallback) if backend == "auto" else BACKENDS[backend]


def check_family(family: str) -> None:
    """Raises InvalidInput if the backend has no kernels for this family of codecs."""
    if _chosen[0] is fallback and family not in fallback.FAMILIES:
        raise fallback.refusal(f"codec {family}")


GRAIN = 1 << 18
"""Minimum number of elements per thread, since starting a thread takes about 20 us."""


def threads(count: int) -> None:
    """Lets up to `count` threads share a native call on a large bucket. Results do not depend on the number of threads."""
    if native.core is not None:
        native.core.threads(count, GRAIN)


@contextlib.contextmanager
def use(backend: ModuleType) -> Iterator[None]:
    """Context manager that sets the backend. For tests and measurements."""
    before, _chosen[0] = _chosen[0], backend
    try:
        yield
    finally:
        _chosen[0] = before


def _of(x: torch.Tensor, payload: Buffer | None = None) -> ModuleType:
    """Returns the backend for x, or for x and a payload."""
    if not tensors.real:
        return _chosen[0]
    on_device = _device().serves(x.device) if payload is None else isinstance(payload, torch.Tensor)
    return _device() if on_device else _chosen[0]


def all_finite(x: torch.Tensor, residual: torch.Tensor | None = None) -> bool:
    """Returns whether all elements of x, or of x + residual, are finite."""
    return bool(_of(x).all_finite(x, residual))


def add_f32(acc: torch.Tensor, x: Buffer) -> None:
    _of(acc, x).add_f32(acc, x)


def add_f16(acc: torch.Tensor, x: Buffer) -> None:
    _of(acc, x).add_f16(acc, x)


def add_bf16(acc: torch.Tensor, x: Buffer) -> None:
    _of(acc, x).add_bf16(acc, x)


def f32_to_f16(dst: Buffer, src: torch.Tensor) -> bool:
    """Casts to float16. Returns whether all results are finite."""
    return bool(_of(src, dst).f32_to_f16(dst, src))


def f32_to_bf16(dst: Buffer, src: torch.Tensor) -> bool:
    """Casts to bfloat16. Returns whether all results are finite."""
    return bool(_of(src, dst).f32_to_bf16(dst, src))


def f16_to_f32(dst: torch.Tensor, src: Buffer) -> None:
    _of(dst, src).f16_to_f32(dst, src)


def bf16_to_f32(dst: torch.Tensor, src: Buffer) -> None:
    _of(dst, src).bf16_to_f32(dst, src)


def int8_encode(quanta: Buffer, scales: Buffer, x: torch.Tensor, residual: torch.Tensor | None, block: int) -> bool:
    """Quantizes x + residual; the residual becomes the rounding error. Returns False if x + residual is not finite: the
    residual then becomes its finite part."""
    return bool(_of(x, quanta).int8_encode(quanta, scales, x, residual, block))


def int8_decode(acc: torch.Tensor, quanta: Buffer, scales: Buffer, block: int, *, assign: bool) -> None:
    _of(acc, quanta).int8_decode(acc, quanta, scales, block, assign)


def linear_encode(
    codes: Buffer,
    scales: Buffer,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    block: int,
    bits: int,
    *,
    euclidean: bool,
    random: tuple[int, int] | None,
) -> bool:
    """Quantizes like int8_encode, with `bits` per element. `euclidean`: scales are from Euclidean norms instead of maxima.
    `random`: key and step of the random numbers for stochastic rounding; None: rounds to the nearest level."""
    key, step = random or (0, 0)
    return bool(_of(x, codes).linear_encode(codes, scales, x, residual, block, bits, euclidean, random is not None, key, step))


def linear_decode(acc: torch.Tensor, codes: Buffer, scales: Buffer, block: int, bits: int, *, assign: bool) -> None:
    _of(acc, codes).linear_decode(acc, codes, scales, block, bits, assign)


def onebit_encode(codes: Buffer, scales: Buffer, x: torch.Tensor, residual: torch.Tensor | None, block: int) -> bool:
    """Quantizes x + residual to signs and mean magnitudes, like int8_encode."""
    return bool(_of(x, codes).onebit_encode(codes, scales, x, residual, block))


def onebit_decode(acc: torch.Tensor, codes: Buffer, scales: Buffer, block: int, *, assign: bool) -> None:
    _of(acc, codes).onebit_decode(acc, codes, scales, block, assign)


def select(
    g: torch.Tensor, residual: torch.Tensor | None, threshold: float, start: int, idx: torch.Tensor, val: torch.Tensor
) -> tuple[int, int, bool]:
    """Selects entries of g + residual with at least this magnitude into `idx` and `val`. Returns (entries selected, entries
    that did not fit, whether all of g + residual is finite)."""
    count, overflow, finite = _of(g).select(g, residual, threshold, start, idx, val)
    return int(count), int(overflow), bool(finite)


def sample_abs(g: torch.Tensor, residual: torch.Tensor | None, offset: int, out: torch.Tensor) -> None:
    _of(g).sample_abs(g, residual, offset, out)


def scatter_add(acc: torch.Tensor, idx: torch.Tensor, val: torch.Tensor) -> None:
    """Adds values at positions. `idx` must come from `select` or from a decode, which checks positions."""
    _of(acc).scatter_add(acc, idx, val)


def scatter_add_int8(acc: torch.Tensor, idx: torch.Tensor, quanta: Buffer, scales: Buffer, block: int) -> None:
    """Adds values scale * quanta at positions, like scatter_add."""
    _of(acc, quanta).scatter_add_int8(acc, idx, quanta, scales, block)


def ef_encode(out: Buffer, idx: torch.Tensor, n: int) -> int:
    return int(_of(idx, out).ef_encode(out, idx, n))


def ef_decode(idx: torch.Tensor, n: int, src: Buffer) -> None:
    """Decodes positions from Elias-Fano. Raises CorruptPayload for bytes that are not exactly idx.numel() positions below n."""
    _of(idx, src).ef_decode(idx, n, src)


def bitmap_encode(out: Buffer, idx: torch.Tensor, n: int) -> int:
    return int(_of(idx, out).bitmap_encode(out, idx, n))


def bitmap_decode(idx: torch.Tensor, n: int, src: Buffer) -> None:
    """Decodes positions from a bitmap. Raises CorruptPayload for bytes that are not exactly idx.numel() positions below n."""
    _of(idx, src).bitmap_decode(idx, n, src)


def blocks_nbytes(idx: torch.Tensor, n: int) -> int:
    return int(_of(idx).blocks_nbytes(idx, n))


def blocks_encode(out: Buffer, idx: torch.Tensor, n: int) -> int:
    return int(_of(idx, out).blocks_encode(out, idx, n))


def blocks_decode(idx: torch.Tensor, n: int, src: Buffer) -> None:
    """Decodes positions from blocks. Raises CorruptPayload for bytes that are not exactly idx.numel() positions below n."""
    _of(idx, src).blocks_decode(idx, n, src)


def kth_abs(g: torch.Tensor, residual: torch.Tensor | None, rank: int, scratch: torch.Tensor) -> float:
    return float(_of(g).kth_abs(g, residual, rank, scratch))


def count_above(x: torch.Tensor, cut: float) -> int:
    return int(_of(x).count_above(x, cut))


def trim(
    residual: torch.Tensor | None,
    n: int,
    idx: torch.Tensor,
    val: torch.Tensor,
    count: int,
    keep: int,
    start: int,
    scratch: torch.Tensor,
) -> int:
    """Keeps the `keep` largest of `count` entries, at the front of idx and val, and returns their number. The others are added
    to the residual."""
    return int(_of(val).trim(residual, n, idx, val, count, keep, start, scratch))


def select_runs(
    g: torch.Tensor,
    residual: torch.Tensor | None,
    run: int,
    threshold: float,
    start: int,
    ids: torch.Tensor,
    scores: torch.Tensor,
) -> tuple[int, int, bool]:
    """Selects like `select`, but runs of neighboring elements instead of single ones. Their elements stay in the residual until
    scatter_runs writes their rounding errors."""
    count, overflow, finite = _chosen[0].select_runs(g, residual, run, threshold, start, ids, scores)
    return int(count), int(overflow), bool(finite)


def score_runs(g: torch.Tensor, residual: torch.Tensor | None, run: int, offset: int, out: torch.Tensor) -> None:
    _chosen[0].score_runs(g, residual, run, offset, out)


def gather_runs(src: torch.Tensor, run: int, ids: torch.Tensor, val: torch.Tensor) -> int:
    return int(_chosen[0].gather_runs(src, run, ids, val))


def scatter_runs(acc: torch.Tensor, run: int, ids: torch.Tensor, val: torch.Tensor, *, assign: bool) -> None:
    _chosen[0].scatter_runs(acc, run, ids, val, assign)


def draw_word(key: int, step: int) -> int:
    return int(_chosen[0].draw_word(key, step))


def draw_strata(idx: torch.Tensor, n: int, seed: int) -> None:
    _of(idx).draw_strata(idx, n, seed)


def take(src: torch.Tensor, idx: torch.Tensor, val: torch.Tensor) -> None:
    """Copies elements: val = src[idx]."""
    _of(src).take(src, idx, val)


def nibbles_encode(q: Buffer, scales: Buffer, x: torch.Tensor, rest: torch.Tensor, block: int) -> bool:
    """Quantizes x with 4 bits per entry; `rest` becomes x - decoded x. Returns False if x is not finite."""
    return bool(_of(x, q).nibbles_encode(q, scales, x, rest, block))


def nibbles_decode(out: torch.Tensor, q: Buffer, scales: Buffer, block: int) -> None:
    _of(out, q).nibbles_decode(out, q, scales, block)


def outer(out: torch.Tensor, p: torch.Tensor, q: torch.Tensor, rank: int) -> None:
    """Computes out = p' q for p (rank x m) and q (rank x n), with the same bits on every machine."""
    _chosen[0].outer(out, p, q, rank)


def copy_f32(dst: torch.Tensor, src: Buffer) -> None:
    """Copies the float32 numbers in the bytes `src` to `dst`, whatever the alignment of `src`."""
    if isinstance(src, torch.Tensor):
        dst.copy_(src.view(torch.float32))
    else:
        np.copyto(dst.numpy(), np.frombuffer(src, np.float32))


def store_f32(dst: Buffer, src: torch.Tensor) -> None:
    """Writes the float32 numbers of `src` as bytes. Does nothing if `dst` is the memory of `src`."""
    if isinstance(dst, torch.Tensor):
        dst.view(torch.float32).copy_(src)
    else:
        floats = np.frombuffer(dst, np.float32)
        if floats.ctypes.data != src.data_ptr():
            np.copyto(floats, src.numpy())


def largest(src: Buffer, dtype: type[np.uint8] | type[np.uint16]) -> int:
    """Returns the largest of the unsigned numbers in `src`; 0 if there are none."""
    if isinstance(src, torch.Tensor):
        return int(_device().largest(src, np.dtype(dtype).itemsize))
    numbers = np.frombuffer(src, dtype)
    return int(numbers.max()) if numbers.size else 0


def octets(src: Buffer) -> npt.NDArray[np.uint8]:
    """Copies the bytes to host memory. Only for few bytes, since the call waits for the device."""
    return src.cpu().numpy() if isinstance(src, torch.Tensor) else np.frombuffer(src, np.uint8)


def scales_valid(src: Buffer, most: np.floating[Any] = MOST_SCALE) -> bool:
    """Returns whether every float32 scale in `src` is from 0 to `most`."""
    if isinstance(src, torch.Tensor):
        return bool(_device().within(src, float(most)))
    scales = np.frombuffer(src, np.float32)
    return scales.size == 0 or bool(scales.min() >= 0 and scales.max() <= most)


def absorb(residual: torch.Tensor, x: torch.Tensor) -> None:
    """Adds x to the residual where the sum is finite; elsewhere the residual is unchanged. Slow, so only for input with
    non-finite elements."""
    v = residual + x
    torch.where(torch.isfinite(v), v, residual, out=residual)
