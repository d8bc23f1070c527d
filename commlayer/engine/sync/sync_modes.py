"""Defines the sync modes: attach()'s argument `sync`, its effect on a plan, and the modes that a job can use.

After the start only the plan defines when workers exchange. Modes that not every job can use, and the plan's field for each:

    forward   results arrive during the next forward pass                     Plan.overlap
    updates   weight changes are exchanged after every step                   Plan.codes
    local     weight changes are exchanged after several steps                Plan.local_steps
    round     the exchange overlaps with the next local steps                 Plan.overlap
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from msgspec import structs
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commlayer.engine.model.shard_parameters import is_sharded
from commlayer.engine.worker.sparse_averages import sparse_weights, stepped_lazily
from commlayer.errors import InvalidInput
from commlayer.optim import OuterSGD
from commlayer.optim.pieces import calls_step_hooks, why_indivisible
from commlayer.planner.buckets import most_fragments
from commlayer.records import Plan

MODES = ("forward", "updates", "local", "round")
Forbids = Callable[[str], str]
"""Function that maps one of `MODES` to the reason why this rank cannot use that sync mode; "" if it can."""


class LocalSteps(msgspec.Struct, frozen=True):
    """Value of attach()'s argument `sync` for local steps: each worker takes `every` optimizer steps on its own batches, then
    the workers exchange their weight changes, and an outer optimizer applies the average.

    `overlap`: training continues during the exchange, and its result is merged before the next exchange. `fragments`: number of
    parts in which the model is exchanged, one after every (every / fragments) steps. By default, overlapped exchanges have up
    to 8 parts, at most one every two steps; all others have one part. A plan passed to attach() keeps its own number.
    `outer`: the outer optimizer. None: the average is applied as it is, or for Adam and similar optimizers scaled to the norm
    of the workers' changes. every=1 exchanges weight changes in every step: for optimizers like Adam with sparse codecs.
    """

    every: int
    overlap: bool = True
    fragments: int | None = None
    outer: OuterSGD | None = None

    def __post_init__(self) -> None:
        if not _whole(self.every):
            raise InvalidInput("E-SYNC-EVERY", f"LocalSteps: every is {self.every!r}, but it must be a whole number of steps, "
                                               "1 or more")
        if self.fragments is not None and (not _whole(self.fragments) or self.every % self.fragments):
            raise InvalidInput("E-SYNC-FRAGMENTS",
                               f"LocalSteps: fragments is {self.fragments!r} with every={self.every}, but it must be a divisor "
                               "of every, because one fragment is exchanged every (every / fragments) steps")
        if not isinstance(self.overlap, bool) or not (self.outer is None or isinstance(self.outer, OuterSGD)):
            raise InvalidInput("E-SYNC-MODE", f"{self!r}: overlap must be True or False, and outer an OuterSGD or None")


def DiLoCo(every: int = 500, *, overlap: bool = False) -> LocalSteps:
    """Returns the local steps that Douillard et al. (2023) published: the outer optimizer is SGD with Nesterov momentum."""
    return LocalSteps(every, overlap=overlap, outer=OuterSGD(lr=0.7, momentum=0.9, nesterov=True))


class RequestedModes(NamedTuple):
    """The requirements of the argument `sync` on every plan of the job. The value is the same on all ranks. None in a field:
    the plan decides."""

    every: int | None = None
    """Number of steps after which weight changes are exchanged. The value is None if the script did not request local steps."""
    overlap: str | None = None
    fragments: int | None = None
    exact: bool | None = None
    """True: every plan must apply the average of all gradients in each step. False: the automatic plan can use local steps.
    None: only a plan that the script requests can use local steps."""
    text: str = "sync=None"
    """The argument as the script wrote it, for error messages."""

    @property
    def updates(self) -> bool:
        """True: weight changes are exchanged, whatever the plan defines."""
        return self.every is not None

    def __str__(self) -> str:
        return self.text


def requested_modes(sync: Any) -> RequestedModes:
    """Returns the modes that the argument `sync` of attach() requires."""
    text = f"sync={sync!r}"
    if isinstance(sync, LocalSteps):
        return RequestedModes(sync.every, "round" if sync.overlap else "", sync.fragments, text=text)
    exact = {None: None, "step": True, "auto": False, "forward": None}
    if not (sync is None or isinstance(sync, str)) or sync not in exact:
        raise InvalidInput("E-SYNC-MODE", f"sync: got {sync!r}, allowed: 'step', 'forward', 'auto' or LocalSteps(...)")
    return RequestedModes(overlap="forward" if sync == "forward" else None, exact=exact[sync], text=text)


def with_modes(plan: Plan, requested: RequestedModes) -> Plan:
    """Returns the plan with the requested sync mode. Raises ValueError if the plan contradicts it."""
    late = any(b.stale for b in plan.buckets)
    if requested.updates and late:
        raise InvalidInput("E-SYNC-MODE",
                           "plan: it has results that are one step late, which is not supported when weight changes are "
                           "exchanged: make the plan without staleness")
    if requested.every is not None and requested.every != plan.local_steps > 1:
        _contradiction(requested, f"{plan.local_steps} local steps")
    if (requested.exact or requested.overlap == "forward") and (plan.steps_locally or late):
        _contradiction(requested, "late results" if late else "an exchange of weight changes in every step"
                       if plan.local_steps == 1 else f"{plan.local_steps} local steps")
    if requested.overlap is not None and plan.overlap not in ("", requested.overlap):
        _contradiction(requested, f"overlap={plan.overlap!r}")
    every = requested.every or plan.local_steps
    fragments = plan.fragments
    if requested.fragments is not None:
        fragments = most_fragments(requested.fragments, every, len(plan.buckets))
        if plan.fragments not in (1, fragments, requested.fragments):
            _contradiction(requested, f"{plan.fragments} fragments")
    changed = structs.replace(plan, local_steps=every, codes="updates" if requested.every == 1 else plan.codes,
                              overlap=requested.overlap or plan.overlap, fragments=fragments)
    if all(getattr(changed, name) == getattr(plan, name) for name in ("local_steps", "overlap", "fragments", "steps_locally")):
        return changed
    # The prediction is for steps that wait for their exchange.
    return structs.replace(changed, step_s=0.0, steps=0.0, steps_high=0.0)


def _contradiction(requested: RequestedModes, what: str) -> None:
    raise InvalidInput("E-SYNC-PLAN", f"{requested}, but the plan has {what}: leave sync out, so that the plan decides, or "
                                      "give another plan")


def used_sync_modes(plan: Plan) -> list[tuple[str, str]]:
    """Returns the modes in `MODES` that a plan uses, each with a description."""
    modes = [("forward", "sync='forward'")] if plan.overlap == "forward" else []
    if plan.local_steps > 1:
        modes.append(("local", f"{plan.local_steps} local steps"))
    elif plan.codes == "updates":
        modes.append(("updates", "weight changes are exchanged in every step"))
    return modes + ([("round", "overlap='round'")] if plan.overlap == "round" else [])


def requested_otherwise(requested: RequestedModes, mode: str) -> str:
    """Returns the reason why the argument `sync`, which applies to every plan, excludes a mode; "" if `sync` allows the mode.
    """
    if mode == "forward":
        excluded = requested.updates
    else:
        excluded = bool(requested.exact) or requested.overlap == "forward" or (
            requested.every is not None and (requested.every > 1) == (mode == "updates"))
    return f"attach() was given {requested}" if excluded else ""


def forbidden_as_useless(scaler: Any, *, clips: bool, apart: Callable[[], bool]) -> Forbids:
    """Returns a function that returns the reason why a sync mode would bring no benefit in this job; "" if it might. `apart`
    returns True if local steps have left the optimizers in different states on different ranks."""

    def useless(mode: str) -> str:
        if mode != "forward":
            return ""
        if scaler is not None and scaler.is_enabled():
            return "a GradScaler needs all gradients to decide whether to skip a step, so backward() would wait for them"
        if clips:
            return "clip_grad_norm clips by the norm of all gradients, so step() would wait for them"
        return "the optimizers have different states on different ranks, because they have stepped locally" if apart() else ""

    return useless


def forbidden_by_model(model: Any, named: Sequence[tuple[str, nn.Parameter]], optimizer: Any) -> Forbids:
    """Returns a function that returns the reason why model or optimizer exclude a sync mode; "" if they allow it. The function
    checks at each call, because the optimizer can change."""

    def forbids(mode: str) -> str:
        try:
            if mode == "forward":
                check_forward(model, named, optimizer)
            else:
                check_local(optimizer)
        except ValueError as error:
            return str(error)
        return ""

    return forbids


SHARDED = "ZeroRedundancyOptimizer"
"""Name of an optimizer class that is detected by name: torch has the class only if torch.distributed is built, and importing it
is slow."""


def check_local(optimizer: Any) -> None:
    """Raises ValueError for an optimizer that cannot take local steps."""
    if problem := next(_local_problems(optimizer), ""):
        raise InvalidInput("E-SYNC-OPTIMIZER", problem)


def _local_problems(optimizer: Any) -> Iterator[str]:
    name = type(optimizer).__name__
    if not hasattr(optimizer, "register_step_post_hook"):
        yield (f"optimizer: got {name}, allowed with local steps: a torch.optim.Optimizer, because exchanges follow its steps; "
               "call attach(model, optimizer, sync=...)")
    if not calls_step_hooks(optimizer):  # a wrapper that only looks like an Optimizer, such as Accelerate's
        yield f"local steps: optimizer {name} does not support step hooks: pass the optimizer that it wraps"
    if any(kind.__name__ == SHARDED for kind in type(optimizer).__mro__):
        yield (f"local steps are not supported with {SHARDED}: it updates each parameter on one rank, which would learn only "
               "from its own batches; pass the optimizer that it shards, or use sync='step'")
    if isinstance(optimizer, torch.optim.LBFGS):
        yield ("local steps are not supported with LBFGS: it makes a variable number of backward passes per step, which "
               "differs between ranks; use an optimizer with one backward pass per step, such as AdamW, or sync='step'")


def check_forward(model: Any, named: Sequence[tuple[str, nn.Parameter]], optimizer: Any) -> None:
    """Raises ValueError if the model, its wrapper or its optimizer does not support averages that arrive during the next
    forward pass."""
    if problem := next(_problems_of_forward_sync(model, named, optimizer), ""):
        raise InvalidInput("E-SYNC-FORWARD", problem)


def _problems_of_forward_sync(model: Any, named: Sequence[tuple[str, nn.Parameter]], optimizer: Any) -> Iterator[str]:
    if isinstance(model, DistributedDataParallel):
        yield ("sync='forward' is not supported with DistributedDataParallel, whose backward() ends only when gradients are "
               "final; attach the module inside it, without DistributedDataParallel")
    if sharded := [name for name, p in named if is_sharded(p)]:
        yield (f"sync='forward' is not supported with sharded models such as that of {sharded[0]}, because FSDP gathers "
               "parameters before the forward pass; use sync='step'")
    if optimizer is None:
        yield ("sync='forward' needs the optimizer, because it applies updates when results arrive: call attach(model, "
               "optimizer, ...)")
    if why := why_indivisible(optimizer):
        yield f"sync='forward' applies a step in pieces, but {why}; use another optimizer, or sync='step'"
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if missing := [name for name, p in named if id(p) not in stepped]:
        yield (f"sync='forward': {len(missing)} parameters do not belong to the optimizer, for example {missing[0]}: one "
               "optimizer must step all parameters; add them, or exclude them with requires_grad=False")
    weights = sparse_weights(model)
    if sparse := [name for name, p in named if id(p) in weights]:
        yield (f"sync='forward' is not supported with the sparse gradient of {sparse[0]}, because sparse averages cannot be "
               "applied in pieces; pass sparse=False to its nn.Embedding, or use sync='step'")
    if stepped_lazily(optimizer, [p for _, p in named]):
        yield (f"sync='forward' is not supported with {type(optimizer).__name__}, whose sparse averages cannot be applied in "
               "pieces; use the dense optimizer, or sync='step'")


def _whole(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 1
