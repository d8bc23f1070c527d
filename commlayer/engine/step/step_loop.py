"""Runs the training step of one attached model. Hooks on its parameters collect gradients in every backward pass.

    _begin          before a step's first gradient: sets loss scale and learning rate
    _ready          for each gradient that becomes final
    _average        after the backward pass: waits for sums, compares with exact gradients, commits
    _note_written   after averages are written to `.grad`: starts to observe whether the script applies or clears them
    _observe        runs drift checks, controller, trace and stale plan, in the order of components.py

JobContext.passes counts the steps.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from commlayer.config import Config
from commlayer.engine.buckets.shared_buffers import store_agreed_values
from commlayer.engine.components import Pending
from commlayer.engine.guards.attached_model import AttachedModel
from commlayer.engine.guards.averaging_guard import AveragingGuard
from commlayer.engine.guards.finite_steps import FiniteSteps
from commlayer.engine.guards.model_checks import refuse_ddp_around
from commlayer.engine.guards.parameter_drift import ParameterDrift
from commlayer.engine.guards.uneven_inputs import UnevenInputs
from commlayer.engine.hooks.aliases import shares_memory
from commlayer.engine.hooks.forward_order import ForwardOrder
from commlayer.engine.job.job import DistributedJob
from commlayer.engine.model.model_tensors import averaged_buffers, learning_rate, loss_scale, trained_parameters
from commlayer.engine.model.shard_parameters import engine_parameters, make_all_reduce_check, original_parameter
from commlayer.engine.observers.stale_plan import StalePlanWatch
from commlayer.engine.step.driver import Driver
from commlayer.engine.step.exchange_schedule import ExchangeSchedule
from commlayer.engine.step.forward_overlap import ForwardOverlap
from commlayer.engine.step.quiet_ddp import QuietDDP
from commlayer.engine.sync.sync_modes import forbidden_as_useless
from commlayer.engine.worker.averages import AverageUse, averaging_targets, hand_out
from commlayer.engine.worker.gradient_hooks import Hooks
from commlayer.engine.worker.sparse_averages import SparseGradients
from commlayer.engine.worker.worker import Worker
from commlayer.errors import InvalidState, StepAbandoned, exit_reason
from commlayer.optim import OuterSGD

CHANGED = (
    "the gradient of {} changed during backward() after it was passed on to be averaged, so the change would be lost on this "
    "rank or on all: change a gradient in a hook on its own parameter (register_post_accumulate_grad_hook), or after backward()"
)


class StepLoop(Driver):
    """Runs the training steps of one attached model in a job of several workers."""

    def __init__(
        self, model: nn.Module, context: DistributedJob, *, optimizer: Any, scaler: Any, config: Config, outer: OuterSGD,
        ddp: QuietDDP | None = None, clips: bool = False,
    ) -> None:
        """Registers the hooks. `ddp`: object that stops a DistributedDataParallel module around this module from averaging.
        `clips`: True if the optimizer's step begins with clipping by the norm of all gradients."""
        super().__init__(context)
        self.context: DistributedJob = context
        self._model, self._optimizer, self._scaler, self._ddp, self._clips = model, optimizer, scaler, ddp, clips
        self._config, self._deadline_s = config, config.deadline_s
        named = trained_parameters(model)
        self._names, self._parameters = [name for name, _ in named], engine_parameters([p for _, p in named])
        self._buffers = [name for name, _ in averaged_buffers(model)]
        self._sparse = SparseGradients(model, self._parameters, optimizer)
        self._passed_on: list[tuple[int, torch.Tensor, int]] = []
        """Gradients that this backward pass has passed on to be averaged: number, tensor and version."""
        self._written: list[tuple[int, int, int] | None] = []
        """Identities of the gradients into which the last step has written averages, as `_gradients` returns them."""
        self._overlap: ForwardOverlap | None = None
        self._places: dict[int, int] = {}
        self._guard = AveragingGuard(AttachedModel(model, named, optimizer), [*zip(self._names, self._parameters, strict=True)],
                                     lambda error: context.worker.latch(error))
        context.on_close.append(self._guard.remove)
        self._finite = FiniteSteps(context, self._parameters, self._guard.held)
        self._uneven = UnevenInputs(model, context, optimizer, scaler, config.deadline_s)
        self._schedule = ExchangeSchedule(model, self._parameters, self._buffers_now, outer=outer, context=context,
                                          deadline_s=config.deadline_s, guard=self._guard, optimizer=optimizer,
                                          merged=self._finite.exchanged, uneven=self._uneven)
        self._use = AverageUse(self._parameters, optimizer, lambda: context.worker, self._guard.held)
        context.on_close.append(self._use.detach)
        for component in (self, StalePlanWatch(context), self._finite):
            context.components.add(component)
        if config.drift_steps and (context.world > 1 or context.elastic):
            context.components.add(ParameterDrift(context, [*model.named_parameters()], optimizer, config, self._guard.held))
        context.terms.useless = forbidden_as_useless(scaler, clips=clips, apart=context.stays_apart)
        context.on_close.append(self._drop)
        store_agreed_values(context.worker.shared_buffers, [*[None] * len(self._parameters), *self._buffers_now()])
        self._order: ForwardOrder | None = None
        self.new_plan()
        ordered = [*self._parameters, *self._buffers_now()]
        self._order = ForwardOrder(model, {id(original_parameter(tensor)): i for i, tensor in enumerate(ordered)})
        if ddp is None:
            refuse_ddp_around(model)
        # Compiled modules forward attributes to their original module.
        plain = vars(getattr(model, "_orig_mod", model))
        # Code that trains through several wrappers (Accelerate) sets DDP's attribute on any module.
        reduces = make_all_reduce_check(model)
        self._hooks = Hooks(self._parameters, lambda: context.worker, self._ready, self._end,
                            lambda: self._syncing and reduces() and plain.get("require_backward_grad_sync", True)
                            and (ddp is None or ddp.syncing), self._guard.own.add, self._abandon)

    @property
    def _worker(self) -> Worker:
        return self.context.worker

    @property
    def in_join(self) -> bool:
        return self._uneven.inside

    def new_plan(self) -> None:
        """Adapts hooks, buckets and forward overlap to a plan that has just taken effect."""
        if self.context.local is not None:
            self._use.note_written(can_roll_back=False)  # local steps have no averages to watch
        forward = self._worker.plan.overlap == "forward"
        if forward and self._overlap is None:
            self._overlap = ForwardOverlap(
                self._model, trained_parameters(self._model), self._optimizer, self._scaler, self.context, self._deadline_s,
                self._buffers_now(), clips=self._clips, launch=self._launch, ended=self._end_overlapped,
                observe=lambda: self._observe(between=False))
        elif not forward and self._overlap is not None:
            self._overlap.detach()
            self._overlap = None
        self._sparse.follow(self._worker)
        self._reorder()

    def new_members(self) -> None:
        self._sparse.follow(self._worker)

    def complete(self, pending: Pending) -> None:
        if pending is Pending.STEP:
            self._use.settle()
        if self._overlap is not None and pending is Pending.DUE:
            self._overlap.end_and_observe()
        else:
            self._finish_overlap()

    def close(self) -> None:
        self._finish_overlap()

    def _reorder(self) -> None:
        """Sets the order in which buckets are sent to the order in which the forward pass needs them. Buffers have a position
        in this order only if averages arrive during the forward pass."""
        some = len(self._parameters) + (len(self._buffers) if self._overlap is not None else 0)
        if self._order is None:
            self._worker.reorder({number: place for number, place in self._places.items() if number < some})

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        self._finish_overlap()
        self._uneven.enter()
        try:
            yield
            self._hooks.end_broken()
            self._use.discard()  # this rank has run out of batches
            self._uneven.leave(self._take_part)
        except BaseException as error:
            self.context.close(exit_reason(error))
            raise
        finally:
            self._uneven.end()

    def weight(self, n: float) -> None:
        if self._overlap is None:
            self._set_weight(n)
        else:
            self._overlap.call_at_end(lambda: self._set_weight(n))

    def _set_weight(self, n: float) -> None:
        local = self.context.local
        weights = self._worker.units if local is None else local.weights
        weights.weight = n / self._config.batch
        self.context.stream.set_weight(n)

    def synchronize(self) -> None:
        if not self._finish_overlap() and self._written != self._gradients():
            self._end(adds=False)
            self._finish_overlap()

    def _drop(self) -> None:
        if self._overlap is not None:
            self._overlap.drop()

    def _finish_overlap(self) -> bool:
        """Waits for averages that arrive during a forward pass. Returns True if there were any."""
        return self._overlap is not None and self._overlap.end()

    def flush(self) -> bool:
        self._finish_overlap()
        self._sparse.make_dense()
        self._schedule.drain()
        self._set_units()
        if has_late := hand_out(self._worker, self._parameters):
            self._guard.exchanged()
        self._sparse.make_sparse()
        return has_late

    def detach(self) -> None:
        self._hooks.remove()
        if self._ddp is not None:
            self._ddp.remove()
        if self._overlap is not None:
            self._overlap.detach()
        self._use.detach()
        self._schedule.detach()

    def _begin(self) -> None:
        """Starts a step. Called before the step's first gradient; later calls in the same step do nothing."""
        worker = self.context.worker
        if not worker.begun:
            self._set_units()
            self._uneven.check_entered()
            worker.open()  # a worker that joins sends the following row, too
            self._uneven.send()

    def _set_units(self) -> None:
        units = self._worker.units
        units.scale = loss_scale(self._scaler)
        units.rate = learning_rate(self._optimizer, units.rate)

    def _ready(self, number: int, gradient: torch.Tensor) -> None:
        """Receives a parameter's gradient, which is final for this step. Called once per parameter and step, so it must be
        fast."""
        if self._order is not None:
            self._places, self._order = self._order.take(), None
            self._reorder()
        if (local := self.context.local) is not None:
            local.recorder.tensor(number)
            return
        self._passed_on.append((number, gradient, gradient._version))
        if gradient.layout is torch.sparse_coo:
            gradient = self._sparse.dense(number, gradient)
        worker = self.context.worker
        if not worker.begun:
            self._begin()
        worker.ready(number, gradient)

    def _check_unchanged(self) -> None:
        """Raises an error if a gradient has changed since it was passed on, because exchanges read gradients at any time."""
        passed_on, self._passed_on = self._passed_on, []
        for number, gradient, version in passed_on:
            grad = self._parameters[number].grad
            if grad is not gradient or (grad._version != version and not shares_memory(grad)):
                self._worker.latch(InvalidState("E-GRADIENT-CHANGED", CHANGED.format(self._names[number])))
                self._worker.check()

    def _abandon(self) -> None:
        """Drops the step on all ranks, after an exception has ended the last backward pass and the script has continued."""
        self._passed_on.clear()
        self._sparse.forget()
        if self.context.local is None:
            self._begin()
            self._use.end()
            try:
                self._worker.abort(self._deadline_s)
            finally:
                self._count_pass()

    def _end(self, *, adds: bool = True) -> None:
        """Exchanges and averages gradients at the end of a backward pass. `adds` is False if the script requests the exchange
        without a backward pass."""
        self._guard.check()
        if self.context.local is not None:
            self._uneven.check_entered()
        if self._schedule.count_backward(loss_scale(self._scaler), adds=adds):
            self._end_local_step()
            return
        self._check_unchanged()
        if self._overlap is not None:
            self._overlap.end_and_observe()  # ends the previous step, if no gradient hook has done so
        self._sparse.make_dense()
        buffers = self._buffers_now()
        if self._overlap is not None and not self._uneven.inside and self._overlap.can_overlap() and not self._must_wait:
            self._overlap.launch(buffers)
            return
        entries: dict[int, torch.Tensor] = {}

        def targets() -> list[torch.Tensor | None]:
            entries.update(self._sparse.arrived(self._worker))
            into = averaging_targets(self._worker, self._parameters)
            return [*(None if number in entries else target for number, target in enumerate(into)), *buffers]

        averages = self._average([*(p.grad for p in self._parameters), *buffers], targets)
        for number, (p, average) in enumerate(zip(self._parameters, averages, strict=False)):
            p.grad = entries.get(number, average)
        self._sparse.make_sparse()
        self._note_written()
        self._observe()

    def _end_local_step(self) -> None:
        self._finite.check_running_steps()
        begin = time.perf_counter()
        self.context.components.end_local_step()
        self._worker.stopwatch.skip(time.perf_counter() - begin)

    def _average(
        self, leftovers: Sequence[torch.Tensor | None], targets: Callable[[], Sequence[torch.Tensor | None]],
    ) -> Sequence[torch.Tensor | None]:
        """Ends a backward pass: waits for all sums, and writes the averages into the tensors that `targets` then returns.
        Returns these tensors.

        `leftovers[n]`: the gradient of a parameter that was not passed on, or None. Raises CommError if a worker is lost or
        misses the deadline; then nothing has been written.
        """
        self._end_pass()
        try:
            self._worker.finish(leftovers, self._deadline_s)
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
        self._worker.commit(into)
        self._guard.exchanged()
        self._report_finite()
        return into

    def _end_pass(self) -> None:
        self._worker.stopwatch.stop(self.context.passes)
        self._begin()
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

    def _take_part(self) -> None:
        """Takes part, with weight 0, in a step or exchange of the ranks that still have batches. This rank's gradients do not
        change."""
        self._worker.stopwatch.drop()
        if self.context.local is not None:
            self._schedule.take_part()
            return
        tensors = [*[None] * len(self._parameters), *self._buffers_now()]
        with contextlib.suppress(StepAbandoned):
            self._average(tensors, lambda: tensors)
            self._observe()

    def _report_finite(self, *, dropped: bool = False) -> None:
        """Reports the end of a step to the check for finite values; see FiniteSteps.averaged."""
        worker = self._worker
        self._finite.averaged(worker.not_finite, finite=not worker.tentative, dropped=dropped)

    def _launch(self, leftovers: Sequence[torch.Tensor | None]) -> None:
        """Ends a backward pass instead of `_average`, if results are applied bucket by bucket after it (forward_overlap.py)."""
        self._end_pass()
        self._worker.complete(leftovers)
        self._finite.reset()
        self._guard.exchanged()
        self.context.count_step()
        self._worker.stopwatch.start()

    def _end_overlapped(self, known: Collection[int], *, dropped: bool) -> None:
        """Ends a step after `_launch`, when its averages have arrived. `known`: parameters whose averages have been reported as
        applied or discarded. `dropped`: True if averages that were not finite have not been applied."""
        self._report_finite(dropped=dropped)
        self._note_written(known)

    @property
    def _must_wait(self) -> bool:
        """Returns True if a component reads this step's sums or times, or a worker takes part for the first time; then the
        training thread waits for the complete step."""
        context = self.context
        return (context.fresh or context.members.entering or self._worker.recorder.on or context.components.reads_sums())

    def _note_written(self, known: Collection[int] = ()) -> None:
        """Starts to observe whether the script applies or clears the averages in `.grad`. `known`: parameters whose averages
        have already been reported as applied or discarded."""
        self._written = self._gradients()
        self._finite.check_running_steps()
        self._use.note_written(can_roll_back=self._worker.can_roll_back, known=known)

    def _observe(self, *, between: bool = True) -> None:
        """Runs the components after averages are written; one of them might switch to another plan.
        `between`: True if no forward pass has run since then."""
        def skip(took_s: float) -> None:  # the time of components does not count as compute
            self.context.observed_s += took_s
            self._worker.recorder.skip(took_s)
            if between:
                self._worker.stopwatch.start()
            else:
                self._worker.stopwatch.skip(took_s)

        if self._uneven.all_active():
            self.context.components.end_step(skip)

    def _gradients(self) -> list[tuple[int, int, int] | None]:
        """Returns identities and versions of gradients and parameters. They change when gradients change or an optimizer steps.
        """
        return [None if p.grad is None else (id(p.grad), p.grad._version, p._version) for p in self._parameters]

    def _buffers_now(self) -> list[torch.Tensor]:
        # Looks buffers up by name, because a module can replace a buffer by another tensor.
        named = dict(self._model.named_buffers()) if self._buffers else {}
        return [named[name] for name in self._buffers]
