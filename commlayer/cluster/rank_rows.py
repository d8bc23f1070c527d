"""Small rows of numbers from all ranks to all, without waiting. Knows torch.distributed; not what the numbers mean."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from commlayer.cluster.members import Members, rows_of_all
from commlayer.errors import CommError
from commlayer.transport.pending import Pending, named

CLOSE_S = 2.0
"""How long an end waits for rows that are on their way."""


class RowChannel:
    """A group of its own, on CPUs, so that rows neither wait for gradients nor change their order.

    All ranks make it together, before anybody can be gone: making a group would wait for who is. Who tells rows takes `rows`
    of it. All ranks begin exchanges in one order, of whatever these are.
    """

    def __init__(self, members: Members, timeout_s: float) -> None:
        self.members, self.timeout_s = members, timeout_s
        self._late_s = timeout_s
        self._group: Any = members.group(timeout_s=timeout_s, backend="gloo")
        self._told: list[Rows] = []

    def rows(self, what: str = "measured times") -> Rows:
        self._told.append(Rows(self, what))
        return self._told[-1]

    def regroup(self, members: Members) -> None:
        """Other ranks tell each other from now on. What was on its way was among those before."""
        self.members, self._group = members, members.group(timeout_s=self._late_s, backend="gloo")
        self.forget()

    def allow(self, late_s: float) -> None:
        """From now on ranks may come to an exchange so much later than others. `timeout_s` it is at least."""
        late_s = max(late_s, self.timeout_s)
        if late_s != self._late_s:
            self.members.allow(self._group, late_s)
        self._late_s = late_s

    def gather(self, row: tuple[float, ...], what: str) -> tuple[Pending, torch.Tensor]:
        """Begins to give everybody's row to all."""
        mine = torch.tensor(row, dtype=torch.float64)
        with named(what):
            work, rows = rows_of_all(mine, self.members.world, self._group)
        return Pending(work, what, on_device=False), rows

    def forget(self) -> None:
        """What is on its way will not be read."""
        for rows in self._told:
            rows.forget()

    def close(self, patience_s: float = CLOSE_S) -> None:
        for rows in self._told:
            if rows.under_way:
                # Others may still need what this rank has to say of its last step.
                with contextlib.suppress(CommError):
                    rows.read(patience_s)
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None  # its threads end with the last reference, in this process: in one that is forked that would hang


class Rows:
    """What somebody tells over a channel. One exchange at a time."""

    def __init__(self, channel: RowChannel, what: str) -> None:
        self._channel, self._what = channel, f"exchange of {what}"
        self._pending: Pending | None = None
        self._all = torch.empty(0)

    def start(self, *row: float) -> None:
        """All ranks call it together, with rows of one length."""
        self._pending, self._all = self._channel.gather(row, self._what)

    @property
    def under_way(self) -> bool:
        return self._pending is not None

    def forget(self) -> None:
        """What was started will not be read."""
        self._pending = None

    def read(self, patience_s: float | None = None,
             failed: Callable[[], BaseException | None] = lambda: None) -> list[list[float]]:
        """The rows that were started last, in rank order. What `failed` gives meanwhile is raised."""
        assert self._pending is not None
        pending, self._pending = self._pending, None
        pending.wait(time.monotonic() + (self._channel.timeout_s if patience_s is None else patience_s), failed)
        rows: list[list[float]] = self._all.tolist()
        return rows
