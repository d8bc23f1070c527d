"""Collectives of torch.distributed with deadlines and named errors.

All ranks of a group must call the group's collectives in the same order; the caller ensures this.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import msgspec
import torch
import torch.distributed as dist

from commlayer.cluster.processes.bounded_calls import PendingCollective, torch_errors
from commlayer.cluster.processes.channels import Channel, node_ranks
from commlayer.cluster.processes.process_groups import Members, rows_of_all
from commlayer.cluster.processes.relayed_group import ERROR_NOTICE_S
from commlayer.errors import CommError, CorruptFrame, InvalidInput, check_nbytes, short_line
from commlayer.observe.events import WaitKind
from commlayer.records import MALFORMED, complete

V = TypeVar("V")
Failed = Callable[[], BaseException | None]
PIECE_NBYTES = 16 << 20
"""Number of bytes per broadcast of a longer byte string. Each broadcast has its own deadline."""


class NodeGroups(NamedTuple):
    """Process groups of this node's ranks. All ranks must call the collectives of one group in the same order. Calls of
    different groups need no common order. The groups stay when other nodes leave or join."""

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

    def __init__(self, sites: Sequence[Sequence[int]] | int, timeout_s: float, device: torch.device,
                 members: Members | None = None, *, patience_s: float = 0.0, former: Groups | None = None) -> None:
        """Creates the groups; a collective call. `sites`: the ranks of each node, or their number. `timeout_s`: timeout of
        their collectives. `members`: the ranks that take part; None: all ranks of the world. `patience_s`: how much longer
        ranks wait for an exchange with other nodes. `former`: the closed groups of other members, whose groups within this node
        are used again."""
        self.device = device
        self.members = members or Members()
        self.rank, self.world = self.members.rank, self.members.world
        self.timeout_s, self._patience_s = timeout_s, patience_s
        self.sites = node_ranks(self.world, sites) if isinstance(sites, int) else sites
        """The ranks of each node."""
        self.ranks_per_node = max(map(len, self.sites))
        """Number of ranks of a node; the largest one if nodes differ."""
        self.node, self.site = next((node, site) for node, site in enumerate(self.sites) if self.rank in site)
        self.local = self.site.index(self.rank)
        self.waiting_since = 0.0
        """When the pending call that waits for other ranks began, by time.monotonic(); 0 if no call waits."""
        self.missing: Callable[[], tuple[str, ...]] = tuple
        """Returns the names of the peers that the call waits for, as far as they are known."""
        self._all = Channel(self.members.group(timeout_s=timeout_s), "over all ranks")
        self._inside: NodeGroups | None = self._nodes() if former is None else former._inside
        self._hosts: Channel | None = None
        self._of_site: Channel | None = None if former is None else former._of_site

    def _nodes(self) -> NodeGroups | None:
        out, back, late = (self._node() for _ in range(3))
        ready, late_ready = (None if self.device.type == "cpu" else self._node("gloo") for _ in range(2))
        if out is None or back is None or late is None:
            return None
        return NodeGroups(out, back, late, ready, late_ready)

    def site_channel(self) -> Channel | None:
        """Creates a CPU group of this node's ranks. All ranks call it together. Returns None if this node has no other
        ranks."""
        self._of_site = self._node("gloo")
        return self._of_site

    def _node(self, backend: str | None = None) -> Channel | None:
        """Creates a group of this node's ranks. Returns None if this node has no other ranks. Every rank takes part in creating
        the groups of all nodes."""
        mine: Channel | None = None
        for ranks in self.sites:
            if len(ranks) > 1 and (group := self.members.group(ranks, timeout_s=self.timeout_s, backend=backend)) is not None:
                mine = Channel(group, "inside the node")
                if "nccl" in dist.get_backend(group):  # connects with its first call, through a store that is closed later
                    mine.allreduce(torch.zeros(1, device=self.device)).wait(time.monotonic() + self.timeout_s)
        return mine

    @property
    def inside(self) -> NodeGroups:
        """The groups within this node. Call this only if this node has several ranks."""
        assert self._inside is not None, "this node has one rank"
        return self._inside

    def allow_inside(self, steps: int) -> None:
        """Sets the timeout of collectives on CPUs inside this node: a rank may wait in them for a sibling whose server waits
        for other nodes. These may be late by the deadline for each of the `steps` between two exchanges."""
        for channel in self.inside:
            if channel is not None and (channel in (self.inside.ready, self.inside.late_ready) or self.device.type == "cpu"):
                channel.allow(steps * self.timeout_s + self._patience_s)

    @property
    def first_ranks(self) -> list[int]:
        """The first rank of each node."""
        return [site[0] for site in self.sites]

    @property
    def hosts(self) -> Channel:
        """A CPU group of all ranks. The group is created at its first use, which all ranks must make together."""
        if self._hosts is None:
            self._hosts = Channel(self.members.group(timeout_s=self.timeout_s, backend="gloo"), "of the hosts")
        return self._hosts

    def allreduce(self, x: torch.Tensor) -> PendingCollective:
        """Starts a sum of `x` over all ranks, in place."""
        return self._all.allreduce(x)

    def broadcast_all(self, x: torch.Tensor, source: int = 0) -> PendingCollective:
        """Starts a broadcast of `x` from rank `source` to all ranks, in place."""
        return self._all.broadcast(x, source)

    @property
    def waits_s(self) -> float:
        """How long a collective may wait for other ranks, in seconds."""
        return self.timeout_s

    @contextlib.contextmanager
    def waits(self, what: str, missing: Callable[[], tuple[str, ...]] = tuple) -> Iterator[None]:
        """Context manager around a wait for other ranks between two steps: sets `waiting_since`, and turns torch's errors into
        a CommError that names the collective. `missing`: see the attribute; collectives know no names."""
        self.waiting_since, self.missing = time.monotonic(), missing
        try:
            with torch_errors(what):
                yield
        finally:
            self.waiting_since = 0.0

    def gather_all(self, x: torch.Tensor) -> torch.Tensor:
        """Gathers a small tensor of every rank. Returns one tensor with a row per rank, in rank order. Blocks until all ranks
        have sent their tensors."""
        with self.waits("all-gather"):
            work, rows = rows_of_all(x, self.world, self._all.group)
            work.wait()
        return rows

    def share_bytes(self, data: bytes, most_nbytes: int, what: str, nbytes: int | None = None, source: int = 0) -> bytes:
        """Broadcasts the bytes of rank `source` and returns them on every rank. This does not use torch's object broadcast,
        which unpickles data.

        `most_nbytes`: largest size in this job, above which all ranks raise CommError. `what`: what is sent, for that error.
        `nbytes`: the size that rank `source` named before; None: it is broadcast first. Each piece has a deadline.
        """
        # The collective's own error comes first, because it names the missing ranks.
        limit_s = self.waits_s + self._patience_s + ERROR_NOTICE_S
        with self.waits(f"broadcast from rank {source}"):
            if nbytes is None:
                size = torch.tensor([len(data)], dtype=torch.int64, device=self.device)
                self.broadcast_all(size, source).wait(time.monotonic() + limit_s)
                nbytes = int(size.item())
            self.check_nbytes(nbytes, most_nbytes, what, source)
            body = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            if self.rank == source and data:
                body.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            for piece in body.split(PIECE_NBYTES) if nbytes else ():
                self.broadcast_all(piece, source).wait(time.monotonic() + limit_s)
        return body.cpu().numpy().tobytes()

    def check_nbytes(self, nbytes: int, most_nbytes: int, what: str, rank: int) -> int:
        """Returns the size that a rank named, if it is allowed; see check_nbytes."""
        return check_nbytes(nbytes, most_nbytes, what, f"rank {self.members.ranks[rank]}")

    def gather_inside(self, data: bytes, failed: Failed = lambda: None) -> list[bytes]:
        """Gathers the bytes of each rank of this node, in their order. All its ranks call it together, between two steps.
        `failed` is polled during the wait; an error that it returns is raised."""
        if len(self.site) == 1:
            return [data]
        size = torch.tensor([len(data)], dtype=torch.int64, device=self.device)
        sizes: list[int] = self._gather_inside(size, failed).tolist()
        rows = self._gather_inside(_padded(data, sizes).to(self.device), failed).view(len(sizes), -1)
        return _without_padding(rows, sizes)

    def _gather_inside(self, x: torch.Tensor, failed: Failed) -> torch.Tensor:
        rows = x.new_empty(len(self.site) * x.numel())
        self.inside.out.allgather(rows, x).wait(time.monotonic() + self.timeout_s, failed)
        return rows

    def barrier(self) -> None:
        self.gather_all(torch.zeros(1, device=self.device))

    def close(self, *, nodes: bool = True) -> None:
        """`nodes`: False: the groups within this node stay, for the Groups of other members."""
        for channel in (self._hosts, *((*(self._inside or ()), self._of_site) if nodes else ()), self._all):
            if channel is not None:
                channel.close()
        self._inside, self._hosts = None if nodes else self._inside, None


class RankNumbers:
    """Integers that each rank sends to all ranks at the end of an `all_or_none` block."""

    def __init__(self, numbers: int) -> None:
        self.mine = [0] * numbers
        self.rows: list[list[int]] = []
        """The integers of all ranks, in rank order. Empty until the `all_or_none` block has ended."""


DONE, FAILED, LOST = range(3)
"""How a rank has left a block of `all_or_none`; LOST: with a CommError."""


@contextlib.contextmanager
def all_or_none(groups: Groups | None, what: str, numbers: int = 0) -> Iterator[RankNumbers]:
    """Makes all ranks leave the block together. If a rank raises an error in the block, the other ranks raise an error that
    names that rank: a CommError if all of these errors are, since the job may continue without those ranks. The block must not
    contain collectives, since other ranks would wait in them for a rank that fails. `numbers`: how many integers each rank puts
    into `mine`, to be sent to all ranks."""
    failure: Exception | None = None
    shared = RankNumbers(numbers)
    try:
        yield shared
    except Exception as error:
        failure = error
    try:
        outcome = DONE if failure is None else LOST if isinstance(failure, CommError) else FAILED
        rows = gather(groups, [outcome, *shared.mine])
    except CommError as error:
        if failure is None or isinstance(failure, CommError):
            raise (failure or error) from None
        raise failure from error  # the other ranks have not received this rank's failure
    if failure is not None:
        raise failure
    if failed := [str(rank) for rank, row in enumerate(rows) if row[0] != DONE]:
        line = f"{what} failed on rank {', '.join(failed)}: see the error on that rank"
        if any(row[0] == FAILED for row in rows):
            raise InvalidInput("E-OTHER-RANK", line)
        raise CommError(line, code="E-OTHER-RANK")
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
    return _without_padding(groups.gather_all(_padded(data, sizes).to(groups.device)), sizes)


def _padded(data: bytes, sizes: Sequence[int]) -> torch.Tensor:
    padded = torch.zeros(max(*sizes, 1), dtype=torch.uint8)
    padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else 0
    return padded


def _without_padding(rows: torch.Tensor, sizes: Sequence[int]) -> list[bytes]:
    return [row[:nbytes].numpy().tobytes() for row, nbytes in zip(rows.cpu(), sizes, strict=True)]


def gather_values(groups: Groups | None, value: V, kind: type[V], most_nbytes: int, what: str) -> list[V]:
    """Gathers one value per rank, encoded as JSON, and otherwise works like `gather_bytes`."""
    rows = gather_bytes(groups, msgspec.json.encode(value), most_nbytes, what)
    return [decode_json(row, kind, what, f"rank {rank if groups is None else groups.members.ranks[rank]}")
            for rank, row in enumerate(rows)]


def decode_json(data: bytes, kind: type[V], what: str, peer: str) -> V:
    """Decodes what a peer sent. Raises CorruptFrame, which names the peer, if the data is malformed."""
    try:
        return msgspec.json.decode(data, type=complete(kind))
    except MALFORMED as error:
        raise CorruptFrame(f"sends {what} that is malformed: {short_line(error, 200)}", peer=peer) from None
