"""Collectives of torch.distributed with deadlines and named errors.

All ranks of a group must make its calls in the same order; the caller ensures that.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from commlayer.cluster.members import Members, rows_of_all
from commlayer.cluster.stage_groups import Channel, node_ranks
from commlayer.errors import InvalidInput
from commlayer.transport.pending import Pending, named


class Inside(NamedTuple):
    """Several groups of this node's ranks. Calls are ordered within a group, and need no order between groups."""

    out: Channel
    """For adding gradients up, as they become final."""
    back: Channel
    """For distributing results, as they arrive."""
    late: Channel
    """For both, of buckets whose exchange ends after their step."""
    ready: Channel | None
    """On the host: agrees that all ranks are ready before a call on `back`, because a collective that waits on a GPU would keep
    the GPU from computing. None if tensors are on the host."""
    late_ready: Channel | None
    """As `ready`, before calls on `late`. A second group, because two threads use them in no common order."""


class Groups:
    """The group of all ranks and, if nodes have several ranks, the groups of this node's ranks."""

    def __init__(self, ranks_per_node: int, timeout_s: float, device: torch.device, members: Members | None = None) -> None:
        """`members`: the ranks that take part; None: all of the world."""
        self.device = device
        self.members = members or Members()
        self.rank, self.world = self.members.rank, self.members.world
        self.ranks_per_node, self.timeout_s = ranks_per_node, timeout_s
        if self.world % ranks_per_node:
            raise InvalidInput("E-PROCESS-GROUP",
                               f"ranks_per_node {ranks_per_node} does not divide the world of {self.world} ranks")
        self.node, self.local = divmod(self.rank, ranks_per_node)
        self.waiting_since = 0.0
        """Since when a call waits for other ranks, by time.monotonic(); 0 while none does."""
        self._all = self.members.group(timeout_s=timeout_s)
        self._nodes: list[Any] = []
        self._inside: Inside | None = None
        self._hosts: Channel | None = None
        if ranks_per_node > 1:
            out, back, late = (self._node() for _ in range(3))
            ready, late_ready = (None if device.type == "cpu" else self._node("gloo") for _ in range(2))
            self._inside = Inside(out, back, late, ready, late_ready)

    def _node(self, backend: str | None = None) -> Channel:
        """A group of this node's ranks. All ranks create the groups of all nodes."""
        mine: Channel | None = None
        for ranks in node_ranks(self.world, self.ranks_per_node):
            group = self.members.group(ranks, timeout_s=self.timeout_s, backend=backend)
            if group is not None:
                self._nodes.append(group)
                mine = Channel(group, [self.members.ranks[m] for m in ranks], "inside the node")
        assert mine is not None
        return mine

    @property
    def inside(self) -> Inside:
        """The groups within this node; only if nodes have several ranks."""
        assert self._inside is not None, "this node has one rank"
        return self._inside

    @property
    def hosts(self) -> Channel:
        """A group of all ranks on the host. Created at the first use, which must be a joint one of all ranks."""
        if self._hosts is None:
            group = self.members.group(timeout_s=self.timeout_s, backend="gloo")
            self._nodes.append(group)
            self._hosts = Channel(group, self.members.ranks, "of the hosts")
        return self._hosts

    def allreduce(self, x: torch.Tensor) -> Pending:
        """Sum over all ranks, in place."""
        return self._start("all-reduce", dist.all_reduce, x, group=self._all)

    def broadcast_all(self, x: torch.Tensor, source: int = 0) -> Pending:
        """Broadcasts from rank `source` to all."""
        return self._start("broadcast", dist.broadcast, x, self.members.ranks[source], group=self._all)

    def _start(self, what: str, call: Callable[..., Any], x: torch.Tensor, *args: Any, group: Any) -> Pending:
        with named(what):
            return Pending(call(x, *args, group=group, async_op=True), what, on_device=x.is_cuda)

    @property
    def waits_s(self) -> float:
        """How long such a call may wait."""
        return self.timeout_s

    def missing(self) -> tuple[str, ...]:
        """The ranks that it waits for: unknown to a collective."""
        return ()

    @contextlib.contextmanager
    def waits(self, what: str) -> Iterator[None]:
        """Around a call between two steps that waits for the other ranks."""
        self.waiting_since = time.monotonic()
        try:
            with named(what):
                yield
        finally:
            self.waiting_since = 0.0

    def gather_all(self, x: torch.Tensor) -> torch.Tensor:
        """Gathers a small tensor: one row per rank."""
        with self.waits("all-gather"):
            work, rows = rows_of_all(x, self.world, self._all)
            work.wait()
        return rows

    def share_bytes(self, data: bytes, nbytes: int | None = None, source: int = 0) -> bytes:
        """The bytes of rank `source`, on every rank. `nbytes`: their number, if all ranks know it. Not torch's object
        broadcast, which unpickles."""
        with self.waits(f"broadcast from rank {source}"):
            if nbytes is None:
                size = torch.tensor([len(data)], dtype=torch.int64, device=self.device)
                dist.broadcast(size, self.members.ranks[source], group=self._all)
                nbytes = int(size.item())
            body = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            if self.rank == source and data:
                body.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            if body.numel():
                dist.broadcast(body, self.members.ranks[source], group=self._all)
        return bytes(body.cpu().numpy())

    def barrier(self) -> None:
        self.gather_all(torch.zeros(1, device=self.device))

    def close(self) -> None:
        for group in (*self._nodes, self._all):
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)
        # Connections end with the last reference. A peer with a pending collective waits for that when it closes its own.
        for channel in (*(self._inside or ()), self._hosts):
            if channel is not None:
                channel.close()
        self._nodes, self._inside, self._hosts, self._all = [], None, None, None
