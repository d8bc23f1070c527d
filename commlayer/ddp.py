"""Averages gradients through DistributedDataParallel's communication hook.

DDP regroups its buckets after the first step, so tensors are identified by their parameters and not by bucket index. The first
backward pass only collects buckets and exchanges them together after the last one: the hook has not seen all parameters before.

(No `from __future__ import annotations`: DDP checks the annotations of a hook.)
"""

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from commlayer.config import Config, read_config
from commlayer.engine import checkpoint
from commlayer.engine.averages import write_gradient
from commlayer.engine.connection import JobContext
from commlayer.engine.ddp_modes import DDPBuffers, DDPModes
from commlayer.engine.guards import WITH_DDP, AttachedModel, Claim, StepGuard, found_in, name_of, wrapper_of
from commlayer.engine.hooks import COMPILED, TAKEN, in_compiled_autograd
from commlayer.engine.lanes import Lane
from commlayer.engine.observers import Observers
from commlayer.engine.optimizers import check_dense, settings_of
from commlayer.engine.plan_choice import requested_plan
from commlayer.engine.start import Start, connect, group_of
from commlayer.engine.step_loop import StepLoop
from commlayer.engine.sync_modes import RequestedModes
from commlayer.errors import DeadlineExceeded, InvalidInput, InvalidState
from commlayer.optim import family_of
from commlayer.records import Plan

CLOSING_S = 1.0
"""Seconds that closing a session waits for the lane's thread to end."""
ENDING_S = 30.0
"""Seconds that a backward pass waits beyond the deadline, for an error to be reported and residuals to be restored."""


def _forbids(_way: str) -> str:
    return ("local steps need attach(model, optimizer): a communication hook that the script registers only averages "
            "gradients; call attach(), or make the plan without local steps")


class _Part(NamedTuple):
    """One bucket of DDP, as the hook received it: its parameters, gradients, flat buffer, and the future that DDP waits for."""

    parameters: list[torch.Tensor]
    gradients: list[torch.Tensor]
    buffer: torch.Tensor
    future: torch.futures.Future[torch.Tensor]


class HookState:
    """The state of `comm_hook`: `ddp.register_comm_hook(commlayer.HookState(optimizer), commlayer.comm_hook)`."""

    def __init__(
        self, optimizer: Any = None, *, compression: Any = None, plan: str | Path | Plan | None = None, grad_scaler: Any = None,
        process_group: Any = None, config: Config | dict[str, Any] | None = None,
    ) -> None:
        """Creates the state of one DDP module's hook. Arguments are as in attach(); every step applies the average of all
        gradients. `process_group`: the ranks to average over, if other than those of the DDP module."""
        self._plan, self._config = requested_plan(compression, plan), read_config(config)
        self._scaler, self._optimizer, self._process_group = grad_scaler, optimizer, group_of(process_group)
        self.modes: DDPModes | None = None
        """Permits plans of local steps if set. attach() sets it, since it knows the module and its optimizer."""
        self._claim: Claim | None = None
        self._held: dict[str, Any] = {}
        """Codec state of a copied or pickled hook; it is restored after the first backward pass has connected."""
        self.connection, self.observers = JobContext(), Observers()
        self._loop: StepLoop | None = None
        self._weight: tuple[float, float | None] | None = None
        """The weight and total that the script has set since the last step; None if it has set none."""
        self._numbers: dict[int, int] = {}
        self._step: list[_Part] = []
        self._lane: Lane | None = None
        self._guard: StepGuard | None = None
        self._unused_here: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Pairs of a parameter that this rank did not use in the last backward pass and the average that arrived for it."""
        self._actions: list[Callable[[], None]] = []
        self.module: nn.Module | None = None
        """The module wrapped by DDP, for the parameter names used in plans; None until it is known."""
        self._views = False
        """Whether `.grad` tensors are views of DDP's buckets (gradient_as_bucket_view=True)."""
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._closed = False
        self._brought: list[torch.Tensor] = []
        """Parameters that have received a gradient in the backward pass whose autograd id is `_pass`."""
        self._pass = -1

    def take(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Receives one bucket of DDP during the backward pass. The returned future completes when the whole step has been
        averaged."""
        if in_compiled_autograd():
            self._latch(InvalidState("E-COMPILED", COMPILED))
        if self._error is not None:
            raise self._error
        parameters, buffer = bucket.parameters(), bucket.buffer()
        self._check(parameters, buffer)
        device = buffer.device
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[device] if device.type == "cuda" else None)
        part = _Part(parameters, bucket.gradients(), buffer, future)
        self._step.append(part)
        last = bucket.is_last()
        if last:
            # Not before: under a reentrant checkpoint an earlier bucket may belong to a backward pass inside this one.
            self._ended.clear()
            inside = torch._C._current_graph_task_id() >= 0
            if inside:
                torch.autograd.Variable._execution_engine.queue_callback(self._end)
        if self._lane is not None:
            self._feed(part)
        elif last:
            try:
                self._connect(device)
            except BaseException as error:
                self._latch(error)
                raise
            self._lane = Lane("ddp", self._latch)
            for earlier in self._step:
                self._feed(earlier)
        if last:
            step, self._step = self._step, []
            assert self._lane is not None
            self._lane.put(lambda: self._finish(step))
            if not inside:
                self._end()  # ddp.join(): a rank without inputs takes part with zeros, outside any backward pass
        return future

    @property
    def closed(self) -> bool:
        """Whether the session of this state has ended without an error."""
        return self._closed or (self.connection.closed and self._error is None)

    @property
    def group(self) -> Any:
        return self._process_group or dist.group.WORLD

    def _check(self, parameters: list[torch.Tensor], buffer: torch.Tensor) -> None:
        """Checks that a bucket belongs to this state's model and is dense. An error is raised again in all later passes."""
        try:
            if self._lane is not None and not all(id(p) in self._numbers for p in parameters):
                raise InvalidInput("E-DDP-HOOK",
                                   "this HookState belongs to another model, or the model's parameters have changed since "
                                   "its first backward pass: make one HookState for each DistributedDataParallel module")
            if buffer.layout != torch.strided:
                self._find_module()
                check_dense(name_of(parameters[0], self.module), buffer)
        except ValueError as error:
            self._latch(error)
            raise

    def _connect(self, device: torch.device) -> None:
        """Connects to the other ranks at the end of the first backward pass, when the hook has seen all parameters."""
        self._find_module()
        with Start(self._process_group, device) as start:
            model = found_in([p for part in self._step for p in part.parameters], self.module)
            self.claim(model.named)
            self.connection = connect(model.job, device, start, plan=self._plan, config=self._config, full_job=model.full_job,
                                      forbids=_forbids if self.modes is None else self.modes.forbids,
                                      requested=RequestedModes() if self.modes is None else self.modes.requested,
                                      optimizer=family_of(self._optimizer),
                                      must={"wrapper": "DistributedDataParallel", "optimizer": "not given"},
                                      settings=settings_of(self._optimizer, model.named))
        self._numbers = {id(p): number for number, (_, p) in enumerate(model.named)}
        self.connection.on_close.append(self.release)
        self.connection.after_regroup.append(self._regroup)
        if self.connection.worker is None:
            self._unwatch()
        else:
            self.watch(model.named)
        self.connection.on_close.append(self._unwatch)
        self._loop = StepLoop(
            self.connection, [p for _, p in model.named if isinstance(p, nn.Parameter)], model.named, optimizer=self._optimizer,
            scaler=self._scaler, config=self._config, observers=self.observers,
            schedule=None if self.modes is None else self.modes.schedule(self.connection, model.named, self.observers,
                                                                               self._guard),
            guard=self._guard)
        if self.modes is not None and self._guard is not None:
            self.connection.after_switch.append(self._weigh)
            self.modes.follow(self._loop, self._guard)
            self._weigh()
        self._take_buffers(self._loop)
        for action in self._actions:
            action()
        self._actions.clear()
        handles = [p.register_post_accumulate_grad_hook(self._got) for _, p in model.named]
        self.connection.on_close += [*(handle.remove for handle in handles), self._let_go]

    def _take_buffers(self, loop: StepLoop) -> None:
        """Broadcasts the module's buffers instead of DDP, if DDP broadcasts them, both use the same ranks, and the workers
        cannot change."""
        connection, ddp = self.connection, wrapper_of(self)
        if (ddp is not None and connection.worker is not None and connection.groups is not None and connection.members is None
                and ddp.process_group == self._process_group and ddp.broadcast_buffers and ddp.modules_buffers):
            DDPBuffers(ddp, connection, self._config.deadline_s, lambda: loop.local)

    def _got(self, parameter: torch.Tensor) -> None:
        if (graph := torch._C._current_graph_task_id()) != self._pass:
            self._pass = graph
            self._brought.clear()
        self._brought.append(parameter)

    def _let_go(self) -> None:
        """Drops all references when the session has ended: lane, buffers, model and optimizer. DDP keeps this HookState and
        would keep them alive."""
        if self._lane is not None:
            self._lane.close(CLOSING_S)
        self._closed = self._error is None
        self._lane = self._loop = self._guard = self.modes = self.module = None
        self._optimizer = self._scaler = None
        self.connection, self.observers = JobContext(), Observers()
        for kept in (self._numbers, self._step, self._unused_here, self._actions, self._brought):
            kept.clear()

    def _find_module(self) -> None:
        """Finds the DDP module that uses this state, and takes parameter names and process group from it."""
        if (ddp := wrapper_of(self)) is not None:
            self.module, self._views = ddp.module, ddp.gradient_as_bucket_view
            self._process_group = self._process_group or ddp.process_group

    def _regroup(self) -> None:
        """Switches DDP to the new default process group after workers have left or joined. DDP copies buffers within this
        group, and averages in it after the session has ended."""
        self._process_group = None
        if (ddp := wrapper_of(self)) is not None:
            ddp.process_group = dist.distributed_c10d._get_default_group()

    def watch(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Starts checking the optimizers that step the given parameters."""
        if self._guard is None:
            ignored = getattr(self.module, "_ddp_params_and_buffers_to_ignore", ())
            named = [(name, p) for name, p in named if name not in ignored]
            self._guard = StepGuard(AttachedModel(self.module, named, self._optimizer, ignored), named, self._latch, WITH_DDP)

    def _unwatch(self) -> None:
        if self._guard is not None:
            self._guard.remove()
            self._guard = None

    def claim(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Reserves the given parameters for this session. Raises ValueError if another session averages one of them."""
        self._claim = self._claim or Claim(named)

    def release(self) -> None:
        """Ends the reservation made by `claim`: other sessions can average these parameters."""
        if self._claim is not None:
            self._claim.release()

    def _feed(self, part: _Part) -> None:
        loop = self._averaging()
        if loop is None or loop.local:
            return
        if self._weight is not None and not loop.worker.begun:
            loop.weigh(*self._weight)
            self._weight = None
        for p, gradient in zip(part.parameters, part.gradients, strict=True):
            # For unused parameters DDP fills in zeros, and drops the result if no rank used them.
            if loop.has_gradient(number := self._numbers[id(p)]):
                loop.ready(number, gradient)

    def _averaging(self) -> StepLoop | None:
        """The step loop; None if this rank has no other ranks to average with."""
        return None if self.connection.worker is None else self._loop

    def flush(self, parameters: list[torch.nn.Parameter]) -> bool:
        """Does what Session.flush describes. `parameters` are the model's, in any order."""
        mine = [p for p in parameters if id(p) in self._numbers]
        return self._loop is not None and self._loop.flush(sorted(mine, key=lambda p: self._numbers[id(p)]))

    def _finish(self, step: list[_Part]) -> None:
        """Ends the step, on the lane's thread. Completes DDP's futures with the averages, or with local gradients after an
        error."""
        try:
            if self.connection.worker is None:
                self.connection.passed()
            # If local steps began after DDP had started to reduce this pass, the pass is the first local step.
            if (loop := self._averaging()) is not None and not loop.count_local():
                by_number = {self._numbers[id(p)]: (p, gradient) for part in step
                             for p, gradient in zip(part.parameters, part.gradients, strict=True)}
                gradients = [by_number[n][1] if n in by_number else None for n in range(len(self._numbers))]
                inputs = [g if loop.has_gradient(n) else None for n, g in enumerate(gradients)]

                def targets() -> list[torch.Tensor | None]:
                    use_flags = loop.worker.used() if loop.worker.late else []
                    self._unused_here = [by_number[n] for n, anyone in enumerate(use_flags) if anyone and inputs[n] is None]
                    return gradients

                loop.average(inputs, targets)
                loop.observe()
        except BaseException as error:
            self._latch(error)
        finally:
            for part in step:
                part.future.set_result(part.buffer)
            self._ended.set()

    def _end(self) -> None:
        """Waits for the step at the end of the backward pass and raises its error. (PyTorch would turn an exception in a future
        into a cast error.)"""
        connection = self.connection
        patience_s = connection.patience()
        if not self._ended.wait(self._config.deadline_s + ENDING_S + connection.waits.verdict_s + patience_s):
            self._latch(DeadlineExceeded("the step did not end by its deadline", peer="this worker's own lane"))
        if self._guard is not None:
            self._guard.check()
        for p in self._brought if torch._C._current_graph_task_id() == self._pass else ():
            if p.grad is None:
                self._latch(InvalidState("E-HOOKS-TAKEN", TAKEN.format(tuple(p.shape))))
        if self._error is not None:
            raise self._error
        if (loop := self._averaging()) is not None and torch._C._current_graph_task_id() >= 0:
            # After DDP's own end callback, which writes averages into `.grad`.
            torch.autograd.Variable._execution_engine.queue_callback(functools.partial(self._written, loop))

    def _written(self, loop: StepLoop) -> None:
        """Writes late averages of parameters that no rank used in this pass. They stem from an earlier pass, and DDP skips such
        parameters."""
        for p, average in self._unused_here:
            write_gradient(p, average, keep=self._views)
        self._unused_here.clear()
        if not loop.local:
            loop.written()

    def _latch(self, error: BaseException) -> None:
        self._error = self._error or error

    def weight(self, n: float, total: float | None = None) -> None:
        self._weight = n, total
        self._weigh()

    def _weigh(self) -> None:
        """Applies the script's weight at the start of a pass under local steps. Otherwise `_feed` applies it with the first
        gradient of a step."""
        if self._loop is not None and self._loop.local and self._weight is not None:
            self._loop.weigh(*self._weight)
            self._weight = None

    def detach(self) -> None:
        self._unwatch()
        if self.modes is not None:
            self.modes.remove()
            if self._loop is not None:
                self._loop.detach()
        self.release()

    def log_loss(self, loss: float | torch.Tensor) -> None:
        if self._loop is not None:
            self._loop.log_loss(loss)

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a copied or pickled DDP module contains of its hook. Connection, scaler and optimizer belong to this
        process and are left out."""
        return {"plan": self._plan, "config": self._config, "weight": self._weight,
                "state": checkpoint.worker_state(self.connection) if self.connected else self._held}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        """Restores a copied or pickled state. Register it with a module again: DDP does not register the hooks of a loaded
        module."""
        HookState.__init__(self, config=saved["config"])
        self._plan, self._weight, self._held = saved["plan"], saved["weight"], saved["state"]
        self.when_connected(lambda: checkpoint.restore_worker(self.connection, self._held))

    @property
    def connected(self) -> bool:
        """Whether the first backward pass has connected this rank to the others."""
        return self._lane is not None

    @property
    def deadline_s(self) -> float:
        return self._config.deadline_s

    def when_connected(self, action: Callable[[], None]) -> None:
        """Runs `action` at once if this rank is connected, else at the end of the first backward pass."""
        if self._lane is not None:
            action()
        else:
            self._actions.append(action)


def comm_hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook function to register with DDP. It averages by the plan in `state`, and with DDP's own all-reduce after the
    session has ended."""
    if state.closed:
        return default_hooks.allreduce_hook(state.group, bucket)
    return state.take(bucket)
