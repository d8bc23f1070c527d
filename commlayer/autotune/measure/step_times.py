"""Measures steps of a model: when each tensor is needed and ready, peak memory, and batches of other sizes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec import structs
from torch import nn

from commlayer.autotune.measure.model_info import ModelWatch
from commlayer.engine.hooks.forward_order import before_forward
from commlayer.engine.model.model_tensors import describe_model, trained_parameters
from commlayer.errors import InvalidInput
from commlayer.observe.step_trace import RecordedStep
from commlayer.planner.data.tables import device_named
from commlayer.records import Job, Timing

WARM_STEPS, STEPS = 2, 5
DrawnLoss = Callable[[], torch.Tensor]
"""Function that draws a batch and returns its loss."""


def timed_job(model: nn.Module, loss_of: DrawnLoss, *, batch: int | None = None, name: str = "") -> Job:
    """Returns the model's Job with its Timing: medians of a few steps of loss_of() and backward()."""
    job = describe_model(model)
    cuda = next((p.is_cuda for _, p in trained_parameters(model)), False)

    def now_s() -> float:
        if cuda:
            torch.cuda.synchronize()  # the GPU's work counts for the right tensor
        return time.perf_counter()

    with StepHooks(model, now_s) as hooks:
        _, shown = described_step(hooks, model, loss_of)
        for _ in range(WARM_STEPS - 1):
            hooks.step(loss_of)
        steps = [hooks.step(loss_of) for _ in range(STEPS)]
    timing = timing_from_clock(PassClock(*(np.median(values, 0) for values in zip(*steps, strict=True))))
    device = device_named(torch.cuda.get_device_name()) if cuda else "cpu"
    return Job(job.tensors, batch, structs.replace(timing, device=device, **shown), name)


class PassClock(NamedTuple):
    """The times of one step. `backward`: from the start of the backward pass until each gradient is final, and until the pass
    ends. `forward`: from the start of the forward pass until each tensor is read, and until the pass ends."""

    ready: Any
    needed: Any
    backward: Any
    forward: Any


class StepHooks:
    """Module and tensor hooks that read a clock: of seconds, or of counted work. The clock's values are numbers or arrays."""

    def __init__(self, model: nn.Module, now: Callable[[], Any]) -> None:
        self._model, self._now = model, now
        self._tensors = len(describe_model(model).tensors)
        self._ready: dict[int, Any] = {}
        self._needed: dict[int, Any] = {}
        parameters = [p for _, p in trained_parameters(model)]
        number = {id(p): i for i, p in enumerate(parameters)}
        self._handles = [p.register_post_accumulate_grad_hook(self._final(i)) for i, p in enumerate(parameters)]
        for module in model.modules():
            own = [number[id(p)] for p in module.parameters(recurse=False) if id(p) in number]
            if own:
                self._handles.append(before_forward(module, self._record_first_use(own)))

    def _final(self, tensor: int) -> Callable[[torch.Tensor], None]:
        def final(_: torch.Tensor) -> None:
            self._ready[tensor] = self._now()

        return final

    def _record_first_use(self, tensors: list[int]) -> Callable[[nn.Module, object], None]:
        def reads(_module: nn.Module, _args: object) -> None:
            now = self._now()
            for tensor in tensors:
                self._needed.setdefault(tensor, now)

        return reads

    def step(self, loss_of: DrawnLoss) -> PassClock:
        self._model.zero_grad()
        self._ready.clear()
        self._needed.clear()
        begin = self._now()
        loss: object = loss_of()
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise InvalidInput("E-USER-CODE",
                               f"the loss is {_describe_loss(loss)}, allowed: a tensor of one element with a gradient, "
                               "the one that backward() is called on")
        middle = self._now()
        loss.backward()
        end = self._now()
        ready = [self._ready.get(tensor, end) - middle for tensor in range(self._tensors)]
        needed = [self._needed.get(tensor, begin) - begin for tensor in range(self._tensors)]
        return PassClock(np.array(ready), np.array(needed), end - middle, middle - begin)

    def __enter__(self) -> StepHooks:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()


def described_step(hooks: StepHooks, model: nn.Module, loss_of: DrawnLoss) -> tuple[PassClock, dict[str, Any]]:
    """Runs a step. Returns what the clock shows, and fields of Timing that do not depend on it."""
    layers = ModelWatch(model)
    try:
        with count_activation_nbytes(model) as activation_nbytes:
            clock = hooks.step(loss_of)
    finally:
        layers.remove()
    frozen_nbytes = float(sum(p.nbytes for p in model.parameters() if not p.requires_grad))
    return clock, {"activation_nbytes": activation_nbytes(), "frozen_nbytes": frozen_nbytes, "model": layers.info()}


def timing_from_clock(clock: PassClock) -> Timing:
    """The Timing of a step whose clock shows seconds."""
    return Timing(tuple(np.minimum(clock.ready, clock.backward).tolist()),
                  tuple(np.minimum(clock.needed, clock.forward).tolist()), float(clock.backward), float(clock.forward))


@contextlib.contextmanager
def count_activation_nbytes(model: nn.Module) -> Iterator[Callable[[], float]]:
    """Context manager around a forward pass. The function that it returns adds up the bytes of activations that the pass has
    kept for the backward pass."""
    def storage(tensor: torch.Tensor) -> Any:
        return getattr(tensor, "meta", tensor).untyped_storage()

    own, kept = {storage(p)._cdata for p in model.parameters()}, dict[int, int]()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if storage(tensor)._cdata not in own:
            kept[storage(tensor)._cdata] = storage(tensor).nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield lambda: float(sum(kept.values()))


def _describe_loss(loss: object) -> str:
    if not isinstance(loss, torch.Tensor):
        return f"of type {type(loss).__name__}"
    return f"a Tensor of {loss.numel()}" + ("" if loss.requires_grad else " without a gradient")


def median_timing(steps: Sequence[RecordedStep], tensors: int, places: Mapping[int, int]) -> Timing:
    """Returns a Timing with medians over the recorded steps. `places`: the tensors' known order in the forward pass.

    Hooks see when gradients become final and when a step ends, but not where the forward pass ends. The time before the first
    gradient counts as forward pass, and tensors are assumed to be needed at equal intervals in that pass. Communication is not
    included: training waits for it only between the last gradient and the step's end.
    """
    if not steps:
        raise InvalidInput("E-ARGUMENT", "no recorded step to take times from: record at least one")
    first_s = median(min(s.ready.values(), default=s.marks["backward"]) for s in steps)
    backward_s = median(max(0.0, s.marks["backward"] - min(s.ready.values(), default=s.marks["backward"])) for s in steps)
    ready_s = []
    for tensor in range(tensors):
        delays_s = [s.ready[tensor] - min(s.ready.values()) for s in steps if tensor in s.ready]
        ready_s.append(min(median(delays_s), backward_s) if delays_s else backward_s)  # without a gradient, or a buffer
    far = len(places)
    needed_s = [first_s * places.get(tensor, far) / max(1, far) for tensor in range(tensors)]
    return Timing(tuple(ready_s), tuple(needed_s), backward_s, first_s)
