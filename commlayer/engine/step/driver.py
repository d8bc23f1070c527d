"""Defines drivers, by which a session reaches its model's gradients, and the one of a script without other workers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from commlayer.engine.components import Component, ComponentOrder
from commlayer.engine.guards.uneven_inputs import TWICE
from commlayer.engine.job.job import JobContext
from commlayer.engine.model.model_tensors import trained_parameters
from commlayer.errors import InvalidInput, exit_reason


class Driver(Component):
    """Base class of drivers. Session describes their methods."""

    order = ComponentOrder.LOOP

    def __init__(self, context: JobContext) -> None:
        self.context, self._syncing = context, True

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self._syncing = self._syncing, False
        try:
            yield
        finally:
            self._syncing = before


class SoloDriver(Driver):
    """The driver of a session without other workers, which only counts steps."""

    in_join = False

    def __init__(self, model: nn.Module, context: JobContext, optimizer: Any) -> None:
        """Counts the optimizer's steps. Without an optimizer, or if it has no step hooks, counts backward passes."""
        super().__init__(context)
        trained = [p for _, p in trained_parameters(model)]
        self._counting: Any = None
        if hasattr(optimizer, "_optimizer_step_post_hooks"):  # wrappers of optimizers have no hooks
            self._counting = optimizer.register_step_post_hook(lambda *_: context.count_step())
        elif trained:
            self._counting = register_multi_grad_hook(
                trained, lambda _: context.count_step() if self._syncing else None, mode="any")

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        if self.in_join:
            raise InvalidInput("E-UNEVEN-INPUTS", TWICE)
        self.in_join = True
        try:
            yield
        except BaseException as error:
            self.context.close(exit_reason(error))
            raise
        finally:
            self.in_join = False

    def weight(self, n: float) -> None:
        """Sets the number of samples in events. An average over one worker has no weights."""
        self.context.stream.set_weight(n)

    def synchronize(self) -> None:
        """Does nothing: one worker's gradients are their own average."""

    def flush(self) -> bool:
        return False

    def detach(self) -> None:
        if self._counting is not None:
            self._counting.remove()
