"""How well what was sent matches the exact gradient, as numbers that add up over pieces. Knows no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

TINY = 1e-30


class Fidelity(NamedTuple):
    """What a sampled piece shows of one step: the sent against the exact gradient."""

    cosine: float
    norm_ratio: float
    residual_ratio: float
    """Norm of the residual over that of the gradient."""


class Dots(NamedTuple):
    """Sums over elements: exact with exact, exact with other, other with other, kept with kept. They add up over pieces."""

    xx: float = 0.0
    xy: float = 0.0
    yy: float = 0.0
    kk: float = 0.0

    def plus(self, other: Dots, fade: float = 1.0) -> Dots:
        return Dots(*(fade * a + b for a, b in zip(self, other, strict=True)))

    def fidelity(self) -> Fidelity:
        """Nothing to send is sent perfectly."""
        if self.xx <= TINY:
            return Fidelity(1.0, 1.0, 0.0)
        return Fidelity(self.xy / max((self.xx * self.yy) ** 0.5, TINY), (self.yy / self.xx) ** 0.5, (self.kk / self.xx) ** 0.5)


def worst(seen: Sequence[Fidelity]) -> Fidelity:
    """Of several: the least cosine, the norm farthest from its own, the largest residual."""
    return Fidelity(
        min(f.cosine for f in seen),
        max((f.norm_ratio for f in seen), key=lambda r: abs(r - 1)),
        max(f.residual_ratio for f in seen),
    )
