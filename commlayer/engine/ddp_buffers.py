"""Broadcasts rank 0's buffers before a training pass of DistributedDataParallel, instead of DDP itself.

If another rank has ended or is lost, DDP would wait until torch's timeout and name no rank. This wait ends at once.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.parallel import DistributedDataParallel

from commlayer.cluster.process_groups import PendingCollective, torch_errors
from commlayer.engine.connection import Connection
from commlayer.engine.hooks import uncompiled
from commlayer.errors import CommError

WHAT = "broadcast of the buffers of DistributedDataParallel"


class DDPBuffers:
    """The broadcast for one module. All ranks create it together."""

    def __init__(
        self, ddp: DistributedDataParallel, connection: Connection, deadline_s: float, local: Callable[[], bool],
    ) -> None:
        """`local`: whether the plan takes local steps now, which average buffers instead."""
        assert connection.groups is not None
        self._connection: Connection | None = connection
        self._deadline_s, self._local = deadline_s, local
        self._ranks = connection.groups.members.ranks
        # A separate group, because late results use the other groups meanwhile.
        self._group: Any = connection.groups.members.group(timeout_s=deadline_s)
        self._hook = ddp.register_forward_pre_hook(uncompiled(self._before_forward))
        connection.on_close.append(self.remove)

    def __getstate__(self) -> dict[str, Any]:
        """DDP modules are saved and copied with their hooks. In a copy this hook does nothing."""
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
        if (peer_error := worker.ended.begin(worker.step)) is not None:
            worker.latch(peer_error)
            worker.check()
        try:
            ddp._assign_modules_buffers()
            self._broadcast([b for b in ddp.modules_buffers if b.numel()], worker.now.failed)
        except CommError as error:
            worker.latch(error)
            worker.check()
        worker.ended.over()
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
