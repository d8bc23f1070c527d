"""Averages gradients through DistributedDataParallel's communication hook, which a script registers itself.

DDP regroups its buckets after the first step, so tensors are identified by their parameters and not by bucket index. The first
backward pass only collects buckets and exchanges them together after the last one: the hook has not seen all parameters before.
attach() on a DistributedDataParallel module does not use the hook; see engine/quiet_ddp.py.

(No `from __future__ import annotations`: DDP checks the annotations of a hook.)
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from commlayer.cluster.process_groups import PendingCollective, torch_errors
from commlayer.config import Config, read_config
from commlayer.engine import checkpoint
from commlayer.engine.connection import DistributedJob, JobContext
from commlayer.engine.finite_steps import FiniteSteps
from commlayer.engine.guards import WITH_DDP, AttachedModel, Claim, HookedTensors, StepGuard, found_in, name_of, wrapper_of
from commlayer.engine.hooks import COMPILED, TAKEN, in_compiled_autograd, uncompiled
from commlayer.engine.lanes import Lane
from commlayer.engine.observers import Observers
from commlayer.engine.optimizers import HeldParameters, OptimizerMemory, check_dense, settings_of
from commlayer.engine.plan_choice import requested_plan
from commlayer.engine.start import Start, connect, group_of
from commlayer.engine.step_loop import StepLoop
from commlayer.errors import CommError, DeadlineExceeded, InvalidInput, InvalidState
from commlayer.optim import family_of, usual
from commlayer.records import Plan

CLOSING_S = 1.0
"""Seconds that closing a session waits for the lane's thread to end."""
ENDING_S = 30.0
"""Seconds that a backward pass waits beyond the deadline, for an error to be reported and residuals to be restored."""
ONLY_AVERAGES = ("a communication hook that the script registers only averages the gradients of each step: use attach(model, "
                 "optimizer), or make the plan without local steps and results that are one step late")


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
        self._averager: _Averager | None = None
        """Averages the module's gradients, from the end of its first backward pass to the end of its session."""
        self._unconnected = JobContext()
        self._saved: dict[str, Any] = {}
        """Codec state of a copied or pickled hook; it is restored after the first backward pass has connected."""
        self._weight: tuple[float, float | None] | None = None
        """The weight and total that the script has set since the last step; None if it has set none."""
        self._parts: list[_Part] = []
        """Buckets of the current backward pass."""
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._closed = False
        self._brought: list[torch.Tensor] = []
        """Parameters that have received a gradient in the backward pass whose autograd id is `_pass`."""
        self._pass = -1

    @property
    def connection(self) -> JobContext:
        return self._unconnected if self._averager is None else self._averager.connection

    def weight(self, n: float, total: float | None = None) -> None:
        """Sets the weight of this worker's gradients from the next step on, as Session.weight does."""
        self._weight = n, total

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
        self._parts.append(_Part(parameters, bucket.gradients(), buffer, future))
        last = bucket.is_last()
        if last:
            # Not before: under a reentrant checkpoint an earlier bucket may belong to a backward pass inside this one.
            self._ended.clear()
            inside = torch._C._current_graph_task_id() >= 0
            if inside:
                torch.autograd.Variable._execution_engine.queue_callback(self._end)
        averager, fresh = self._averager, self._parts[-1:]
        if averager is None and last:
            averager, fresh = self._connect(device), self._parts
        if averager is not None:
            for part in fresh:
                self._feed(averager, part)
            if last:
                step, self._parts = self._parts, []
                averager.lane.put(lambda: self._finish(averager, step))
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
            if self._averager is not None and not all(id(p) in self._averager.numbers for p in parameters):
                raise InvalidInput("E-DDP-HOOK",
                                   "this HookState belongs to another model, or the model's parameters have changed since "
                                   "its first backward pass: make one HookState for each DistributedDataParallel module")
            if buffer.layout != torch.strided:
                ddp = wrapper_of(self)
                check_dense(name_of(parameters[0], None if ddp is None else ddp.module), buffer)
        except ValueError as error:
            self._latch(error)
            raise

    def _connect(self, device: torch.device) -> "_Averager":
        """Connects to the other ranks at the end of the first backward pass, when the hook has seen all parameters."""
        claim: Claim | None = None
        try:
            ddp = wrapper_of(self)
            if ddp is not None:
                self._process_group = self._process_group or ddp.process_group
            with Start(self._process_group, device) as start:
                model = found_in([p for part in self._parts for p in part.parameters], None if ddp is None else ddp.module)
                claim = Claim(model.named)
                memory = OptimizerMemory(model.parameters, self._optimizer, usual(family_of(self._optimizer)))
                connection = connect(model.job, device, start, memory, plan=self._plan, config=self._config,
                                     full_job=model.full_job, forbids=lambda _: ONLY_AVERAGES,
                                     must={"wrapper": "communication hook", "optimizer": "not given"},
                                     settings=settings_of(self._optimizer, model.named))
            connection.on_close.append(claim.release)
            if connection.plan is not None and any(b.stale for b in connection.plan.buckets):
                connection.close(ONLY_AVERAGES)
                raise InvalidInput("E-PLAN-REFUSED", f"plan: {ONLY_AVERAGES}")
            self._averager = averager = _Averager(model, connection, ddp, self._optimizer, self._scaler, self._config,
                                                  self._latch)
            if (ddp is not None and isinstance(connection, DistributedJob) and ddp.process_group == self._process_group
                    and ddp.broadcast_buffers and ddp.modules_buffers):
                DDPBuffers(ddp, connection, self._config.deadline_s)
            if isinstance(connection, DistributedJob):
                checkpoint.restore_worker(connection, self._saved)
        except BaseException as error:
            if claim is not None and self._averager is None:
                claim.release()
            self._latch(error)
            raise
        handles = [p.register_post_accumulate_grad_hook(self._got) for p in model.parameters]
        connection.on_close += [*(handle.remove for handle in handles), self._let_go]
        return averager

    def _got(self, parameter: torch.Tensor) -> None:
        if (graph := torch._C._current_graph_task_id()) != self._pass:
            self._pass = graph
            self._brought.clear()
        self._brought.append(parameter)

    def _let_go(self) -> None:
        """Drops all references when the session has ended: lane, buffers, model and optimizer. DDP keeps this HookState and
        would keep them alive."""
        if self._averager is not None:
            self._averager.lane.close(CLOSING_S)
        self._closed = self._error is None
        self._averager = self._optimizer = self._scaler = None
        self._parts.clear()
        self._brought.clear()

    def _feed(self, averager: "_Averager", part: _Part) -> None:
        if (loop := averager.loop) is None:
            return
        if self._weight is not None and not loop.worker.begun:
            loop.weigh(*self._weight)
            self._weight = None
        for p, gradient in zip(part.parameters, part.gradients, strict=True):
            # For unused parameters DDP fills in zeros, and drops the result if no rank used them.
            if loop.has_gradient(number := averager.numbers[id(p)]):
                loop.ready(number, gradient)

    def _finish(self, averager: "_Averager", step: list[_Part]) -> None:
        """Ends the step, on the lane's thread. Completes DDP's futures with the averages, or with local gradients after an
        error."""
        try:
            averager.average(step)
        except BaseException as error:
            self._latch(error)
        finally:
            for part in step:
                part.future.set_result(part.buffer)
            self._ended.set()

    def _end(self) -> None:
        """Waits for the step at the end of the backward pass and raises its error. (PyTorch would turn an exception in a future
        into a cast error.)"""
        averager = self._averager
        waits_s = averager.connection.waits.verdict_s if averager and isinstance(averager.connection, DistributedJob) else 0.0
        if not self._ended.wait(self._config.deadline_s + ENDING_S + waits_s):
            self._latch(DeadlineExceeded("the step did not end by its deadline", peer="this worker's own lane"))
        if averager is not None and averager.guard is not None:
            averager.guard.check()
        for p in self._brought if torch._C._current_graph_task_id() == self._pass else ():
            if p.grad is None:
                self._latch(InvalidState("E-HOOKS-TAKEN", TAKEN.format(tuple(p.shape))))
        if self._error is not None:
            raise self._error
        if averager is not None and averager.loop is not None and torch._C._current_graph_task_id() >= 0:
            # After DDP's own end callback, which writes averages into `.grad`.
            torch.autograd.Variable._execution_engine.queue_callback(averager.loop.written)

    def _latch(self, error: BaseException) -> None:
        self._error = self._error or error

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a copied or pickled DDP module contains of its hook. Connection, scaler and optimizer belong to this
        process and are left out."""
        job = self.connection
        return {"plan": self._plan, "config": self._config, "weight": self._weight,
                "state": checkpoint.worker_state(job) if isinstance(job, DistributedJob) else self._saved}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        """Restores a copied or pickled state. Register it with a module again: DDP does not register the hooks of a loaded
        module."""
        HookState.__init__(self, config=saved["config"])
        self._plan, self._weight, self._saved = saved["plan"], saved["weight"], saved["state"]


class _Averager:
    """Averages the gradients of one DDP module, until its session ends."""

    def __init__(
        self, model: HookedTensors, connection: JobContext, ddp: DistributedDataParallel | None, optimizer: Any, scaler: Any,
        config: Config, latch: Callable[[BaseException], None],
    ) -> None:
        self.connection = connection
        self.numbers = {id(p): number for number, p in enumerate(model.parameters)}
        self.lane = Lane("ddp", latch)
        self.loop: StepLoop | None = None
        """None if this rank has no other ranks to average with."""
        self.guard: StepGuard | None = None
        if not isinstance(connection, DistributedJob):
            return
        ignored = () if ddp is None else getattr(ddp.module, "_ddp_params_and_buffers_to_ignore", ())
        named = [(name, p) for name, p in model.named if name not in ignored]
        module = None if ddp is None else ddp.module
        self.guard = StepGuard(AttachedModel(module, named, optimizer, ignored), named, latch, WITH_DDP)
        connection.on_close.append(self.guard.remove)
        finite = FiniteSteps(connection, model.parameters, HeldParameters(model.parameters))
        self.loop = StepLoop(connection, model.parameters, model.named, optimizer=optimizer, scaler=scaler, config=config,
                             observers=Observers(), guard=self.guard, finite=finite)

    def average(self, step: Sequence[_Part]) -> None:
        if (loop := self.loop) is None:
            self.connection.passed()
            return
        by_number = {self.numbers[id(p)]: gradient for part in step
                     for p, gradient in zip(part.parameters, part.gradients, strict=True)}
        gradients = [by_number.get(n) for n in range(len(self.numbers))]
        loop.average([g if loop.has_gradient(n) else None for n, g in enumerate(gradients)], lambda: gradients)
        loop.observe()


def comm_hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook function to register with DDP. It averages by the plan in `state`, and with DDP's own all-reduce after the
    session has ended."""
    if state.closed:
        return default_hooks.allreduce_hook(state.group, bucket)
    return state.take(bucket)


# ---- broadcasts rank 0's buffers before a training pass of DistributedDataParallel, instead of DDP itself
#
# If another rank has ended or is lost, DDP would wait until torch's timeout and name no rank. This wait ends at once.

WHAT = "broadcast of the buffers of DistributedDataParallel"


class DDPBuffers:
    """Broadcasts rank 0's buffers of one DDP module before its training forward passes. All ranks create it together."""

    def __init__(self, ddp: DistributedDataParallel, connection: DistributedJob, deadline_s: float) -> None:
        """Registers the hook on `ddp`."""
        self._connection: DistributedJob | None = connection
        self._deadline_s, self._ranks = deadline_s, connection.groups.members.ranks
        # A separate group, because late results use the other groups meanwhile.
        self._group: Any = connection.groups.members.group(timeout_s=deadline_s)
        self._hook = ddp.register_forward_pre_hook(uncompiled(self._before_forward))
        connection.on_close.append(self.remove)

    def __getstate__(self) -> dict[str, Any]:
        """State for a copy of the DDP module, which is saved and copied with its hooks. In a copy this hook does nothing."""
        return {"_connection": None}

    def remove(self) -> None:
        self._hook.remove()
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    def _before_forward(self, ddp: Any, _args: Any) -> None:
        if (self._connection is None or ddp._join_config.enable or hasattr(ddp, "buffer_hook")
                or not ddp.will_sync_module_buffers()):
            return
        worker = self._connection.worker
        worker.check()
        if (peer_error := worker.finished_peers.begin(worker.step)) is not None:
            worker.latch(peer_error)
            worker.check()
        try:
            ddp._assign_modules_buffers()
            self._broadcast([b for b in ddp.modules_buffers if b.numel()], worker.now.failed)
        except CommError as error:
            worker.latch(error)
            worker.check()
        worker.finished_peers.end()
        ddp.require_forward_param_sync = False  # DDP sets it to True at the end of this forward pass

    def _broadcast(self, buffers: list[torch.Tensor], failed: Callable[[], BaseException | None]) -> None:
        by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = defaultdict(list)
        for buffer in buffers:
            by_kind[buffer.dtype, buffer.device].append(buffer.detach())
        for same in by_kind.values():
            flat = _flatten_dense_tensors(same)
            with torch_errors(WHAT):
                work = dist.broadcast(flat.view(torch.uint8), self._ranks[0], group=self._group, async_op=True)
            PendingCollective(work, WHAT, on_device=flat.is_cuda).wait(time.monotonic() + self._deadline_s, failed)
            if dist.get_rank() != self._ranks[0]:
                for buffer, values in zip(same, _unflatten_dense_tensors(flat, same), strict=True):
                    buffer.data.copy_(values)  # `.data`, as in DDP, so that autograd does not count a change
