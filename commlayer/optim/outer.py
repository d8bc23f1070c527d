"""The outer optimizer of local steps: what an exchange does with the average of the workers' changes. Knows no network."""

from __future__ import annotations

import math

import msgspec
import torch

from commlayer.errors import InvalidInput
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
            raise InvalidInput("E-OPTIM-ARGUMENT", f"Outer: lr {self.lr}, allowed: a finite number above 0")
        if not 0 <= self.momentum < 1:
            raise InvalidInput("E-OPTIM-ARGUMENT", f"Outer: momentum {self.momentum}, allowed: 0 up to, but not, 1")

    def step(self, starts: torch.Tensor, change: torch.Tensor, velocity: torch.Tensor | None) -> None:
        """Moves starts by the mean change of the same elements, as torch.optim.SGD does by a gradient. `velocity`: those
        elements of what the last steps left, zeros at first; changes with it. Needed if there is momentum."""
        if velocity is not None:
            velocity.mul_(self.momentum).add_(change)
            change = change.add(velocity, alpha=self.momentum) if self.nesterov else velocity
        starts.add_(change, alpha=-self.lr)


def usual(family: Family) -> Outer:
    """What is taken where nobody says: the average, as long as optimizers of that family need it."""
    return Outer(matched=family == "adam")
