"""Small rows of numbers, exchanged asynchronously between all ranks."""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from commlayer.cluster.processes.bounded_calls import PendingCollective, torch_errors
from commlayer.cluster.processes.process_groups import Members, rows_of_all
from commlayer.errors import CommError

CLOSE_S = 2.0
"""Seconds that close() waits for exchanges in flight."""
HEAD, PART = 2, 62
"""Numbers of values in each message of an exchange: what is exchanged and the row's length, then a part of the row. All
messages of all users have this size: a Gloo process ends itself if a peer's message has another size than expected, so ranks
that make different calls would not get an error."""


class RowChannel:
    """Exchanges small rows of numbers between all ranks, asynchronously, over a separate CPU process group. The rows therefore
    neither wait for gradients nor change the order of gradient collectives.

    All ranks create the channel together at the start, since creating a group waits for every member. Each user gets a separate
    `Rows`. All ranks must start exchanges in the same order, over all users.
    """

    def __init__(self, members: Members, timeout_s: float) -> None:
        self.members, self.timeout_s = members, timeout_s
        self._late_s = timeout_s
        self._group: Any = members.group(timeout_s=timeout_s, backend="gloo")
        self._users: list[Rows] = []

    def rows(self, what: str = "measured times") -> Rows:
        self._users.append(Rows(self, what))
        return self._users[-1]

    def regroup(self, members: Members) -> None:
        """Switches to other members over a new process group. All new members must call this together. Exchanges in flight are
        dropped."""
        self.members, self._group = members, members.group(timeout_s=self._late_s, backend="gloo")
        self.forget()

    def allow(self, late_s: float) -> None:
        """Sets, in seconds, how much later than the other ranks one rank may start an exchange from now on; `timeout_s` at
        least."""
        late_s = max(late_s, self.timeout_s)
        if late_s != self._late_s:
            self.members.allow(self._group, late_s)
        self._late_s = late_s

    def gather(self, row: tuple[float, ...], what: str) -> tuple[PendingCollective, torch.Tensor]:
        """Starts an all-gather of this rank's row. Returns the pending collective and the tensor that it fills."""
        mine = torch.tensor(row, dtype=torch.float64)
        with torch_errors(what):
            work, rows = rows_of_all(mine, self.members.world, self._group)
        return PendingCollective(work, what, on_device=False), rows

    def name_of(self, number: float) -> str:
        """Returns what a rank exchanges, from the first value of its message."""
        known = {float(zlib.crc32(rows.what.encode())): rows.what for rows in self._users}
        return known.get(number, "exchange of other values")

    def forget(self) -> None:
        """Drops all exchanges in flight, without reading their results."""
        for rows in self._users:
            rows.forget()

    def close(self, patience_s: float = CLOSE_S) -> None:
        for rows in self._users:
            if rows.under_way:
                # Other ranks may still need this rank's row, so the exchange is completed.
                with contextlib.suppress(CommError):
                    rows.read(patience_s)
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None  # frees the group's threads in this process; in a forked process that would hang


class Rows:
    """Exchanges of one user of a RowChannel, at most one in flight at a time."""

    def __init__(self, channel: RowChannel, what: str) -> None:
        self._channel, self.what = channel, f"exchange of {what}"
        self._pending: list[tuple[PendingCollective, torch.Tensor]] = []
        self._length = 0

    @property
    def _head(self) -> list[float]:
        return [float(zlib.crc32(self.what.encode())), float(self._length)]

    def start(self, *row: float) -> None:
        """Starts an exchange of this rank's row. All ranks call it, with rows of equal length."""
        self._length = len(row)
        for at in range(0, max(len(row), 1), PART):
            part = row[at : at + PART]
            self._pending.append(self._channel.gather((*self._head, *part, *[0.0] * (PART - len(part))), self.what))

    @property
    def under_way(self) -> bool:
        return bool(self._pending)

    @property
    def arrived(self) -> bool:
        """True: all ranks have started the exchange in flight, so `read` returns at once."""
        return all(pending.is_over() for pending, _ in self._pending)

    def forget(self) -> None:
        """Drops the exchange in flight, without reading its result."""
        self._pending = []

    def read(self, patience_s: float | None = None,
             failed: Callable[[], BaseException | None] = lambda: None) -> list[list[float]]:
        """Waits for the exchange in flight and returns all rows in rank order. Raises CommError if a rank exchanges something
        else. `patience_s`: longest wait; None: the channel's timeout. `failed`: polled during the wait; an error that it
        returns is raised."""
        assert self._pending
        messages, self._pending = self._pending, []
        deadline = time.monotonic() + (self._channel.timeout_s if patience_s is None else patience_s)
        rows: list[list[float]] = [[] for _ in self._channel.members.ranks]
        for pending, parts in messages:
            pending.wait(deadline, failed)
            for rank, row, part in zip(self._channel.members.ranks, rows, parts.tolist(), strict=True):
                if part[:HEAD] != self._head:
                    theirs = self._channel.name_of(part[0])
                    raise CommError(f"is in the {theirs}, but this rank is in the {self.what}: make the same calls on all "
                                    "ranks, in the same order", peer=f"rank {rank}", code="E-CALLS-DIFFER")
                row += part[HEAD:]
        return [row[: self._length] for row in rows]
