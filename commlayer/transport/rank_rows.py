"""Small rows of numbers from all ranks to all, without waiting. Knows torch.distributed; not what the numbers mean."""

from __future__ import annotations

import contextlib
import time

import torch
import torch.distributed as dist

from commlayer.errors import CommError
from commlayer.transport.members import Members
from commlayer.transport.pending import Pending, named
from commlayer.transport.row_spacing import spacing as spacing


class Rows:
    """A group of its own, on CPUs, so that rows neither wait for gradients nor change their order. One exchange at a time."""

    def __init__(self, members: Members, timeout_s: float, what: str = "measured times") -> None:
        self.rank, self.world, self._timeout_s = members.rank, members.world, timeout_s
        self._what = f"exchange of {what}"
        self._group = members.group(timeout_s=timeout_s, backend="gloo")
        self._pending: Pending | None = None
        self._all: list[torch.Tensor] = []

    def start(self, *row: float) -> None:
        """All ranks call it together, with rows of one length."""
        mine = torch.tensor(row, dtype=torch.float64)
        self._all = [torch.empty_like(mine) for _ in range(self.world)]
        with named(self._what):
            work = dist.all_gather(self._all, mine, group=self._group, async_op=True)
        self._pending = Pending(work, self._what, on_device=False)

    @property
    def under_way(self) -> bool:
        return self._pending is not None

    def read(self, patience_s: float | None = None) -> list[list[float]]:
        """The rows that were started last, in rank order."""
        assert self._pending is not None
        pending, self._pending = self._pending, None
        pending.wait(time.monotonic() + (self._timeout_s if patience_s is None else patience_s))
        return [row.tolist() for row in self._all]

    def close(self, patience_s: float | None = None) -> None:
        if self.under_way:
            # Others may still need what this rank has to say of its last step.
            with contextlib.suppress(CommError):
                self.read(patience_s)
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None  # its threads end with the last reference, in this process: in one that is forked that would hang
