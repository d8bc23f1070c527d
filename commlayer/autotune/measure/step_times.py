"""Measures steps of a model: when each tensor is needed and ready, peak memory, and batches of other sizes."""

from __future__ import annotations

import contextlib
import gc
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec import structs
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset

from commlayer.autotune.measure.model_info import ModelWatch
from commlayer.engine.hooks.forward_order import before_forward
from commlayer.engine.model.model_tensors import job_of, parameters_of
from commlayer.errors import InvalidInput
from commlayer.observe.step_trace import RecordedStep
from commlayer.planner.tables import device_named
from commlayer.records import Job, Timing

WARM_STEPS, STEPS = 2, 5
DrawnLoss = Callable[[], torch.Tensor]
"""Function that draws a batch and returns its loss."""


def timed_job(model: nn.Module, loss_of: DrawnLoss, *, batch: int | None = None, name: str = "") -> Job:
    """Returns the model's Job with its Timing: medians of a few steps of loss_of() and backward()."""
    job = job_of(model)
    cuda = next((p.is_cuda for _, p in parameters_of(model)), False)

    def now_s() -> float:
        if cuda:
            torch.cuda.synchronize()  # the GPU's work counts for the right tensor
        return time.perf_counter()

    with StepHooks(model, now_s) as hooks:
        _, shown = described_step(hooks, model, loss_of)
        for _ in range(WARM_STEPS - 1):
            hooks.step(loss_of)
        steps = [hooks.step(loss_of) for _ in range(STEPS)]
    timing = timing_at(PassClock(*(np.median(values, 0) for values in zip(*steps, strict=True))))
    device = device_named(torch.cuda.get_device_name()) if cuda else "cpu"
    return Job(job.tensors, batch, structs.replace(timing, device=device, **shown), name)


class PassClock(NamedTuple):
    """What a clock shows in one step: when each gradient is final and the end of backward, since backward began; when each
    tensor is read and the end of forward, since forward began."""

    ready: Any
    needed: Any
    backward: Any
    forward: Any


class StepHooks:
    """Module and tensor hooks that read a clock: of seconds, or of counted work. The clock's values are numbers or arrays."""

    def __init__(self, model: nn.Module, now: Callable[[], Any]) -> None:
        self._model, self._now = model, now
        self._tensors = len(job_of(model).tensors)
        self._ready: dict[int, Any] = {}
        self._needed: dict[int, Any] = {}
        parameters = [p for _, p in parameters_of(model)]
        number = {id(p): i for i, p in enumerate(parameters)}
        self._handles = [p.register_post_accumulate_grad_hook(self._final(i)) for i, p in enumerate(parameters)]
        for module in model.modules():
            own = [number[id(p)] for p in module.parameters(recurse=False) if id(p) in number]
            if own:
                self._handles.append(before_forward(module, self._reads(own)))

    def _final(self, tensor: int) -> Callable[[torch.Tensor], None]:
        def final(_: torch.Tensor) -> None:
            self._ready[tensor] = self._now()

        return final

    def _reads(self, tensors: list[int]) -> Callable[[nn.Module, object], None]:
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
                               f"the loss is {_said(loss)}, allowed: a tensor of one element with a gradient, "
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
        with kept_nbytes(model) as activation_nbytes:
            clock = hooks.step(loss_of)
    finally:
        layers.remove()
    frozen_nbytes = float(sum(p.nbytes for p in model.parameters() if not p.requires_grad))
    return clock, {"activation_nbytes": activation_nbytes(), "frozen_nbytes": frozen_nbytes, "model": layers.info()}


def timing_at(clock: PassClock) -> Timing:
    """The Timing of a step whose clock shows seconds."""
    return Timing(tuple(np.minimum(clock.ready, clock.backward).tolist()),
                  tuple(np.minimum(clock.needed, clock.forward).tolist()), float(clock.backward), float(clock.forward))


@contextlib.contextmanager
def kept_nbytes(model: nn.Module) -> Iterator[Callable[[], float]]:
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


def _said(loss: object) -> str:
    if not isinstance(loss, torch.Tensor):
        return f"of type {type(loss).__name__}"
    return f"a Tensor of {loss.numel()}" + ("" if loss.requires_grad else " without a gradient")


def timing_of(steps: Sequence[RecordedStep], tensors: int, places: Mapping[int, int]) -> Timing:
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


# ---- peak and free memory, from Linux's /proc and cgroups; elsewhere unknown

_STATUS, _RESET, _MACHINE = Path("/proc/self/status"), Path("/proc/self/clear_refs"), Path("/proc/meminfo")
_LIMIT, _TAKEN = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
RESET_PEAK = "5"
"""Written to /proc/self/clear_refs, this resets the peak memory: see proc(5)."""


def room_nbytes() -> float:
    """Returns the bytes of memory that are free for all processes, by the machine or by the container's limit."""
    room = _field(_MACHINE, "MemAvailable")
    with contextlib.suppress(OSError, ValueError):  # "max" means no limit
        room = min(room, float(_LIMIT.read_text()) - float(_TAKEN.read_text()))
    return room


class Peak:
    """Predicts the memory of a batch from the peaks of smaller ones."""

    def __init__(self) -> None:
        self._peaks: dict[int, float] = {}

    def begin(self) -> None:
        with contextlib.suppress(OSError):
            _RESET.write_text(RESET_PEAK)

    def end(self, samples: int) -> None:
        """Records the peak memory of a batch that ran since `begin`."""
        peak = _field(_STATUS, "VmHWM")
        if peak < math.inf:
            self._peaks[samples] = max(peak, self._peaks.get(samples, 0.0))

    def more_nbytes(self, samples: int) -> float:
        """Predicts the bytes that a batch needs beyond the process's present use; 0 until two smaller batches are known."""
        known = sorted(self._peaks.items())[-2:]
        if len(known) < 2 or samples <= known[-1][0]:
            return 0.0
        (few, low), (many, high) = known
        return high + max(0.0, high - low) / (many - few) * (samples - many) - _field(_STATUS, "VmRSS")


def _field(file: Path, name: str) -> float:
    """Returns the bytes in field `name` of a /proc file; infinite if the system does not report it."""
    with contextlib.suppress(OSError):
        for line in file.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return 1024.0 * int(line.split()[1])
    return math.inf


# ---- trial runs of batches of any size, without a lasting effect on the model

LossOf = Callable[[nn.Module, Any], torch.Tensor]
"""Function that returns the loss of a batch, as the training loop computes it."""
BatchOf = Callable[[int], Any]
"""Function that returns a batch of this many samples."""

NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED")
"""Parts of the messages of RuntimeErrors with which torch's allocators and libraries report a lack of memory."""
KEPT_COPIES = 3
"""Copies of the parameters that training allocates in the first step and keeps: two moments of the optimizer and a codec's
residual."""


def bare(model: nn.Module) -> nn.Module:
    """Returns the model that one rank can run alone. Raises InvalidInput if there is none."""
    module: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    if any(isinstance(one, nn.SyncBatchNorm) for one in module.modules()):
        raise InvalidInput("E-USER-CODE",
                           "profile: the model has SyncBatchNorm, which waits for the other ranks in each forward pass, "
                           "allowed: "
                           "a model that runs alone; give LoadBalancer(line=...) and Sampler(cap=...) what you know instead")
    return module


def batches_of(source: Any) -> BatchOf:
    """Returns a function that collates the first samples of a DataLoader's dataset, or `source` itself if it is a function."""
    if not hasattr(source, "collate_fn"):
        if callable(source):
            return source  # type: ignore[no-any-return]
        raise InvalidInput("E-USER-CODE",
                           f"profile: got {type(source).__name__} for batches, allowed: a DataLoader, or a function that gives "
                           "a batch of N samples")
    dataset, collate = source.dataset, source.collate_fn
    if isinstance(dataset, IterableDataset):
        raise InvalidInput("E-USER-CODE",
                           f"profile: the dataset {type(dataset).__name__} has no samples by index, allowed instead of the "
                           "loader: a function that gives a batch of N samples")

    def batch_of(samples: int) -> Any:
        places = list(range(samples))
        several = getattr(dataset, "__getitems__", None)
        return collate(several(places) if callable(several) else [dataset[place] for place in places])

    return batch_of


class BatchTrial:
    """Runs forward and backward pass of a batch. Raises MemoryError at the memory limit."""

    def __init__(
        self, model: nn.Module, loss_of: LossOf, batch_of: BatchOf, *, measure: Callable[[int], float] | None = None,
        sharing: int = 1,
    ) -> None:
        """`measure`: returns the seconds of a batch that was run; None: the clock measures them. `sharing`: number of
        processes on this machine that profile at the same time."""
        self._measure = measure
        self._model, self._loss_of, self._batch_of = bare(model), loss_of, batch_of
        self._parameters = list(self._model.parameters())
        self._device = self._parameters[0].device if self._parameters else torch.device("cpu")
        self._batch: tuple[int, Any] = (0, None)
        # A CPU's allocator overcommits memory, and the kernel kills the process that uses it.
        self._peak = Peak() if self._device.type == "cpu" else None
        self._sharing = sharing

    def __call__(self, samples: int) -> float:
        """Returns the seconds of a batch."""
        if self._too_much(samples) or self._run_out(samples):
            # Not in the except block: the traceback would keep the memory alive.
            self._batch = (0, None)
            gc.collect()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            raise MemoryError(f"a batch of {samples} does not fit")
        return self._seconds if self._measure is None else self._measure(samples)

    def _too_much(self, samples: int) -> bool:
        return self._peak is not None and self._peak.more_nbytes(samples) * self._sharing > room_nbytes()

    def _run_out(self, samples: int) -> bool:
        try:
            if self._batch[0] != samples:
                self._batch = (0, None)  # frees the old batch first
                self._batch = (samples, self._batch_of(samples))
            for parameter in self._parameters:
                parameter.grad = None
            if self._peak is not None:
                self._peak.begin()
            begin = self._now()
            loss = self._loss_of(self._model, self._batch[1])
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
                raise InvalidInput("E-USER-CODE",
                                   f"profile: the loss is {what}, allowed: a tensor of one element, on which "
                                   "backward() was not called yet")
            loss.backward()
            self._seconds = self._now() - begin
            if self._peak is not None:
                self._peak.end(samples)
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            return True
        return False

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def _reserve(self) -> list[torch.Tensor]:
        """Allocates the memory that training will allocate, so batches fail at the same size as in training. Raises
        MemoryError if that memory does not fit."""
        try:
            return [torch.empty_like(p) for p in self._parameters if p.requires_grad for _ in range(KEPT_COPIES)]
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            raise MemoryError(f"{KEPT_COPIES} copies of the parameters do not fit into memory") from None

    @contextlib.contextmanager
    def untouched(self, *, begun: bool) -> Iterator[None]:
        """Context manager that restores gradients, buffers (BatchNorm's statistics) and random state. `begun`: True: training
        has allocated its memory."""
        gradients = [parameter.grad for parameter in self._parameters]
        buffers = [(module, name, buffer, buffer.detach().clone())
                   for module in self._model.modules() for name, buffer in module._buffers.items() if buffer is not None]
        random_state, numpy_state = random.getstate(), np.random.get_state()  # datasets draw from both
        reserve = [] if begun else self._reserve()
        cuda = [self._device.index or 0] if self._device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices=cuda):
                yield
        finally:
            reserve.clear()
            self._batch = (0, None)
            random.setstate(random_state)
            np.random.set_state(numpy_state)
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                parameter.grad = gradient
            with torch.no_grad():
                for module, name, buffer, value in buffers:
                    buffer.copy_(value)
                    module._buffers[name] = buffer
            if cuda:
                torch.cuda.empty_cache()


def out_of_memory(error: BaseException) -> bool:
    """Returns whether the error reports a lack of memory."""
    return isinstance(error, MemoryError | torch.cuda.OutOfMemoryError) or any(word in str(error) for word in NO_MEMORY)
