"""When local steps exchange. Knows the script's model and optimizer by their hooks; what an exchange does is LocalSteps'."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from commlayer.engine.connection import Connection
from commlayer.engine.local_steps import LocalSteps, StepWeights
from commlayer.engine.observers import Observers
from commlayer.engine.optimizer_hooks import Around, OptimizerHooks
from commlayer.engine.plan_handover import owe
from commlayer.engine.step import Regroup
from commlayer.engine.step_guard import StepGuard
from commlayer.engine.told_lengths import ToldLengths
from commlayer.engine.worker import Worker
from commlayer.optim import Outer


def _nothing() -> None:
    """Everything is in the exchange."""


class ExchangeSchedule:
    """Of one attached model, under whatever plan is in force; under one that averages gradients it does nothing.

    Steps are counted by the optimizer's steps. A step counts from the first backward pass that adds to its gradients, so a step
    that a scaler skips on one rank alone counts there, too. A pass begins another step if gradients were applied or cleared
    before it. A step with gradients of no backward pass, as of torch.autograd.grad, counts as it begins.

    An exchange follows the optimizer's step, or if that was skipped, comes before the next forward pass of the training.
    """

    def __init__(
        self, model: nn.Module, parameters: Sequence[nn.Parameter], buffers: Callable[[], list[torch.Tensor]], *,
        hooks: OptimizerHooks, outer: Outer, connection: Connection, observers: Observers, deadline_s: float,
        guard: StepGuard | None = None, optimizer: Any = None, share: Callable[[], None] = _nothing,
    ) -> None:
        """`model`: the module whose forward passes come behind exchanges. `share` is called with each, on all ranks."""
        self._model, self._parameters, self._buffers, self._hooks = model, parameters, buffers, hooks
        self._outer, self._connection, self._observers, self._deadline_s = outer, connection, observers, deadline_s
        self._forward: Any = None
        self._share, self._guard, self._optimizer = share, guard, optimizer
        self._counted = False
        """Whether a step was counted since steps are local."""
        self._noted = 0, 0
        """How many gradients there were after the last pass, and the sum of their versions."""
        if guard is not None:
            guard.local_step = self._local_step
        self.merged: Callable[..., None] | None = None
        """See LocalSteps."""
        self._lengths = ToldLengths(connection, outer, deadline_s)
        self._around = Around(last=lambda *_: self._if_due())
        connection.bring_in.append(self.settle)
        connection.catch_up.append(self._if_due)
        connection.end_rounds.append(self.end_rounds)
        connection.before_switch.append(self.drain)
        connection.after_switch.append(self._enter)
        connection.after_regroup.append(self._weigh_anew)
        connection.after_between.append(self._align)
        self._enter()

    @property
    def local(self) -> LocalSteps | None:
        return self._connection.local

    def count(self, scale: float, *, adds: bool = True) -> bool:
        """A backward pass is over, of a loss times `scale`. Whether it was of a local step.

        `adds`: it has added to gradients. Otherwise the script has put them in place.
        """
        if self.local is None:
            return False
        cleared = adds and self._accumulates and self._cleared()
        if cleared:
            self.local.take_back()
        if not self._accumulates or (cleared and not self._stepping):
            self._count()
        self.local.pay(scale)
        self._noted = self._versions()
        return True

    def _count(self) -> None:
        assert self.local is not None
        self._counted = True
        self.local.count()
        self._connection.passed()
        if self._guard is not None:
            self._guard.exchanged()

    def _local_step(self, counts: bool) -> bool:
        if self.local is None:
            return False
        if counts:
            self._count()
            self.local.pay()
            self._noted = self._versions()  # a closure may clear them
        elif self._counted:  # else its gradients are averages of the plan before
            self.local.begin()
        return True

    @property
    def _accumulates(self) -> bool:
        """Whether a local step is counted whose gradients the optimizer has not applied yet."""
        return self._counted and self._guard is not None and self._guard.awaits_step(self._optimizer)

    @property
    def _stepping(self) -> bool:
        return self._guard is not None and self._guard.inside

    def _versions(self) -> tuple[int, int]:
        grads = [p.grad for p in self._parameters if p.grad is not None]
        return len(grads), sum(grad._version for grad in grads)

    def _cleared(self) -> bool:
        """Whether gradients were cleared before the last pass added to them. Adding moves the version of each by one, and
        clearing by one more; gradients in place of None begin at version 0."""
        count, versions = self._noted
        return not 1 <= self._versions()[1] - versions <= count

    def _skipped(self) -> bool:
        """Before a forward pass: whether gradients that no step has applied are gone, zeros or not finite."""
        grads = [grad._values() if grad.is_sparse else grad for p in self._parameters if (grad := p.grad) is not None]
        largest = [torch.linalg.vector_norm(grad.detach(), math.inf).double() for grad in grads if grad.numel()]
        return not largest or not 0 < float(torch.stack(largest).max()) < math.inf

    def _before_forward(self, model: nn.Module) -> None:
        if not model.training or self.local is None or self._stepping:
            return
        if not self._accumulates:
            self._if_due()
        elif self.local.due and self._skipped():
            self.local.take_back()
            self._if_due()
        elif self._versions()[1] - self._noted[1] >= self._noted[0] and not self._skipped():
            self._noted = self._versions()  # clipped, or a scale was taken out: they are not cleared

    def join_round(self, given: Mapping[str, torch.Tensor]) -> None:
        """The others have let this rank in, in an exchange. `given`: what they gave."""
        assert self.local is not None
        self.local.join(given)
        if self.local.tells:
            self._lengths.agree(self.local.starts)

    def drain(self) -> None:
        """Exchanges what was done since the last exchange. All ranks call it behind the same step."""
        with self._connection.closed_door():
            if self.local is not None and self.local.drain(self._worker, self._buffers(), self._deadline_s * self.local.every):
                self._drained()

    def settle(self) -> None:
        """Brings in what is under way. All ranks call it behind the same step."""
        if self.local is not None and self.local.under_way:
            with self._connection.closed_door():
                self.local.settle(self._worker, self._buffers(), self._deadline_s * self.local.every)
            self._drained()

    def detach(self) -> None:
        """No more exchanges."""
        if self.local is not None and self.local.unsent:
            self._connection.log(f"the last {self.local.unsent} steps were not exchanged, so ranks end with different weights: "
                                 "session.drain() before close() brings them together", logging.WARNING)
        self._unhook()

    def _unhook(self) -> None:
        self._hooks.leave(self._around)
        if self._forward is not None:
            self._forward.remove()
            self._forward = None

    def _enter(self) -> None:
        """A plan has come into force."""
        made = self._connection
        if made.worker is None:
            return
        plan, units = made.worker.plan, made.worker.units
        if not plan.steps_locally:
            if made.local is not None:
                units.weigh(*made.local.weights.now)
                owe(made.worker, made.local.unpaid)
                made.local = None
                self._lengths.rest()
                self._unhook()
            return
        how: dict[str, Any] = {"fragments": plan.fragments, "overlap": plan.overlap == "round"}
        if made.local is None:
            weights = StepWeights(units.weight, units.total if units.told else None)
            made.local = LocalSteps(self._parameters, plan.local_steps, self._outer, weights, regroup=self._regroup,
                                    hold=self._invites, merged=self._heard)
            made.local.owe(made.worker.unpaid)
            self._counted = False
            self._hooks.join(self._around)
            self._forward = self._model.register_forward_pre_hook(lambda model, _: self._before_forward(model))
        made.local.go(plan.local_steps, **how, lengths=self._lengths if self._lengths.go(plan.local_steps) else None)

    def end_rounds(self) -> None:
        """Exchanges as behind a round's last step until all steps are in what all ranks have: once, or twice where rounds
        overlap. All ranks call it behind the same step. Unlike a drain it lets in who waits to take part."""
        while self.local is not None and self.local.behind:
            self._exchange(self.local)

    def _if_due(self) -> None:
        if self.local is not None and self.local.due:
            self._exchange(self.local)

    def _exchange(self, local: LocalSteps) -> None:
        # Ranks that differ in speed drift apart for all of the steps between.
        local.exchange(self._worker, self._buffers(), self._deadline_s * local.every)
        if self._connection.fresh:
            self._connection.begun()
        self._share()
        with contextlib.suppress(Regroup):  # then observers begin anew with those who are left
            for observer in self._observers:
                observer.after_exchange()
        if local is self.local and not local.under_way and local.every > 1:
            self._worker.let_go()

    def _regroup(self) -> Worker:
        """Members have gone from the exchange under way."""
        assert self._connection.members is not None
        self._connection.members.go()
        if self.local is not None and self.local.tells:
            self._lengths.agree(self.local.starts)
        return self._worker

    def _weigh_anew(self) -> None:
        """Members have gone or come: what the steps so far say of all is no longer so."""
        if self.local is not None:
            self.local.weights.regroup()

    def _align(self) -> None:
        """Members have gone between two exchanges."""
        if self.local is not None and self.local.tells:
            self.local.align(self._lengths.agree)

    def _heard(self, own: int, *, finite: bool) -> None:
        if self.merged is not None:
            self.merged(own, finite=finite)

    def _invites(self) -> bool:
        return (members := self._connection.members) is not None and members.invites()

    @property
    def _worker(self) -> Worker:
        assert self._connection.worker is not None
        return self._connection.worker

    def _drained(self) -> None:
        self._share()
        with contextlib.suppress(Regroup):
            for observer in self._observers:
                observer.after_drain()
