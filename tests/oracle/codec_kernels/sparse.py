"""The sparse kernels in plain torch: selection, ordering, scattering, positions, 4-bit values."""

from __future__ import annotations

import numpy as np
import torch
from oracle.codec_kernels.dense import int8_values
from oracle.codec_kernels.memory import MAX_N, Memory, floats, increasing, octets_of, positions, read, total, write

from commlayer.errors import CorruptPayload, InvalidInput

LEAST_THRESHOLD = 2.0**-126


def select(g: Memory, residual: Memory | None, threshold: float, start: int, idx: Memory, val: Memory) -> tuple[int, int, bool]:
    v = total(g, residual)
    n = v.numel()
    limit = torch.tensor(threshold, dtype=torch.float32)
    if not limit >= LEAST_THRESHOLD or not (0 <= start < n or start == n == 0):
        need = "threshold >= 2^-126 and 0 <= start < n"
        raise InvalidInput("E-CODEC-INPUT",
                           f"select: got threshold {threshold} and start {start} for {n} elements, need {need}")
    finite = v.isfinite()
    passed = ((v.abs() >= limit) & finite).nonzero().view(-1)
    scanned = torch.cat([passed[passed >= start], passed[passed < start]])
    room = min(octets_of(idx).numel() // 4, octets_of(val).numel() // 4)
    taken = scanned[:room].sort().values
    write(idx, taken.to(torch.int32))
    write(val, v[taken])
    if residual is not None:
        kept = floats(residual)
        kept.copy_(torch.where(finite, v, kept))
        kept[taken] = 0.0
    return len(taken), len(passed) - len(taken), bool(finite.all())


def sample_abs(g: Memory, residual: Memory | None, offset: int, out: Memory) -> None:
    v, target = total(g, residual), floats(out)
    if v.numel() == 0 or target.numel() == 0:
        target.zero_()
        return
    sample = torch.arange(target.numel())
    groups = (target.numel() + 3) // 4 | 1
    where = offset + sample // 4 * v.numel() // groups + sample % 4
    target.copy_(v[where % v.numel()].abs())


def _scatter(acc: Memory, idx: Memory, value: torch.Tensor, name: str) -> int:
    total, where = floats(acc), positions(idx)
    if not increasing(where, total.numel()):
        raise CorruptPayload(f"{name}: positions do not increase below {total.numel()}")
    total[where] += value
    return len(where)


def scatter_add(acc: Memory, idx: Memory, val: Memory, at: int = 0) -> int:
    return _scatter(acc, idx, read(val, torch.float32, len(positions(idx)), at), "scatter_add")


def scatter_add_int8(acc: Memory, idx: Memory, q: Memory, scale: Memory, block: int, q_at: int = 0, scale_at: int = 0) -> int:
    value = int8_values(q, scale, len(positions(idx)), block, q_at, scale_at)
    return _scatter(acc, idx, value, "scatter_add_int8")


def _low_bits(n: int, k: int) -> int:
    return max(0, (n // k).bit_length() - 1)


def ef_bound(n: int, k: int) -> int:
    if not 0 <= k <= n <= MAX_N:
        raise InvalidInput("E-CODEC-INPUT", f"ef_bound: got {k} positions below {n}, need 0 <= k <= n < 2^32")
    if k == 0:
        return 0
    low = _low_bits(n, k)
    return (k * low + 7) // 8 + (k + (n >> low) + 1 + 7) // 8


def _packed(bits: torch.Tensor) -> torch.Tensor:
    """Bits (0 or 1, uint8) as bytes, the lowest bit first."""
    return torch.from_numpy(np.packbits(bits.numpy(), bitorder="little"))


def _unpacked(octets: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.unpackbits(octets.numpy(), bitorder="little"))


def checked_positions(idx: Memory, n: int) -> torch.Tensor:
    where = positions(idx)
    if not 0 <= n <= MAX_N or not increasing(where, n):
        raise InvalidInput("E-CODEC-INPUT", f"positions do not increase below {n}")
    return where


def _put(out: Memory, octets: torch.Tensor, at: int) -> int:
    write(out, octets, at)
    return octets.numel()


def ef_encode(out: Memory, idx: Memory, n: int, at: int = 0) -> int:
    where = checked_positions(idx, n)
    k = len(where)
    if k == 0:
        return 0
    low = _low_bits(n, k)
    lower = (where[:, None] >> torch.arange(low)) & 1
    upper = torch.zeros(k + (n >> low) + 1, dtype=torch.uint8)
    upper[(where >> low) + torch.arange(k)] = 1
    return _put(out, torch.cat([_packed(lower.to(torch.uint8).view(-1)), _packed(upper)]), at)


def corrupt(k: int, n: int) -> CorruptPayload:
    return CorruptPayload(f"positions: bytes are not {k} positions below {n}")


def ef_decode(idx: Memory, n: int, src: Memory, at: int = 0, nbytes: int = -1) -> int:
    k = len(positions(idx))
    octets = octets_of(src, at, None if nbytes < 0 else nbytes)
    if k > n or octets.numel() != ef_bound(n, k):
        raise corrupt(k, n)
    if k == 0:
        return 0
    low = _low_bits(n, k)
    middle = (k * low + 7) // 8
    lower, upper = _unpacked(octets[:middle]), _unpacked(octets[middle:])
    ones = upper.nonzero().view(-1)
    if lower[k * low :].any() or upper[k + (n >> low) + 1 :].any() or len(ones) != k:
        raise corrupt(k, n)
    weights = torch.ones(low, dtype=torch.int64) << torch.arange(low)
    where = ((ones - torch.arange(k)) << low) + (lower[: k * low].view(k, low).to(torch.int64) * weights).sum(1)
    if not increasing(where, n):
        raise corrupt(k, n)
    write(idx, where.to(torch.int32))
    return k


def bitmap_encode(out: Memory, idx: Memory, n: int, at: int = 0) -> int:
    bits = torch.zeros(n, dtype=torch.uint8)
    bits[checked_positions(idx, n)] = 1
    return _put(out, _packed(bits), at)


def bitmap_decode(idx: Memory, n: int, src: Memory, at: int = 0, nbytes: int = -1) -> int:
    k = len(positions(idx))
    octets = octets_of(src, at, None if nbytes < 0 else nbytes)
    bits = _unpacked(octets)
    if octets.numel() != (n + 7) // 8 or bits[n:].any() or int(bits.sum()) != k:
        raise corrupt(k, n)
    write(idx, bits.nonzero().view(-1).to(torch.int32))
    return k


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


_ABS = 0x7FFFFFFF


def _magnitudes(x: torch.Tensor) -> torch.Tensor:
    """Magnitudes as integers: the same order, with NaN above infinity."""
    return x.view(torch.int32) & _ABS


def kth_abs(g: Memory, residual: Memory | None, rank: int, scratch: Memory) -> float:
    v = total(g, residual)
    if not 1 <= rank <= v.numel():
        raise InvalidInput("E-CODEC-INPUT", f"kth_abs: got rank {rank} of {v.numel()}, need 1 <= rank <= n")
    magnitude = _magnitudes(v).kthvalue(v.numel() + 1 - rank).values
    return float(magnitude.view(torch.float32))


def count_above(x: Memory, cut: float) -> int:
    return int((floats(x) >= torch.tensor(cut, dtype=torch.float32)).sum())


def trim(residual: Memory | None, n: int, idx: Memory, val: Memory, count: int, keep: int, start: int, scratch: Memory) -> int:
    if not 1 <= keep <= count <= n:
        raise InvalidInput("E-CODEC-INPUT", f"trim: got {keep} of {count} of {n}, need 1 <= keep <= count <= n")
    where, values = positions(idx)[:count], read(val, torch.float32, count).clone()
    order = torch.cat([(where >= start).nonzero().view(-1), (where < start).nonzero().view(-1)])
    best = order[_magnitudes(values)[order].sort(descending=True, stable=True).indices[:keep]]
    kept = torch.zeros(count, dtype=torch.bool)
    kept[best] = True
    if residual is not None:
        floats(residual)[where[~kept]] += values[~kept]
    write(idx, where[kept].to(torch.int32))
    write(val, values[kept])
    return keep
