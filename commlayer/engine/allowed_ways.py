"""Decides which sync modes a job can use, and gives the reasons that exclude the others. It has no side effects."""

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
"""Name of an optimizer class that is detected by name: torch has the class only if torch.distributed is built, and importing it
is slow."""


def allowed_ways(connection: JobContext) -> set[str]:
    """The sync modes in `WAYS` that a planner can choose on this rank."""
    return {way for way, why in forbidden_ways(connection).items() if not why}


def forbidden_ways(connection: JobContext) -> dict[str, str]:
    """Maps each sync mode in `WAYS` to the reason why a planner cannot choose it, or to "" if it can. Reasons can differ
    between ranks, so ranks exchange them."""
    terms = connection.terms
    return {way: _asked_otherwise(connection, way) or terms.forbids(way) or terms.useless(way) for way in WAYS}


def takes_fragments(connection: JobContext) -> bool:
    """Whether a planner can choose the number of fragments: the script did not set it, and the workers cannot change. If
    workers might leave, an exchange must be complete before any part of it is applied."""
    return connection.terms.requested.fragments is None and connection.members is None


def useless_of(connection: JobContext, scaler: Any, *, clips: bool) -> Forbids:
    """Returns a function from a sync mode to the reason why the mode would bring no benefit in this job; "" if it might."""

    def useless(way: str) -> str:
        if way != "forward":
            return ""
        if scaler is not None and scaler.is_enabled():
            return "a GradScaler needs all gradients to decide whether to skip a step, so backward() would wait for them"
        if clips:
            return "max_norm clips by the norm of all gradients, so step() would wait for them"
        if connection.local is not None and connection.stepped is not None and connection.stepped.remembers:
            return "the optimizers have different states on different ranks, because they have stepped locally"
        return ""

    return useless


def _asked_otherwise(connection: JobContext, way: str) -> str:
    """The reason why the arguments of attach(), which apply to every plan, exclude a sync mode; "" if they allow it."""
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
    """Returns a function from a sync mode to the reason why model, optimizer or wrapper exclude it; "" if they allow it. It
    checks at each call, because the optimizer can change. `hook`: commlayer's hook state on DDP; None: there is none."""

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
    """Raises ValueError for an optimizer that cannot take local steps. `said`: the argument of attach() that requested them; ""
    if none did."""
    name, also = f"{said}: " if said else "", f", {said}" if said else ""
    if not hasattr(optimizer, "register_step_post_hook"):
        raise InvalidInput("E-SYNC-OPTIMIZER",
                           f"{name}got optimizer {type(optimizer).__name__}, but local steps need a torch.optim.Optimizer, "
                           f"after whose steps weight changes are exchanged: attach(model, optimizer{also})")
    if not hooked(optimizer):  # a wrapper that only pretends to be an Optimizer, such as Accelerate's
        raise InvalidInput("E-SYNC-OPTIMIZER",
                           f"{name}got optimizer {type(optimizer).__name__}, which does not support step hooks: pass the "
                           "optimizer that it wraps")
    if any(kind.__name__ == SHARDED for kind in type(optimizer).__mro__):
        raise InvalidInput("E-SYNC-OPTIMIZER",
                           f"{name}{SHARDED} is not supported with local steps: it updates each parameter on one rank, "
                           "which would learn only from its own batches; pass the optimizer that it shards, or use every=1 "
                           "with gradients")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidInput("E-SYNC-OPTIMIZER",
                           f"{name}LBFGS is not supported with local steps: it makes a variable number of backward passes "
                           "per step, which differs between ranks; use an optimizer with one backward pass per step, such "
                           "as AdamW, or every=1 with gradients")


def check_overlap(model: Any, named: Sequence[tuple[str, nn.Parameter]], optimizer: Any) -> None:
    """Raises ValueError if the model, its wrapper or its optimizer does not support averages that arrive after backward() has
    returned."""
    if isinstance(model, DistributedDataParallel):
        raise InvalidInput("E-SYNC-FORWARD",
                           "overlap='forward' is not supported with DistributedDataParallel, whose backward() ends only "
                           "when gradients are final; attach the module inside it, without DistributedDataParallel")
    if optimizer is None:
        raise InvalidInput("E-SYNC-FORWARD",
                           "overlap='forward' needs the optimizer, because it applies updates when results arrive: call "
                           "attach(model, optimizer, ...)")
    if why := indivisible(optimizer):
        raise InvalidInput("E-SYNC-FORWARD",
                           f"overlap='forward' applies a step in pieces, but {why}; use another optimizer, or leave overlap "
                           "out")
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if missing := [name for name, p in named if id(p) not in stepped]:
        raise InvalidInput("E-SYNC-FORWARD",
                           f"overlap='forward': {len(missing)} parameters do not belong to the optimizer, for example "
                           f"{missing[0]}: one optimizer must step all parameters; add them, or exclude them with "
                           "requires_grad=False")
    weights = sparse_weights(model)
    if sparse := [name for name, p in named if id(p) in weights]:
        raise InvalidInput("E-SYNC-FORWARD",
                           f"overlap='forward' is not supported with the sparse gradient of {sparse[0]}, because sparse "
                           "averages cannot be applied in pieces; pass sparse=False to its nn.Embedding, or leave overlap "
                           "out")
    if stepped_lazily(optimizer, [p for _, p in named]):
        raise InvalidInput("E-SYNC-FORWARD",
                           f"overlap='forward' is not supported with {type(optimizer).__name__}, whose sparse averages "
                           "cannot be applied in pieces; use the dense optimizer, or leave overlap out")
