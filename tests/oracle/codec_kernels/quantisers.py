"""The kernels of int4, qsgd, onebit and of 4-bit values in plain torch."""

from __future__ import annotations

import torch
from oracle.codec_kernels import blockwise as bw
from oracle.codec_kernels.draws import uniform, words
from oracle.codec_kernels.memory import Memory, floats, octets_of, read, write

from commlayer.errors import InvalidInput


def _steps(rows: torch.Tensor, scale: torch.Tensor, top: int, word: torch.Tensor | None) -> torch.Tensor:
    """rows / scale as integers: rounded to the nearest, or with random words to one of the two nearest."""
    some = torch.where(scale == 0, torch.ones_like(scale), scale)
    t = (rows / some).clamp(-top, top)
    down = t.floor()
    levels = t.round() if word is None else down + (uniform(word).view_as(t) < t - down)
    return torch.where(scale == 0, torch.zeros_like(levels), levels) + 0.0  # turns -0 into 0


def linear_encode(
    q: Memory,
    scale: Memory,
    x: Memory,
    residual: Memory | None,
    block: int,
    bits: int,
    euclidean: bool,
    dither: bool,
    key: int = 0,
    step: int = 0,
) -> bool:
    n, top = floats(x).numel(), (1 << (bits - 1)) - 1

    def code(rows: torch.Tensor) -> torch.Tensor:
        most = bw.most_of(rows)
        size = bw.norm_of(rows, most) if euclidean else most
        scale16 = bw.scale16(size / top, bw.MOST16 - ((bits - 1) << 7))
        wide = bw.wide16(scale16)[:, None]
        levels = _steps(rows, wide, top, words(rows.numel(), 0, key, step) if dither else None)
        bw.write16(scale, scale16)
        bw.put_stream(q, levels.view(-1)[:n].to(torch.int64), bits)
        return wide * levels

    return bw.encode(x, residual, block, code)


def linear_decode(acc: Memory, q: Memory, scale: Memory, block: int, bits: int, assign: bool = False) -> None:
    n = floats(acc).numel()
    codes = bw.get_stream(q, n, bits)
    levels = torch.where(codes >= 1 << (bits - 1), codes - (1 << bits), codes)
    bw.decode(acc, bw.read16(scale, n, block) * bw.rows_of(levels.float(), block), assign=assign)


def onebit_encode(q: Memory, scale: Memory, x: Memory, residual: Memory | None, block: int) -> bool:
    n, shrink = floats(x).numel(), 2.0**-24

    def code(rows: torch.Tensor) -> torch.Tensor:
        counts = bw.counts_of(n, block).float()
        mean = bw.lane_sum(rows.abs()) / counts
        mean = torch.where(mean.isfinite(), mean, bw.lane_sum((rows * shrink).abs()) / counts / shrink)
        scale16 = bw.scale16(mean, bw.MOST16)
        wide = bw.wide16(scale16)[:, None]
        negative = bw.bits(rows) >> 31
        bw.write16(scale, scale16)
        bw.put_stream(q, negative.view(-1)[:n], 1)
        return torch.where(negative > 0, -wide, wide)

    return bw.encode(x, residual, block, code)


def onebit_decode(acc: Memory, q: Memory, scale: Memory, block: int, assign: bool = False) -> None:
    n = floats(acc).numel()
    negative = bw.rows_of(bw.get_stream(q, n, 1), block)
    wide = bw.read16(scale, n, block).expand_as(negative)
    bw.decode(acc, torch.where(negative > 0, -wide, wide), assign=assign)


SMALLEST = 7.0 * 2.0**-126
"""Below this a block counts as zeros: its scale would not be a normal number."""

MOST_SCALE = torch.finfo(torch.float32).max / 8


def _check_block(name: str, block: int) -> None:
    if block < 2 or block % 2:
        raise InvalidInput("E-CODEC-INPUT", f"{name}: got block {block}, need an even number")


def nibbles_encode(q: Memory, scale: Memory, x: Memory, rest: Memory | None, block: int) -> bool:
    _check_block("nibbles_encode", block)
    v = floats(x)
    if not v.isfinite().all():
        return False
    n = v.numel()
    rows = torch.zeros(-(-n // block) * block)
    rows[:n] = v
    rows = rows.view(-1, block)
    most = rows.abs().amax(1, keepdim=True)
    scales = torch.where(most < SMALLEST, torch.zeros_like(most), (most / 7.0).clamp(max=MOST_SCALE))
    levels = torch.where(scales == 0, torch.zeros_like(rows), rows / scales).clamp(-7, 7).round().to(torch.int16)
    nibbles = (levels & 15).view(-1, 2)
    write(q, (nibbles[:, 0] | nibbles[:, 1] << 4).to(torch.uint8)[: (n + 1) // 2])
    write(scale, scales.view(-1))
    if rest is not None:
        write(rest, (rows - scales * levels.float()).view(-1)[:n])
    return True


def nibbles_decode(out: Memory, q: Memory, scale: Memory, block: int) -> None:
    _check_block("nibbles_decode", block)
    target = floats(out)
    n = target.numel()
    octets = octets_of(q, 0, (n + 1) // 2).to(torch.int16)
    nibbles = torch.stack([octets & 15, octets >> 4], 1).view(-1)[:n]
    scales = read(scale, torch.float32, -(-n // block)).repeat_interleave(block)[:n]
    target.copy_(scales * torch.where(nibbles > 7, nibbles - 16, nibbles).float())
