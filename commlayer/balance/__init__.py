"""Work shares of unequal machines: batches, balancers, time models and the settings tuner.

Each name loads its module on first use. A training script therefore imports no solver, and a planner no sampler.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commlayer.balance.balancer import Balancer as Balancer
    from commlayer.balance.balancer import Decision as Decision
    from commlayer.balance.balancer import Joined as Joined
    from commlayer.balance.balancer import Measurement as Measurement
    from commlayer.balance.balancer import Note as Note
    from commlayer.balance.balancer import Outcome as Outcome
    from commlayer.balance.balancer import SharePolicy as SharePolicy
    from commlayer.balance.sampler import Sampler as Sampler
    from commlayer.balance.share_solver import Communication as Communication
    from commlayer.balance.share_solver import Solution as Solution
    from commlayer.balance.share_solver import shares as shares
    from commlayer.balance.share_solver import solve as solve
    from commlayer.balance.time_models import LinearTime as LinearTime
    from commlayer.balance.time_models import Piecewise as Piecewise

_MODULES = {
    "balancer": ("Balancer", "Decision", "Joined", "Measurement", "Note", "Outcome", "SharePolicy"),
    "sampler": ("Sampler",),
    "share_solver": ("Communication", "Solution", "shares", "solve"),
    "time_models": ("LinearTime", "Piecewise"),
}
_MODULE_OF = {name: f"commlayer.balance.{module}" for module, names in _MODULES.items() for name in names}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module 'commlayer.balance' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
