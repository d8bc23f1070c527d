"""The dense kernels in plain torch: checksum, sums, casts, int8."""

from __future__ import annotations

import torch
from oracle.codec_kernels.blockwise import encode, most_of
from oracle.codec_kernels.memory import Memory, floats, octets_of, read, total, write

SMALLEST = 127.0 * 2.0**-126
"""Below this an int8 block counts as zeros: its scale would not be a normal number."""

MOST_SCALE = torch.finfo(torch.float32).max / 128
"""The largest scale: any int8 times it is finite."""

_POLY = 0x82F63B78


def crc32c(data: Memory, crc: int = 0) -> int:
    crc ^= 0xFFFFFFFF
    for octet in octets_of(data).tolist():
        crc ^= octet
        for _ in range(8):
            crc = (crc >> 1) ^ (_POLY if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def _add(acc: Memory, x: Memory, dtype: torch.dtype, w: float, at: int) -> None:
    total = floats(acc)
    weight = torch.tensor(w, dtype=torch.float32)
    total.copy_(total + weight * read(x, dtype, total.numel(), at).float())


def add_f32(acc: Memory, x: Memory, w: float = 1.0, at: int = 0) -> None:
    _add(acc, x, torch.float32, w, at)


def add_f16(acc: Memory, x: Memory, w: float = 1.0, at: int = 0) -> None:
    _add(acc, x, torch.float16, w, at)


def add_bf16(acc: Memory, x: Memory, w: float = 1.0, at: int = 0) -> None:
    _add(acc, x, torch.bfloat16, w, at)


def f32_to_f16(dst: Memory, src: Memory, at: int = 0) -> bool:
    narrow = floats(src).to(torch.float16)
    write(dst, narrow, at)
    return bool(narrow.isfinite().all())


def f32_to_bf16(dst: Memory, src: Memory, at: int = 0) -> bool:
    narrow = floats(src).to(torch.bfloat16)
    write(dst, narrow, at)
    return bool(narrow.isfinite().all())


def f16_to_f32(dst: Memory, src: Memory, at: int = 0) -> None:
    wide = floats(dst)
    wide.copy_(read(src, torch.float16, wide.numel(), at))


def bf16_to_f32(dst: Memory, src: Memory, at: int = 0) -> None:
    wide = floats(dst)
    wide.copy_(read(src, torch.bfloat16, wide.numel(), at))


def all_finite(x: Memory, residual: Memory | None = None) -> bool:
    return bool(total(x, residual).isfinite().all())


def int8_encode(
    q: Memory, scale: Memory, x: Memory, residual: Memory | None, block: int, q_at: int = 0, scale_at: int = 0
) -> bool:
    n = floats(x).numel()

    def code(rows: torch.Tensor) -> torch.Tensor:
        most = most_of(rows)[:, None]
        scales = torch.where(most < SMALLEST, torch.zeros_like(most), (most / 127.0).clamp(max=MOST_SCALE))
        levels = torch.where(scales == 0, torch.zeros_like(rows), rows / scales).clamp(-127, 127).round()
        quanta = levels.to(torch.int8)
        write(q, quanta.view(-1)[:n], q_at)
        write(scale, scales.view(-1), scale_at)
        return scales * quanta.float()

    return encode(x, residual, block, code)


def int8_values(q: Memory, scale: Memory, n: int, block: int, q_at: int, scale_at: int) -> torch.Tensor:
    scales = read(scale, torch.float32, (n + block - 1) // block, scale_at)
    return scales.repeat_interleave(block)[:n] * read(q, torch.int8, n, q_at).float()


def int8_decode(
    acc: Memory, q: Memory, scale: Memory, block: int, assign: bool = False, q_at: int = 0, scale_at: int = 0
) -> None:
    total = floats(acc)
    value = int8_values(q, scale, total.numel(), block, q_at, scale_at)
    total.copy_(value if assign else total + value)
