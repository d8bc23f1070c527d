"""Local steps of a DistributedDataParallel module, and broadcasts of its buffers.

Under a plan of local steps DDP's averaging is off (quiet_ddp.py), and hooks on parameters count backward passes. DDP would copy
rank 0's buffers before each forward pass; instead each exchange averages them.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.parallel import DistributedDataParallel

from commlayer.cluster.process_groups import PendingCollective, torch_errors
from commlayer.engine.connection import JobContext
from commlayer.engine.exchange_schedule import ExchangeSchedule
from commlayer.engine.guards import StepGuard
from commlayer.engine.hooks import Hooks, OptimizerHooks, uncompiled
from commlayer.engine.observers import Observers
from commlayer.engine.optimizers import OptimizerMemory
from commlayer.engine.quiet_ddp import QuietDDP
from commlayer.engine.step import EpochChanged
from commlayer.engine.step_loop import StepLoop
from commlayer.engine.sync_modes import Forbids, RequestedModes, useless_of
from commlayer.errors import CommError
from commlayer.optim import OuterSGD


class DDPModes:
    """The sync modes of one DDP module that was passed to attach() together with its optimizer."""

    def __init__(
        self, ddp: DistributedDataParallel, optimizer: Any, *, requested: RequestedModes, forbids: Forbids, outer: OuterSGD,
        deadline_s: float,
    ) -> None:
        self.requested, self.forbids = requested, forbids
        self._ddp, self._optimizer, self._outer, self._deadline_s = ddp, optimizer, outer, deadline_s
        self._quiet: QuietDDP | None = None
        self._hooks: Hooks | None = None

    def schedule(
        self, connection: JobContext, named: Sequence[tuple[str, torch.Tensor]], observers: Observers,
        guard: StepGuard | None,
    ) -> ExchangeSchedule:
        """Creates the schedule of local steps. `named`: the parameters with their names, in the order of their numbers."""
        self._connection, self._names = connection, [name for name, _ in named]
        self._parameters = [p for _, p in named if isinstance(p, nn.Parameter)]
        connection.stepped = OptimizerMemory(self._parameters, self._optimizer, self._outer)
        connection.terms.useless = useless_of(None, clips=False, apart=connection.stepped_apart)
        return ExchangeSchedule(
            self._ddp, self._parameters, list, hooks=OptimizerHooks(self._optimizer), outer=self._outer, connection=connection,
            observers=observers, deadline_s=self._deadline_s, guard=guard, optimizer=self._optimizer,
            share=self._share_buffers)

    def follow(self, loop: StepLoop, guard: StepGuard) -> None:
        """Starts to adapt the module's hooks to the current plan and to every later plan."""
        self._loop, self._guard = loop, guard
        self._connection.after_switch.append(self._enter)
        self._enter()

    def _enter(self) -> None:
        """Starts or ends local steps as the current plan requires. Called when a plan takes effect."""
        local = self._connection.local
        if local is not None and self._quiet is None:
            # A pass that has begun already ends in DDP's own hook.
            self._quiet = quiet = QuietDDP(self._ddp, syncing=False, first=False)
            self._hooks = Hooks(self._parameters, lambda: self._loop.worker, self._loop.ready, self._end,
                                lambda: quiet.syncing, self._loop.abandon)
        elif local is None:
            self.remove()
        self._loop.enter(dict(zip(self._names, local.starts, strict=True)) if local is not None and local.shifted else {})

    def _end(self) -> None:
        self._guard.check()
        self._loop.count_local()

    def remove(self) -> None:
        """Removes the hooks for local steps, so that DDP averages gradients again."""
        if self._hooks is not None and self._quiet is not None:
            self._hooks.remove()
            self._quiet.remove()
        self._hooks = self._quiet = None

    def _share_buffers(self) -> None:
        """Averages the buffers that DDP would copy from rank 0. If a buffer is not finite on some rank, each rank keeps its own
        values."""
        connection, module = self._connection, self._ddp.module
        buffers = [b.detach() for b in module.buffers() if b.is_floating_point() and b.numel()]
        if not self._ddp.broadcast_buffers or not buffers or connection.groups is None or connection.worker is None:
            return
        sums = torch.cat([b.reshape(-1).double() for b in buffers])
        try:
            connection.groups.allreduce(sums).wait(time.monotonic() + self._deadline_s, connection.worker.now.failed)
        except CommError as error:
            with contextlib.suppress(EpochChanged):  # the remaining ranks average them at the next exchange
                connection.broke(error)
            return
        for buffer, mean in zip(buffers, (sums / connection.groups.world).split([b.numel() for b in buffers]), strict=True):
            if bool(mean.isfinite().all()):
                buffer.copy_(mean.view(buffer.shape))


# ---- broadcasts rank 0's buffers before a training pass of DistributedDataParallel, instead of DDP itself
#
# If another rank has ended or is lost, DDP would wait until torch's timeout and name no rank. This wait ends at once.

WHAT = "broadcast of the buffers of DistributedDataParallel"


class DDPBuffers:
    """Broadcasts rank 0's buffers of one DDP module before its training forward passes. All ranks create it together."""

    def __init__(
        self, ddp: DistributedDataParallel, connection: JobContext, deadline_s: float, local: Callable[[], bool],
    ) -> None:
        """Registers the hook on `ddp`. `local` returns whether the plan currently has local steps, which average buffers
        instead."""
        assert connection.groups is not None
        self._connection: JobContext | None = connection
        self._deadline_s, self._local = deadline_s, local
        self._ranks = connection.groups.members.ranks
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
        worker = None if self._connection is None else self._connection.worker
        if (worker is None or self._local() or ddp._join_config.enable
                or hasattr(ddp, "buffer_hook") or not ddp.will_sync_module_buffers()):
            return
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
