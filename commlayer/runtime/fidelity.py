"""Compares what a bucket sent with what it was given. Knows codecs and tensors; what follows from it is the guard's."""

from __future__ import annotations

import torch

from commlayer.balance.guard import Fidelity
from commlayer.compressors.codec import Codec, State

TINY = 1e-30


def compare(exact: torch.Tensor, sent: torch.Tensor, residual: torch.Tensor | None = None) -> Fidelity:
    """Of one bucket of one step; `residual` is what is still kept back after it. A zero gradient is sent perfectly."""
    x, y = exact.double().flatten(), sent.double().flatten()
    norm, other = float(x.norm()), float(y.norm())
    kept = float(residual.double().norm()) if residual is not None else 0.0
    if norm < TINY:
        return Fidelity(1.0, 1.0, 0.0)
    return Fidelity(float(x @ y) / max(norm * other, TINY), other / norm, kept / norm)


def measure(codec: Codec, x: torch.Tensor, payload: memoryview, state: State) -> Fidelity:
    """After `start(x, state, out)` gave that payload: decodes it once more, on a copy of nothing but its result.

    For codecs of one round; of those with several a payload alone means nothing.
    """
    if len(codec.rounds) != 1:
        raise ValueError(f"{codec} has {len(codec.rounds)} rounds: only payloads of one round can be compared")
    sent = torch.empty_like(x)
    codec.decode(payload, state, sent)
    residual = state.get("residual")
    return compare(x, sent, residual if isinstance(residual, torch.Tensor) else None)


def worst(seen: list[Fidelity]) -> Fidelity:
    """Of several buckets: the least cosine, the norm farthest from its own, the largest residual."""
    return Fidelity(
        min(f.cosine for f in seen),
        max((f.norm_ratio for f in seen), key=lambda r: abs(r - 1)),
        max(f.residual_ratio for f in seen),
    )
