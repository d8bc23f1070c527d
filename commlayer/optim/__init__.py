"""Optimizers of commlayer's own. Knows parameters and gradients; no plans and no peers."""

from commlayer.optim.lans import CLAN as CLAN
from commlayer.optim.lans import LANS as LANS
from commlayer.optim.outer import Outer as Outer

__all__ = ["CLAN", "LANS", "Outer"]
