"""Fidelity of sent gradients: cosine, norm and residual relative to the exact gradient, as sums over pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

TINY = 1e-30


class Fidelity(NamedTuple):
    """Fidelity of a sampled piece in one step."""

    cosine: float
    norm_ratio: float
    residual_ratio: float
    """Norm of the residual over that of the gradient."""


class Dots(NamedTuple):
    """Sums over elements of products: exact*exact, exact*sent, sent*sent, residual*residual. They add up over pieces."""

    xx: float = 0.0
    xy: float = 0.0
    yy: float = 0.0
    kk: float = 0.0

    def plus(self, other: Dots, fade: float = 1.0) -> Dots:
        return Dots(*(fade * a + b for a, b in zip(self, other, strict=True)))

    def fidelity(self) -> Fidelity:
        """A zero gradient counts as sent perfectly."""
        if self.xx <= TINY:
            return Fidelity(1.0, 1.0, 0.0)
        return Fidelity(self.xy / max((self.xx * self.yy) ** 0.5, TINY), (self.yy / self.xx) ** 0.5, (self.kk / self.xx) ** 0.5)


def worst(seen: Sequence[Fidelity]) -> Fidelity:
    """The lowest cosine, the norm ratio farthest from 1, and the largest residual."""
    return Fidelity(
        min(f.cosine for f in seen),
        max((f.norm_ratio for f in seen), key=lambda r: abs(r - 1)),
        max(f.residual_ratio for f in seen),
    )
