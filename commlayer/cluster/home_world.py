"""Sets up torch.distributed for ranks in several homes, which reach each other only through the coordinator.

torch reports rank and world size of the whole job, so scripts shard their data and log as on one cluster.
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
    """Equal on all ranks. torch counts its groups from 0 in each world, so keys need this prefix."""
    ids: tuple[int, ...]
    """The coordinator's rank number of each rank."""
    home: frozenset[int]
    """Those of these numbers that are on this machine."""
    inside: str
    timeout_s: float
    store: WorldStore
    """torch keeps only the C++ half of this object, which calls the Python half."""
    without: bool
    """Whether scripts' collectives leave out ranks that are gone."""
    held: str
    """As in RelayedGroup, for scripts' collectives in the default group."""
    patience_s: float
    """As in RelayedGroup."""


_worlds: list[_World] = []
_groups: weakref.WeakSet[RelayedGroup] = weakref.WeakSet()
_moved: dict[str, RelayedGroup] = {}
"""Default groups of former worlds, kept here because Python may have no other reference to them (DDP holds its group in C++).
Keyed by the name of a group's first world, which is equal on all ranks, also on ranks that joined later."""
END_S = 5.0


def begin(desk: Desk, rank: int, world: int, home: range, *, inside: str, timeout_s: float, without: bool = False,
          held: str = "", patience_s: float = 0.0) -> None:
    """Makes torch's default group. `home`: numbers of the ranks on this machine, whose own groups use the backend `inside`.
    `without`: scripts' collectives leave out ranks that are gone. `held`: until `release` they fail with that line.
    `patience_s`: how long collectives wait beyond their timeout until a missing rank is evicted."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _group, extended_api=True, devices=["cpu", "cuda"])
    if not _worlds:
        atexit.register(_end)
    _make(_World(desk, f"world{len(_worlds)}", tuple(range(world)), frozenset(home), inside, timeout_s,
                 WorldStore(desk, timeout_s, rank), without, held, patience_s), rank)


def begin_again(desk: Desk, ids: Sequence[int], rank: int, generation: int) -> None:
    """Makes the default group of the remaining ranks in a new view. Other groups of the former world become unusable."""
    former, default = _worlds[-1], dist.group.WORLD
    for group in [group for group in _groups if group is default]:
        _moved[former.name] = group
    moved = [*_moved.values()]
    dist.destroy_process_group()
    for group in moved:
        group.join(END_S)  # scripts' collectives leave out ranks that are gone, so they end soon
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
    """Scripts' collectives are carried out from now on."""
    if _worlds and _worlds[-1].held:
        _worlds[-1] = _worlds[-1]._replace(held="")
        for group in _groups:
            group.held = ""


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Collectives on hold succeed locally meanwhile, as if all ranks had this rank's data."""
    groups = [group for group in _groups if group.held]
    for group in groups:
        group.alone = True
    try:
        yield
    finally:
        for group in groups:
            group.alone = False


def allow(group: Any, timeout: datetime.timedelta) -> None:
    """Sets the timeout of collectives that begin in the group from now on."""
    if isinstance(group, RelayedGroup):
        group.allow(timeout.total_seconds())
    else:
        distributed_c10d._set_pg_timeout(timeout, group)


def desk() -> Desk:
    """The store client of this world's ranks."""
    return _worlds[-1].desk


def strict(group: Any) -> Any:
    """Marks a group of commlayer's own: its collectives include all members or fail, and are never on hold."""
    if isinstance(group, RelayedGroup):
        group.without, group.held = False, ""
    return group


def relayed() -> bool:
    """Whether torch's world is of this kind, so that its ranks do not reach each other."""
    return dist.is_initialized() and dist.get_backend() == NAME


def backend_for(ranks: Iterable[int], wanted: str | None) -> str | None:
    """The backend for a group of these ranks, where `wanted` is requested. Sockets are used only within one machine."""
    if not relayed():
        return wanted
    world = _worlds[-1]
    at_home = {world.ids[rank] for rank in ranks} <= world.home
    return (wanted if wanted not in (None, NAME) else world.inside) if at_home else NAME


def _group(options: Any, _: Any) -> RelayedGroup:
    world = _worlds[-1]
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    group = RelayedGroup(world.desk, f"{world.name}/group{options.group_id}", [world.ids[rank] for rank in ranks],
                         options.group_rank, options.timeout.total_seconds())
    group.without, group.held, group.patience_s = world.without, world.held, world.patience_s
    _groups.add(group)
    return group


def _end() -> None:
    """A thread that still waits inside gRPC would crash the process when the interpreter ends."""
    for group in _groups:
        group.shutdown()
    for world in _worlds:
        world.desk.close()
    for group in _groups:
        group.join(END_S)
