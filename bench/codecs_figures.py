"""Cost and quality of sparse payloads: bits per entry, positions against their entropy, recall of the threshold."""

from __future__ import annotations

import math

import torch

from commlayer.compressors import entries, error_feedback, topk
from commlayer.compressors.payload import HEADER_NBYTES
from commlayer.compressors.payload import read as read_header
from commlayer.records import Spec

N, N_QUICK = 10_000_000, 1_000_000
SETTLE = 10
"""Number of steps after which a codec's threshold is steady."""


def figures(quick: bool) -> dict[str, float]:
    n = N_QUICK if quick else N
    return {
        **fed(n),
        "threshold_recall_1pct": round(recall(n), 4),
        **{f"position_bits_over_entropy_{name}": round(position_cost(n, share), 4)
           for name, share in (("01pct", 0.001), ("1pct", 0.01), ("10pct", 0.1))},
    }


def fed(n: int) -> dict[str, float]:
    """Bits per entry and number of entries of a steady payload of topk at 1 % with int8 values and error feedback."""
    codec = error_feedback(topk(0.01, "int8"))
    state, out = codec.init(Spec((n,))), memoryview(bytearray(codec.bound(Spec((n,)))))
    generator, nbytes = torch.Generator().manual_seed(1), 0
    for _ in range(SETTLE):
        nbytes = codec.start(torch.randn(n, generator=generator), state, out)
    count = read_header(out[:nbytes], codec.id, n).entries
    return {"bits_per_entry_1pct_int8": round(8 * (nbytes - HEADER_NBYTES) / count, 3),
            "entries_over_k_1pct": round(count / math.ceil(0.01 * n), 4)}


def recall(n: int) -> float:
    """Fraction of the largest 1 % of gradient + residual that the tracked threshold sends once it is steady."""
    inner, k, hits = topk(0.01, "fp32"), math.ceil(0.01 * n), 0
    codec = error_feedback(inner)
    state, out = codec.init(Spec((n,))), memoryview(bytearray(codec.bound(Spec((n,)))))
    generator = torch.Generator().manual_seed(2)
    for step in range(SETTLE):
        x = torch.randn(n, generator=generator)
        v = x + torch.from_numpy(state["residual"])
        nbytes = codec.start(x, state, out)
        if step >= SETTLE - 2:
            mine = torch.zeros(n, dtype=torch.bool)
            entries_ = inner.read(out[:nbytes], n)
            assert entries_ is not None
            mine[torch.from_numpy(entries_[0]).long()] = True
            hits += int(mine[torch.topk(v.abs(), k).indices].sum())
    return hits / (2 * k)


def position_cost(n: int, share: float) -> float:
    """Bits of uniformly distributed positions, divided by log2 C(n, k)."""
    k = int(n * share)
    idx = torch.randperm(n, generator=torch.Generator().manual_seed(3))[:k].sort().values.to(torch.int32)
    room = memoryview(bytearray(entries.positions_bound(n, k)))
    _, nbytes = entries.encode_positions(room, idx, n)
    entropy = (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)
    return 8 * nbytes / entropy
