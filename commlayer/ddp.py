"""DDP's communication hook: attaches a DistributedDataParallel module at the end of its first backward pass.

DDP does not pass its module to a hook, but at the end of the first pass the module can be found. From then on attach()'s own
hooks average, and DDP calls this hook only after the session has ended.

(No `from __future__ import annotations`: DDP checks the annotations of a hook.)
"""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from commlayer.config import Config, read_config
from commlayer.engine.checkpoints import checkpoint
from commlayer.engine.job.job import DistributedJob, JobContext
from commlayer.engine.start.plan_choice import requested_plan
from commlayer.errors import InvalidInput
from commlayer.records import Plan
from commlayer.session import Session, attach


class HookState:
    """State of the hook `comm_hook` of one DDP module: `ddp.register_comm_hook(commlayer.HookState(optimizer),
    commlayer.comm_hook)`."""

    def __init__(
        self, optimizer: Any = None, *, compression: Any = None, plan: str | Path | Plan | None = None, grad_scaler: Any = None,
        process_group: Any = None, config: Config | dict[str, Any] | None = None,
    ) -> None:
        """Creates the hook state of one DDP module. Arguments are as in attach(). The first backward pass attaches the module;
        `session` is then the Session that attach() would return."""
        requested_plan(compression, plan)  # refuses wrong arguments before the first backward pass
        self._arguments = {"compression": compression, "plan": plan, "config": read_config(config)}
        self._own = {"optimizer": optimizer, "grad_scaler": grad_scaler, "process_group": process_group}
        """Arguments of attach() that a copied or pickled HookState does not contain, because they are objects of this process.
        """
        self.session: Session | None = None
        self.group: Any = None
        """Process group over which DDP's own all-reduce averages after the session has ended."""
        self.attaching = False
        """True: this hook attaches its module."""
        self._attached: set[int] = set()
        """Python ids of the parameters of the attached module."""
        self._saved: dict[str, Any] = {}
        """Codec state (residuals, momenta) from a copied or pickled HookState. The first backward pass restores it."""
        self._weight: float | None = None
        self._error: BaseException | None = None

    @property
    def context(self) -> JobContext:
        return JobContext() if self.session is None else self.session.inspect.context

    def weight(self, n: float) -> None:
        """Sets the weight of this worker's gradients from the next step on, as Session.weight does."""
        self._weight = n
        if self.session is not None:
            self.session.weight(n)

    def handle_bucket(self, bucket: GradBucket) -> torch.Tensor:
        """Receives one gradient bucket from DDP. The last bucket of the first backward pass also attaches the module and
        averages `.grad`."""
        if self._error is not None:
            raise self._error
        if self.session is None:
            if bucket.is_last():
                # DDP's own end callback, which is queued already, writes into `.grad`: a callback of a callback follows it.
                queue = torch.autograd.Variable._execution_engine.queue_callback
                queue(lambda: queue(self._attach))
        elif not {id(p) for p in bucket.parameters()} <= self._attached:
            raise InvalidInput("E-DDP-HOOK",
                               "this HookState belongs to another model, or the model's parameters have changed since its "
                               "first backward pass: make one HookState for each DistributedDataParallel module")
        return bucket.buffer()

    def _attach(self) -> None:
        try:
            ddp = find_ddp_module(self)
            self.attaching = True
            self.session = session = attach(ddp, **self._own, **self._arguments)
            self._attached, self.group = {id(p) for p in ddp.parameters()}, ddp.process_group
            job = session.inspect.context
            if isinstance(job, DistributedJob):
                checkpoint.restore_worker(job, self._saved)
                if self._weight is not None:
                    session.weight(self._weight)
                session.synchronize()
            elif self._own["optimizer"] is None:
                job.count_step()  # without an optimizer, backward passes count as training steps
        except BaseException as error:
            self._error = error
            raise
        finally:
            self.attaching = False

    def __getstate__(self) -> dict[str, Any]:
        """Returns the part of this state that a copied or pickled DDP module contains."""
        job = self.context
        return {"arguments": self._arguments, "weight": self._weight,
                "state": checkpoint.worker_state(job) if isinstance(job, DistributedJob) else self._saved}

    def __setstate__(self, saved: dict[str, Any]) -> None:
        """Restores a copied or pickled HookState. DDP does not register the hooks of a loaded module, so register the hook
        again."""
        HookState.__init__(self, **saved["arguments"])
        self._weight, self._saved = saved["weight"], saved["state"]


def comm_hook(state: HookState, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook function to register with DDP. It returns `bucket` unchanged, because `state`'s session averages `.grad`. After
    the session has ended, it returns the average of DDP's own all-reduce."""
    if state.session is not None and state.context.closed:
        return default_hooks.allreduce_hook(state.group, bucket)
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(state.handle_bucket(bucket))
    return future


def find_ddp_module(state: object) -> DistributedDataParallel:
    """Returns the DDP module with which this HookState is registered. Raises ValueError if there is none or more than one."""
    kinds = tuple(_kinds(DistributedDataParallel))
    wrapped = [thing for thing in gc.get_objects() if type(thing) in kinds]
    modules: list[DistributedDataParallel] = [
        ddp for ddp in wrapped if any(theirs is state for _, theirs in getattr(ddp, "_comm_hooks", ()))]
    if len(modules) != 1:
        raise InvalidInput("E-DDP-HOOK",
                           f"this HookState is registered with {len(modules)} DistributedDataParallel modules: make one "
                           "HookState for each module")
    return modules[0]


def _kinds(kind: type[object]) -> Iterator[type[object]]:
    """Yields the class and all of its subclasses. The caller compares exact types of all Python objects with them, because
    issubclass of an abstract class is slow."""
    yield kind
    for below in kind.__subclasses__():
        yield from _kinds(below)
