"""Makes, explains, compares and verifies communication plans. Pure: no torch, no clock, no environment, no randomness."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from commlayer.planner.model.default_plan import default_plan
from commlayer.planner.model.plan_rules import verify, verify_alone
from commlayer.planner.model.runtime_form import lower
from commlayer.planner.simulation.timeline import Timeline, simulate
from commlayer.planner.tables.jobs import builtin, on_reference
from commlayer.planner.verbs.diff import diff
from commlayer.planner.verbs.lint import lint

if TYPE_CHECKING:
    from commlayer.planner.search.plan import plan as plan
    from commlayer.planner.verbs.explain import explain as explain
    from commlayer.planner.verbs.whatif import what_if as what_if

_LATE = {"plan": "commlayer.planner.search.plan", "explain": "commlayer.planner.verbs.explain",
         "what_if": "commlayer.planner.verbs.whatif"}
"""Loaded on first use: searching needs numpy, reading plans does not."""

__all__ = [
    "Timeline", "builtin", "default_plan", "diff", "explain", "lint", "lower", "on_reference", "plan", "simulate", "verify",
    "verify_alone", "what_if",
]


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(importlib.import_module(_LATE[name]), name)
    raise AttributeError(f"module 'commlayer.planner' has no attribute {name!r}")
