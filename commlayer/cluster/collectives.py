"""Collectives of torch.distributed with deadlines and named errors.

All ranks of a group must make its calls in the same order; the caller ensures that.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from commlayer.cluster.process_groups import Members, PendingCollective, rows_of_all, torch_errors
from commlayer.errors import CommError, InvalidInput


class NodeGroups(NamedTuple):
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
        self._inside: NodeGroups | None = None
        self._hosts: Channel | None = None
        if ranks_per_node > 1:
            out, back, late = (self._node() for _ in range(3))
            ready, late_ready = (None if device.type == "cpu" else self._node("gloo") for _ in range(2))
            self._inside = NodeGroups(out, back, late, ready, late_ready)

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
    def inside(self) -> NodeGroups:
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

    def allreduce(self, x: torch.Tensor) -> PendingCollective:
        """Sum over all ranks, in place."""
        return self._start("all-reduce", dist.all_reduce, x, group=self._all)

    def broadcast_all(self, x: torch.Tensor, source: int = 0) -> PendingCollective:
        """Broadcasts from rank `source` to all."""
        return self._start("broadcast", dist.broadcast, x, self.members.ranks[source], group=self._all)

    def _start(self, what: str, call: Callable[..., Any], x: torch.Tensor, *args: Any, group: Any) -> PendingCollective:
        with torch_errors(what):
            return PendingCollective(call(x, *args, group=group, async_op=True), what, on_device=x.is_cuda)

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
            with torch_errors(what):
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


# ---- Subgroups of the ranks; staged paths have one group for every stage and scope.
#
# Calls of different groups need no common order, so the stages of several buckets overlap.

_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""Newer versions of torch renamed it."""


class Channel:
    """One process group; members are numbered from 0 within it."""

    def __init__(self, group: Any, ranks: Sequence[int], what: str) -> None:
        self._group, self._ranks, self._what = group, ranks, what

    def allreduce(self, x: torch.Tensor, *, largest: bool = False) -> PendingCollective:
        """Sums, or takes elementwise maxima, in place."""
        return self._start("all-reduce", dist.all_reduce, x, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)

    def alltoall(self, out: torch.Tensor, x: torch.Tensor, out_sizes: list[int] | None,
                 sizes: list[int] | None) -> PendingCollective:
        """Sends the i-th run of `x` to member i; without sizes all runs are equal."""
        return self._start("all-to-all", dist.all_to_all_single, out, x, out_sizes, sizes)

    def allgather(self, out: torch.Tensor, x: torch.Tensor) -> PendingCollective:
        """Fills `out` with every member's `x`, in member order."""
        return self._start("all-gather", _all_gather, out, x)

    def reduce(self, x: torch.Tensor, root: int) -> PendingCollective:
        """Sums into member `root`; elsewhere `x` is undefined afterwards."""
        return self._start("reduce", dist.reduce, x, self._ranks[root])

    def gather(self, x: torch.Tensor, rows: list[torch.Tensor] | None, root: int) -> PendingCollective:
        """Gathers every member's `x` into the root's `rows`; None elsewhere."""
        return self._start("gather", dist.gather, x, rows, self._ranks[root])

    def broadcast(self, x: torch.Tensor, root: int) -> PendingCollective:
        return self._start("broadcast", dist.broadcast, x, self._ranks[root])

    def close(self) -> None:
        self._group = None  # as in RowChannel.close

    def _start(self, name: str, call: Callable[..., Any], x: torch.Tensor, *args: Any) -> PendingCollective:
        what = f"{name} {self._what}"
        with torch_errors(what):
            return PendingCollective(call(x, *args, group=self._group, async_op=True), what, on_device=x.is_cuda)


class Channels:
    """The channels of all stages. All ranks make it together."""

    def __init__(self, wanted: Iterable[tuple[int, str]], members: Members, per_node: int, timeout_s: float) -> None:
        """`wanted`: pairs (stage, scope)."""
        self._groups: list[Any] = []
        self._channels: dict[tuple[int, str], Channel] = {}
        world = members.world
        scopes = {
            "all": ([list(range(world))], "over all ranks"),
            "node": (node_ranks(world, per_node), "inside the node"),
            "net": ([list(range(local, world, per_node)) for local in range(per_node)], "between nodes"),
        }
        for stage, scope in sorted(set(wanted)):
            lists, what = scopes[scope]
            for numbers in lists:
                group = members.group(numbers, timeout_s=timeout_s)
                if group is not None:
                    self._groups.append(group)
                    self._channels[stage, scope] = Channel(group, [members.ranks[m] for m in numbers], what)

    def __getitem__(self, place: tuple[int, str]) -> Channel:
        return self._channels[place]

    def close(self) -> None:
        for group in self._groups:
            if dist.is_initialized():
                dist.destroy_process_group(group)
        self._groups.clear()
        for channel in self._channels.values():
            channel.close()


def node_ranks(world: int, per_node: int) -> list[list[int]]:
    """The members of every node."""
    return [list(range(first, first + per_node)) for first in range(0, world, per_node)]


class RankNumbers:
    """Numbers that ranks exchange at the end of a block."""

    def __init__(self, numbers: int) -> None:
        self.mine = [0] * numbers
        self.rows: list[list[int]] = []
        """After the block: the numbers of all, in rank order."""


@contextlib.contextmanager
def all_or_none(groups: Groups | None, what: str, numbers: int = 0) -> Iterator[RankNumbers]:
    """All ranks leave the block together. An error on one rank is raised there, and the others raise one that names the rank.

    The block must not contain collectives, since a rank that fails would leave the others waiting in them. `numbers`: how many
    numbers each rank puts into `mine`, to be sent to all.
    """
    failure: Exception | None = None
    shared = RankNumbers(numbers)
    try:
        yield shared
    except Exception as error:
        failure = error
    try:
        rows = gather(groups, [failure is not None, *shared.mine])
    except CommError as error:
        if failure is None or isinstance(failure, CommError):
            raise (failure or error) from None
        raise failure from error  # the others have not learned of it
    if failure is not None:
        raise failure
    failed = [str(rank) for rank, row in enumerate(rows) if row[0]]
    if failed:
        raise InvalidInput("E-OTHER-RANK", f"{what} failed on rank {', '.join(failed)}, whose own error says why")
    shared.rows = [row[1:] for row in rows]


def gather(groups: Groups | None, row: list[int]) -> list[list[int]]:
    """Gathers one row per rank."""
    if groups is None:
        return [row]
    rows: list[list[int]] = groups.gather_all(torch.tensor(row, dtype=torch.int64, device=groups.device)).tolist()
    return rows


def gather_bytes(groups: Groups | None, data: bytes) -> list[bytes]:
    """Gathers bytes of different sizes, in rank order."""
    if groups is None:
        return [data]
    sizes = [row[0] for row in gather(groups, [len(data)])]
    padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else 0
    rows = groups.gather_all(padded.to(groups.device)).cpu()
    return [row[:size].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]


# ---- Small rows of numbers, exchanged asynchronously between all ranks.

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
        self._users: list[Rows] = []

    def rows(self, what: str = "measured times") -> Rows:
        self._users.append(Rows(self, what))
        return self._users[-1]

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

    def gather(self, row: tuple[float, ...], what: str) -> tuple[PendingCollective, torch.Tensor]:
        """Starts an all-gather of this rank's row."""
        mine = torch.tensor(row, dtype=torch.float64)
        with torch_errors(what):
            work, rows = rows_of_all(mine, self.members.world, self._group)
        return PendingCollective(work, what, on_device=False), rows

    def forget(self) -> None:
        """Drops exchanges in flight."""
        for rows in self._users:
            rows.forget()

    def close(self, patience_s: float = CLOSE_S) -> None:
        for rows in self._users:
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
        self._pending: PendingCollective | None = None
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
