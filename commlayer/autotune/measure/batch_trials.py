"""Trial runs of batches of any size: measures their time and the memory limit, without a lasting effect on the model."""

from __future__ import annotations

import contextlib
import gc
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset

from commlayer.autotune.measure import memory
from commlayer.errors import InvalidInput

LossOf = Callable[[nn.Module, Any], torch.Tensor]
"""Returns the loss of a batch, as the training loop computes it."""
BatchOf = Callable[[int], Any]
"""Returns a batch of this many samples."""

NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED")
"""Parts of the plain RuntimeErrors of torch's allocators and libraries."""
KEPT_COPIES = 3
"""Copies of the parameters that optimizer (two moments) and codecs (a residual) allocate in the first step and keep."""


def bare(model: nn.Module) -> nn.Module:
    """The model that one rank can run alone. Raises InvalidInput if there is none."""
    module: nn.Module = model.module if isinstance(model, DistributedDataParallel) else model
    if any(isinstance(one, nn.SyncBatchNorm) for one in module.modules()):
        raise InvalidInput("E-USER-CODE",
                           "profile: the model has SyncBatchNorm, which waits for the other ranks in each forward pass, "
                           "allowed: "
                           "a model that runs alone; give Controller(line=...) and Sampler(cap=...) what you know instead")
    return module


def batches_of(source: Any) -> BatchOf:
    """Collates the first samples of a DataLoader's dataset, or calls a function of the size."""
    if not hasattr(source, "collate_fn"):
        if callable(source):
            return source  # type: ignore[no-any-return]
        raise InvalidInput("E-USER-CODE",
                           f"profile: got {type(source).__name__} for batches, allowed: a DataLoader, or a function that gives "
                           "a batch of so many samples")
    dataset, collate = source.dataset, source.collate_fn
    if isinstance(dataset, IterableDataset):
        raise InvalidInput("E-USER-CODE",
                           f"profile: the dataset {type(dataset).__name__} has no samples by index, allowed in place of the "
                           "loader: a function that gives a batch of so many samples")

    def batch_of(samples: int) -> Any:
        places = list(range(samples))
        several = getattr(dataset, "__getitems__", None)
        return collate(several(places) if callable(several) else [dataset[place] for place in places])

    return batch_of


class Trial:
    """Forward and backward pass of a batch. Raises MemoryError at the memory limit."""

    def __init__(
        self, model: nn.Module, loss_of: LossOf, batch_of: BatchOf, *, measure: Callable[[int], float] | None = None,
        sharing: int = 1,
    ) -> None:
        """`measure` returns the seconds of a batch that was run, instead of the clock. `sharing`: processes on this machine
        that profile at the same time."""
        self._measure = measure
        self._model, self._loss_of, self._batch_of = bare(model), loss_of, batch_of
        self._parameters = list(self._model.parameters())
        self._device = self._parameters[0].device if self._parameters else torch.device("cpu")
        self._batch: tuple[int, Any] = (0, None)
        # A CPU's allocator overcommits memory, and the kernel kills the process that uses it.
        self._peak = memory.Peak() if self._device.type == "cpu" else None
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
        return self._peak is not None and self._peak.more_nbytes(samples) * self._sharing > memory.room_nbytes()

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
                                   f"profile: the loss is {what}, allowed: a tensor of one element, not yet passed back")
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
        """Allocates what training will allocate, so that memory ends at the same size. MemoryError if that alone does not fit.
        """
        try:
            return [torch.empty_like(p) for p in self._parameters if p.requires_grad for _ in range(KEPT_COPIES)]
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            raise MemoryError(f"{KEPT_COPIES} copies of the parameters do not fit") from None

    @contextlib.contextmanager
    def untouched(self, *, begun: bool) -> Iterator[None]:
        """Restores gradients, buffers (BatchNorm's statistics) and random state. `begun`: training has allocated its memory."""
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
    """Whether the error reports a lack of memory."""
    return isinstance(error, MemoryError | torch.cuda.OutOfMemoryError) or any(word in str(error) for word in NO_MEMORY)
