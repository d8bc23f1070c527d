"""The outer optimizer of local steps: applies the average of the workers' changes (the pseudo-gradient) at each outer step.

Also classifies optimizers by their convergence with compressed gradients: SGD, Adam, Muon, Lion or other.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec
import torch

from commlayer.errors import InvalidInput


class OuterSGD(msgspec.Struct, frozen=True):
    """The outer optimizer: SGD whose gradient is the workers' mean change since the last outer step, start minus end.

    The defaults give parameter averaging. DiLoCo (Douillard et al. 2023) found lr=0.7 and Nesterov momentum of 0.9 best for
    outer steps that are hundreds of steps apart.
    """

    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = True
    matched: bool = False
    """Norm-matched averaging: rescales the average to the root mean square norm of the workers' changes, by at most the
    square root of the number of workers. Adam, Lion and Muon divide a gradient by its own size, so a worker's steps have about
    the same length for any noise in its gradients, and the mean of several workers' steps is too short. The more the workers
    agree, the closer the factor is to 1. With SGD the mean is correct. If workers have data of different kinds, their changes
    disagree for another reason than noise, and the plain average can be better."""

    def __post_init__(self) -> None:
        if not 0 < self.lr < math.inf:
            raise InvalidInput("E-OPTIM-ARGUMENT", f"OuterSGD: lr is {self.lr}, allowed: a finite number above 0")
        if not 0 <= self.momentum < 1:
            raise InvalidInput("E-OPTIM-ARGUMENT", f"OuterSGD: momentum is {self.momentum}, allowed: a number of at least 0 "
                                                   "and below 1")

    def __str__(self) -> str:
        """
        >>> str(OuterSGD(matched=True)), str(OuterSGD(lr=0.7, momentum=0.9))
        ('norm-matched averaging', 'SGD with lr=0.7, Nesterov momentum 0.9')
        """
        if self.lr == 1 and not self.momentum:
            return "norm-matched averaging" if self.matched else "averaging"
        momentum = f", {'Nesterov ' * self.nesterov}momentum {self.momentum:g}" if self.momentum else ""
        return f"SGD with lr={self.lr:g}{momentum}{', norm-matched' if self.matched else ''}"

    def step(self, starts: torch.Tensor, change: torch.Tensor, velocity: torch.Tensor | None) -> None:
        """Updates `starts` by the mean change of the same elements, as torch.optim.SGD does with a gradient.

        `velocity`: momentum of these elements, zeros at first; updated in place; required if momentum > 0.
        """
        if velocity is not None:
            velocity.mul_(self.momentum).add_(change)
            change = change.add(velocity, alpha=self.momentum) if self.nesterov else velocity
        starts.add_(change, alpha=-self.lr)


def default_outer(family: Family) -> OuterSGD:
    """Returns the default outer optimizer: averaging, norm-matched if optimizers of that family need it. None of its constants
    depends on the number of local steps, so a plan can change that number alone."""
    return OuterSGD(matched=family in ("adam", "lion", "muon"))


Family = Literal["sgd", "adam", "muon", "lion", "other"]

ADAM = ("adam", "lans", "clan", "lamb", "adagrad", "adadelta", "adafactor", "rmsprop", "novograd", "adopt")
"""Parts of class names of the Adam family, which divides each entry's step by the running size of its gradient. If a codec
sends an entry rarely, this size comes from rare, large gradients, and the steps between them are too small."""
MUON = ("muon", "dion")
"""Parts of class names of optimizers whose steps for matrices are orthogonal: all directions have the same length."""
LION = ("lion", "signsgd", "signum")
"""Parts of class names of optimizers that step by signs, so that all entries' steps have the same size."""
SGD = ("sgd", "lars")
"""Parts of class names of the SGD family. Its steps are proportional to gradients or to their running mean, so a later gradient
can compensate for an omitted one."""
INSIDE = ("optimizer", "optim", "base_optimizer", "_optimizer")
"""Attributes in which wrappers store the inner optimizer: Accelerate, ZeroRedundancyOptimizer, FSDP, Lookahead."""
DEEPEST = 8


def family_of(optimizer: Any) -> Family:
    """Returns the optimizer's family. "other" for None and for LBFGS or Rprop; a wrapper has the family of its inner optimizer.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.zeros(1))
    >>> family_of(torch.optim.AdamW([weight])), family_of(torch.optim.SGD([weight], lr=0.1)), family_of(None)
    ('adam', 'sgd', 'other')
    """
    for _ in range(DEEPEST):
        family = _named(type(optimizer))
        inner = next((launch_over_items for name in INSIDE
                      if hasattr(launch_over_items := getattr(optimizer, name, None), "param_groups")), None)
        if inner is None or inner is optimizer:
            return family
        optimizer = inner
    return "other"


def _named(kind: type) -> Family:
    """Classifies an optimizer class by its name or the name of a base class, so Adam8bit and FusedAdam are Adam."""
    families: list[tuple[Family, tuple[str, ...]]] = [("muon", MUON), ("lion", LION), ("adam", ADAM), ("sgd", SGD)]
    for name in (launch_over_items.__name__.lower() for launch_over_items in kind.__mro__):
        for family, words in families:
            if any(word in name for word in words):
                return family
    return "other"
