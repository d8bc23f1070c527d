"""The kernels in plain torch: slow, obviously right, the twins of commlayer._core. Knows no payload headers and no codecs.

Same names, arguments and results as the native ones (native/include/commlayer.h, commlayer/_core.pyi), bit for bit but for
which NaN a NaN becomes. Buffers and numpy arrays are viewed as tensors, never copied.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from commlayer.compressors.codec import Buffer
from commlayer.errors import CorruptFrame

Memory = torch.Tensor | np.ndarray[Any, Any] | Buffer

MAX_N = (1 << 32) - 1
"""Positions are 32-bit."""

SMALLEST = 127.0 * 2.0**-126
"""Below it a block of int8 counts as zeros: its scale would not be a normal number."""

MOST_SCALE = torch.finfo(torch.float32).max / 128
"""Any int8 times this is finite."""

LEAST_THRESHOLD = 2.0**-126

_POLY = 0x82F63B78


def _octets(memory: Memory, at: int = 0, nbytes: int | None = None) -> torch.Tensor:
    """nbytes bytes from `at` on, as uint8 over the same memory."""
    if isinstance(memory, torch.Tensor):
        whole = memory.detach().reshape(-1).view(torch.uint8)
    else:
        whole = _shared(np.frombuffer(memory, dtype=np.uint8))
    end = len(whole) if nbytes is None else at + nbytes
    if not 0 <= at <= end <= len(whole):
        raise ValueError(f"bytes [{at}, {end}) are outside of {len(whole)} bytes")
    return whole[at:end]


def _shared(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Over the same memory. Read-only memory is copied: torch has no such tensors, and nobody writes it."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _floats(memory: Memory) -> torch.Tensor:
    """All of an array of float32."""
    return _read(memory, torch.float32, _octets(memory).numel() // 4)


def _read(memory: Memory, dtype: torch.dtype, n: int, at: int = 0) -> torch.Tensor:
    """n elements from byte `at`: a view where alignment allows, else a copy."""
    if n == 0:
        return torch.empty(0, dtype=dtype)  # an empty buffer may have no strides to view
    octets = _octets(memory, at, n * dtype.itemsize)
    if octets.data_ptr() % dtype.itemsize:
        octets = octets.clone()
    return octets.view(dtype)


def _write(memory: Memory, value: torch.Tensor, at: int = 0) -> None:
    octets = value.contiguous().view(torch.uint8)
    _octets(memory, at, octets.numel()).copy_(octets)


def _positions(idx: Memory) -> torch.Tensor:
    """All of an array of uint32 or int32, as int64."""
    return _read(idx, torch.int32, _octets(idx).numel() // 4).to(torch.int64) & MAX_N


def _increasing(idx: torch.Tensor, n: int) -> bool:
    return bool((idx < n).all() and (idx[1:] > idx[:-1]).all())


def _sum(g: Memory, residual: Memory | None) -> torch.Tensor:
    return _floats(g) if residual is None else _floats(g) + _floats(residual)


def crc32c(data: Memory, crc: int = 0) -> int:
    crc ^= 0xFFFFFFFF
    for octet in _octets(data).tolist():
        crc ^= octet
        for _ in range(8):
            crc = (crc >> 1) ^ (_POLY if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def _add(acc: Memory, x: Memory, dtype: torch.dtype, w: float, at: int) -> None:
    total = _floats(acc)
    weight = torch.tensor(w, dtype=torch.float32)
    total.copy_(total + weight * _read(x, dtype, total.numel(), at).float())


def add_f32(acc: Memory, x: Memory, w: float = 1.0, at: int = 0) -> None:
    _add(acc, x, torch.float32, w, at)


def add_f16(acc: Memory, x: Memory, w: float = 1.0, at: int = 0) -> None:
    _add(acc, x, torch.float16, w, at)


def add_bf16(acc: Memory, x: Memory, w: float = 1.0, at: int = 0) -> None:
    _add(acc, x, torch.bfloat16, w, at)


def f32_to_f16(dst: Memory, src: Memory, at: int = 0) -> bool:
    narrow = _floats(src).to(torch.float16)
    _write(dst, narrow, at)
    return bool(narrow.isfinite().all())


def f32_to_bf16(dst: Memory, src: Memory, at: int = 0) -> bool:
    narrow = _floats(src).to(torch.bfloat16)
    _write(dst, narrow, at)
    return bool(narrow.isfinite().all())


def f16_to_f32(dst: Memory, src: Memory, at: int = 0) -> None:
    wide = _floats(dst)
    wide.copy_(_read(src, torch.float16, wide.numel(), at))


def bf16_to_f32(dst: Memory, src: Memory, at: int = 0) -> None:
    wide = _floats(dst)
    wide.copy_(_read(src, torch.bfloat16, wide.numel(), at))


def all_finite(x: Memory, residual: Memory | None = None) -> bool:
    return bool(_sum(x, residual).isfinite().all())


def int8_encode(
    q: Memory, scale: Memory, x: Memory, residual: Memory | None, block: int, q_at: int = 0, scale_at: int = 0
) -> bool:
    v = _sum(x, residual)
    if not v.isfinite().all():
        return False
    n = v.numel()
    count = (n + block - 1) // block
    rows = torch.zeros(count * block, dtype=torch.float32)
    rows[:n] = v
    rows = rows.view(count, block)
    most = rows.abs().amax(1, keepdim=True)
    scales = torch.where(most < SMALLEST, torch.zeros_like(most), (most / 127.0).clamp(max=MOST_SCALE))
    whole = torch.where(scales == 0, torch.zeros_like(rows), rows / scales).clamp(-127, 127).round()
    quanta = whole.to(torch.int8)
    _write(q, quanta.view(-1)[:n], q_at)
    _write(scale, scales.view(-1), scale_at)
    if residual is not None:
        _floats(residual).copy_((rows - scales * quanta.float()).view(-1)[:n])
    return True


def _int8_values(q: Memory, scale: Memory, n: int, block: int, q_at: int, scale_at: int) -> torch.Tensor:
    scales = _read(scale, torch.float32, (n + block - 1) // block, scale_at)
    return scales.repeat_interleave(block)[:n] * _read(q, torch.int8, n, q_at).float()


def int8_decode(
    acc: Memory, q: Memory, scale: Memory, block: int, assign: bool = False, q_at: int = 0, scale_at: int = 0
) -> None:
    total = _floats(acc)
    value = _int8_values(q, scale, total.numel(), block, q_at, scale_at)
    total.copy_(value if assign else total + value)


def select(g: Memory, residual: Memory | None, threshold: float, start: int, idx: Memory, val: Memory) -> tuple[int, int, bool]:
    v = _sum(g, residual)
    n = v.numel()
    limit = torch.tensor(threshold, dtype=torch.float32)
    if not limit >= LEAST_THRESHOLD or not (0 <= start < n or start == n == 0):
        need = "threshold >= 2^-126 and 0 <= start < n"
        raise ValueError(f"select: got threshold {threshold} and start {start} for {n} elements, need {need}")
    finite = v.isfinite()
    passed = ((v.abs() >= limit) & finite).nonzero().view(-1)
    scanned = torch.cat([passed[passed >= start], passed[passed < start]])
    room = min(_octets(idx).numel() // 4, _octets(val).numel() // 4)
    taken = scanned[:room].sort().values
    _write(idx, taken.to(torch.int32))
    _write(val, v[taken])
    if residual is not None:
        kept = _floats(residual)
        kept.copy_(torch.where(finite, v, kept))
        kept[taken] = 0.0
    return len(taken), len(passed) - len(taken), bool(finite.all())


def sample_abs(g: Memory, residual: Memory | None, offset: int, out: Memory) -> None:
    v, target = _sum(g, residual), _floats(out)
    if v.numel() == 0 or target.numel() == 0:
        target.zero_()
        return
    steps = torch.arange(target.numel()) * v.numel() // target.numel()
    target.copy_(v[(offset + steps) % v.numel()].abs())


def _scatter(acc: Memory, idx: Memory, value: torch.Tensor, name: str) -> int:
    total, where = _floats(acc), _positions(idx)
    if not _increasing(where, total.numel()):
        raise CorruptFrame(f"{name}: positions do not increase below {total.numel()}")
    total[where] += value
    return len(where)


def scatter_add(acc: Memory, idx: Memory, val: Memory, at: int = 0) -> int:
    return _scatter(acc, idx, _read(val, torch.float32, len(_positions(idx)), at), "scatter_add")


def scatter_add_int8(acc: Memory, idx: Memory, q: Memory, scale: Memory, block: int, q_at: int = 0, scale_at: int = 0) -> int:
    value = _int8_values(q, scale, len(_positions(idx)), block, q_at, scale_at)
    return _scatter(acc, idx, value, "scatter_add_int8")


def _low_bits(n: int, k: int) -> int:
    return max(0, (n // k).bit_length() - 1)


def ef_bound(n: int, k: int) -> int:
    if not 0 <= k <= n <= MAX_N:
        raise ValueError(f"ef_bound: got {k} positions below {n}, need 0 <= k <= n < 2^32")
    if k == 0:
        return 0
    low = _low_bits(n, k)
    return (k * low + 7) // 8 + (k + (n >> low) + 1 + 7) // 8


def _packed(bits: torch.Tensor) -> torch.Tensor:
    """Bits (0 or 1, uint8) as bytes, the first bit lowest."""
    return torch.from_numpy(np.packbits(bits.numpy(), bitorder="little"))


def _unpacked(octets: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.unpackbits(octets.numpy(), bitorder="little"))


def _checked_positions(idx: Memory, n: int) -> torch.Tensor:
    where = _positions(idx)
    if not 0 <= n <= MAX_N or not _increasing(where, n):
        raise ValueError(f"positions do not increase below {n}")
    return where


def _put(out: Memory, octets: torch.Tensor, at: int) -> int:
    _write(out, octets, at)
    return octets.numel()


def ef_encode(out: Memory, idx: Memory, n: int, at: int = 0) -> int:
    where = _checked_positions(idx, n)
    k = len(where)
    if k == 0:
        return 0
    low = _low_bits(n, k)
    lower = (where[:, None] >> torch.arange(low)) & 1
    upper = torch.zeros(k + (n >> low) + 1, dtype=torch.uint8)
    upper[(where >> low) + torch.arange(k)] = 1
    return _put(out, torch.cat([_packed(lower.to(torch.uint8).view(-1)), _packed(upper)]), at)


def _corrupt(k: int, n: int) -> CorruptFrame:
    return CorruptFrame(f"positions: bytes are not {k} positions below {n}")


def ef_decode(idx: Memory, n: int, src: Memory, at: int = 0, nbytes: int = -1) -> int:
    k = len(_positions(idx))
    octets = _octets(src, at, None if nbytes < 0 else nbytes)
    if k > n or octets.numel() != ef_bound(n, k):
        raise _corrupt(k, n)
    if k == 0:
        return 0
    low = _low_bits(n, k)
    middle = (k * low + 7) // 8
    lower, upper = _unpacked(octets[:middle]), _unpacked(octets[middle:])
    ones = upper.nonzero().view(-1)
    if lower[k * low :].any() or upper[k + (n >> low) + 1 :].any() or len(ones) != k:
        raise _corrupt(k, n)
    weights = torch.ones(low, dtype=torch.int64) << torch.arange(low)
    where = ((ones - torch.arange(k)) << low) + (lower[: k * low].view(k, low).to(torch.int64) * weights).sum(1)
    if not _increasing(where, n):
        raise _corrupt(k, n)
    _write(idx, where.to(torch.int32))
    return k


def bitmap_encode(out: Memory, idx: Memory, n: int, at: int = 0) -> int:
    bits = torch.zeros(n, dtype=torch.uint8)
    bits[_checked_positions(idx, n)] = 1
    return _put(out, _packed(bits), at)


def bitmap_decode(idx: Memory, n: int, src: Memory, at: int = 0, nbytes: int = -1) -> int:
    k = len(_positions(idx))
    octets = _octets(src, at, None if nbytes < 0 else nbytes)
    bits = _unpacked(octets)
    if octets.numel() != (n + 7) // 8 or bits[n:].any() or int(bits.sum()) != k:
        raise _corrupt(k, n)
    _write(idx, bits.nonzero().view(-1).to(torch.int32))
    return k
