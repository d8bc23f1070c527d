"""Plans: made, explained, compared and checked against the model. Pure: no torch, no clock, no environment, no randomness."""

from commlayer.planner.default import default_plan
from commlayer.planner.diff import diff
from commlayer.planner.explain import explain
from commlayer.planner.jobs import builtin, on_reference
from commlayer.planner.lint import lint
from commlayer.planner.lower import lower
from commlayer.planner.rules import verify, verify_alone
from commlayer.planner.select import plan
from commlayer.planner.simulate import Timeline, simulate
from commlayer.planner.whatif import what_if

__all__ = [
    "Timeline", "builtin", "default_plan", "diff", "explain", "lint", "lower", "on_reference", "plan", "simulate", "verify",
    "verify_alone", "what_if",
]
