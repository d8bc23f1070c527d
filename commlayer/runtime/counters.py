"""What a worker counts about itself. Plain numbers, added to by its lanes; read by session.stats()."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Counters:
    """Sums since the start. Each field is written by one thread only."""

    steps: int = 0
    sent_nbytes: int = 0
    received_nbytes: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0
    exposed_s: float = 0.0
    """Time that the training thread waited for communication after backward was over."""
    guard_s: float = 0.0
    """Time that it spent on comparing with exact gradients."""

    def as_dict(self) -> dict[str, float]:
        return dataclasses.asdict(self)
