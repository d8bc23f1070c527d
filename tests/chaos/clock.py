"""Shifts the clock of a process in a chaos run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace


def jump(seconds: float) -> None:
    """Shifts the time of day that commlayer's modules read, as if the clock had been set. The machine's clock cannot be set for
    one process. gRPC reads the system's clock and is not affected."""
    for module in [module for name, module in sys.modules.items() if name.startswith("commlayer.")]:
        clock = vars(module).get("time")
        if clock is not None and hasattr(clock, "monotonic"):
            vars(module)["time"] = SimpleNamespace(**(vars(clock) | {"time": _later(clock.time, seconds)}))


def _later(clock: Callable[[], float], seconds: float) -> Callable[[], float]:
    return lambda: clock() + seconds
