"""The kernels that codecs are made of, and the one table that chooses who runs them: native where it is built, else reference.

Tensors are float32, contiguous, one-dimensional, on the CPU; payload bytes are memoryviews of any alignment. Both backends
give the same bytes. native/include/commlayer.h states what each does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import torch

from commlayer import native
from commlayer.compressors import reference

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


GRAIN = 1 << 18
"""Elements that make a thread worth starting, at some 20 us."""


def threads(count: int) -> None:
    """From now on up to `count` threads share a native call on a large bucket. Results do not depend on it."""
    if native.core is not None:
        native.core.threads(count, GRAIN)


@contextlib.contextmanager
def use(backend: str) -> Iterator[None]:
    """Within it, `backend` runs the kernels. For tests and measurements."""
    before = _chosen[0]
    choose(backend)
    try:
        yield
    finally:
        _chosen[0] = before


def all_finite(x: torch.Tensor, residual: torch.Tensor | None = None) -> bool:
    """Whether all of x, or of x + residual, is finite."""
    return bool(_chosen[0].all_finite(x, residual))


def add_f32(acc: torch.Tensor, x: memoryview) -> None:
    _chosen[0].add_f32(acc, x)


def add_f16(acc: torch.Tensor, x: memoryview) -> None:
    _chosen[0].add_f16(acc, x)


def add_bf16(acc: torch.Tensor, x: memoryview) -> None:
    _chosen[0].add_bf16(acc, x)


def f32_to_f16(dst: memoryview, src: torch.Tensor) -> bool:
    """Whether all results are finite."""
    return bool(_chosen[0].f32_to_f16(dst, src))


def f32_to_bf16(dst: memoryview, src: torch.Tensor) -> bool:
    """Whether all results are finite."""
    return bool(_chosen[0].f32_to_bf16(dst, src))


def f16_to_f32(dst: torch.Tensor, src: memoryview) -> None:
    _chosen[0].f16_to_f32(dst, src)


def bf16_to_f32(dst: torch.Tensor, src: memoryview) -> None:
    _chosen[0].bf16_to_f32(dst, src)


def int8_encode(quanta: memoryview, scales: memoryview, x: torch.Tensor, residual: torch.Tensor | None, block: int) -> bool:
    """Codes x + residual and writes back what the rounding keeps. False if it is not finite: residual takes the finite part."""
    return bool(_chosen[0].int8_encode(quanta, scales, x, residual, block))


def int8_decode(acc: torch.Tensor, quanta: memoryview, scales: memoryview, block: int, *, assign: bool) -> None:
    _chosen[0].int8_decode(acc, quanta, scales, block, assign)


def linear_encode(
    codes: memoryview,
    scales: memoryview,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    block: int,
    bits: int,
    *,
    euclidean: bool,
    random: tuple[int, int] | None,
) -> bool:
    """As int8_encode; `random` is key and step of the words that round, None rounds to the nearest."""
    key, step = random or (0, 0)
    return bool(_chosen[0].linear_encode(codes, scales, x, residual, block, bits, euclidean, random is not None, key, step))


def linear_decode(acc: torch.Tensor, codes: memoryview, scales: memoryview, block: int, bits: int, *, assign: bool) -> None:
    _chosen[0].linear_decode(acc, codes, scales, block, bits, assign)


def ternary_encode(
    codes: memoryview,
    scales: memoryview,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    block: int,
    clip: float,
    *,
    random: tuple[int, int],
) -> bool:
    """As linear_encode; clip is in root mean squares of a block, 0 for none."""
    return bool(_chosen[0].ternary_encode(codes, scales, x, residual, block, clip, *random))


def ternary_decode(acc: torch.Tensor, codes: memoryview, scales: memoryview, block: int, *, assign: bool) -> None:
    _chosen[0].ternary_decode(acc, codes, scales, block, assign)


def natural_encode(
    codes: memoryview,
    bases: memoryview,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    block: int,
    bits: int,
    *,
    random: tuple[int, int],
) -> bool:
    """As linear_encode."""
    return bool(_chosen[0].natural_encode(codes, bases, x, residual, block, bits, *random))


def natural_decode(acc: torch.Tensor, codes: memoryview, bases: memoryview, block: int, bits: int, *, assign: bool) -> None:
    _chosen[0].natural_decode(acc, codes, bases, block, bits, assign)


def onebit_encode(codes: memoryview, scales: memoryview, x: torch.Tensor, residual: torch.Tensor | None, block: int) -> bool:
    """As int8_encode."""
    return bool(_chosen[0].onebit_encode(codes, scales, x, residual, block))


def onebit_decode(acc: torch.Tensor, codes: memoryview, scales: memoryview, block: int, *, assign: bool) -> None:
    _chosen[0].onebit_decode(acc, codes, scales, block, assign)


def select(
    g: torch.Tensor, residual: torch.Tensor | None, threshold: float, start: int, idx: torch.Tensor, val: torch.Tensor
) -> tuple[int, int, bool]:
    """(entries selected, entries that reached the threshold but did not fit, whether all of g + residual is finite)."""
    count, overflow, finite = _chosen[0].select(g, residual, threshold, start, idx, val)
    return int(count), int(overflow), bool(finite)


def sample_abs(g: torch.Tensor, residual: torch.Tensor | None, offset: int, out: torch.Tensor) -> None:
    _chosen[0].sample_abs(g, residual, offset, out)


def scatter_add(acc: torch.Tensor, idx: torch.Tensor, val: torch.Tensor) -> None:
    """idx must have been made by `select` or checked by a decode."""
    _chosen[0].scatter_add(acc, idx, val)


def scatter_add_int8(acc: torch.Tensor, idx: torch.Tensor, quanta: memoryview, scales: memoryview, block: int) -> None:
    """As scatter_add, with values scale * q."""
    _chosen[0].scatter_add_int8(acc, idx, quanta, scales, block)


def ef_encode(out: memoryview, idx: torch.Tensor, n: int) -> int:
    return int(_chosen[0].ef_encode(out, idx, n))


def ef_decode(idx: torch.Tensor, n: int, src: memoryview) -> None:
    """CorruptFrame for bytes that are not exactly idx.numel() positions below n."""
    _chosen[0].ef_decode(idx, n, src)


def bitmap_encode(out: memoryview, idx: torch.Tensor, n: int) -> int:
    return int(_chosen[0].bitmap_encode(out, idx, n))


def bitmap_decode(idx: torch.Tensor, n: int, src: memoryview) -> None:
    """As ef_decode."""
    _chosen[0].bitmap_decode(idx, n, src)


def blocks_nbytes(idx: torch.Tensor, n: int) -> int:
    return int(_chosen[0].blocks_nbytes(idx, n))


def blocks_encode(out: memoryview, idx: torch.Tensor, n: int) -> int:
    return int(_chosen[0].blocks_encode(out, idx, n))


def blocks_decode(idx: torch.Tensor, n: int, src: memoryview) -> None:
    """As ef_decode."""
    _chosen[0].blocks_decode(idx, n, src)


def kth_abs(g: torch.Tensor, residual: torch.Tensor | None, rank: int, scratch: torch.Tensor) -> float:
    return float(_chosen[0].kth_abs(g, residual, rank, scratch))


def count_above(x: torch.Tensor, cut: float) -> int:
    return int(_chosen[0].count_above(x, cut))


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
    """How many entries stay, at the front of idx and val; the rest of the first `count` goes back to the residual."""
    return int(_chosen[0].trim(residual, n, idx, val, count, keep, start, scratch))


def select_runs(
    g: torch.Tensor,
    residual: torch.Tensor | None,
    run: int,
    threshold: float,
    start: int,
    ids: torch.Tensor,
    scores: torch.Tensor,
) -> tuple[int, int, bool]:
    """As select, by runs. Their elements stay in the residual until scatter_runs says what is kept of them."""
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
    _chosen[0].draw_strata(idx, n, seed)


def take(src: torch.Tensor, idx: torch.Tensor, val: torch.Tensor) -> None:
    """val = src[idx]."""
    _chosen[0].take(src, idx, val)


def nibbles_encode(q: memoryview, scales: memoryview, x: torch.Tensor, rest: torch.Tensor, block: int) -> bool:
    """Codes x to 4 bits an entry; rest = x - what that says. False if x is not finite."""
    return bool(_chosen[0].nibbles_encode(q, scales, x, rest, block))


def nibbles_decode(out: torch.Tensor, q: memoryview, scales: memoryview, block: int) -> None:
    _chosen[0].nibbles_decode(out, q, scales, block)


def int_maxima(most: memoryview, x: torch.Tensor, block: int) -> bool:
    """Largest magnitude of each block as bfloat16, rounded up; whether all of x is finite."""
    return bool(_chosen[0].int_maxima(most, x, block))


def int_encode(
    q: memoryview, x: torch.Tensor, most: memoryview, block: int, bits: int, *, dither: bool, key: int, step: int
) -> None:
    """x in the scale that the maxima give, `bits` each; dithered by the random numbers of (key, step), or to the nearest."""
    _chosen[0].int_encode(q, x, most, block, bits, dither, key, step)


def int_legal(q: memoryview, n: int, bits: int) -> bool:
    """Whether q holds n integers that an encoder makes, and no padding is set."""
    return bool(_chosen[0].int_legal(q, n, bits))


def int_add(acc: torch.Tensor, q: memoryview, bits: int, *, assign: bool) -> None:
    """acc is int32."""
    _chosen[0].int_add(acc, q, bits, assign)


def int_pack(out: memoryview, acc: torch.Tensor, width: int) -> None:
    """acc (int32) in `width` bits each, which must hold them."""
    _chosen[0].int_pack(out, acc, width)


def int_decode(out: torch.Tensor, q: memoryview, most: memoryview, block: int, bits: int, width: int) -> None:
    _chosen[0].int_decode(out, q, most, block, bits, width)


def outer(out: torch.Tensor, p: torch.Tensor, q: torch.Tensor, rank: int) -> None:
    """out = the product of p (rank x m) and q (rank x n), the same bits on every machine."""
    _chosen[0].outer(out, p, q, rank)


def copy_f32(dst: torch.Tensor, src: memoryview) -> None:
    """dst = the floats in src, whatever its alignment."""
    np.copyto(dst.numpy(), np.frombuffer(src, np.float32))


def store_f32(dst: memoryview, src: torch.Tensor) -> None:
    """The floats of src as bytes."""
    np.copyto(np.frombuffer(dst, np.float32), src.numpy())


def scales_valid(src: memoryview, most: np.floating[Any] = MOST_SCALE) -> bool:
    """Whether every float32 scale in src is from 0 to `most`."""
    scales = np.frombuffer(src, np.float32)
    return scales.size == 0 or bool(scales.min() >= 0 and scales.max() <= most)


def absorb(residual: torch.Tensor, x: torch.Tensor) -> None:
    """residual += x where the sum is finite; elsewhere residual stays. For input that is not finite as a whole: not fast."""
    v = residual + x
    torch.where(torch.isfinite(v), v, residual, out=residual)
