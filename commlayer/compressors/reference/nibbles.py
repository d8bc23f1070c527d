"""4-bit values with a scale for each block, in plain torch. Knows no headers and no codecs."""

from __future__ import annotations

import torch

from commlayer.compressors.reference.memory import Memory, floats, octets_of, read, write

SMALLEST = 7.0 * 2.0**-126
"""Below it a block counts as zeros: its scale would not be a normal number."""

MOST_SCALE = torch.finfo(torch.float32).max / 8


def _check_block(name: str, block: int) -> None:
    if block < 2 or block % 2:
        raise ValueError(f"{name}: got block {block}, need an even number")


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
    whole = torch.where(scales == 0, torch.zeros_like(rows), rows / scales).clamp(-7, 7).round().to(torch.int16)
    nibbles = (whole & 15).view(-1, 2)
    write(q, (nibbles[:, 0] | nibbles[:, 1] << 4).to(torch.uint8)[: (n + 1) // 2])
    write(scale, scales.view(-1))
    if rest is not None:
        write(rest, (rows - scales * whole.float()).view(-1)[:n])
    return True


def nibbles_decode(out: Memory, q: Memory, scale: Memory, block: int) -> None:
    _check_block("nibbles_decode", block)
    target = floats(out)
    n = target.numel()
    octets = octets_of(q, 0, (n + 1) // 2).to(torch.int16)
    nibbles = torch.stack([octets & 15, octets >> 4], 1).view(-1)[:n]
    scales = read(scale, torch.float32, -(-n // block)).repeat_interleave(block)[:n]
    target.copy_(scales * torch.where(nibbles > 7, nibbles - 16, nibbles).float())
