"""The outer optimizer of local steps: what an exchange does with the average of the workers' changes. Knows no network."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import torch

from commlayer.optim.family import Family


class Outer(msgspec.Struct, frozen=True):
    """SGD whose gradient is how far the workers have come on average, start minus end, since the last exchange.

    As it stands it is parameter averaging. DiLoCo (Douillard et al. 2023) found lr=0.7 and Nesterov's momentum of 0.9 best for
    exchanges hundreds of steps apart.
    """

    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = True
    matched: bool = False
    """Whether the average is first made as long as what workers have changed, by root mean square over them: at most the square
    root of their number times as long as it is. Each worker's Adam takes steps of about one length whatever the noise in its
    gradients, and the mean of such steps is too short; that of SGD's is right. It is what attach() takes by itself under Adam
    and its like."""

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise ValueError(f"Outer: lr {self.lr}, allowed: a finite number above 0")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"Outer: momentum {self.momentum}, allowed: 0 up to, but not, 1")

    def over(self, parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
        """One that updates these tensors by their `.grad`."""
        nesterov = self.nesterov and self.momentum > 0
        return torch.optim.SGD(list(parameters), lr=self.lr, momentum=self.momentum, nesterov=nesterov)


def usual(family: Family) -> Outer:
    """What is taken where nobody says: the average, as long as optimizers of that family need it."""
    return Outer(matched=family == "adam")
