"""Collectives of torch.distributed with deadlines and named errors.

All ranks of a group must call the group's collectives in the same order; the caller ensures this.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
import torch.distributed as dist

from commlayer.cluster.process_groups import Members, PendingCollective, rows_of_all, torch_errors
from commlayer.errors import CommError, CorruptFrame, InvalidInput, check_nbytes, short_line
from commlayer.observe.events import WaitKind
from commlayer.records import MALFORMED

V = TypeVar("V")
PIECE_NBYTES = 16 << 20
"""Number of bytes per broadcast of a longer byte string. Each broadcast has its own deadline."""


class NodeGroups(NamedTuple):
    """Process groups of this node's ranks. All ranks must call the collectives of one group in the same order. Calls of
    different groups need no common order."""

    out: Channel
    """Group that sums gradients inside the node, as soon as the gradients are final."""
    back: Channel
    """Group that distributes averaged gradients inside the node, as soon as they arrive from outside."""
    late: Channel
    """Group that sums and distributes, inside the node, buckets whose exchange ends after their step."""
    ready: Channel | None
    """CPU group on which ranks wait for each other before each call on `back`. Without that wait, a collective that waits on a
    GPU would block the GPU's computation. None if tensors are on the CPU."""
    late_ready: Channel | None
    """CPU group on which ranks wait for each other before each call on `late`. Two threads use `ready` and `late_ready` in no
    common order, so the two groups are separate."""


class Groups:
    """The process group of all ranks and, if nodes have several ranks, the groups of this node's ranks."""

    wait_kind: WaitKind = "call"

    def __init__(self, ranks_per_node: int, timeout_s: float, device: torch.device, members: Members | None = None) -> None:
        """Creates the groups; a collective call. `timeout_s`: timeout of their collectives. `members`: the ranks that take
        part; None: all ranks of the world."""
        self.device = device
        self.members = members or Members()
        self.rank, self.world = self.members.rank, self.members.world
        self.ranks_per_node, self.timeout_s = ranks_per_node, timeout_s
        if self.world % ranks_per_node:
            raise InvalidInput("E-PROCESS-GROUP",
                               f"ranks_per_node {ranks_per_node} does not divide the world of {self.world} ranks")
        self.node, self.local = divmod(self.rank, ranks_per_node)
        self.waiting_since = 0.0
        """When the pending call that waits for other ranks began, by time.monotonic(); 0 if no call waits."""
        self._all = self.members.group(timeout_s=timeout_s)
        self._nodes: list[Any] = []
        self._inside: NodeGroups | None = None
        self._hosts: Channel | None = None
        if ranks_per_node > 1:
            out, back, late = (self._node() for _ in range(3))
            ready, late_ready = (None if device.type == "cpu" else self._node("gloo") for _ in range(2))
            self._inside = NodeGroups(out, back, late, ready, late_ready)

    def _node(self, backend: str | None = None) -> Channel:
        """Creates a group of this node's ranks. Every rank takes part in creating the groups of all nodes."""
        mine = dict[int, Channel]()
        for ranks in node_ranks(self.world, self.ranks_per_node):
            group = self.members.group(ranks, timeout_s=self.timeout_s, backend=backend)
            if group is not None:
                self._nodes.append(group)
                mine[self.node] = Channel(group, [self.members.ranks[m] for m in ranks], "inside the node")
        return mine[self.node]

    @property
    def inside(self) -> NodeGroups:
        """The groups within this node. Call this only if nodes have several ranks."""
        assert self._inside is not None, "this node has one rank"
        return self._inside

    @property
    def hosts(self) -> Channel:
        """A CPU group of all ranks. It is created at the first use, which all ranks must make together."""
        if self._hosts is None:
            group = self.members.group(timeout_s=self.timeout_s, backend="gloo")
            self._nodes.append(group)
            self._hosts = Channel(group, self.members.ranks, "of the hosts")
        return self._hosts

    def allreduce(self, x: torch.Tensor) -> PendingCollective:
        """Starts a sum of `x` over all ranks, in place."""
        return self._start("all-reduce", dist.all_reduce, x, group=self._all)

    def broadcast_all(self, x: torch.Tensor, source: int = 0) -> PendingCollective:
        """Starts a broadcast of `x` from rank `source` to all ranks, in place."""
        return self._start("broadcast", dist.broadcast, x, self.members.ranks[source], group=self._all)

    def _start(self, what: str, call: Callable[..., Any], x: torch.Tensor, *args: Any, group: Any) -> PendingCollective:
        with torch_errors(what):
            return PendingCollective(call(x, *args, group=group, async_op=True), what, on_device=x.is_cuda)

    @property
    def waits_s(self) -> float:
        """How long a collective may wait for other ranks, in seconds."""
        return self.timeout_s

    def missing(self) -> tuple[str, ...]:
        """Returns the ranks that a pending collective waits for: always empty, since collectives do not report them."""
        return ()

    @contextlib.contextmanager
    def waits(self, what: str) -> Iterator[None]:
        """Context manager around a collective between two steps that waits for other ranks: sets `waiting_since`, and turns
        torch's errors into a CommError that names the collective."""
        self.waiting_since = time.monotonic()
        try:
            with torch_errors(what):
                yield
        finally:
            self.waiting_since = 0.0

    def gather_all(self, x: torch.Tensor) -> torch.Tensor:
        """Gathers a small tensor of every rank. Returns one tensor with a row per rank, in rank order. Blocks until all ranks
        have sent their tensors."""
        with self.waits("all-gather"):
            work, rows = rows_of_all(x, self.world, self._all)
            work.wait()
        return rows

    def share_bytes(self, data: bytes, most_nbytes: int, what: str, nbytes: int | None = None, source: int = 0) -> bytes:
        """Broadcasts the bytes of rank `source` and returns them on every rank. This does not use torch's object broadcast,
        which unpickles data.

        `most_nbytes`: largest size in this job, above which all ranks raise CommError. `what`: what is sent, for that error.
        `nbytes`: the size that rank `source` named before; None: it is broadcast first. Each piece has a deadline.
        """
        with self.waits(f"broadcast from rank {source}"):
            if nbytes is None:
                size = torch.tensor([len(data)], dtype=torch.int64, device=self.device)
                dist.broadcast(size, self.members.ranks[source], group=self._all)
                nbytes = int(size.item())
            self.check_nbytes(nbytes, most_nbytes, what, source)
            body = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            if self.rank == source and data:
                body.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            for piece in body.split(PIECE_NBYTES) if nbytes else ():
                self.broadcast_all(piece, source).wait(time.monotonic() + self.waits_s)
        return body.cpu().numpy().tobytes()

    def check_nbytes(self, nbytes: int, most_nbytes: int, what: str, rank: int) -> int:
        """Returns the size that a rank named, if it is allowed; see check_nbytes."""
        return check_nbytes(nbytes, most_nbytes, what, f"rank {self.members.ranks[rank]}")

    def barrier(self) -> None:
        self.gather_all(torch.zeros(1, device=self.device))

    def close(self) -> None:
        for group in (*self._nodes, self._all):
            if group is not None and dist.is_initialized():
                dist.destroy_process_group(group)
        # A group's connections close with its last reference. A peer with a pending collective would otherwise wait for this
        # rank's connections to close when it closes its own.
        for channel in (*(self._inside or ()), self._hosts):
            if channel is not None:
                channel.close()
        self._nodes, self._inside, self._hosts, self._all = [], None, None, None


# ---- Subgroups of ranks. Staged paths have one group for every stage and scope. Calls of different groups need no common
# order, so the stages of several buckets overlap.

_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""torch's all-gather into one tensor, which newer versions of torch call all_gather_single."""


class Channel:
    """Collectives of one process group. Members are numbered from 0 within the group."""

    def __init__(self, group: Any, ranks: Sequence[int], what: str) -> None:
        self._group, self._ranks, self._what = group, ranks, what

    def allreduce(self, x: torch.Tensor, *, largest: bool = False) -> PendingCollective:
        """Starts an all-reduce of `x` in place: a sum, or with `largest` an elementwise maximum."""
        return self._start("all-reduce", dist.all_reduce, x, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)

    def alltoall(self, out: torch.Tensor, x: torch.Tensor, out_sizes: list[int] | None,
                 sizes: list[int] | None) -> PendingCollective:
        """Starts an all-to-all: sends the i-th slice of `x` to member i. `sizes` and `out_sizes`: slice lengths of `x` and
        `out`; None: equal slices."""
        return self._start("all-to-all", dist.all_to_all_single, out, x, out_sizes, sizes)

    def allgather(self, out: torch.Tensor, x: torch.Tensor) -> PendingCollective:
        """Starts an all-gather that fills `out` with every member's `x`, in member order."""
        return self._start("all-gather", _all_gather, out, x)

    def reduce(self, x: torch.Tensor, root: int) -> PendingCollective:
        """Starts a sum of `x` into member `root`, in place. On other members `x` is undefined afterwards."""
        return self._start("reduce", dist.reduce, x, self._ranks[root])

    def gather(self, x: torch.Tensor, rows: list[torch.Tensor] | None, root: int) -> PendingCollective:
        """Starts a gather of every member's `x` into `rows` of member `root`. `rows` is None on other members."""
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
    """Process groups for all stages of a staged path (an all-reduce that first sums inside nodes), keyed by (stage, scope). All
    ranks create and close them together."""

    def __init__(self, wanted: Iterable[tuple[int, str]], members: Members, per_node: int, timeout_s: float) -> None:
        """Creates the groups; a collective call. `wanted`: pairs (stage, scope); a scope is "all", "node" (ranks of one node)
        or "net" (ranks with the same local rank)."""
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
    """Returns the members of every node, as one list of consecutive member numbers per node."""
    return [list(range(first, first + per_node)) for first in range(0, world, per_node)]


class RankNumbers:
    """Integers that each rank sends to all ranks at the end of an `all_or_none` block."""

    def __init__(self, numbers: int) -> None:
        self.mine = [0] * numbers
        self.rows: list[list[int]] = []
        """The integers of all ranks, in rank order. Empty until the `all_or_none` block has ended."""


@contextlib.contextmanager
def all_or_none(groups: Groups | None, what: str, numbers: int = 0) -> Iterator[RankNumbers]:
    """Makes all ranks leave the block together. If a rank raises an error in the block, the other ranks raise an error that
    names that rank. The block must not contain collectives, since other ranks would wait in them for a rank that fails.
    `numbers`: how many integers each rank puts into `mine`, to be sent to all ranks."""
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
        raise failure from error  # the other ranks have not received this rank's failure
    if failure is not None:
        raise failure
    failed = [str(rank) for rank, row in enumerate(rows) if row[0]]
    if failed:
        raise InvalidInput("E-OTHER-RANK", f"{what} failed on rank {', '.join(failed)}: see the error on that rank")
    shared.rows = [row[1:] for row in rows]


def gather(groups: Groups | None, row: list[int]) -> list[list[int]]:
    """Gathers one list of integers per rank; blocks. Returns the lists in rank order; only this rank's `row` if `groups` is
    None."""
    if groups is None:
        return [row]
    rows: list[list[int]] = groups.gather_all(torch.tensor(row, dtype=torch.int64, device=groups.device)).tolist()
    return rows


def gather_bytes(groups: Groups | None, data: bytes, most_nbytes: int, what: str) -> list[bytes]:
    """Gathers byte strings of different lengths; blocks. Returns them in rank order; only this rank's `data` if `groups` is
    None. `most_nbytes`: largest size in this job, above which all ranks raise CommError. `what`: what is sent, for that error.
    """
    if groups is None:
        return [data]
    sizes = [groups.check_nbytes(row[0], most_nbytes, what, rank) for rank, row in enumerate(gather(groups, [len(data)]))]
    padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else 0
    rows = groups.gather_all(padded.to(groups.device)).cpu()
    return [row[:size].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]


def gather_values(groups: Groups | None, value: V, kind: type[V], most_nbytes: int, what: str) -> list[V]:
    """Gathers one value per rank, encoded as JSON, and otherwise works like `gather_bytes`."""
    rows = gather_bytes(groups, msgspec.json.encode(value), most_nbytes, what)
    return [decode_json(row, kind, what, f"rank {rank if groups is None else groups.members.ranks[rank]}")
            for rank, row in enumerate(rows)]


def decode_json(data: bytes, kind: type[V], what: str, peer: str) -> V:
    """Decodes what a peer sent. Raises CorruptFrame, which names the peer, if the data is malformed."""
    try:
        return msgspec.json.decode(data, type=kind)
    except MALFORMED as error:
        raise CorruptFrame(f"sends {what} that is malformed: {short_line(error, 200)}", peer=peer) from None


# ---- Small rows of numbers, exchanged asynchronously between all ranks.

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
