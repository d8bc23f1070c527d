"""Decides which sync modes a job can use, and why others are excluded. Changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commlayer.engine.connection import JobContext
from commlayer.engine.plan_choice import WAYS, Forbids
from commlayer.engine.quiet_ddp import check_silenceable
from commlayer.engine.sparse_averages import sparse_weights, stepped_lazily
from commlayer.errors import InvalidInput
from commlayer.optim.pieces import hooked, indivisible

SHARDED = "ZeroRedundancyOptimizer"
"""A name, because torch has the class only if torch.distributed is built, and importing it is slow."""


def allowed_ways(connection: JobContext) -> set[str]:
    """The modes of `WAYS` that a planner may choose on this rank."""
    return {way for way, why in forbidden_ways(connection).items() if not why}


def forbidden_ways(connection: JobContext) -> dict[str, str]:
    """For each of `WAYS`, why a planner may not choose it; "" if it may. Ranks may differ, so they exchange the results."""
    terms = connection.terms
    return {way: _asked_otherwise(connection, way) or terms.forbids(way) or terms.useless(way) for way in WAYS}


def takes_fragments(connection: JobContext) -> bool:
    """Whether a planner may choose the number of fragments: the script did not set it, and members are fixed. If members may
    leave, an exchange must be complete before any part of it is applied."""
    return connection.terms.requested.fragments is None and connection.members is None


def useless_of(connection: JobContext, scaler: Any, *, clips: bool) -> Forbids:
    """Modes that would run without any benefit."""

    def useless(way: str) -> str:
        if way != "forward":
            return ""
        if scaler is not None and scaler.is_enabled():
            return "a GradScaler decides from all gradients whether to skip a step, so backward() waits for them"
        if clips:
            return "max_norm= clips by the norm of all gradients, so step() waits for them"
        if connection.local is not None and connection.stepped is not None and connection.stepped.remembers:
            return "the ranks' optimizers are in different states since they stepped locally"
        return ""

    return useless


def _asked_otherwise(connection: JobContext, way: str) -> str:
    """The script's arguments to attach() hold for every plan."""
    requested = connection.terms.requested
    if way == "forward" and (requested.updates or requested.overlap == "round"):
        return f"attach() was given {requested}"
    if way != "forward" and (requested.codes == "gradients" or requested.overlap == "forward"):
        return f"attach() was given {requested}"
    if way != "forward" and requested.exact:
        return "attach() was given exact=True"
    if requested.every is not None and (requested.every > 1) == (way == "updates"):
        return f"attach() was given {requested}"
    return ""


def forbids_of(model: Any, named: Sequence[tuple[str, nn.Parameter]], optimizer: Any, hook: object = None) -> Forbids:
    """Which modes the arguments of attach() exclude. Checked at each call, because the optimizer may have changed. `hook`:
    commlayer's hook state on DDP."""

    def forbids(way: str) -> str:
        try:
            if way == "forward":
                check_overlap(model, named, optimizer)
            else:
                check_local(optimizer)
                if isinstance(model, DistributedDataParallel):
                    check_silenceable(model, hook)
        except ValueError as error:
            return str(error)
        return ""

    return forbids


def check_local(optimizer: Any, said: str = "") -> None:
    """Raises ValueError for an optimizer that cannot take local steps. `said`: the argument of attach()."""
    name, also = f"{said}: " if said else "", f", {said}" if said else ""
    if not hasattr(optimizer, "register_step_post_hook"):
        raise InvalidInput("E-SYNC-OPTIMIZER",
                           f"{name}got optimizer {type(optimizer).__name__}, allowed: a torch.optim.Optimizer, after whose "
                           f"steps weights are exchanged: attach(model, optimizer{also})")
    if not hooked(optimizer):  # a wrapper that only pretends to be an Optimizer, such as Accelerate's
        raise InvalidInput("E-SYNC-OPTIMIZER",
                           f"{name}got optimizer {type(optimizer).__name__}, which has no hooks on its steps: pass the "
                           "optimizer inside it")
    if any(kind.__name__ == SHARDED for kind in type(optimizer).__mro__):
        raise InvalidInput("E-SYNC-OPTIMIZER",
                           f"{name}{SHARDED} steps each parameter on one rank alone, which would learn from its own batches "
                           "only; allowed: the optimizer that it shards, or every=1 with gradients")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidInput("E-SYNC-OPTIMIZER",
                           f"{name}LBFGS makes its own number of backward passes per step, which differs between ranks; "
                           "allowed: an optimizer with one backward pass per step, such as AdamW, or every=1 with gradients")


def check_overlap(model: Any, named: Sequence[tuple[str, nn.Parameter]], optimizer: Any) -> None:
    """Raises ValueError if averages may not arrive after backward() has returned."""
    if isinstance(model, DistributedDataParallel):
        raise InvalidInput("E-SYNC-FORWARD",
                           "overlap='forward': DistributedDataParallel ends backward() only when gradients are final; attach "
                           "the module inside it, and leave DistributedDataParallel out")
    if optimizer is None:
        raise InvalidInput("E-SYNC-FORWARD",
                           "overlap='forward' calls the optimizer when results arrive: attach(model, optimizer, ...)")
    if why := indivisible(optimizer):
        raise InvalidInput("E-SYNC-FORWARD",
                           f"overlap='forward' applies a step in pieces, and {why}; remedy: another optimizer, or "
                           "leave overlap out")
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if missing := [name for name, p in named if id(p) not in stepped]:
        raise InvalidInput("E-SYNC-FORWARD",
                           f"overlap='forward': {len(missing)} parameters are not in the optimizer that was given, the first "
                           "is "
                           f"{missing[0]}: one optimizer has to step all of them, or leave these out with requires_grad=False")
    weights = sparse_weights(model)
    if sparse := [name for name, p in named if id(p) in weights]:
        raise InvalidInput("E-SYNC-FORWARD",
                           f"overlap='forward': the gradient of {sparse[0]} is sparse, and sparse averages are not split; pass "
                           "sparse=False to its nn.Embedding, or leave overlap out")
    if stepped_lazily(optimizer, [p for _, p in named]):
        raise InvalidInput("E-SYNC-FORWARD",
                           f"overlap='forward': {type(optimizer).__name__} takes sparse averages, which are not split; use the "
                           "dense optimizer, or leave overlap out")
