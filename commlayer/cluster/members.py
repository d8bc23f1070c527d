"""The ranks that take part: all of torch's world, or some of it. Knows torch.distributed and its store; nothing of nodes."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from commlayer.cluster import home_world
from commlayer.cluster.store_waits import bounded
from commlayer.errors import CommError, DeadlineExceeded, InvalidInput
from commlayer.transport.pending import GROUP, named

_told: dict[str, int] = {}
"""How often these ranks have told each other something. They do so together, so they count alike."""
_named: dict[tuple[int, ...], int] = {}
"""The highest number that a group of these ranks was named by."""


def begin_anew() -> None:
    """Ranks are others now, and so is their store."""
    _told.clear()
    _named.clear()


def exchange(store: Any, ranks: Sequence[int], rank: int, data: bytes, deadline_s: float, what: str) -> list[bytes]:
    """Everyone's bytes, in rank order; DeadlineExceeded names who said nothing. All of `ranks` call it together.

    By the store that made the process group: it works before there is a group, whatever its collectives would do, and it knows
    who is missing.
    """
    return bounded(lambda: _exchange(store, ranks, rank, data, deadline_s, what), deadline_s, what, "the launcher")


def _exchange(store: Any, ranks: Sequence[int], rank: int, data: bytes, deadline_s: float, what: str) -> list[bytes]:
    place = "commlayer/" + hashlib.sha256(repr(tuple(ranks)).encode()).hexdigest()[:16]
    number = _told[place] = _told.get(place, 0) + 1
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
        raise DeadlineExceeded(f"{what}: nothing heard within {deadline_s:g} s, of {len(ranks)} ranks: did it start, and has "
                               "it come as far as this one?", peer=f"rank {', '.join(missing)}") from None


def rows_of_all(x: torch.Tensor, world: int, group: Any) -> tuple[Any, torch.Tensor]:
    """Begins to give every member's `x`, which is small, to all: the work, and where they will be, in member order.

    Over Gloo each sends its own to all others at once, so that it takes one way of a link. Gloo's all-gather is a ring, which
    takes one for every member but one.
    """
    rows = x.new_empty((world, *x.shape))
    if x.device.type == "cpu" and x.numel() and "cpu:gloo" in dist.get_backend_config(group):
        return dist.all_to_all_single(rows, x.expand_as(rows).contiguous(), group=group, async_op=True), rows
    return dist.all_gather([*rows.unbind()], x, group=group, async_op=True), rows


class Members:
    """Members are counted from 0 among themselves; `ranks` says who they are in the world."""

    def __init__(self, group: Any = None) -> None:
        """`group`: a process group that this rank is in, None for the world."""
        if not dist.is_initialized():
            raise InvalidInput("E-PROCESS-GROUP",
                               "torch.distributed is not initialised: call init_process_group or start under torchrun")
        if group is not None and (not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0):
            outside = isinstance(group, dist.ProcessGroup) or group == dist.GroupMember.NON_GROUP_MEMBER
            what = "this rank is not in it" if outside else f"got {group!r}"
            raise InvalidInput("E-PROCESS-GROUP",
                               f"process_group: {what}, allowed: a group of torch.distributed that this rank is in, on those "
                               "ranks alone")
        # In the order that our own groups have.
        self.ranks = tuple(sorted(dist.get_process_group_ranks(group or dist.group.WORLD)))
        self.rank, self.world = self.ranks.index(dist.get_rank()), len(self.ranks)
        self._all = self.world == dist.get_world_size()
        self.reachable = not home_world.relayed()
        """Whether they reach each other. Between homes they do not: what is asked of all of them goes through the coordinator,
        and is for what is small or rare."""

    def tell(self, data: bytes, deadline_s: float, what: str) -> list[bytes]:
        """Everyone's bytes, in rank order."""
        return exchange(distributed_c10d._get_default_store(), self.ranks, self.rank, data, deadline_s, what)

    def group(self, members: Iterable[int] | None = None, *, timeout_s: float, backend: str | None = None) -> Any:
        """A process group of these, None for all; None for who is not among them. All members call it, in one order."""
        chosen = range(self.world) if members is None else list(members)
        ranks = [self.ranks[m] for m in chosen]
        backend = home_world.backend_for(ranks, backend)
        what = "making a process group"

        def make(**how: Any) -> Any:
            timeout = datetime.timedelta(seconds=timeout_s)
            with named(what):
                return bounded(lambda: dist.new_group(ranks, timeout=timeout, backend=backend, **how), timeout_s, what, GROUP)

        if self._all:
            made = home_world.strict(make())
            return made if self.rank in chosen else None
        with self._numbered(timeout_s, what):
            return make(use_local_synchronization=True)

    @contextlib.contextmanager
    def all_there(self, deadline_s: float) -> Iterator[None]:
        """Around groups that are made before anybody's heartbeats are heard: who says nothing more is named."""
        try:
            yield
        except CommError as error:
            if error.peer == GROUP:
                self.tell(b"", deadline_s, error.what)
            raise

    def allow(self, group: Any, timeout_s: float) -> None:
        """So long may collectives take that begin in that group from now on. It is of CPUs."""
        home_world.allow(group, datetime.timedelta(seconds=timeout_s))

    @contextlib.contextmanager
    def _numbered(self, timeout_s: float, what: str) -> Iterator[None]:
        """Where others of the world take no part, torch names a group by its ranks and by how many groups this process is in.

        That may differ between members, and would repeat a name whose keys are in the store from a group that was closed. So
        all go to a number that none has used; groups of one, which talk to nobody, fill up to it.
        """
        mine = max(len(distributed_c10d._world.pg_names), _named.get(self.ranks, 0) + 1)
        told = self.tell(str(mine).encode(), timeout_s, what)
        number = _named[self.ranks] = max(int(row) for row in told)
        alone = [dist.get_rank()]
        fillers = [dist.new_group(alone, backend="gloo", use_local_synchronization=True)
                   for _ in range(number - len(distributed_c10d._world.pg_names))]
        try:
            yield
        finally:
            for filler in fillers:
                dist.destroy_process_group(filler)
