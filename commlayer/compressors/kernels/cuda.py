"""Kernels of the codecs that run on a CUDA device: identity, fp16, bf16, int8, int4 and topk.

Names, arguments and results are those of commlayer._core on the CPU. Payload bytes are uint8 tensors on the device of the other
arguments, with floats at multiples of 4. A function that returns a value waits for the device; the others only queue work.
Encoding a non-finite input returns False; the residual then becomes the finite part. Unlike on the CPU, scattering does not
check positions, and corrupt bytes are detected only after temporary positions are written. Sums and casts are operations of
torch. Positions as blocks of 16 are encoded on the host.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from commlayer import native
from commlayer.compressors.kernels import fallback
from commlayer.errors import CorruptPayload, InvalidInput
from commlayer.gpu.launch import MOST_BLOCKS, THREADS, launch_over_items, start
from commlayer.gpu.launch import has_kernels_for as has_kernels_for

HOST = native.core or fallback
SEGMENT = 1024
"""Elements per warp, as in cuda/int8.cu."""


def empty(count: int, like: torch.Tensor, dtype: type) -> torch.Tensor:
    return torch.empty(count, dtype=torch.int32 if dtype is np.int32 else torch.float32, device=like.device)


def copy_f32(dst: torch.Tensor, src: torch.Tensor) -> None:
    dst.copy_(src.view(torch.float32))


def store_f32(dst: torch.Tensor, src: torch.Tensor) -> None:
    dst.view(torch.float32).copy_(src)


def add_f32(acc: torch.Tensor, x: torch.Tensor) -> None:
    acc += x.view(torch.float32)


def add_f16(acc: torch.Tensor, x: torch.Tensor) -> None:
    acc += x.view(torch.float16)


def add_bf16(acc: torch.Tensor, x: torch.Tensor) -> None:
    acc += x.view(torch.bfloat16)


def scale_f32(dst: torch.Tensor, src: torch.Tensor, factor: float) -> bool:
    numbers = src.view(torch.float32)
    torch.mul(numbers, factor, out=dst)
    return all_finite(numbers)


def f32_to_f16(dst: torch.Tensor, src: torch.Tensor) -> bool:
    return all_finite(dst.view(torch.float16).copy_(src))


def f32_to_bf16(dst: torch.Tensor, src: torch.Tensor) -> bool:
    return all_finite(dst.view(torch.bfloat16).copy_(src))


def f16_to_f32(dst: torch.Tensor, src: torch.Tensor) -> None:
    dst.copy_(src.view(torch.float16))


def bf16_to_f32(dst: torch.Tensor, src: torch.Tensor) -> None:
    dst.copy_(src.view(torch.bfloat16))


def all_finite(x: torch.Tensor, residual: torch.Tensor | None = None) -> bool:
    return bool((x if residual is None else x + residual).isfinite().all())


def scales_within(scales: torch.Tensor, most: float) -> bool:
    """Returns True if every float32 in these bytes is from 0 to `most`."""
    numbers = scales.view(torch.float32)
    return bool(((numbers >= 0) & (numbers <= most)).all())


def largest(src: torch.Tensor) -> int:
    return int((src.view(torch.int16).to(torch.int32) & 0xFFFF).max()) if src.numel() else 0


def true_flag(like: torch.Tensor) -> torch.Tensor:
    """Returns a flag tensor with value 1, which a kernel may clear."""
    return torch.ones(1, dtype=torch.int64, device=like.device)


def finite_or_absorbed(finite: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None) -> bool:
    """Waits for the device and returns True if the input of an encode was finite. If not, nothing was encoded, and the residual
    becomes the finite part of x + residual."""
    good = bool(finite.item())
    if not good and residual is not None:
        v = residual + x
        torch.where(torch.isfinite(v), v, residual, out=residual)
    return good


def int8_encode(q: torch.Tensor, scale: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None, block: int) -> bool:
    n = x.numel()
    if n == 0:
        return True
    blocks, finite = -(-n // block), true_flag(x)
    most = torch.zeros(blocks, dtype=torch.int32, device=x.device)
    warps = blocks * -(-block // SEGMENT)
    start("int8", "int8_most", min(-(-warps * 32 // THREADS), MOST_BLOCKS), most, x, residual, n, block, finite)
    launch_over_items("int8", "int8_code", n, q, scale, most, x, residual, n, block, finite)
    return finite_or_absorbed(finite, x, residual)


def int8_decode(acc: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, block: int, assign: bool = False) -> None:
    launch_over_items("int8", "int8_decode", acc.numel(), acc, q, scale, acc.numel(), block, int(assign))


def linear_encode(
    q: torch.Tensor, scale: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None, block: int, bits: int,
    euclidean: bool, dither: bool,
) -> bool:
    n, finite = x.numel(), true_flag(x)
    launch_over_items("quantise", "linear_measure", 32 * -(-n // block), scale, x, residual, n, block, bits, finite)
    launch_over_items("quantise", "linear_code", -(-n // 8), q, scale, x, residual, n, block, bits, finite)
    return finite_or_absorbed(finite, x, residual)


def linear_decode(acc: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, block: int, bits: int, assign: bool = False) -> None:
    launch_over_items("quantise", "linear_decode", -(-acc.numel() // 8), acc, q, scale, acc.numel(), block, bits, int(assign))


TILE = 16 * THREADS
"""Number of elements that a CUDA block scans, as in cuda/select.cu."""

UNPACK_TILE_NBYTES = 16 * THREADS
"""Number of bytes that a CUDA block unpacks, as in cuda/positions.cu."""

TRIM_TILE = 4 * THREADS
TRIM_DIGITS = 3
TRIM_HISTOGRAMS = TRIM_DIGITS * 2048
"""Number of 32-bit histogram counters, as in cuda/trim.cu."""

ELIAS_FANO, BITMAP, SMALLER = 0, 1, -1
"""Encodings of positions. SMALLER: the kernel chooses the smaller encoding."""

NO_VALUES = -1
VALUES_BLOCK = 256
"""Entries per scale, as in cuda/layout.cuh."""

LEAST_THRESHOLD = 2.0**-126
FOUND = 3
"""Number of results of select_over: count of entries that reached the threshold, a flag for elements that are not finite, and
count of entries at or after `start`."""


def tiles(n: int, start_: int) -> int:
    """Returns the number of CUDA blocks, of TILE elements each, for a scan that starts at `start_` and wraps around."""
    return -(-(n - start_ // 4 * 4) // TILE) + -(-start_ // TILE)


Entries = tuple[torch.Tensor, torch.Tensor]
"""Positions and values of selected entries."""


def queue_scan(
    g: torch.Tensor, residual: torch.Tensor | None, threshold: torch.Tensor, start_: int, to: Entries, found: torch.Tensor,
    state: torch.Tensor,
) -> None:
    """Queues a kernel that selects entries into `to`, in scan order. `found` and `state` (1 + tiles) must contain zeros."""
    n, cap = g.numel(), min(to[0].numel(), to[1].numel())
    start("select", "select_over", tiles(n, start_), g, residual, n, threshold, start_, *to, cap, state, found)


def queue_rotate(to: Entries, from_: Entries, count: torch.Tensor, first: torch.Tensor) -> None:
    """Queues a kernel that reorders entries from scan order to position order. `first`: number of entries at or after the
    scan's start."""
    cap = min(to[0].numel(), to[1].numel())
    launch_over_items("select", "rotate", cap, *to, *from_, count, first, cap)


def queue_select(
    g: torch.Tensor, residual: torch.Tensor | None, threshold: torch.Tensor, start_: int, raw: Entries, picked: Entries,
    found: torch.Tensor, state: torch.Tensor,
) -> None:
    """Queues a selection into `raw`, then a copy to `picked` in position order. The other arguments are those of queue_scan."""
    queue_scan(g, residual, threshold, start_, raw, found, state)
    queue_rotate(picked, raw, found, found[2:])


def trim_words(cap: int) -> int:
    return TRIM_HISTOGRAMS // 2 + 2 * (1 + _trim_tiles(cap))


def _trim_tiles(cap: int) -> int:
    return -(-cap // TRIM_TILE)


def queue_trim(
    to: Entries, from_: Entries, residual: torch.Tensor | None, k: int, room: int, control: torch.Tensor, words: torch.Tensor
) -> None:
    """Queues kernels that keep the k largest of a scan's entries, if there are more than `room`. The order does not change; the
    other entries are added to the residual."""
    cap = from_[0].numel()
    histograms, scans = words[: TRIM_HISTOGRAMS // 2], words[TRIM_HISTOGRAMS // 2 :]
    above, equal = scans.chunk(2)
    for digit in range(TRIM_DIGITS):
        launch_over_items("trim", "trim_count", cap, from_[1], k, cap, room, digit, histograms, control)
    start("trim", "trim", _trim_tiles(cap), *to, *from_, residual, k, cap, room, histograms, above, equal, control)


def select(
    g: torch.Tensor, residual: torch.Tensor | None, threshold: float, start_: int, idx: torch.Tensor, val: torch.Tensor
) -> tuple[int, int, bool]:
    n, cap = g.numel(), min(idx.numel(), val.numel())
    if not threshold >= LEAST_THRESHOLD or not (0 <= start_ < n or start_ == n == 0):
        need = "threshold >= 2^-126 and 0 <= start < n"
        raise InvalidInput("E-CODEC-INPUT",
                           f"select: got threshold {threshold} and start {start_} for {n} elements, allowed: {need}")
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
    launch_over_items("select", "sample_abs", out.numel(), g, residual, g.numel(), offset, out.numel(), out)


def scatter_add(acc: torch.Tensor, idx: torch.Tensor, val: torch.Tensor) -> None:
    launch_over_items("sparse", "scatter_add", idx.numel(), acc, idx, val, idx.numel())


def scatter_add_int8(acc: torch.Tensor, idx: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, block: int) -> None:
    launch_over_items("sparse", "scatter_add_int8", idx.numel(), acc, idx, q, scale, idx.numel(), block)


def queue_pack(out: torch.Tensor, idx: torch.Tensor, n: int, most: int, count: torch.Tensor, values: int, kind: int) -> None:
    """Queues kernels that encode `count` positions below n (at most `most`) into the payload `out`, after its values of format
    `values`."""
    launch_over_items("positions", "clear_positions", min(-(-n // 8), most), out, n, count, values, kind)
    launch_over_items("positions", "pack_positions", most, out, idx, n, count, values, kind)


def _encode(out: torch.Tensor, idx: torch.Tensor, n: int, kind: int) -> int:
    """Encodes positions. `out` must have exactly the size of the encoded positions."""
    k = idx.numel()
    queue_pack(out, idx, n, k, torch.full((1,), k, dtype=torch.int64, device=idx.device), NO_VALUES, kind)
    return out.numel() if k or kind == BITMAP else 0


def _decode(idx: torch.Tensor, n: int, src: torch.Tensor, kind: int) -> None:
    """Decodes k >= 1 positions; `src` must be exactly the encoded bytes. Raises CorruptPayload otherwise."""
    k, valid = idx.numel(), true_flag(idx)
    grid = max(1, -(-src.numel() // UNPACK_TILE_NBYTES))
    state = torch.zeros(1 + grid, dtype=torch.int64, device=idx.device)
    start("positions", "unpack_positions", grid, idx, k, n, src, kind, state, valid)
    launch_over_items("positions", "check_increasing", k, idx, k, valid)
    if not valid.item():
        raise CorruptPayload(f"sparse payload: its bytes do not encode {k} increasing positions below {n}")


ef_encode, bitmap_encode = partial(_encode, kind=ELIAS_FANO), partial(_encode, kind=BITMAP)
ef_decode, bitmap_decode = partial(_decode, kind=ELIAS_FANO), partial(_decode, kind=BITMAP)


def nibbles_encode(q: torch.Tensor, scale: torch.Tensor, x: torch.Tensor, rest: torch.Tensor | None, block: int) -> bool:
    n, finite = x.numel(), true_flag(x)
    launch_over_items("nibbles", "nibbles_measure", 32 * -(-n // block), scale, x, n, block, finite)
    launch_over_items("nibbles", "nibbles_code", -(-n // 2), q, scale, x, rest, n, block, finite)
    return bool(finite.item())


def nibbles_decode(out: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, block: int) -> None:
    launch_over_items("nibbles", "nibbles_decode", out.numel(), out, q, scale, out.numel(), block)


ABS = 0x7FFFFFFF


def _magnitudes(x: torch.Tensor) -> torch.Tensor:
    """Returns the magnitudes of float32 numbers as integers with the same order; NaN is larger than infinity."""
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
    """Keeps the `keep` largest entries with torch operations, like cuda/trim.cu, which the queued version of topk uses."""
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


def blocks_nbytes(idx: torch.Tensor, n: int) -> int:
    return int(HOST.blocks_nbytes(idx.cpu().numpy(), n))


def blocks_encode(out: torch.Tensor, idx: torch.Tensor, n: int) -> int:
    """Encodes positions as blocks. `out` must have exactly the size of the encoded positions."""
    encoded = np.empty(out.numel(), np.uint8)
    HOST.blocks_encode(encoded, idx.cpu().numpy(), n)
    out.copy_(torch.from_numpy(encoded))
    return out.numel()


def blocks_decode(idx: torch.Tensor, n: int, src: torch.Tensor) -> None:
    where = np.empty(idx.numel(), np.int32)
    HOST.blocks_decode(where, n, src.cpu().numpy().data)
    idx.copy_(torch.from_numpy(where))
