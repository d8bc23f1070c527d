"""The kernels of int4, qsgd, natural, terngrad and onebit in plain torch. Obviously right. Knows no headers and no codecs."""

from __future__ import annotations

import torch

from commlayer.compressors.reference import blockwise as bw
from commlayer.compressors.reference.draws import uniform, words
from commlayer.compressors.reference.memory import Memory, floats, octets_of, write

GROUP, DIGITS = 160, 5
"""Elements whose ternaries share bytes, and how many share one."""


def _steps(rows: torch.Tensor, scale: torch.Tensor, top: int, word: torch.Tensor | None) -> torch.Tensor:
    """rows as whole numbers of scales, to the nearest or, with random words, to one of both neighbours."""
    some = torch.where(scale == 0, torch.ones_like(scale), scale)
    t = (rows / some).clamp(-top, top)
    down = t.floor()
    whole = t.round() if word is None else down + (uniform(word).view_as(t) < t - down)
    return torch.where(scale == 0, torch.zeros_like(whole), whole) + 0.0  # whole numbers have no -0


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
        whole = _steps(rows, wide, top, words(rows.numel(), 0, key, step) if dither else None)
        bw.write16(scale, scale16)
        bw.put_stream(q, whole.view(-1)[:n].to(torch.int64), bits)
        return wide * whole

    return bw.encode(x, residual, block, code)


def linear_decode(acc: Memory, q: Memory, scale: Memory, block: int, bits: int, assign: bool = False) -> None:
    n = floats(acc).numel()
    codes = bw.get_stream(q, n, bits)
    whole = torch.where(codes >= 1 << (bits - 1), codes - (1 << bits), codes)
    bw.decode(acc, bw.read16(scale, n, block) * bw.rows_of(whole.float(), block), assign=assign)


def ternary_encode(
    q: Memory, scale: Memory, x: Memory, residual: Memory | None, block: int, clip: float, key: int, step: int
) -> bool:
    n = floats(x).numel()

    def code(rows: torch.Tensor) -> torch.Tensor:
        size = most = bw.most_of(rows)
        if clip > 0:
            rms = bw.norm_of(rows, most) / bw.counts_of(n, block).float().sqrt()
            size = torch.minimum(most, torch.tensor(clip, dtype=torch.float32) * rms)
        scale16 = bw.scale16(size, bw.MOST16)
        wide = bw.wide16(scale16)[:, None]
        whole = _steps(rows, wide, 1, words(rows.numel(), 0, key, step))
        bw.write16(scale, scale16)
        write(q, _bytes_of(whole.view(-1)[:n].to(torch.int64) % 3))
        return wide * whole

    return bw.encode(x, residual, block, code)


def _bytes_of(trits: torch.Tensor) -> torch.Tensor:
    """Full groups as rows of 5 x 32, then the last one, which may be shorter."""
    n, weights = trits.numel(), 3 ** torch.arange(DIGITS)
    full = n // GROUP * GROUP
    last = trits[full:]
    m = -(-last.numel() // DIGITS)
    padded = torch.zeros(m * DIGITS, dtype=trits.dtype)
    padded[: last.numel()] = last
    parts = (trits[:full].view(-1, DIGITS, GROUP // DIGITS), padded.view(1, DIGITS, m))
    return torch.cat([(part * weights[:, None]).sum(1).view(-1) for part in parts]).to(torch.uint8)


def _trits_of(octets: torch.Tensor, n: int) -> torch.Tensor:
    full = n // GROUP * (GROUP // DIGITS)
    weights = 3 ** torch.arange(DIGITS)
    parts = octets[:full].view(-1, 1, GROUP // DIGITS), octets[full:].view(1, 1, -1)
    return torch.cat([(part.to(torch.int64) // weights[:, None] % 3).view(-1) for part in parts])[:n]


def ternary_decode(acc: Memory, q: Memory, scale: Memory, block: int, assign: bool = False) -> None:
    n = floats(acc).numel()
    trits = _trits_of(octets_of(q, 0, -(-n // DIGITS)), n)
    whole = torch.where(trits == 2, -torch.ones_like(trits), trits)
    bw.decode(acc, bw.read16(scale, n, block) * bw.rows_of(whole.float(), block), assign=assign)


def natural_encode(
    q: Memory, base: Memory, x: Memory, residual: Memory | None, block: int, bits: int, key: int, step: int
) -> bool:
    n, levels = floats(x).numel(), (1 << (bits - 1)) - 1

    def code(rows: torch.Tensor) -> torch.Tensor:
        top = ((bw.bits(bw.most_of(rows)) + (1 << 23) - 1) >> 23).clamp(max=254)
        first = (top - levels).clamp(min=0)[:, None]
        word = words(rows.numel(), 0, key, step).view_as(rows)
        a = bw.bits(rows.abs())
        share = rows.abs() * bw.of_bits((253 - first) << 23)
        carried = (((a + (word >> 9)) >> 23) - first).clamp(max=levels)
        k = torch.where(a < (first + 1) << 23, (uniform(word) < share).long(), carried)
        negative = (bw.bits(rows) >> 31) * (k > 0)
        write(base, first.to(torch.uint8).view(-1))
        bw.put_stream(q, (k + (negative << (bits - 1))).view(-1)[:n], bits)
        return _meaning(k, negative, first)

    return bw.encode(x, residual, block, code)


def _meaning(k: torch.Tensor, negative: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    magnitude = bw.of_bits((first + k) << 23)
    return torch.where(k > 0, torch.where(negative > 0, -magnitude, magnitude), torch.zeros_like(magnitude))


def natural_decode(acc: Memory, q: Memory, base: Memory, block: int, bits: int, assign: bool = False) -> None:
    n, levels = floats(acc).numel(), (1 << (bits - 1)) - 1
    codes = bw.rows_of(bw.get_stream(q, n, bits), block)
    first = octets_of(base, 0, -(-n // block)).to(torch.int64)[:, None]
    bw.decode(acc, _meaning(codes & levels, codes >> (bits - 1), first), assign=assign)


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
