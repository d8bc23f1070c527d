"""How much work each worker gets, and how that follows what is measured. Pure: no torch, no clock, no threads."""

from commlayer.balance.balancer import Balancer, Policy
from commlayer.balance.events import Decision, Joined, Measurement, Note, Outcome, Vanished
from commlayer.balance.models import Cubic, Line, Piecewise
from commlayer.balance.solve import Communication, Solution, shares, solve

__all__ = [
    "Balancer",
    "Communication",
    "Cubic",
    "Decision",
    "Joined",
    "Line",
    "Measurement",
    "Note",
    "Outcome",
    "Piecewise",
    "Policy",
    "Solution",
    "Vanished",
    "shares",
    "solve",
]
