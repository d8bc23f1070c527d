"""Decides when local steps are counted and exchanged, by hooks on the model and its optimizer. OuterSteps runs the exchange."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from commlayer.engine.components import Component, ComponentOrder, Pending
from commlayer.engine.guards.averaging_guard import AveragingGuard
from commlayer.engine.guards.uneven_inputs import UnevenInputs
from commlayer.engine.hooks.forward_order import before_forward
from commlayer.engine.job.job import DistributedJob
from commlayer.engine.model.optimizers import watch
from commlayer.engine.step.update_norms import UpdateNorms
from commlayer.engine.sync.local_steps import OuterSteps, StepWeights
from commlayer.engine.worker.worker import Worker
from commlayer.optim import OuterSGD


class ExchangeSchedule(Component):
    """Schedule of one attached model's local steps. The schedule does nothing under a plan that averages gradients.

    The schedule counts the optimizer's steps. A step counts from the first backward pass that adds to its gradients, so a step
    that a GradScaler skips on one rank is counted on that rank, too. A backward pass starts another step if gradients were
    applied or cleared before it. A step whose gradients come from no backward pass (torch.autograd.grad) is counted when it
    begins.

    An exchange follows the optimizer's step. If that step was skipped, the exchange runs before the next training forward pass.
    """

    order = ComponentOrder.SCHEDULE

    def __init__(
        self, model: nn.Module, parameters: Sequence[nn.Parameter], buffers: Callable[[], list[torch.Tensor]], *,
        outer: OuterSGD, context: DistributedJob, deadline_s: float, guard: AveragingGuard, optimizer: Any,
        merged: Callable[..., None], uneven: UnevenInputs,
    ) -> None:
        """`model`: an exchange can run before a training forward pass of this module. `merged`: see OuterSteps.__init__."""
        self._model, self._parameters, self._buffers, self._uneven = model, parameters, buffers, uneven
        self._outer, self._context, self._deadline_s = outer, context, deadline_s
        self._forward: Any = None
        self._guard, self._optimizer, self._merged = guard, optimizer, merged
        self._counted = False
        """True: a step was counted since local steps began."""
        self._noted = 0, 0
        """Number of gradients after the last backward pass, and the sum of the versions of these tensors."""
        guard.local_step = self._local_step
        context.on_close.append(watch(before=self._before_step, after=self._after_step))
        context.components.add(self)
        self.new_plan()
        if self.local is not None and context.joined is not None:
            self.local.join(context.joined.local)

    @property
    def local(self) -> OuterSteps | None:
        return self._context.local

    def count_backward(self, scale: float, *, adds: bool = True) -> bool:
        """Counts a backward pass of a loss times `scale` that has just ended. Returns True if the pass belonged to a local
        step.

        `adds`: True if the pass has added to gradients, False if the script has written them.
        """
        if (local := self.local) is None:
            return False
        cleared = adds and self._accumulates and self._gradients_cleared()
        if cleared:
            local.pending_residuals.remove_from_gradients()
        if not self._accumulates or (cleared and not self._guard.step_is_running):
            if cleared:  # the optimizer has skipped a step, so the measured time covers more than one step
                self._worker.stopwatch.drop()
            self._count(local)
        self._add_residuals(local, scale)
        self._noted = self._versions()
        return True

    def _count(self, local: OuterSteps) -> None:
        if not self._counted:
            self._context.memory.begin_local_steps()
        self._counted = True
        local.count()
        self._context.count_step()
        self._guard.exchanged()

    def _add_residuals(self, local: OuterSteps, scale: float = 1.0) -> None:
        """Adds pending residuals to the gradients of a loss times `scale`."""
        units, weight = self._worker.units, local.weights.weight
        if weight:
            # The exchange multiplies this worker's gradients by its weight. A pending residual is already a part of the mean,
            # so it is divided by that weight here.
            local.pending_residuals.add_to_gradients(scale * units.total / (weight * units.members))

    def _local_step(self, counts: bool) -> bool:
        if (local := self.local) is None:
            return False
        if counts:
            self._count(local)
            self._add_residuals(local)
            self._noted = self._versions()  # a closure may clear them
        elif self._counted:  # otherwise the gradients are averages of the previous plan
            local.begin()
        return True

    @property
    def _accumulates(self) -> bool:
        """True: the optimizer has not applied the gradients of the last counted step yet."""
        return self._counted and self._guard.awaits_step(self._optimizer)

    def _versions(self) -> tuple[int, int]:
        grads = [p.grad for p in self._parameters if p.grad is not None]
        return len(grads), sum(grad._version for grad in grads)

    def _gradients_cleared(self) -> bool:
        """Returns True if gradients were cleared before the last backward pass added to them. Adding increases each tensor's
        version by one, clearing by one more. Gradients that replace None start at version 0."""
        count, versions = self._noted
        return not 1 <= self._versions()[1] - versions <= count

    def _step_was_skipped(self) -> bool:
        """Returns True if the current gradients, which no optimizer step has applied, are missing, zero or not finite. Called
        before a forward pass."""
        grads = [grad._values() if grad.is_sparse else grad for p in self._parameters if (grad := p.grad) is not None]
        wide = torch.float64 if any(grad.dtype == torch.float64 for grad in grads) else torch.float32  # some have only this
        largest = [torch.linalg.vector_norm(grad.detach(), math.inf).to(wide) for grad in grads if grad.numel()]
        return not largest or not 0 < float(torch.stack(largest).max()) < math.inf

    def _before_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if optimizer is self._optimizer and self.local is not None:
            self._worker.stopwatch.stop(self._context.passes - 1)

    def _after_step(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if optimizer is self._optimizer:
            self._catch_up()
            if self.local is not None:
                self._worker.stopwatch.start()

    def _before_forward(self, model: nn.Module) -> None:
        if not model.training or self.local is None or self._guard.step_is_running:
            return
        if not self._accumulates:
            self._catch_up()
        elif self.local.exchange_is_due and self._step_was_skipped():
            self.local.pending_residuals.remove_from_gradients()
            self._catch_up()
        elif self._versions()[1] - self._noted[1] >= self._noted[0] and not self._step_was_skipped():
            self._noted = self._versions()  # gradients were clipped or unscaled, not cleared

    def drain(self, deadline_s: float = 0.0) -> None:
        """Exchanges the weight changes of all local steps since the last exchange. All ranks call it after the same step.
        `deadline_s`: 0: the usual one, in which a slower rank can take all steps of a round."""
        self._catch_up()  # other ranks have made this exchange already, if this rank's scaler has skipped the step
        if self.local is not None:
            self._exchange_early(self.local.drain, deadline_s or self._deadline_s * self.local.every)

    def _exchange_early(self, exchange: Callable[[Worker, list[torch.Tensor], float], bool], deadline_s: float) -> None:
        """Calls `exchange`, which returns True if something was left to exchange. No worker joins meanwhile."""
        worker = self._worker
        may_withdraw, worker.may_withdraw = worker.may_withdraw, False
        try:
            with self._context.members.without_joins():
                if exchange(worker, self._buffers(), deadline_s):
                    self._ended(early=True)
        finally:
            worker.may_withdraw = may_withdraw

    def complete(self, pending: Pending) -> None:
        if pending >= Pending.DUE:
            self._catch_up()
        if pending in (Pending.SENT, Pending.RUNNING) and self.local is not None:
            complete = self.local.receive if pending is Pending.SENT else self.local.complete
            self._exchange_early(complete, self._deadline_s * self.local.every)
        elif pending is Pending.ALL_STEPS:
            self.drain()
        elif pending is Pending.ALL_EXCHANGES:
            while self.local is not None and self.local.unshared_steps:
                self._exchange(self.local)

    def close(self) -> None:
        """Exchanges the last steps, if all ranks end after the same step. Where members may leave, others may continue."""
        self._worker.may_withdraw = False
        if not self._context.elastic:
            self.complete(Pending.RUNNING)
            self.drain(self._deadline_s)
        elif self.local is not None and self.local.unshared_steps:
            if self._context.rows.leave(self._deadline_s * self.local.every):
                self.local.drain(self._worker, self._buffers(), self._deadline_s)
            else:
                self._context.log(f"the last {self.local.unshared_steps} steps were not exchanged, because other workers train "
                                  f"on",
                                  logging.WARNING)

    def detach(self) -> None:
        if self._forward is not None:
            self._forward.remove()
            self._forward = None

    def new_plan(self) -> None:
        """Starts or ends local steps as the current plan requires. Called when a plan takes effect."""
        context = self._context
        plan, units = context.worker.plan, context.worker.units
        if not plan.steps_locally:
            if context.local is not None:
                units.weight = context.local.weights.weight
                context.local = None
                context.rows.allow(0.0)
                self.detach()
            return
        before = 0 if context.local is None else context.local.every
        if context.local is None:
            weights = StepWeights(units.weight)
            context.local = OuterSteps(self._parameters, plan.local_steps, self._outer, weights, merged=self._merged,
                                       sent=self._uneven.send)
            self._counted = False
            self._forward = before_forward(self._model, lambda model, _: self._before_forward(model))
        if plan.local_steps != before:
            parts = f" in {plan.fragments} fragments" if plan.fragments > 1 else ""
            steps = "every step" if plan.local_steps == 1 else f"every {plan.local_steps} steps"
            context.log(f"exchanging weight changes {steps}{parts}; outer optimizer: {self._outer}")
        context.rows.allow(self._deadline_s * plan.local_steps)
        norms = UpdateNorms(context) if context.matched else None
        context.local.set_schedule(plan.local_steps, fragments=plan.fragments, overlap=plan.overlap == "round", norms=norms)
        context.local.pending_residuals.inherit(context.worker.pending_residuals)

    def take_part(self) -> None:
        """Takes part in an exchange of the ranks that still have batches."""
        assert self.local is not None
        self._exchange(self.local)

    def _catch_up(self) -> None:
        if self.local is not None and self.local.exchange_is_due:
            self._exchange(self.local)

    def _exchange(self, local: OuterSteps) -> None:
        # The deadline covers all steps between exchanges, because ranks may differ in speed.
        deadline_s = self._deadline_s * local.every
        if local.receive(self._worker, self._buffers(), deadline_s) and self._worker.withdrawn:
            local.postpone()  # a link has collapsed, so the controller may change the plan before anything else is sent
        else:
            local.exchange(self._worker, self._buffers(), deadline_s)
        if (joined := self._context.joined) is not None and joined.fresh:
            joined.end_first_step()
            self._context.components.new_members()
            local.recorder.restart()  # the controller that has begun may read the next step's times already
        self._uneven.end_step()
        if self._uneven.all_active():
            self._ended(early=False)
        if local is self.local and not local.under_way and local.every > 1:
            self._worker.release_memory()

    @property
    def _worker(self) -> Worker:
        return self._context.worker

    def _ended(self, *, early: bool) -> None:
        """Calls the components after an exchange, or after an early one."""
        recorders = [self._worker.recorder, *([] if self.local is None else [self.local.recorder])]

        def skip(took_s: float) -> None:
            self._context.observed_s += took_s
            for recorder in recorders:
                recorder.skip(took_s)

        self._context.components.end_exchange(skip, early=early)
