"""Work shares of unequal machines: batches, balancers, time models and the settings tuner.

Each name loads its module on first use: a training script imports no solver, and a planner no sampler.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commlayer.balance.balancer import Balancer as Balancer
    from commlayer.balance.balancer import Policy as Policy
    from commlayer.balance.dealer import Dealer as Dealer
    from commlayer.balance.events import Decision as Decision
    from commlayer.balance.events import Joined as Joined
    from commlayer.balance.events import Measurement as Measurement
    from commlayer.balance.events import Note as Note
    from commlayer.balance.events import Outcome as Outcome
    from commlayer.balance.events import Vanished as Vanished
    from commlayer.balance.models import Cubic as Cubic
    from commlayer.balance.models import Line as Line
    from commlayer.balance.models import Piecewise as Piecewise
    from commlayer.balance.sampler import Sampler as Sampler
    from commlayer.balance.share_solver import Communication as Communication
    from commlayer.balance.share_solver import Solution as Solution
    from commlayer.balance.share_solver import shares as shares
    from commlayer.balance.share_solver import solve as solve

_MODULES = {
    "balancer": ("Balancer", "Policy"),
    "dealer": ("Dealer",),
    "events": ("Decision", "Joined", "Measurement", "Note", "Outcome", "Vanished"),
    "models": ("Cubic", "Line", "Piecewise"),
    "sampler": ("Sampler",),
    "share_solver": ("Communication", "Solution", "shares", "solve"),
}
_MODULE_OF = {name: f"commlayer.balance.{module}" for module, names in _MODULES.items() for name in names}

__all__ = [
    "Balancer",
    "Communication",
    "Cubic",
    "Dealer",
    "Decision",
    "Joined",
    "Line",
    "Measurement",
    "Note",
    "Outcome",
    "Piecewise",
    "Policy",
    "Sampler",
    "Solution",
    "Vanished",
    "shares",
    "solve",
]


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module 'commlayer.balance' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
