"""Plans: made, explained, compared and checked against the model. Pure: no torch, no clock, no environment, no randomness."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from commlayer.planner.default import default_plan
from commlayer.planner.diff import diff
from commlayer.planner.explain import explain
from commlayer.planner.jobs import builtin, on_reference
from commlayer.planner.lint import lint
from commlayer.planner.lower import lower
from commlayer.planner.rules import verify, verify_alone
from commlayer.planner.simulate import Timeline, simulate

if TYPE_CHECKING:
    from commlayer.planner.select import plan as plan
    from commlayer.planner.whatif import what_if as what_if

_LATE = {"plan": "commlayer.planner.select", "what_if": "commlayer.planner.whatif"}
"""Searching is arithmetic over arrays: whoever only reads plans need not load numpy."""

__all__ = [
    "Timeline", "builtin", "default_plan", "diff", "explain", "lint", "lower", "on_reference", "plan", "simulate", "verify",
    "verify_alone", "what_if",
]


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(importlib.import_module(_LATE[name]), name)
    raise AttributeError(f"module 'commlayer.planner' has no attribute {name!r}")
