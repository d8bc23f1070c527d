"""Collectives of torch.distributed with deadlines and named errors. Knows groups and tensors; nothing of buckets.

The order of calls must be the same on all ranks of a group; the caller sees to that.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from commlayer.errors import CommError, DeadlineExceeded
from commlayer.transport.members import Members

GROUP = "a peer of the process group"
"""A collective does not say which: the heartbeats do."""
LOOK_S = 0.5


class Pending:
    """A collective under way."""

    def __init__(self, work: Any, what: str, *, on_device: bool) -> None:
        self._work, self._what, self._on_device = work, what, on_device

    def is_over(self) -> bool:
        """Whether `wait` would not wait."""
        work = self._work
        return work is None or bool(work.is_completed())

    def wait(self, deadline: float, failed: Callable[[], BaseException | None] = lambda: None) -> None:
        """Until `deadline` of time.monotonic(), or until failed() gives an error, which is raised.

        On CUDA it orders the current stream instead of blocking the host; the group's own time-out watches there.
        """
        work = self._work
        with named(self._what):
            if self._on_device:
                work.wait()
                return
            while work is not None:
                left_s = deadline - time.monotonic()
                try:
                    work.wait(datetime.timedelta(seconds=max(min(left_s, LOOK_S), 0.001)))
                    work = self._work = None  # it would keep its group's connections
                except RuntimeError as error:
                    if not _timed_out(error) or left_s <= 0:
                        raise
                    if (cause := failed()) is not None:
                        raise cause from None


@contextlib.contextmanager
def named(what: str) -> Iterator[None]:
    """Turns what torch raises into a CommError that says what failed, in one line."""
    try:
        yield
    except RuntimeError as error:
        kind = DeadlineExceeded if _timed_out(error) else CommError
        raise kind(f"{what} failed: {str(error).splitlines()[0]}", peer=GROUP) from None


def _timed_out(error: RuntimeError) -> bool:
    return "timed out" in str(error).lower() or "timeout" in str(error).lower()


class Groups:
    """The group of all ranks and, where nodes have several, the group of this node's."""

    def __init__(self, ranks_per_node: int, timeout_s: float, device: torch.device, members: Members | None = None) -> None:
        """`members`: the ranks that take part, None for the world."""
        self.device = device
        self.members = members or Members()
        self.rank, self.world = self.members.rank, self.members.world
        self.ranks_per_node, self.timeout_s = ranks_per_node, timeout_s
        if self.world % ranks_per_node:
            raise ValueError(f"ranks_per_node {ranks_per_node} does not divide the world of {self.world} ranks")
        self.node, self.local = divmod(self.rank, ranks_per_node)
        self._all = self.members.group(timeout_s=timeout_s)
        self._node = None
        if ranks_per_node > 1:
            for node in range(self.world // ranks_per_node):
                ranks = range(node * ranks_per_node, (node + 1) * ranks_per_node)
                group = self.members.group(ranks, timeout_s=timeout_s)
                self._node = self._node if group is None else group

    def allreduce(self, x: torch.Tensor) -> Pending:
        """Sum over all ranks, in place."""
        return self._start("all-reduce", dist.all_reduce, x, group=self._all)

    def reduce(self, x: torch.Tensor, owner: int) -> Pending:
        """Sum over this node's ranks into local rank `owner`; on the others x is undefined afterwards."""
        return self._start("reduce inside the node", dist.reduce, x, self._local_rank(owner), group=self._node)

    def broadcast(self, x: torch.Tensor, owner: int) -> Pending:
        """From local rank `owner` to this node's ranks."""
        return self._start("broadcast inside the node", dist.broadcast, x, self._local_rank(owner), group=self._node)

    def broadcast_all(self, x: torch.Tensor) -> Pending:
        """From rank 0 to all."""
        return self._start("broadcast", dist.broadcast, x, self.members.ranks[0], group=self._all)

    def _local_rank(self, owner: int) -> int:
        return self.members.ranks[self.node * self.ranks_per_node + owner]

    def _start(self, what: str, call: Callable[..., Any], x: torch.Tensor, *args: Any, group: Any) -> Pending:
        with named(what):
            return Pending(call(x, *args, group=group, async_op=True), what, on_device=x.is_cuda)

    def gather_all(self, x: torch.Tensor) -> torch.Tensor:
        """One row per rank of a small tensor."""
        rows = [torch.empty_like(x) for _ in range(self.world)]
        with named("all-gather"):
            dist.all_gather(rows, x, group=self._all)
        return torch.stack(rows)

    def share_bytes(self, data: bytes) -> bytes:
        """Rank 0's bytes, on every rank. Not torch's object broadcast: that one unpickles."""
        size = torch.tensor([len(data)], dtype=torch.int64, device=self.device)
        with named("broadcast from rank 0"):
            dist.broadcast(size, self.members.ranks[0], group=self._all)
            body = torch.empty(int(size.item()), dtype=torch.uint8, device=self.device)
            if self.rank == 0 and data:
                body.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            if body.numel():
                dist.broadcast(body, self.members.ranks[0], group=self._all)
        return bytes(body.cpu().numpy())

    def barrier(self) -> None:
        self.gather_all(torch.zeros(1, device=self.device))

    def close(self) -> None:
        for group in (self._node, self._all):
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)
        # Connections end with the last reference: a peer with a collective under way waits for that as it lets go of its own.
        self._node = self._all = None
