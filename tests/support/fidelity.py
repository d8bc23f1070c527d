"""The fidelity of a payload, measured by decoding it: the reference for the guard's own comparison."""

from __future__ import annotations

import torch

from commlayer.compressors.codec import Codec, State
from commlayer.observe.fidelity import Fidelity


def compare(exact: torch.Tensor, sent: torch.Tensor, residual: torch.Tensor | None = None) -> Fidelity:
    """Compares one bucket of one step; `residual` is what is still kept back after it."""
    x, y = exact.double().flatten(), sent.double().flatten()
    norm, other = float(x.norm()), float(y.norm())
    kept = float(residual.double().norm()) if residual is not None else 0.0
    return Fidelity(float(x @ y) / (norm * other), other / norm, kept / norm)


def measure(codec: Codec, x: torch.Tensor, payload: memoryview, state: State) -> Fidelity:
    """After `start(x, state, out)` gave that payload, of a codec of one round."""
    assert len(codec.rounds) == 1
    sent = torch.empty_like(x)
    codec.decode(payload, state, sent)
    residual = state.get("residual")
    return compare(x, sent, None if residual is None else torch.as_tensor(residual))
