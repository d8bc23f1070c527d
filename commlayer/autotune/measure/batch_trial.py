"""Runs batches of any size without a lasting effect on the model, up to the memory limit. Memory is known on Linux only."""

from __future__ import annotations

import contextlib
import gc
import math
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset

from commlayer.engine.buckets.bucket_layout import trim
from commlayer.errors import InvalidInput

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
        trim()  # otherwise a batch that reuses memory which earlier ones have freed appears to need none
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
        trim()  # memory that the last batch has freed is not in use
        (few, low), (many, high) = known
        return high + max(0.0, high - low) / (many - few) * (samples - many) - _field(_STATUS, "VmRSS")


def _field(file: Path, name: str) -> float:
    """Returns the bytes in field `name` of a /proc file; infinite if the system does not report it."""
    with contextlib.suppress(OSError):
        for line in file.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return 1024.0 * int(line.split()[1])
    return math.inf


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
                           "allowed: a model that runs alone; give LoadBalancer(line=...) and Sampler(cap=...) what you know "
                           "instead")
    return module


def make_batch_function(source: Any) -> BatchOf:
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

    def collate_batch(samples: int) -> Any:
        places = list(range(samples))
        several = getattr(dataset, "__getitems__", None)
        return collate(several(places) if callable(several) else [dataset[place] for place in places])

    return collate_batch


class BatchTrial:
    """Runs forward and backward pass of a batch. Raises MemoryError at the memory limit."""

    def __init__(
        self, model: nn.Module, loss_of: LossOf, collate_batch: BatchOf, *, measure: Callable[[int], float] | None = None,
        sharing: int = 1,
    ) -> None:
        """`measure`: returns the seconds of a batch that was run; None: the clock measures them. `sharing`: number of
        processes on this machine that profile at the same time."""
        self._measure = measure
        self._model, self._loss_of, self._batch_of = bare(model), loss_of, collate_batch
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
    def preserve_state(self, *, begun: bool) -> Iterator[None]:
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
