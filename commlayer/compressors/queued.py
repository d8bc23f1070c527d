"""topk on a device with one wait in all: what selection.pick and the encoding do, queued as kernels. Knows launches, no format.

The host decides nothing between gradient and bytes: sample, cut, scan and packing follow one another on the device, and the
size of the payload comes back in the end with what the threshold's filter learns from. Where the scan found too little, too
much or something not finite, nothing was packed, and the caller goes on in the general way.
"""

from __future__ import annotations

import torch

from commlayer.compressors import selection, threshold
from commlayer.compressors.codec import State
from commlayer.compressors.device import sparse
from commlayer.compressors.device.launch import start as launch
from commlayer.compressors.selection import Picked

CONTROL = 10
"""Words of struct Control in cuda/topk.cu: total, bad, first, count, nbytes, shifted, infinite, then cut, slope, shift."""

CUT_THREADS = 1024


def start(
    codec: int, values: int, k: int, x: torch.Tensor, residual: torch.Tensor | None, state: State, out: torch.Tensor
) -> tuple[int, Picked | None]:
    """(nbytes, None) with the payload in `out`, or (0, what was picked) with nothing there yet."""
    n, scratch = x.numel(), state["_scratch"]
    idx, val = scratch["idx"], scratch["val"]
    raw = _raw(scratch)
    begin = threshold.rotation(n, state)
    words = torch.zeros(CONTROL + 1 + sparse.tiles(n, begin), dtype=torch.int64, device=x.device)
    control, scan = words[:CONTROL], words[CONTROL:]
    cut = torch.empty(1, device=x.device)
    _queue_cut(k, x, residual, state, begin, control, cut)
    sparse.queue_select(x, residual, cut, begin, raw, (idx, val), control, scan)
    room = selection.room(n, k, False)
    launch("topk", "settle", 1, out, n, k, idx.numel(), room, codec, values, control, threads=1)
    blocks = -(-room // sparse.VALUES_BLOCK)
    launch("topk", "pack_values", blocks, out, idx, val, residual, values, control, threads=sparse.VALUES_BLOCK)
    sparse.queue_pack(out, idx, n, room, control[3:], values, sparse.SMALLER)
    told = control.cpu()
    passed, bad, _, count, nbytes, shifted, infinite = told[:7].tolist()
    threshold_, slope, shift = told[7:].view(torch.float64).tolist()
    tracked = threshold.Cut(threshold_, slope, shift if shifted else None)
    if count < 0:
        found = min(passed, idx.numel())
        return 0, selection.mend(k, x, residual, state, tracked, found, passed - found, not bad)
    threshold.end(k, n, passed, tracked, state)
    if infinite:  # the general way sees it again, and flags the payload
        return 0, Picked(idx[:count], val[:count], True)
    return nbytes, None


def _queue_cut(
    k: int, x: torch.Tensor, residual: torch.Tensor | None, state: State, offset: int, control: torch.Tensor, cut: torch.Tensor
) -> None:
    """threshold.begin."""
    n, sample = x.numel(), state["_scratch"]["sample"]
    usual, larger, rank, expected, calm = threshold.sampling(n, k, state)
    tracked = torch.tensor([state["threshold"], state["slope"], state["doubt"]], dtype=torch.float64).to(x.device)
    sparse.sample_abs(x, residual, offset, sample[:usual])
    numbers = (offset, sample, usual, larger, rank, int(calm), expected, tracked, control, cut)
    launch("topk", "cut_begin", 1, x, residual, n, *numbers, threads=CUT_THREADS)


def _raw(scratch: State) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for entries in the order of the scan, made once."""
    if "raw_idx" not in scratch:
        scratch["raw_idx"], scratch["raw_val"] = torch.empty_like(scratch["idx"]), torch.empty_like(scratch["val"])
    return scratch["raw_idx"], scratch["raw_val"]
