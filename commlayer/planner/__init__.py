"""Makes, explains, compares and verifies communication plans. Pure: no torch, no clock, no environment, no randomness."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from commlayer.planner.buckets import default_plan
from commlayer.planner.plan_lint import lint
from commlayer.planner.plan_rules import lower, verify, verify_alone
from commlayer.planner.simulation import Timeline, simulate
from commlayer.planner.tables import builtin, on_reference

if TYPE_CHECKING:
    from commlayer.planner.explanation import diff as diff
    from commlayer.planner.explanation import explain as explain
    from commlayer.planner.explanation import what_if as what_if
    from commlayer.planner.search import plan as plan

_LATE = {"plan": "commlayer.planner.search",
         **dict.fromkeys(("diff", "explain", "what_if"), "commlayer.planner.explanation")}
"""Loaded on first use: searching needs numpy, reading plans does not."""

__all__ = [
    "Timeline", "builtin", "default_plan", "diff", "explain", "lint", "lower", "on_reference", "plan", "simulate", "verify",
    "verify_alone", "what_if",
]


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(importlib.import_module(_LATE[name]), name)
    raise AttributeError(f"module 'commlayer.planner' has no attribute {name!r}")
