"""Plans: made, and checked against the model. Pure: no torch, no clock, no environment, no randomness."""

from commlayer.planner.default import default_plan
from commlayer.planner.rules import verify, verify_alone

__all__ = ["default_plan", "verify", "verify_alone"]
