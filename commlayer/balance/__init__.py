"""How much work each machine gets, and with which settings. Knows no torch and no network; each name loads when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commlayer.balance.dealer import Dealer as Dealer
    from commlayer.balance.sampler import Sampler as Sampler

_HOMES = {
    "Dealer": "commlayer.balance.dealer",
    "Sampler": "commlayer.balance.sampler",
}

__all__ = ["Dealer", "Sampler"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'commlayer.balance' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
