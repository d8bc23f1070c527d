"""Top-k on a device with only one wait for the device: selection.pick and the encoding, queued as kernels.

The host makes no decision between gradient and payload: the device runs sample, threshold, scan, trim and pack one after the
other. At the end the host reads the payload's size and the counts that update the threshold. If the scan found too few entries
or a non-finite one, or if positions are smallest as blocks, nothing was packed. The caller then continues with the general
method.
"""

from __future__ import annotations

import torch

from commlayer.compressors import selection
from commlayer.compressors.codec import State
from commlayer.compressors.kernels import cuda
from commlayer.compressors.selection import Picked
from commlayer.gpu.launch import launch_over_items
from commlayer.gpu.launch import start as launch

CONTROL = 13
"""Number of 64-bit words of struct Control in cuda/control.cuh: integers, then three doubles."""

KEPT, COUNT, CUT = 3, 6, 10
"""Offsets in Control. KEPT: entries kept, followed by how many of them are at or after the scan's start. COUNT: entries in the
payload. CUT: threshold, followed by slope and shift."""

RESELECT = -1
"""Special value of COUNT: the device's selection failed, so the host must select entries again."""

CUT_THREADS = 1024


def start(
    codec: int, values: int, k: int, x: torch.Tensor, residual: torch.Tensor | None, state: State, out: torch.Tensor
) -> tuple[int, Picked | None]:
    """Returns (nbytes, None) with the payload in `out`, or (0, the selected entries) if nothing was written."""
    n, scratch = x.numel(), state["_scratch"]
    idx, val = scratch["idx"], scratch["val"]
    begin, room = selection.rotation(n, state), selection.capacity(n, k, False)
    sizes = (CONTROL, 1 + cuda.tiles(n, begin), cuda.trim_words(idx.numel()))
    control, scan, trim = torch.zeros(sum(sizes), dtype=torch.int64, device=x.device).split(sizes)
    cut = torch.empty(1, device=x.device)
    _queue_cut(k, x, residual, state, begin, control, cut)
    cuda.queue_scan(x, residual, cut, begin, (idx, val), control, scan)
    _queue_trim(k, room, residual, scratch, control, trim)
    launch_over_items("topk", "count_blocks", room, idx, control)
    launch("topk", "settle", 1, out, n, k, codec, values, control, threads=1)
    blocks = -(-room // cuda.VALUES_BLOCK)
    launch("topk", "pack_values", blocks, out, idx, val, residual, values, control, threads=cuda.VALUES_BLOCK)
    cuda.queue_pack(out, idx, n, room, control[COUNT:], values, cuda.SMALLER)
    fields = control.cpu()
    passed, bad, _, kept, _, _, count, nbytes, shifted, infinite = fields[:CUT].tolist()
    threshold_, slope, shift = fields[CUT:].view(torch.float64).tolist()
    tracked = selection.Estimate(threshold_, slope, shift if shifted else None)
    if count == RESELECT:
        return 0, selection.complete(k, x, residual, state, tracked, kept, passed - kept, not bad)
    selection.update(k, n, passed, tracked, state)
    if count < 0 or infinite:  # positions as blocks, or an infinite value: the caller encodes
        return 0, Picked(idx[:kept], val[:kept], True)
    return nbytes, None


def _queue_cut(
    k: int, x: torch.Tensor, residual: torch.Tensor | None, state: State, offset: int, control: torch.Tensor, cut: torch.Tensor
) -> None:
    """Queues selection.estimate, which computes the threshold."""
    n, sample = x.numel(), state["_scratch"]["sample"]
    usual, larger, rank, expected, calm = selection.sampling(n, k, state)
    tracked = torch.tensor([state["threshold"], state["slope"], state["doubt"]], dtype=torch.float64).to(x.device)
    cuda.sample_abs(x, residual, offset, sample[:usual])
    numbers = (offset, sample, usual, larger, rank, int(calm), expected, tracked, control, cut)
    launch("topk", "cut_begin", 1, x, residual, n, *numbers, threads=CUT_THREADS)


def _queue_trim(
    k: int, room: int, residual: torch.Tensor | None, scratch: State, control: torch.Tensor, words: torch.Tensor
) -> None:
    """Queues cuda.trim for the scan's entries in idx and val, if there are more than `room`; then restores position
    order."""
    if "raw_idx" not in scratch:
        scratch["raw_idx"], scratch["raw_val"] = torch.empty_like(scratch["idx"]), torch.empty_like(scratch["val"])
    idx, val, raw_idx, raw_val = (scratch[name] for name in ("idx", "val", "raw_idx", "raw_val"))
    cuda.queue_trim((raw_idx, raw_val), (idx, val), residual, k, room, control, words)
    cuda.queue_rotate((idx, val), (raw_idx, raw_val), control[KEPT:], control[KEPT + 1 :])
