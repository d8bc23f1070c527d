"""What overlap="forward" refuses by name before anything is attached. Knows modules and optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commlayer.optim.pieces import indivisible
from commlayer.runtime.sparse_averages import stepped_lazily


def check_overlap(model: Any, named: Sequence[tuple[str, nn.Parameter]], optimizer: Any) -> None:
    """ValueError where results may not come in behind backward()."""
    if isinstance(model, DistributedDataParallel):
        raise ValueError("overlap='forward': DistributedDataParallel ends backward() only when gradients are final; attach the "
                         "module inside it, and leave DistributedDataParallel out")
    if optimizer is None:
        raise ValueError("overlap='forward' steps with the optimizer when results come in: attach(model, optimizer, ...)")
    if why := indivisible(optimizer):
        raise ValueError(f"overlap='forward' applies a step in pieces, and {why}; remedy: another optimizer, or "
                         "leave overlap out")
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if missing := [name for name, p in named if id(p) not in held]:
        raise ValueError(f"overlap='forward': {len(missing)} parameters are not in the optimizer that was given, the first is "
                         f"{missing[0]}: one optimizer has to step all of them, or leave these out with requires_grad=False")
    if stepped_lazily(optimizer, [p for _, p in named]):
        raise ValueError(f"overlap='forward': {type(optimizer).__name__} takes sparse averages, which come whole; take "
                         "the dense optimizer, or leave overlap out")
