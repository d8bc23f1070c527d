"""Computes how well compressed gradients represent the exact ones (cosine, norm, residual), from sums over parts of the
gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

TINY = 1e-30


class Fidelity(NamedTuple):
    """How well a sampled part of the gradient was sent in one step. `cosine`: between sent and exact gradient; `norm_ratio`:
    norm of the sent over the exact gradient."""

    cosine: float
    norm_ratio: float
    residual_ratio: float
    """Norm of the residual over the norm of the exact gradient."""


class Dots(NamedTuple):
    """Dot products over the same elements: exact*exact, exact*sent, sent*sent, residual*residual. The products of several parts
    can be added."""

    xx: float = 0.0
    xy: float = 0.0
    yy: float = 0.0
    kk: float = 0.0

    def plus(self, other: Dots, fade: float = 1.0) -> Dots:
        return Dots(*(fade * a + b for a, b in zip(self, other, strict=True)))

    def fidelity(self) -> Fidelity:
        """Returns the fidelity. A gradient of zeros counts as sent perfectly."""
        if self.xx <= TINY:
            return Fidelity(1.0, 1.0, 0.0)
        return Fidelity(self.xy / max((self.xx * self.yy) ** 0.5, TINY), (self.yy / self.xx) ** 0.5, (self.kk / self.xx) ** 0.5)


def worst(seen: Sequence[Fidelity]) -> Fidelity:
    """Returns the worst value of each field: lowest cosine, norm ratio farthest from 1, largest residual."""
    return Fidelity(
        min(f.cosine for f in seen),
        max((f.norm_ratio for f in seen), key=lambda r: abs(r - 1)),
        max(f.residual_ratio for f in seen),
    )
