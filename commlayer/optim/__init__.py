"""Optimizers of commlayer's own. Knows parameters and gradients; no plans and no peers."""

from commlayer.optim.outer import Outer as Outer

__all__ = ["Outer"]
