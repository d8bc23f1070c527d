"""Fidelity of sent gradients: cosine, norm and residual relative to the exact gradient, from sums over pieces of the
gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

TINY = 1e-30


class Fidelity(NamedTuple):
    """How well a sampled piece of the gradient was sent in one step. `cosine`: between sent and exact gradient; `norm_ratio`:
    norm of the sent over the exact gradient."""

    cosine: float
    norm_ratio: float
    residual_ratio: float
    """Norm of the residual over the norm of the exact gradient."""


class Dots(NamedTuple):
    """Sums over elements of products: exact*exact, exact*sent, sent*sent, residual*residual. Sums of several pieces can be
    added."""

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
    """Returns the lowest cosine, the norm ratio farthest from 1, and the largest residual."""
    return Fidelity(
        min(f.cosine for f in seen),
        max((f.norm_ratio for f in seen), key=lambda r: abs(r - 1)),
        max(f.residual_ratio for f in seen),
    )
