"""Which family an optimizer is of, as far as learning under coded gradients goes. Knows classes by name; no plans."""

from __future__ import annotations

from typing import Any, Literal

Family = Literal["sgd", "adam", "other"]

ADAM = ("adam", "lans", "clan", "lamb", "adagrad", "adadelta", "adafactor", "rmsprop", "novograd", "adopt")
"""Each entry's step is divided by the running size of its gradient. Where a codec brings an entry rarely, that size is one of
rare, large gradients, and the step is as small in between."""
SGD = ("sgd", "lars")
"""Steps are proportional to gradients, or to their running mean: what comes later is made up for."""
INSIDE = ("optimizer", "optim", "base_optimizer", "_optimizer")
"""Where wrappers have the one that steps: Accelerate's, ZeroRedundancyOptimizer, FSDP's, look-ahead ones."""
DEEPEST = 8


def family_of(optimizer: Any) -> Family:
    """"other" for what is neither, such as LBFGS, Lion or Rprop, and for None; wrappers count as what they wrap.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.zeros(1))
    >>> family_of(torch.optim.AdamW([weight])), family_of(torch.optim.SGD([weight], lr=0.1)), family_of(None)
    ('adam', 'sgd', 'other')
    """
    for _ in range(DEEPEST):
        found = _named(type(optimizer))
        inner = next((each for name in INSIDE if hasattr(each := getattr(optimizer, name, None), "param_groups")), None)
        if inner is None or inner is optimizer:
            return found
        optimizer = inner
    return "other"


def _named(kind: type) -> Family:
    """By its name or that of a class that it is made from: Adam8bit and FusedAdam are Adam."""
    for name in (each.__name__.lower() for each in kind.__mro__):
        if any(word in name for word in ADAM):
            return "adam"
        if any(word in name for word in SGD):
            return "sgd"
    return "other"
