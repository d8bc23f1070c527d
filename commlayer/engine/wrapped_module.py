"""What a communication hook finds out about the module that DDP wraps: DDP does not tell its hook. Knows no networks.

Runs once, in the first backward pass, and where an error is to name a parameter.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commlayer.engine.accepted_models import check_dtypes, check_parameter
from commlayer.engine.model_job import job_of, parameters_of
from commlayer.errors import InvalidInput
from commlayer.planner.model.gradients_only import gradients_of
from commlayer.records import Job, TensorInfo


def wrapper_of(state: object) -> DistributedDataParallel | None:
    """The DDP module that a communication hook's state is registered with. ValueError if there are several."""
    found = wrappers_of(state)
    if len(found) > 1:
        raise InvalidInput("E-DDP-HOOK",
                           f"this HookState is registered with {len(found)} DistributedDataParallel modules: make one for each")
    return found[0] if found else None


def wrappers_of(state: object) -> list[DistributedDataParallel]:
    """All of them."""
    kinds = tuple(_kinds(DistributedDataParallel))
    wrapped = [thing for thing in gc.get_objects() if type(thing) in kinds]
    return [ddp for ddp in wrapped if any(theirs is state for _, theirs in getattr(ddp, "_comm_hooks", ()))]


def _kinds(kind: type[object]) -> Iterator[type[object]]:
    """It and all below. Comparing the types of some hundred thousand things is quick; issubclass of an abstract one is not."""
    yield kind
    for below in kind.__subclasses__():
        yield from _kinds(below)


def name_of(parameter: torch.Tensor, module: nn.Module | None) -> str:
    """For an error."""
    named = parameters_of(module) if module is not None else []
    return next((name for name, p in named if p is parameter), "a parameter")


class Found(NamedTuple):
    """What is to be averaged."""

    named: list[tuple[str, torch.Tensor]]
    """The parameters by number."""
    job: Job
    """Their gradients; buffers are DDP's own."""
    whole: Job
    """The same with buffers, for which a plan may be made."""


def found_in(seen: Sequence[torch.Tensor], module: nn.Module | None) -> Found:
    """`seen`: all parameters in DDP's order, which is the same on all ranks. ValueError for what cannot be averaged."""
    # DDP's order is ready order; a Job stands in registration order, which is about its reverse.
    parameters = [*seen][::-1]
    whole = Job(tuple(
        TensorInfo(f"p{i}", tuple(p.shape), str(p.dtype).removeprefix("torch.")) for i, p in enumerate(parameters)
    ))
    known: list[torch.Tensor] = [p for _, p in parameters_of(module)] if module is not None else []
    if module is not None and {id(p) for p in known} == {id(p) for p in parameters}:
        parameters, whole = known, job_of(module)
    job = gradients_of(whole)
    named = list(zip((info.name for info in job.tensors), parameters, strict=True))
    for name, p in named:
        check_parameter(name, p)
    check_dtypes(job)
    return Found(named, job, whole)
