"""Connects a session to a module: hooks on its parameters collect gradients in every backward pass.

step/step_loop.py runs the rest of the step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from commlayer.config import Config
from commlayer.engine.buckets.shared_buffers import agree
from commlayer.engine.components import ComponentOrder, Pending
from commlayer.engine.guards.attached_model import AttachedModel
from commlayer.engine.guards.averaging_guard import AveragingGuard
from commlayer.engine.guards.finite_steps import FiniteSteps
from commlayer.engine.guards.model_checks import refuse_ddp_around
from commlayer.engine.guards.uneven_inputs import UnevenInputs
from commlayer.engine.hooks.aliases import shares_memory
from commlayer.engine.hooks.forward_order import ForwardOrder
from commlayer.engine.job.job import DistributedJob
from commlayer.engine.model.model_tensors import averaged_buffers, trained_parameters
from commlayer.engine.model.shard_parameters import engine_parameters, make_all_reduce_check, original_parameter
from commlayer.engine.step.driver import Driver
from commlayer.engine.step.exchange_schedule import ExchangeSchedule
from commlayer.engine.step.forward_overlap import ForwardOverlap
from commlayer.engine.step.quiet_ddp import QuietDDP
from commlayer.engine.step.step_loop import StepLoop
from commlayer.engine.sync.sync_modes import forbidden_as_useless
from commlayer.engine.worker.averages import averaging_targets
from commlayer.engine.worker.gradient_hooks import Hooks
from commlayer.engine.worker.sparse_averages import SparseGradients
from commlayer.errors import InvalidState, exit_reason
from commlayer.optim import OuterSGD

CHANGED = (
    "the gradient of {} changed during backward() after it was passed on to be averaged, so the change would be lost on this "
    "rank or on all: change a gradient in a hook on its own parameter (register_post_accumulate_grad_hook), or after backward()"
)


class ModuleDriver(Driver):
    order = ComponentOrder.DRIVER

    def __init__(
        self, model: nn.Module, context: DistributedJob, *, optimizer: Any, scaler: Any, config: Config, outer: OuterSGD,
        ddp: QuietDDP | None = None, clips: bool = False,
    ) -> None:
        """Registers the hooks. `ddp`: object that stops a DistributedDataParallel module around this module from averaging.
        `clips`: True if the optimizer's step begins with clipping by the norm of all gradients."""
        super().__init__(context)
        self.context: DistributedJob = context
        self._ddp, self._model = ddp, model
        named = trained_parameters(model)
        self._names, self._parameters = [name for name, _ in named], engine_parameters([p for _, p in named])
        self._buffers = [name for name, _ in averaged_buffers(model)]
        self._sparse = SparseGradients(model, self._parameters, optimizer)
        self._entries: dict[int, torch.Tensor] = {}
        """Maps a parameter's number to its average in the current step, if this average arrived as sparse entries."""
        self._passed_on: list[tuple[int, torch.Tensor, int]] = []
        """Gradients that this backward pass has passed on to be averaged: number, tensor and version."""
        self._written: list[tuple[int, int, int] | None] = []
        """Identities of the gradients into which the last step has written averages, as `_gradients` returns them."""
        self._overlap: ForwardOverlap | None = None
        self._places: dict[int, int] = {}
        self._guard = AveragingGuard(AttachedModel(model, named, optimizer), [*zip(self._names, self._parameters, strict=True)],
                                     lambda error: context.worker.latch(error))
        context.on_close.append(self._guard.remove)
        finite = FiniteSteps(context, self._parameters, self._guard.held)
        self._uneven = UnevenInputs(model, context, optimizer, scaler, config.deadline_s)
        schedule = ExchangeSchedule(model, self._parameters, self._buffers_now, outer=outer, context=context,
                                    deadline_s=config.deadline_s, guard=self._guard, optimizer=optimizer,
                                    merged=finite.exchanged, uneven=self._uneven)
        self._loop = StepLoop(context, self._parameters, [*model.named_parameters()], optimizer=optimizer, scaler=scaler,
                              config=config, guard=self._guard, finite=finite, schedule=schedule, uneven=self._uneven)
        self._overlapped: Callable[[], ForwardOverlap] = lambda: ForwardOverlap(
            model, trained_parameters(model), optimizer, scaler, self._loop, self._buffers_now, self._note_written, clips=clips)
        context.terms.useless = forbidden_as_useless(scaler, clips=clips, apart=context.stepped_apart)
        context.on_close.append(self._drop)
        context.components.add(self)
        agree(context.worker.shared_buffers, [*[None] * len(self._parameters), *self._buffers_now()])
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
                            and (ddp is None or ddp.syncing), self._guard.own.add, self._aborted)

    @property
    def in_join(self) -> bool:
        return self._uneven.inside

    def new_plan(self) -> None:
        """Adapts hooks, buckets and forward overlap to a plan that has just taken effect."""
        worker = self._loop.worker
        forward = worker.plan.overlap == "forward"
        if forward and self._overlap is None:
            self._overlap = self._overlapped()
        elif not forward and self._overlap is not None:
            self._overlap.detach()
            self._overlap = None
        self._sparse.follow(worker)
        self._reorder()

    def new_members(self) -> None:
        self._sparse.follow(self._loop.worker)

    def complete(self, pending: Pending) -> None:
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
            self._loop.worker.reorder({number: place for number, place in self._places.items() if number < some})

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        self._finish_overlap()
        self._uneven.enter()
        try:
            yield
            self._hooks.end_broken()
            self._loop.discard()
            self._uneven.leave(lambda: self._loop.take_part(self._buffers_now()))
        except BaseException as error:
            self.context.close(exit_reason(error))
            raise
        finally:
            self._uneven.end()

    def weight(self, n: float) -> None:
        if self._overlap is None:
            self._loop.set_weight(n)
        else:
            self._overlap.call_at_end(lambda: self._loop.set_weight(n))

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
        has_late = self._loop.flush(self._parameters)
        self._sparse.make_sparse()
        return has_late

    def detach(self) -> None:
        self._hooks.remove()
        if self._ddp is not None:
            self._ddp.remove()
        if self._overlap is not None:
            self._overlap.detach()
        self._loop.detach()

    def _ready(self, number: int, gradient: torch.Tensor) -> None:
        if self._order is not None:
            self._places, self._order = self._order.take(), None
            self._reorder()
        if (local := self.context.local) is not None:
            local.recorder.tensor(number)
            return
        self._passed_on.append((number, gradient, gradient._version))
        if gradient.layout is torch.sparse_coo:
            gradient = self._sparse.dense(number, gradient)
        self._loop.ready(number, gradient)

    def _check_unchanged(self) -> None:
        """Raises an error if a gradient has changed since it was passed on, because exchanges read gradients at any time."""
        passed_on, self._passed_on = self._passed_on, []
        for number, gradient, version in passed_on:
            grad = self._parameters[number].grad
            if grad is not gradient or (grad._version != version and not shares_memory(grad)):
                self._loop.worker.latch(InvalidState("E-GRADIENT-CHANGED", CHANGED.format(self._names[number])))
                self._loop.worker.check()

    def _aborted(self) -> None:
        self._passed_on.clear()
        self._sparse.forget()
        self._loop.abandon()

    def _end(self, *, adds: bool = True) -> None:
        """Exchanges and averages gradients at the end of a backward pass. `adds` is False if the script requests the exchange
        without a backward pass."""
        self._guard.check()
        if self._loop.count_local(adds=adds):
            return
        self._check_unchanged()
        if self._overlap is not None:
            self._overlap.end_and_observe()  # ends the previous step, if no gradient hook has done so
        self._sparse.make_dense()
        buffers = self._buffers_now()
        if self._overlap is not None and not self._uneven.inside and self._overlap.can_overlap():
            self._overlap.launch(buffers)
            return
        averages = self._loop.average([*(p.grad for p in self._parameters), *buffers], lambda: [*self._targets(), *buffers])
        for number, (p, average) in enumerate(zip(self._parameters, averages, strict=False)):
            p.grad = self._entries.pop(number, average)
        self._sparse.make_sparse()
        self._note_written()
        self._loop.written()
        self._loop.observe()

    def _targets(self) -> list[torch.Tensor | None]:
        """Returns the tensors into which to write averages; None for parameters whose averages arrived as sparse entries."""
        self._entries = self._sparse.arrived(self._loop.worker)
        targets = averaging_targets(self._loop.worker, self._parameters)
        return [None if number in self._entries else target for number, target in enumerate(targets)]

    def _note_written(self) -> None:
        self._written = self._gradients()

    def _gradients(self) -> list[tuple[int, int, int] | None]:
        """Returns identities and versions of gradients and parameters. They change when gradients change or an optimizer steps.
        """
        return [None if p.grad is None else (id(p.grad), p.grad._version, p._version) for p in self._parameters]

    def _buffers_now(self) -> list[torch.Tensor]:
        # Looks buffers up by name, because a module can replace a buffer by another tensor.
        named = dict(self._model.named_buffers()) if self._buffers else {}
        return [named[name] for name in self._buffers]
