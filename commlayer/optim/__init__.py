"""Optimizers: sparse SGD and Adam, LANS and CLAN, and the outer optimizer of local steps."""

from commlayer.optim.lans import CLAN as CLAN
from commlayer.optim.lans import LANS as LANS
from commlayer.optim.outer import OuterSGD as OuterSGD
from commlayer.optim.outer import default_outer as default_outer
from commlayer.optim.outer import family_of as family_of
from commlayer.optim.sparse import SparseAdam as SparseAdam
from commlayer.optim.sparse import SparseAdamW as SparseAdamW
from commlayer.optim.sparse import SparseSGD as SparseSGD

__all__ = ["CLAN", "LANS", "OuterSGD", "SparseAdam", "SparseAdamW", "SparseSGD", "default_outer", "family_of"]
