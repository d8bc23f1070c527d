"""How much work each worker gets, and how that follows what is measured. Pure: no torch, no clock, no threads."""

from commlayer.balance.models import Cubic, Line, Piecewise
from commlayer.balance.solve import Communication, Solution, shares, solve

__all__ = ["Communication", "Cubic", "Line", "Piecewise", "Solution", "shares", "solve"]
