"""Times at which a step needs and produces each tensor: measured here without communication, or taken from recorded steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch
from msgspec import structs
from torch import nn

from commlayer.engine.model_job import job_of, parameters_of
from commlayer.errors import InvalidInput
from commlayer.observe import RecordedStep
from commlayer.planner.tables.machines import device_named
from commlayer.records import Job, Timing

WARM_STEPS, STEPS = 2, 5


def timed_job(model: nn.Module, loss_of: Callable[[], torch.Tensor], *, batch: int | None = None, name: str = "") -> Job:
    """The model's Job with its Timing: medians of a few steps of loss_of() and backward()."""
    job = job_of(model)
    watch, activations = _Watch(model, len(job.tensors)), dict[int, int]()
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            activations[storage.data_ptr()] = storage.nbytes()
        return tensor

    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            watch.step(loss_of)
        for _ in range(WARM_STEPS - 1 + STEPS):
            model.zero_grad()
            watch.step(loss_of)
    finally:
        watch.remove()
    return Job(job.tensors, batch, structs.replace(watch.timing(), activation_nbytes=float(sum(activations.values()))), name)


class _Watch:
    """Hooks that record times. Each synchronizes a GPU, so that its work counts for the right tensor."""

    def __init__(self, model: nn.Module, tensors: int) -> None:
        parameters = [p for _, p in parameters_of(model)]
        number = {id(p): i for i, p in enumerate(parameters)}
        self._tensors = tensors
        self._cuda = bool(parameters) and parameters[0].is_cuda
        self._ready: list[dict[int, float]] = []
        self._needed: list[dict[int, float]] = []
        self._forward: list[float] = []
        self._backward: list[float] = []
        self._begin = 0.0
        self._handles = [p.register_post_accumulate_grad_hook(self._final(i)) for i, p in enumerate(parameters)]
        for module in model.modules():
            own = [number[id(p)] for p in module.parameters(recurse=False) if id(p) in number]
            if own:
                self._handles.append(module.register_forward_pre_hook(self._reads(own)))

    def _now(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - self._begin

    def _final(self, tensor: int) -> Callable[[torch.Tensor], None]:
        def final(_: torch.Tensor) -> None:
            self._ready[-1][tensor] = self._now()

        return final

    def _reads(self, tensors: list[int]) -> Callable[[nn.Module, object], None]:
        def reads(_module: nn.Module, _args: object) -> None:
            now = self._now()
            for tensor in tensors:
                self._needed[-1].setdefault(tensor, now)

        return reads

    def step(self, loss_of: Callable[[], torch.Tensor]) -> None:
        self._ready.append({})
        self._needed.append({})
        self._begin = time.perf_counter()
        loss: object = loss_of()
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise InvalidInput("E-USER-CODE",
                               f"the loss is {_said(loss)}, needed is one number with a gradient: return what backward() is of")
        self._forward.append(self._now())
        self._begin = time.perf_counter()
        loss.backward()
        self._backward.append(self._now())

    def timing(self) -> Timing:
        forward_s, backward_s = median(self._forward[WARM_STEPS:]), median(self._backward[WARM_STEPS:])
        ready = [_median(self._ready[WARM_STEPS:], tensor, backward_s) for tensor in range(self._tensors)]
        needed = [_median(self._needed[WARM_STEPS:], tensor, 0.0) for tensor in range(self._tensors)]
        return Timing(
            tuple(min(s, backward_s) for s in ready), tuple(min(s, forward_s) for s in needed), backward_s, forward_s,
            device=device_named(torch.cuda.get_device_name()) if self._cuda else "cpu",
        )

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def _said(loss: object) -> str:
    if not isinstance(loss, torch.Tensor):
        return f"of type {type(loss).__name__}"
    return f"a Tensor of {loss.numel()}" + ("" if loss.requires_grad else " without a gradient")


def _median(steps: list[dict[int, float]], tensor: int, otherwise: float) -> float:
    seen = [step[tensor] for step in steps if tensor in step]
    return median(seen) if seen else otherwise


def timing_of(steps: Sequence[RecordedStep], tensors: int, places: Mapping[int, int]) -> Timing:
    """Medians over the steps. `places`: the tensors' known order in the forward pass.

    Hooks see when gradients become final and when a step ends, but not where the forward pass ends. The time before the first
    gradient counts as forward pass, and tensors are assumed to be needed at equal intervals in it. Communication is not
    included: training waits for it only between the last gradient and the step's end.
    """
    if not steps:
        raise InvalidInput("E-ARGUMENT", "no recorded step to take times from: record at least one")
    first_s = median(min(s.ready.values(), default=s.marks["backward"]) for s in steps)
    backward_s = median(max(0.0, s.marks["backward"] - min(s.ready.values(), default=s.marks["backward"])) for s in steps)
    ready_s = []
    for tensor in range(tensors):
        seen = [s.ready[tensor] - min(s.ready.values()) for s in steps if tensor in s.ready]
        ready_s.append(min(median(seen), backward_s) if seen else backward_s)  # without a gradient, or a buffer
    far = len(places)
    needed_s = [first_s * places.get(tensor, far) / max(1, far) for tensor in range(tensors)]
    return Timing(tuple(ready_s), tuple(needed_s), backward_s, first_s)
