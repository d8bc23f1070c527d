"""Finds the DDP module around a communication hook, which DDP does not pass to its hook, and the tensors to average.

Runs once, in the first backward pass, and when an error has to name a parameter.
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
    """The DDP module with which a communication hook's state is registered. ValueError if there are several."""
    modules = wrappers_of(state)
    if len(modules) > 1:
        raise InvalidInput("E-DDP-HOOK",
                           f"this HookState is registered with {len(modules)} DistributedDataParallel modules: "
                           "make one for each")
    return modules[0] if modules else None


def wrappers_of(state: object) -> list[DistributedDataParallel]:
    kinds = tuple(_kinds(DistributedDataParallel))
    wrapped = [thing for thing in gc.get_objects() if type(thing) in kinds]
    return [ddp for ddp in wrapped if any(theirs is state for _, theirs in getattr(ddp, "_comm_hooks", ()))]


def _kinds(kind: type[object]) -> Iterator[type[object]]:
    """The class and all subclasses. Comparing the types of some hundred thousand objects is quick; issubclass of an abstract
    class is slow."""
    yield kind
    for below in kind.__subclasses__():
        yield from _kinds(below)


def name_of(parameter: torch.Tensor, module: nn.Module | None) -> str:
    named = parameters_of(module) if module is not None else []
    return next((name for name, p in named if p is parameter), "a parameter")


class Found(NamedTuple):
    """The tensors to average."""

    named: list[tuple[str, torch.Tensor]]
    """The parameters, by number."""
    job: Job
    """Their gradients; DDP itself handles buffers."""
    whole: Job
    """The same with buffers; a plan may be made for either."""


def found_in(seen: Sequence[torch.Tensor], module: nn.Module | None) -> Found:
    """`seen`: all parameters in DDP's order, which is the same on all ranks. ValueError if some cannot be averaged."""
    # DDP's order is ready order; a Job is in registration order, which is about the reverse.
    parameters = [*seen][::-1]
    full_job = Job(tuple(
        TensorInfo(f"p{i}", tuple(p.shape), str(p.dtype).removeprefix("torch.")) for i, p in enumerate(parameters)
    ))
    known: list[torch.Tensor] = [p for _, p in parameters_of(module)] if module is not None else []
    if module is not None and {id(p) for p in known} == {id(p) for p in parameters}:
        parameters, full_job = known, job_of(module)
    job = gradients_of(full_job)
    named = list(zip((info.name for info in job.tensors), parameters, strict=True))
    for name, p in named:
        check_parameter(name, p)
    check_dtypes(job)
    return Found(named, job, full_job)
