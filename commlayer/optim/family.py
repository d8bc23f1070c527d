"""Classifies optimizers by how they converge under compressed gradients: SGD, Adam or other."""

from __future__ import annotations

from typing import Any, Literal

Family = Literal["sgd", "adam", "other"]

ADAM = ("adam", "lans", "clan", "lamb", "adagrad", "adadelta", "adafactor", "rmsprop", "novograd", "adopt")
"""These divide each entry's step by the running size of its gradient. If a codec sends an entry rarely, that size comes from
rare, large gradients, and the steps in between are too small."""
SGD = ("sgd", "lars")
"""Steps are proportional to gradients or to their running mean, so a later gradient makes up for a missing one."""
INSIDE = ("optimizer", "optim", "base_optimizer", "_optimizer")
"""Attributes under which wrappers keep the inner optimizer: Accelerate, ZeroRedundancyOptimizer, FSDP, look-ahead."""
DEEPEST = 8


def family_of(optimizer: Any) -> Family:
    """The optimizer's family. "other" for None and for LBFGS, Lion or Rprop; a wrapper counts as its inner optimizer.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.zeros(1))
    >>> family_of(torch.optim.AdamW([weight])), family_of(torch.optim.SGD([weight], lr=0.1)), family_of(None)
    ('adam', 'sgd', 'other')
    """
    for _ in range(DEEPEST):
        family = _named(type(optimizer))
        inner = next((each for name in INSIDE if hasattr(each := getattr(optimizer, name, None), "param_groups")), None)
        if inner is None or inner is optimizer:
            return family
        optimizer = inner
    return "other"


def _named(kind: type) -> Family:
    """Classifies by the name of the class or of a base class: Adam8bit and FusedAdam are Adam."""
    for name in (each.__name__.lower() for each in kind.__mro__):
        if any(word in name for word in ADAM):
            return "adam"
        if any(word in name for word in SGD):
            return "sgd"
    return "other"
