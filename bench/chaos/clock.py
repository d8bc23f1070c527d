"""The clock of a process that was forked for a chaos run: it is off by as much as it is told. Knows no run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace


def jump(seconds: float) -> None:
    """What commlayer takes for the time of day, as after somebody has set the clock. The machine's own cannot be set for one
    process, and gRPC, which keeps to that, is left alone."""
    for module in [module for name, module in sys.modules.items() if name.startswith("commlayer.")]:
        clock = vars(module).get("time")
        if clock is not None and hasattr(clock, "monotonic"):
            vars(module)["time"] = SimpleNamespace(**(vars(clock) | {"time": _later(clock.time, seconds)}))


def _later(clock: Callable[[], float], seconds: float) -> Callable[[], float]:
    return lambda: clock() + seconds
