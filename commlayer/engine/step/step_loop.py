"""Runs the training step of one attached model.

    begin      before a step's first gradient: sets loss scale and learning rate
    ready      for each gradient that becomes final
    average    after the backward pass: waits for sums, compares with exact gradients, commits
    written    after averages are written to `.grad`: starts to observe whether the script applies or clears them
    observe    runs controller, trace, stale plan and drift checks, in the order of components.py

module_driver.py passes in the gradients, and decides where averages are written. JobContext.passes counts the steps.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn

from commlayer.config import Config
from commlayer.engine.components import Component, ComponentOrder, Pending
from commlayer.engine.guards.averaging_guard import AveragingGuard
from commlayer.engine.guards.finite_steps import FiniteSteps
from commlayer.engine.guards.parameter_drift import ParameterDrift
from commlayer.engine.guards.uneven_inputs import UnevenInputs
from commlayer.engine.job.job import DistributedJob
from commlayer.engine.model.model_tensors import learning_rate, loss_scale
from commlayer.engine.observers.stale_plan import StalePlanWatch
from commlayer.engine.step.exchange_schedule import ExchangeSchedule
from commlayer.engine.worker.averages import AverageUse, hand_out
from commlayer.engine.worker.worker import Worker
from commlayer.errors import StepAbandoned


class StepLoop(Component):
    """Runs the training steps of one attached model in a job of several workers."""

    order = ComponentOrder.LOOP

    def __init__(
        self, context: DistributedJob, parameters: Sequence[nn.Parameter], compared: Sequence[tuple[str, torch.Tensor]], *,
        optimizer: Any, scaler: Any, config: Config, guard: AveragingGuard, finite: FiniteSteps,
        schedule: ExchangeSchedule, uneven: UnevenInputs,
    ) -> None:
        """`parameters`: the averaged parameters, in the order of their numbers. `compared`: tensors that must be equal on all
        ranks, with their names."""
        self.context = context
        self._optimizer, self._scaler, self._schedule, self._guard = optimizer, scaler, schedule, guard
        self._uneven, self._finite = uneven, finite
        self._config, self.deadline_s = config, config.deadline_s
        self._use = AverageUse(parameters, optimizer, lambda: context.worker, finite.held)
        context.on_close.append(self._use.detach)
        for component in (self, StalePlanWatch(context), finite):
            context.components.add(component)
        if config.drift_steps and (context.world > 1 or context.elastic):
            context.components.add(ParameterDrift(context, compared, optimizer, config, finite.held))

    @property
    def worker(self) -> Worker:
        return self.context.worker

    @property
    def local(self) -> bool:
        """True: the current plan has local steps, so gradients are not averaged."""
        return self.context.local is not None

    def complete(self, pending: Pending) -> None:
        if pending is Pending.STEP:
            self._use.settle()

    def begin(self) -> None:
        """Starts a step. Called before the step's first gradient; later calls in the same step do nothing."""
        worker = self.context.worker
        if not worker.begun:
            self._units(worker)
            self._uneven.check_entered()
            worker.open()  # a worker that joins sends the following row, too
            self._uneven.send()

    def _units(self, worker: Worker) -> None:
        worker.units.scale = loss_scale(self._scaler)
        worker.units.rate = learning_rate(self._optimizer, worker.units.rate)

    def ready(self, number: int, gradient: torch.Tensor) -> None:
        """Receives a parameter's gradient, which is final for this step. The plan has no local steps. Called once per parameter
        and step, so it must be fast."""
        worker = self.context.worker
        if not worker.begun:
            self.begin()
        worker.ready(number, gradient)

    def count_local(self, *, adds: bool = True) -> bool:
        """Counts a local step if the plan has local steps; see ExchangeSchedule.count_backward. Returns True if it was a local
        step."""
        if self.local:
            self._uneven.check_entered()
        if not self._schedule.count_backward(loss_scale(self._scaler), adds=adds):
            return False
        self._finite.check_local_step()
        begin = time.perf_counter()
        self.context.components.end_local_step()
        self.worker.stopwatch.skip(time.perf_counter() - begin)
        return True

    def new_plan(self) -> None:
        if self.local:
            self._use.note_written(can_roll_back=False)  # local steps have no averages to watch

    def average(
        self, leftovers: Sequence[torch.Tensor | None], targets: Callable[[], Sequence[torch.Tensor | None]],
    ) -> Sequence[torch.Tensor | None]:
        """Ends a backward pass: waits for all sums, and writes the averages into the tensors that `targets` then returns.
        Returns these tensors.

        `leftovers[n]`: the gradient of a parameter for which `ready` was not called, or None. Raises CommError if a worker is
        lost or misses the deadline; then nothing has been written.
        """
        self._end_pass()
        try:
            self.worker.finish(leftovers, self.deadline_s)
        except BaseException as error:
            self._count_pass()
            if isinstance(error, StepAbandoned):
                self._end_first_step()
            raise
        self._count_pass()
        self._end_first_step()
        if self._uneven.all_active():
            self.context.components.sums_arrived()
        into = targets()
        worker = self.worker
        worker.commit(into)
        self._guard.exchanged()
        self.report_finite(worker)
        return into

    def _end_pass(self) -> None:
        self.worker.stopwatch.stop(self.context.passes)
        self.begin()
        self._use.end()

    def _end_first_step(self) -> None:
        """Ends the first step of a rank that has joined, on this rank and on the others."""
        if (joined := self.context.joined) is not None and joined.fresh:
            joined.end_first_step()
            self.context.components.new_members()
        self.context.members.end_first_step()

    def _count_pass(self) -> None:
        self.context.count_step()
        self._uneven.end_step()

    def discard(self) -> None:
        """Marks averages of the last step that no optimizer has applied as discarded, because this rank has run out of batches.
        """
        self._use.discard()

    def take_part(self, buffers: Sequence[torch.Tensor]) -> None:
        """Takes part, with weight 0, in a step or exchange of the ranks that still have batches. This rank's gradients do not
        change."""
        self.worker.stopwatch.drop()
        if self.local:
            self._schedule.take_part()
            return
        tensors = [*[None] * (len(self.worker.job.tensors) - len(buffers)), *buffers]
        with contextlib.suppress(StepAbandoned):
            self.average(tensors, lambda: tensors)
            self.observe()

    def report_finite(self, worker: Worker, *, dropped: bool = False) -> None:
        """Reports the end of a step to the check for finite values; see FiniteSteps.averaged."""
        self._finite.averaged(worker.not_finite, finite=not worker.tentative, dropped=dropped)

    def launch(self, leftovers: Sequence[torch.Tensor | None]) -> None:
        """Ends a backward pass instead of `average`, if results are applied bucket by bucket after it (forward_overlap.py)."""
        self._end_pass()
        self.worker.complete(leftovers)
        self._finite.reset()
        self._guard.exchanged()
        self.context.count_step()
        self.worker.stopwatch.start()

    @property
    def must_wait(self) -> bool:
        """Returns True if a component reads this step's sums or times, or a worker takes part for the first time; then the
        training thread waits for the complete step."""
        context = self.context
        return (context.fresh or context.members.entering or self.worker.recorder.on or context.components.reads_sums())

    def written(self, known: Collection[int] = ()) -> None:
        """Starts to observe whether the script applies or clears the averages in `.grad`. `known`: parameters whose averages
        have already been reported as applied or discarded."""
        self._finite.check_averages()
        self._use.note_written(can_roll_back=self.worker.can_roll_back, known=known)

    def observe(self, *, between: bool = True) -> None:
        """Runs the components after averages are written; one of them might switch to another plan.
        `between`: True if no forward pass has run since then."""
        def skip(took_s: float) -> None:  # the time of components does not count as compute
            self.context.observed_s += took_s
            self.worker.recorder.skip(took_s)
            if between:
                self.worker.stopwatch.start()
            else:
                self.worker.stopwatch.skip(took_s)

        if self._uneven.all_active():
            self.context.components.end_step(skip)

    def abandon(self) -> None:
        """Drops the step on all ranks, after an exception has ended the last backward pass and the script has continued."""
        if not self.local:
            self.begin()
            self._use.end()
            try:
                self.worker.abort(self.deadline_s)
            finally:
                self._count_pass()

    def set_weight(self, n: float) -> None:
        local = self.context.local
        weights = self.worker.units if local is None else local.weights
        weights.weight = n / self._config.batch
        self.context.stream.set_weight(n)

    def flush(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Completes exchanges whose averages are applied later than in their own step, as Session.flush describes. `parameters`
        are in the order of their numbers."""
        self._schedule.drain()
        worker = self.worker
        self._units(worker)
        if has_late := hand_out(worker, parameters):
            self._guard.exchanged()
        return has_late

    def detach(self) -> None:
        self._use.detach()
        self._schedule.detach()
