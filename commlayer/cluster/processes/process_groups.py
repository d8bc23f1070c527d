"""The ranks that train together (all of torch's world, or a subgroup): their process groups, and exchange of bytes through
torch's store."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from commlayer.cluster.processes import site_process_group
from commlayer.cluster.processes.bounded_calls import ANY_PEER, run_bounded, torch_errors
from commlayer.errors import CommError, DeadlineExceeded, InvalidInput

_exchange_counts: dict[str, int] = {}
"""Maps a group of ranks to its number of exchanges so far. All ranks of the group take part in each exchange, so their counts
agree."""
_group_numbers: dict[tuple[int, ...], int] = {}
"""Maps a tuple of ranks to the highest number used in the name of a process group of these ranks."""
MAX_MORE_GROUPS = 64
"""Largest number of process groups by which ranks may differ. Each has threads and descriptors until the ranks agree."""


def reset_counts() -> None:
    """Resets the counts of exchanges and groups, after the ranks and their store were replaced."""
    _exchange_counts.clear()
    _group_numbers.clear()


def exchange(store: Any, ranks: Sequence[int], rank: int, data: bytes, deadline_s: float, what: str) -> list[bytes]:
    """Exchanges one byte string per rank through torch's store; returns them in rank order. All `ranks` must call it. Raises
    DeadlineExceeded with the names of ranks that sent nothing.

    The store is that with which the process group was created. An exchange through the store needs no working collectives, and
    shows which ranks are missing.
    """
    return run_bounded(lambda: _exchange(store, ranks, rank, data, deadline_s, what), deadline_s, what, "the launcher")


def _exchange(store: Any, ranks: Sequence[int], rank: int, data: bytes, deadline_s: float, what: str) -> list[bytes]:
    place = "commlayer/" + hashlib.sha256(repr(tuple(ranks)).encode()).hexdigest()[:16]
    number = _exchange_counts[place] = _exchange_counts.get(place, 0) + 1
    if site_process_group.is_relayed():
        values = site_process_group.exchange(f"{place}/{number}", ranks, rank, data, deadline_s)
        if absent := [str(r) for r, value in zip(ranks, values, strict=True) if value is None]:
            raise _sent_nothing(what, ranks, absent, deadline_s)
        return [value for value in values if value is not None]
    keys = [f"{place}/{number}/{r}" for r in range(len(ranks))]
    try:
        store.set(keys[rank], data)
        store.wait(keys, datetime.timedelta(seconds=deadline_s))
        return [bytes(row) for row in store.multi_get(keys)] if store.has_extended_api() else [store.get(k) for k in keys]
    except RuntimeError as error:
        missing: list[str] = []
        with contextlib.suppress(RuntimeError):
            missing = [str(ranks[r]) for r, key in enumerate(keys) if not store.check([key])]
        if not missing:
            raise CommError(f"{what}: the process group's store does not answer: {str(error).splitlines()[0]}",
                            peer="the launcher") from None
        raise _sent_nothing(what, ranks, missing, deadline_s) from None


def _sent_nothing(what: str, ranks: Sequence[int], missing: Sequence[str], deadline_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"{what}: of {len(ranks)} ranks, this one sent nothing within {deadline_s:g} s: check that it has "
                            "started, and that it makes the same calls as the others", peer=f"rank {', '.join(missing)}")


def rows_of_all(x: torch.Tensor, world: int, group: Any) -> tuple[Any, torch.Tensor]:
    """Starts gathering a small tensor of every member on all members. Returns the pending work and the result, one row per
    member in order.

    With Gloo this is an all-to-all, whose time is one latency of the link. Gloo's all-gather is a ring and needs one latency
    for every member but one.
    """
    rows = x.new_empty((world, *x.shape))
    if x.device.type == "cpu" and x.numel() and "cpu:gloo" in dist.get_backend_config(group):
        return dist.all_to_all_single(rows, x.expand_as(rows).contiguous(), group=group, async_op=True), rows
    return dist.all_gather([*rows.unbind()], x, group=group, async_op=True), rows


def destroy(group: Any) -> None:
    if not dist.is_initialized() or group is None:
        return
    if group in distributed_c10d._world.pg_map:
        dist.destroy_process_group(group)
    else:
        group.shutdown()


class Members:
    """The ranks that train together. Members are numbered from 0; `ranks` maps a member's number to its rank in the world."""

    def __init__(self, group: Any = None) -> None:
        """`group`: a process group that contains this rank; None for the world."""
        if not dist.is_initialized():
            raise InvalidInput("E-PROCESS-GROUP",
                               "torch.distributed is not initialized: call init_process_group or start with torchrun")
        if group is not None and (not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0):
            outside = isinstance(group, dist.ProcessGroup) or group == dist.GroupMember.NON_GROUP_MEMBER
            what = "this rank is not in it" if outside else f"got {group!r}"
            raise InvalidInput("E-PROCESS-GROUP",
                               f"process_group: {what}; pass a torch.distributed group that contains this rank, only on the "
                               "ranks of that group")
        # Sorted, as in the groups created below.
        self.ranks = tuple(sorted(dist.get_process_group_ranks(group or dist.group.WORLD)))
        self.rank, self.world = self.ranks.index(dist.get_rank()), len(self.ranks)
        self._all = self.world == dist.get_world_size()
        self.reachable = not site_process_group.is_relayed()
        """Whether members can connect to each other. Ranks at different sites cannot: their collectives pass through the
        coordinator, and suit only small or rare data."""

    def exchange_bytes(self, data: bytes, deadline_s: float, what: str) -> list[bytes]:
        """Exchanges one byte string per rank; returns them in rank order. A collective call."""
        return exchange(distributed_c10d._get_default_store(), self.ranks, self.rank, data, deadline_s, what)

    def group(self, members: Iterable[int] | None = None, *, timeout_s: float, backend: str | None = None) -> Any:
        """Creates a process group of these members (None: all). Returns None on ranks outside the group. All members must call
        it, in the same order."""
        numbers = range(self.world) if members is None else list(members)
        ranks = [self.ranks[m] for m in numbers]
        backend = site_process_group.backend_for(ranks, backend)
        what = "making a process group"

        def make(**how: Any) -> Any:
            timeout = datetime.timedelta(seconds=timeout_s)
            with torch_errors(what):
                return run_bounded(lambda: dist.new_group(ranks, timeout=timeout, backend=backend, **how), timeout_s, what,
                                   ANY_PEER)

        if self._all:
            group = site_process_group.make_strict(make())
            return group if self.rank in numbers else None
        with self._numbered(timeout_s, what):
            return make(use_local_synchronization=True)

    @contextlib.contextmanager
    def all_there(self, deadline_s: float) -> Iterator[None]:
        """Context manager around the creation of groups before heartbeats start. If the creation fails, raises an error that
        names the missing ranks."""
        try:
            yield
        except CommError as error:
            if error.peer == ANY_PEER:
                self.exchange_bytes(b"", deadline_s, error.what)
            raise

    @contextlib.contextmanager
    def _numbered(self, timeout_s: float, what: str) -> Iterator[None]:
        """Context manager around the creation of a group that has only some ranks of the world. torch names such a group by its
        ranks and by the number of groups in this process.

        That number may differ between members. It could also repeat the name of a closed group, whose keys are still in the
        store. Therefore all members agree on an unused number. Each member raises its own number to it by creating groups of
        one rank, which do not communicate.
        """
        mine = max(len(distributed_c10d._world.pg_names), _group_numbers.get(self.ranks, 0) + 1)
        counts = [int.from_bytes(row[:8], "little") for row in self.exchange_bytes(mine.to_bytes(8, "little"), timeout_s, what)]
        if far := [str(rank) for rank, count in zip(self.ranks, counts, strict=True) if count > mine + MAX_MORE_GROUPS]:
            raise CommError(f"has created {max(counts)} process groups, but this rank {mine}; they may differ by "
                            f"{MAX_MORE_GROUPS}", peer=f"rank {', '.join(far)}", code="E-SIZE")
        number = _group_numbers[self.ranks] = max(counts)
        alone = [dist.get_rank()]
        fillers = [dist.new_group(alone, backend="gloo", use_local_synchronization=True)
                   for _ in range(number - len(distributed_c10d._world.pg_names))]
        try:
            yield
        finally:
            for filler in fillers:
                dist.destroy_process_group(filler)
