"""Makes torch's world of ranks in homes that reach one place alone. Knows torch.distributed; not how that place is reached.

torch then says rank and world as of the whole job, so that scripts shard their data and print as they do in a rack.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore

from commlayer.cluster.relayed_group import NAME, RelayedGroup
from commlayer.cluster.world_store import Desk, WorldStore


class _World(NamedTuple):
    desk: Desk
    name: str
    """The same on all ranks: torch begins to count its groups anew with each world."""
    ids: tuple[int, ...]
    """By rank, how the coordinator knows it."""
    home: frozenset[int]
    """Of those, who share this machine."""
    inside: str
    timeout_s: float
    store: WorldStore
    """torch keeps its own half of it alone, which calls this one."""
    without: bool
    """Whether scripts' collectives go on without who is gone."""
    held: str
    """As of a RelayedGroup, of what scripts ask of all in the default group."""
    patience_s: float
    """As of a RelayedGroup."""


_worlds: list[_World] = []
_groups: weakref.WeakSet[RelayedGroup] = weakref.WeakSet()
_moved: dict[str, RelayedGroup] = {}
"""Of those, the default groups of worlds before, which nobody else may hold on to in Python. By the name of their first world,
which is the same on all ranks, also on those that were not there."""
END_S = 5.0


def begin(desk: Desk, rank: int, world: int, home: range, *, inside: str, timeout_s: float, without: bool = False,
          held: str = "", patience_s: float = 0.0) -> None:
    """torch's default group. `home`: the numbers of ranks that share this machine, whose own groups are of backend `inside`.
    `without`: what scripts ask of all goes on without those who are gone. `held`: until `release` it fails with that line.
    `patience_s`: how long collectives wait behind their limits for a verdict on who has not come."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _group, extended_api=True, devices=["cpu", "cuda"])
    if not _worlds:
        atexit.register(_end)
    _make(_World(desk, f"world{len(_worlds)}", tuple(range(world)), frozenset(home), inside, timeout_s,
                 WorldStore(desk, timeout_s, rank), without, held, patience_s), rank)


def begin_again(desk: Desk, ids: Sequence[int], rank: int, generation: int) -> None:
    """The same for those who go on, in the view of that generation. Groups of the world before are none any more."""
    former, everybody = _worlds[-1], dist.group.WORLD
    for group in [group for group in _groups if group is everybody]:
        _moved[former.name] = group
    moved = [*_moved.values()]
    dist.destroy_process_group()
    for group in moved:
        group.join(END_S)  # what scripts ask of all is without those who are gone, so it ends soon
    former.desk.close()
    for group in [group for group in _groups if group not in moved]:
        group.abort()
    name = f"view{generation}"
    _make(former._replace(desk=desk, name=name, ids=tuple(ids), store=WorldStore(desk, former.timeout_s, ids[rank])), rank)
    for origin, group in _moved.items():
        group.move(desk, f"{name}/{origin}", ids, rank)


def _make(world: _World, rank: int) -> None:
    _worlds.append(world)
    dist.init_process_group(NAME, store=PrefixStore(world.name, world.store), rank=rank, world_size=len(world.ids),
                            timeout=datetime.timedelta(seconds=world.timeout_s))


def release() -> None:
    """What scripts ask of all is carried out from now on."""
    if _worlds and _worlds[-1].held:
        _worlds[-1] = _worlds[-1]._replace(held="")
        for group in _groups:
            group.held = ""


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """What is held meanwhile is answered as if all had what this rank has."""
    groups = [group for group in _groups if group.held]
    for group in groups:
        group.alone = True
    try:
        yield
    finally:
        for group in groups:
            group.alone = False


def allow(group: Any, timeout: datetime.timedelta) -> None:
    """So long may collectives take that begin in it from now on."""
    if isinstance(group, RelayedGroup):
        group.allow(timeout.total_seconds())
    else:
        distributed_c10d._set_pg_timeout(timeout, group)


def desk() -> Desk:
    """Where the ranks of this world leave bytes for each other."""
    return _worlds[-1].desk


def strict(group: Any) -> Any:
    """A collective of that group is of all its members, or fails. It is commlayer's own, so nothing is held."""
    if isinstance(group, RelayedGroup):
        group.without, group.held = False, ""
    return group


def relayed() -> bool:
    """Whether torch's world is one of these: its ranks do not reach each other."""
    return dist.is_initialized() and dist.get_backend() == NAME


def backend_for(ranks: Iterable[int], wanted: str | None) -> str | None:
    """Of a group of these ranks of the world, where `wanted` would be asked for. Sockets are for those of one machine alone."""
    if not relayed():
        return wanted
    world = _worlds[-1]
    at_home = {world.ids[rank] for rank in ranks} <= world.home
    return (wanted if wanted not in (None, NAME) else world.inside) if at_home else NAME


def _group(options: Any, _: Any) -> RelayedGroup:
    world = _worlds[-1]
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    made = RelayedGroup(world.desk, f"{world.name}/group{options.group_id}", [world.ids[rank] for rank in ranks],
                        options.group_rank, options.timeout.total_seconds())
    made.without, made.held, made.patience_s = world.without, world.held, world.patience_s
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
