"""Makes torch's world of ranks in homes that reach one place alone. Knows torch.distributed; not how that place is reached.

torch then says rank and world as of the whole job, so that scripts shard their data and print as they do in a rack.
"""

from __future__ import annotations

import atexit
import datetime
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from commlayer.transport.relayed_group import NAME, RelayedGroup
from commlayer.transport.world_store import Desk, WorldStore


class _World(NamedTuple):
    desk: Desk
    number: int
    """How many this process has made: torch begins to count its groups anew with each."""
    home: range
    inside: str
    store: WorldStore
    """torch keeps its own half of it alone, which calls this one."""


_worlds: list[_World] = []
_groups: weakref.WeakSet[RelayedGroup] = weakref.WeakSet()
END_S = 5.0


def begin(desk: Desk, rank: int, world: int, home: range, *, inside: str, timeout_s: float) -> None:
    """torch's default group. `home`: the ranks that share this machine, whose own groups are of backend `inside`."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _group, extended_api=True, devices=["cpu", "cuda"])
    number = len(_worlds)
    if not number:
        atexit.register(_end)
    kept = WorldStore(desk, timeout_s)
    _worlds.append(_World(desk, number, home, inside, kept))
    store = PrefixStore(f"world{number}", kept)
    dist.init_process_group(NAME, store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=timeout_s))


def relayed() -> bool:
    """Whether torch's world is one of these: its ranks do not reach each other."""
    return dist.is_initialized() and dist.get_backend() == NAME


def backend_for(ranks: Iterable[int], wanted: str | None) -> str | None:
    """Of a group of these ranks of the world, where `wanted` would be asked for. Sockets are for those of one machine alone."""
    if not relayed():
        return wanted
    world = _worlds[-1]
    return (wanted if wanted not in (None, NAME) else world.inside) if set(ranks) <= set(world.home) else NAME


def _group(options: Any, _: Any) -> RelayedGroup:
    world = _worlds[-1]
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    made = RelayedGroup(world.desk, f"world{world.number}/group{options.group_id}", ranks, options.group_rank,
                        options.timeout.total_seconds())
    _groups.add(made)
    return made


def _end() -> None:
    """A thread that still waits inside gRPC when the interpreter ends would take the process down."""
    for group in _groups:
        group.shutdown()
    for world in _worlds:
        world.desk.close()
    for group in _groups:
        group.join(END_S)
