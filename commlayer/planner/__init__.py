"""Makes, explains, compares and verifies communication plans. The package is pure: its functions use no torch, no clock, no
environment and no randomness."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from commlayer.planner.buckets import default_plan
from commlayer.planner.data.models import builtin, on_reference
from commlayer.planner.plan_rules import lower, verify, verify_alone

if TYPE_CHECKING:
    from commlayer.planner.baselines import what_if as what_if
    from commlayer.planner.explanation import diff as diff
    from commlayer.planner.explanation import explain as explain
    from commlayer.planner.plan_lint import lint as lint
    from commlayer.planner.search.plan_search import plan as plan
    from commlayer.planner.simulation import Timeline as Timeline
    from commlayer.planner.simulation import simulate as simulate

_LATE = {"plan": "commlayer.planner.search.plan_search", "lint": "commlayer.planner.plan_lint",
         **dict.fromkeys(("Timeline", "simulate"), "commlayer.planner.simulation"),
         **dict.fromkeys(("diff", "explain"), "commlayer.planner.explanation"), "what_if": "commlayer.planner.baselines"}
"""Maps public names to modules that are imported on first use, because they need numpy and reading plans does not."""

__all__ = [
    "Timeline", "builtin", "default_plan", "diff", "explain", "lint", "lower", "on_reference", "plan", "simulate", "verify",
    "verify_alone", "what_if",
]


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(importlib.import_module(_LATE[name]), name)
    raise AttributeError(f"module 'commlayer.planner' has no attribute {name!r}")
