"""When local steps exchange. Knows the script's model and optimizer by their hooks; what an exchange does is LocalSteps'."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from commlayer.job.connection import Connection
from commlayer.job.observers import Observers
from commlayer.optim import Outer
from commlayer.runtime.local_steps import LocalSteps, StepWeights
from commlayer.runtime.worker import Worker

log = logging.getLogger("commlayer")


class ExchangeSchedule:
    """Of one attached model, under whatever plan is in force; under one that exchanges every step it does nothing.

    Unless that follows one of local steps: then the ranks' optimizers remember different things, and equal gradients would
    lead them apart. So weights are exchanged, behind every step; and where updates are what is to be coded.

    Steps are counted by backward passes, which all ranks have alike: a scaler may skip an optimizer step on one rank alone. An
    exchange follows the optimizer's step, or if that was skipped, comes before the next forward pass of the training.
    """

    def __init__(
        self, model: nn.Module, parameters: Sequence[nn.Parameter], buffers: Callable[[], list[torch.Tensor]], *,
        optimizer: Any, outer: Outer, connection: Connection, observers: Observers, deadline_s: float,
    ) -> None:
        self._model, self._parameters, self._buffers, self._optimizer = model, parameters, buffers, optimizer
        self._outer, self._connection, self._observers, self._deadline_s = outer, connection, observers, deadline_s
        self._handles: list[Any] = []
        connection.bring_in.append(self.settle)
        connection.before_switch.append(self.drain)
        connection.after_switch.append(self._enter)
        self._enter()

    @property
    def local(self) -> LocalSteps | None:
        return self._connection.local

    def count(self) -> bool:
        """A backward pass is over. Whether it was of a local step."""
        if self.local is None:
            return False
        self.local.count()
        return True

    def drain(self) -> None:
        """Exchanges what was done since the last exchange. All ranks call it behind the same step."""
        if self.local is not None and self.local.drain(self._worker, self._buffers(), self._deadline_s * self.local.every):
            self._tell()

    def settle(self) -> None:
        """Brings in what is under way. All ranks call it behind the same step."""
        if self.local is not None and self.local.under_way:
            self.local.settle(self._worker, self._buffers(), self._deadline_s * self.local.every)
            self._tell()

    def detach(self) -> None:
        """No more exchanges."""
        if self.local is not None and self.local.apart:
            log.warning("the last %d steps were not exchanged, so ranks end with different weights: session.drain() before "
                        "close() brings them together", self.local.taken or self.local.every)
        self._unhook()

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(self) -> None:
        """A plan has come into force."""
        made, plan = self._connection, self._connection.plan
        self._unhook()
        if made.worker is None or plan is None or (made.local is None and not plan.steps_locally):
            return
        how: dict[str, Any] = {"fragments": plan.fragments, "overlap": plan.overlap == "round"}
        if made.local is None:
            units = made.worker.units
            weights = StepWeights(units.weight, units.total if units.told else None)
            made.local = LocalSteps(self._parameters, plan.local_steps, self._outer, weights, **how)
        made.local.go(plan.local_steps, **how)
        self._handles.append(self._optimizer.register_step_post_hook(lambda *_: self._if_due()))
        self._handles.append(self._model.register_forward_pre_hook(lambda model, _: self._if_due() if model.training else None))

    def _if_due(self) -> None:
        if self.local is not None and self.local.due:
            self._exchange(self.local)

    def _exchange(self, local: LocalSteps) -> None:
        # Ranks that differ in speed drift apart for all of the steps between.
        local.exchange(self._worker, self._buffers(), self._deadline_s * local.every)
        self._tell()

    @property
    def _worker(self) -> Worker:
        assert self._connection.worker is not None
        return self._connection.worker

    def _tell(self) -> None:
        for observer in self._observers:
            observer.after_exchange()
