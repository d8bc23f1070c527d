"""Optimizers: sparse SGD and Adam, LANS and CLAN, and the outer optimizer of local steps."""

from commlayer.optim.adam import SparseAdam as SparseAdam
from commlayer.optim.adam import SparseAdamW as SparseAdamW
from commlayer.optim.family import family_of as family_of
from commlayer.optim.lans import CLAN as CLAN
from commlayer.optim.lans import LANS as LANS
from commlayer.optim.outer import Outer as Outer
from commlayer.optim.outer import usual as usual
from commlayer.optim.sgd import SparseSGD as SparseSGD

__all__ = ["CLAN", "LANS", "Outer", "SparseAdam", "SparseAdamW", "SparseSGD", "family_of", "usual"]
