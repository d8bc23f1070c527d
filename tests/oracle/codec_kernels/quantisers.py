"""The kernels of int4, qsgd and onebit in plain torch."""

from __future__ import annotations

import torch
from oracle.codec_kernels import blockwise as bw
from oracle.codec_kernels.draws import uniform, words
from oracle.codec_kernels.memory import Memory, floats


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
