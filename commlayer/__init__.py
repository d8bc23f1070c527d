"""commlayer: gradient compression and communication scheduling for PyTorch. Public names, each imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commlayer import balance as balance
    from commlayer import compressors as compressors
    from commlayer import optim as optim
    from commlayer import planner as planner
    from commlayer.autotune.shares.load_balancer import LoadBalancer as LoadBalancer
    from commlayer.config import Config as Config
    from commlayer.ddp import HookState as HookState
    from commlayer.ddp import comm_hook as comm_hook
    from commlayer.engine.sync.sync_modes import DiLoCo as DiLoCo
    from commlayer.engine.sync.sync_modes import LocalSteps as LocalSteps
    from commlayer.errors import CommError as CommError
    from commlayer.session import Session as Session
    from commlayer.session import attach as attach

    __version__: str

_MODULE_OF = {
    "Config": "commlayer.config",
    "CommError": "commlayer.errors",
    "LoadBalancer": "commlayer.autotune.shares.load_balancer",
    "DiLoCo": "commlayer.engine.sync.sync_modes",
    "HookState": "commlayer.ddp",
    "LocalSteps": "commlayer.engine.sync.sync_modes",
    "Session": "commlayer.session",
    "attach": "commlayer.session",
    "comm_hook": "commlayer.ddp",
}
_PACKAGES = ("balance", "compressors", "optim", "planner")

__all__ = sorted([*_MODULE_OF, *_PACKAGES])


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"commlayer.{name}")
    if name == "__version__":
        return importlib.import_module("commlayer.cluster.calls.messages").version()
    if name in _MODULE_OF:
        return getattr(importlib.import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module 'commlayer' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
