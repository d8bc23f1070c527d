"""The outer optimizer of local steps: applies the average of the workers' changes (the pseudo-gradient) at each outer step."""

from __future__ import annotations

import math

import msgspec
import torch

from commlayer.errors import InvalidInput
from commlayer.optim.family import Family


class Outer(msgspec.Struct, frozen=True):
    """SGD whose gradient is the workers' mean change since the last outer step, start minus end.

    The defaults give parameter averaging. DiLoCo (Douillard et al. 2023) found lr=0.7 and Nesterov momentum of 0.9 best when
    outer steps are hundreds of steps apart.
    """

    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = True
    matched: bool = False
    """Norm-matched averaging: rescales the average to the root mean square of the workers' changes. The factor is at most the
    square root of the number of workers. Under Adam each worker's steps have about the same length whatever the noise in its
    gradients, so the mean of such steps is too short; under SGD the mean is right. attach() turns this on for Adam and its
    variants."""

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise InvalidInput("E-OPTIM-ARGUMENT", f"Outer: lr {self.lr}, allowed: a finite number above 0")
        if not 0 <= self.momentum < 1:
            raise InvalidInput("E-OPTIM-ARGUMENT", f"Outer: momentum {self.momentum}, allowed: 0 up to, but not, 1")

    def step(self, starts: torch.Tensor, change: torch.Tensor, velocity: torch.Tensor | None) -> None:
        """Moves `starts` by the mean change of the same elements, as torch.optim.SGD does by a gradient.

        `velocity` holds the momentum of those elements, zeros at first, and is updated in place. Required if momentum > 0.
        """
        if velocity is not None:
            velocity.mul_(self.momentum).add_(change)
            change = change.add(velocity, alpha=self.momentum) if self.nesterov else velocity
        starts.add_(change, alpha=-self.lr)


def usual(family: Family) -> Outer:
    """The default outer optimizer: averaging, norm-matched if optimizers of that family need it."""
    return Outer(matched=family == "adam")
