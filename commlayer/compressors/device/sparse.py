"""The sparse kernels on a device: selection, ordering, scattering, positions, 4-bit values. Names and results as on the host.

Unlike on the host, scattering trusts its positions, and corrupt bytes are found only after scratch positions are written.
"""

from __future__ import annotations

import torch

from commlayer.compressors.device.dense import yes
from commlayer.errors import CorruptPayload, InvalidInput
from commlayer.gpu.launch import THREADS, each, start

TILE = 16 * THREADS
"""Elements that a block scans, as in cuda/select.cu."""

UNPACK_TILE_NBYTES = 16 * THREADS
"""As in cuda/positions.cu."""

TRIM_TILE = 4 * THREADS
TRIM_DIGITS = 3
TRIM_HISTOGRAMS = TRIM_DIGITS * 2048
"""Histogram counters of 32 bits, as in cuda/trim.cu."""

ELIAS_FANO, BITMAP, SMALLER = 0, 1, -1
"""Encodings of positions; SMALLER lets the kernel choose."""

NO_VALUES = -1
VALUES_BLOCK = 256
"""As in cuda/layout.cuh."""

LEAST_THRESHOLD = 2.0**-126
FOUND = 3
"""Numbers that select_over returns: entries that passed, whether an element was not finite, entries from `start` on."""


def tiles(n: int, start_: int) -> int:
    """Tiles of a scan that begins at `start_` and wraps around."""
    return -(-(n - start_ // 4 * 4) // TILE) + -(-start_ // TILE)


Entries = tuple[torch.Tensor, torch.Tensor]
"""Positions and values."""


def queue_scan(
    g: torch.Tensor, residual: torch.Tensor | None, threshold: torch.Tensor, start_: int, to: Entries, found: torch.Tensor,
    state: torch.Tensor,
) -> None:
    """Selects into `to`, in scan order. `found` and `state` (1 + tiles) must hold zeros."""
    n, cap = g.numel(), min(to[0].numel(), to[1].numel())
    start("select", "select_over", tiles(n, start_), g, residual, n, threshold, start_, *to, cap, state, found)


def queue_rotate(to: Entries, from_: Entries, count: torch.Tensor, first: torch.Tensor) -> None:
    """Reorders entries from scan order to position order. `first` of them lie after the scan's start."""
    cap = min(to[0].numel(), to[1].numel())
    each("select", "rotate", cap, *to, *from_, count, first, cap)


def queue_select(
    g: torch.Tensor, residual: torch.Tensor | None, threshold: torch.Tensor, start_: int, raw: Entries, picked: Entries,
    found: torch.Tensor, state: torch.Tensor,
) -> None:
    """Selects into `raw`, then copies to `picked` in position order. Arguments as in queue_scan."""
    queue_scan(g, residual, threshold, start_, raw, found, state)
    queue_rotate(picked, raw, found, found[2:])


def trim_words(cap: int) -> int:
    return TRIM_HISTOGRAMS // 2 + 2 * (1 + _trim_tiles(cap))


def _trim_tiles(cap: int) -> int:
    return -(-cap // TRIM_TILE)


def queue_trim(
    to: Entries, from_: Entries, residual: torch.Tensor | None, k: int, room: int, control: torch.Tensor, words: torch.Tensor
) -> None:
    """Keeps the k largest of a scan's entries if there are more than `room`; the order does not change."""
    cap = from_[0].numel()
    histograms, scans = words[: TRIM_HISTOGRAMS // 2], words[TRIM_HISTOGRAMS // 2 :]
    above, equal = scans.chunk(2)
    for digit in range(TRIM_DIGITS):
        each("trim", "trim_count", cap, from_[1], k, cap, room, digit, histograms, control)
    start("trim", "trim", _trim_tiles(cap), *to, *from_, residual, k, cap, room, histograms, above, equal, control)


def select(
    g: torch.Tensor, residual: torch.Tensor | None, threshold: float, start_: int, idx: torch.Tensor, val: torch.Tensor
) -> tuple[int, int, bool]:
    n, cap = g.numel(), min(idx.numel(), val.numel())
    if not threshold >= LEAST_THRESHOLD or not (0 <= start_ < n or start_ == n == 0):
        need = "threshold >= 2^-126 and 0 <= start < n"
        raise InvalidInput("E-CODEC-INPUT",
                           f"select: got threshold {threshold} and start {start_} for {n} elements, need {need}")
    if n == 0:
        return 0, 0, True
    words = torch.zeros(FOUND + 1 + tiles(n, start_), dtype=torch.int64, device=g.device)
    cut = torch.full((1,), threshold, device=g.device)
    raw = torch.empty(cap, dtype=torch.int32, device=g.device), torch.empty(cap, device=g.device)
    queue_select(g, residual, cut, start_, raw, (idx, val), words[:FOUND], words[FOUND:])
    passed, bad, _ = words[:FOUND].tolist()
    return min(passed, cap), passed - min(passed, cap), not bad


def sample_abs(g: torch.Tensor, residual: torch.Tensor | None, offset: int, out: torch.Tensor) -> None:
    if g.numel() == 0:
        out.zero_()
        return
    each("select", "sample_abs", out.numel(), g, residual, g.numel(), offset, out.numel(), out)


def scatter_add(acc: torch.Tensor, idx: torch.Tensor, val: torch.Tensor) -> None:
    each("sparse", "scatter_add", idx.numel(), acc, idx, val, idx.numel())


def scatter_add_int8(acc: torch.Tensor, idx: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, block: int) -> None:
    each("sparse", "scatter_add_int8", idx.numel(), acc, idx, q, scale, idx.numel(), block)


def queue_pack(out: torch.Tensor, idx: torch.Tensor, n: int, most: int, count: torch.Tensor, values: int, kind: int) -> None:
    """Packs `count` positions, at most `most`, after values of that kind."""
    each("positions", "clear_positions", min(-(-n // 8), most), out, n, count, values, kind)
    each("positions", "pack_positions", most, out, idx, n, count, values, kind)


def smaller(n: int, k: int) -> tuple[int, int]:
    """The smaller of both encodings for k >= 1 positions below n, and its exact size in bytes."""
    low = max(0, (n // k).bit_length() - 1)
    sparse, dense = (k * low + 7) // 8 + (k + (n >> low) + 1 + 7) // 8, (n + 7) // 8
    return (ELIAS_FANO, sparse) if sparse < dense else (BITMAP, dense)


def _encode(out: torch.Tensor, idx: torch.Tensor, n: int, kind: int) -> int:
    k = idx.numel()
    queue_pack(out, idx, n, k, torch.full((1,), k, dtype=torch.int64, device=idx.device), NO_VALUES, kind)
    return out.numel() if k or kind == BITMAP else 0


def ef_encode(out: torch.Tensor, idx: torch.Tensor, n: int) -> int:
    """`out` has exactly the size of the encoded positions."""
    return _encode(out, idx, n, ELIAS_FANO)


def bitmap_encode(out: torch.Tensor, idx: torch.Tensor, n: int) -> int:
    """`out` has exactly the size of the encoded positions."""
    return _encode(out, idx, n, BITMAP)


def _decode(idx: torch.Tensor, n: int, src: torch.Tensor, kind: int) -> None:
    k, valid = idx.numel(), yes(idx)
    grid = max(1, -(-src.numel() // UNPACK_TILE_NBYTES))
    state = torch.zeros(1 + grid, dtype=torch.int64, device=idx.device)
    start("positions", "unpack_positions", grid, idx, k, n, src, kind, state, valid)
    each("positions", "check_increasing", k, idx, k, valid)
    if not valid.item():
        raise CorruptPayload(f"positions: bytes are not {k} positions below {n}")


def ef_decode(idx: torch.Tensor, n: int, src: torch.Tensor) -> None:
    """For k >= 1 positions in exactly their encoded bytes."""
    _decode(idx, n, src, ELIAS_FANO)


def bitmap_decode(idx: torch.Tensor, n: int, src: torch.Tensor) -> None:
    """As ef_decode."""
    _decode(idx, n, src, BITMAP)


def nibbles_encode(q: torch.Tensor, scale: torch.Tensor, x: torch.Tensor, rest: torch.Tensor | None, block: int) -> bool:
    n, finite = x.numel(), yes(x)
    each("nibbles", "nibbles_measure", 32 * -(-n // block), scale, x, n, block, finite)
    each("nibbles", "nibbles_code", -(-n // 2), q, scale, x, rest, n, block, finite)
    return bool(finite.item())


def nibbles_decode(out: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, block: int) -> None:
    each("nibbles", "nibbles_decode", out.numel(), out, q, scale, out.numel(), block)


ABS = 0x7FFFFFFF


def _magnitudes(x: torch.Tensor) -> torch.Tensor:
    """Magnitudes as integers: the same order, with NaN above infinity."""
    return x.view(torch.int32) & ABS


def kth_abs(g: torch.Tensor, residual: torch.Tensor | None, rank: int, scratch: torch.Tensor) -> float:
    v = g if residual is None else g + residual
    return float(_magnitudes(v).kthvalue(v.numel() + 1 - rank).values.view(torch.float32))


def count_above(x: torch.Tensor, cut: float) -> int:
    return int((x >= torch.tensor(cut, dtype=torch.float32)).sum())


def trim(
    residual: torch.Tensor | None, n: int, idx: torch.Tensor, val: torch.Tensor, count: int, keep: int, start: int,
    scratch: torch.Tensor,
) -> int:
    """As cuda/trim.cu, which the queued form of topk uses."""
    where, values = idx[:count].to(torch.int64) & 0xFFFFFFFF, val[:count].clone()
    order = torch.cat([(where >= start).nonzero().view(-1), (where < start).nonzero().view(-1)])
    best = order[_magnitudes(values)[order].sort(descending=True, stable=True).indices[:keep]]
    kept = torch.zeros(count, dtype=torch.bool, device=idx.device)
    kept[best] = True
    if residual is not None:
        residual[where[~kept]] += values[~kept]
    idx[:keep] = where[kept].to(torch.int32)
    val[:keep] = values[kept]
    return keep
