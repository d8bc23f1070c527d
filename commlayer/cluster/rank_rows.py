"""Exchanges small rows of numbers between all ranks, asynchronously."""

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
"""How long close() waits for rows in flight."""


class RowChannel:
    """A process group of its own on CPUs, so that rows neither wait for gradients nor change the order of their collectives.

    All ranks make it together at the start, since making a group waits for every member. Each user gets its `rows`. All ranks
    must start exchanges in the same order, over all users.
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
        """Switches to other members. Exchanges in flight are dropped."""
        self.members, self._group = members, members.group(timeout_s=self._late_s, backend="gloo")
        self.forget()

    def allow(self, late_s: float) -> None:
        """Sets how much later than others a rank may start an exchange from now on; at least `timeout_s`."""
        late_s = max(late_s, self.timeout_s)
        if late_s != self._late_s:
            self.members.allow(self._group, late_s)
        self._late_s = late_s

    def gather(self, row: tuple[float, ...], what: str) -> tuple[Pending, torch.Tensor]:
        """Starts an all-gather of this rank's row."""
        mine = torch.tensor(row, dtype=torch.float64)
        with named(what):
            work, rows = rows_of_all(mine, self.members.world, self._group)
        return Pending(work, what, on_device=False), rows

    def forget(self) -> None:
        """Drops exchanges in flight."""
        for rows in self._told:
            rows.forget()

    def close(self, patience_s: float = CLOSE_S) -> None:
        for rows in self._told:
            if rows.under_way:
                # Other ranks may still need this rank's row.
                with contextlib.suppress(CommError):
                    rows.read(patience_s)
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None  # frees its threads in this process; in a forked one that would hang


class Rows:
    """One user's exchanges over a channel, one at a time."""

    def __init__(self, channel: RowChannel, what: str) -> None:
        self._channel, self._what = channel, f"exchange of {what}"
        self._pending: Pending | None = None
        self._all = torch.empty(0)

    def start(self, *row: float) -> None:
        """Starts an exchange. All ranks call it, with rows of one length."""
        self._pending, self._all = self._channel.gather(row, self._what)

    @property
    def under_way(self) -> bool:
        return self._pending is not None

    def forget(self) -> None:
        """Drops the exchange in flight."""
        self._pending = None

    def read(self, patience_s: float | None = None,
             failed: Callable[[], BaseException | None] = lambda: None) -> list[list[float]]:
        """The rows of the last started exchange, in rank order. Raises an error that `failed` returns while it waits."""
        assert self._pending is not None
        pending, self._pending = self._pending, None
        pending.wait(time.monotonic() + (self._channel.timeout_s if patience_s is None else patience_s), failed)
        rows: list[list[float]] = self._all.tolist()
        return rows
