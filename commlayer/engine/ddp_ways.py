"""Local steps of a DistributedDataParallel module, whose gradients otherwise go through its communication hook.

Under a plan of local steps the module's synchronization is off (quiet_ddp.py), and hooks on parameters count backward passes.
DDP would copy rank 0's buffers before each forward pass; instead each exchange averages them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from commlayer.engine.allowed_ways import useless_of
from commlayer.engine.connection import Connection
from commlayer.engine.exchange_schedule import ExchangeSchedule
from commlayer.engine.hooks import Hooks
from commlayer.engine.observers import Observers
from commlayer.engine.optimizer_hooks import OptimizerHooks
from commlayer.engine.optimizer_memory import Stepped
from commlayer.engine.quiet_ddp import QuietDDP
from commlayer.engine.step import Regroup
from commlayer.engine.step_guard import StepGuard
from commlayer.engine.step_loop import StepLoop
from commlayer.engine.ways import Asked, Forbids
from commlayer.errors import CommError
from commlayer.optim import Outer


class DDPWays:
    """The sync modes of one DDP module that was passed to attach() with its optimizer."""

    def __init__(
        self, ddp: DistributedDataParallel, optimizer: Any, *, asked: Asked, forbids: Forbids, outer: Outer, deadline_s: float,
    ) -> None:
        self.asked, self.forbids = asked, forbids
        self._ddp, self._optimizer, self._outer, self._deadline_s = ddp, optimizer, outer, deadline_s
        self._quiet: QuietDDP | None = None
        self._hooks: Hooks | None = None

    def schedule(
        self, connection: Connection, named: Sequence[tuple[str, torch.Tensor]], observers: Observers,
        guard: StepGuard | None,
    ) -> ExchangeSchedule:
        """`named`: the parameters by number."""
        self._connection, self._names = connection, [name for name, _ in named]
        self._parameters = [p for _, p in named if isinstance(p, nn.Parameter)]
        connection.stepped = Stepped(self._parameters, self._optimizer, self._outer)
        connection.terms.useless = useless_of(connection, None, clips=False)
        return ExchangeSchedule(
            self._ddp, self._parameters, list, hooks=OptimizerHooks(self._optimizer), outer=self._outer, connection=connection,
            observers=observers, deadline_s=self._deadline_s, guard=guard, optimizer=self._optimizer,
            share=self._share_buffers)

    def follow(self, loop: StepLoop, guard: StepGuard) -> None:
        """Follows every change of plan from now on."""
        self._loop, self._guard = loop, guard
        self._connection.after_switch.append(self._enter)
        self._enter()

    def _enter(self) -> None:
        """Called when a plan takes effect."""
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
        """Lets DDP reduce gradients again."""
        if self._hooks is not None and self._quiet is not None:
            self._hooks.remove()
            self._quiet.remove()
        self._hooks = self._quiet = None

    def _share_buffers(self) -> None:
        """Averages the buffers that DDP would copy from rank 0. A buffer that is not finite on some rank stays as it is on
        each."""
        connection, module = self._connection, self._ddp.module
        buffers = [b.detach() for b in module.buffers() if b.is_floating_point() and b.numel()]
        if not self._ddp.broadcast_buffers or not buffers or connection.groups is None or connection.worker is None:
            return
        sums = torch.cat([b.reshape(-1).double() for b in buffers])
        try:
            connection.groups.allreduce(sums).wait(time.monotonic() + self._deadline_s, connection.worker.now.failed)
        except CommError as error:
            with contextlib.suppress(Regroup):  # the remaining ranks average them at the next exchange
                connection.broke(error)
            return
        for buffer, mean in zip(buffers, (sums / connection.groups.world).split([b.numel() for b in buffers]), strict=True):
            if bool(mean.isfinite().all()):
                buffer.copy_(mean.view(buffer.shape))
