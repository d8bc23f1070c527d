"""Sets up torch.distributed for ranks in several sites, which reach each other only through the coordinator."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import inspect
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore

from commlayer.cluster.calls.messages import ANY
from commlayer.cluster.processes import object_collectives
from commlayer.cluster.processes.relayed_group import NAME, Reducer, RelayedGroup, layout
from commlayer.cluster.processes.world_store import WorldStore

if TYPE_CHECKING:
    from commlayer.cluster.calls.site_client import KvClient


class _World(NamedTuple):
    kv: KvClient
    name: str
    """Name of this world, equal on all ranks. torch counts groups from 0 in each world, so keys in the store need this
    prefix."""
    ids: tuple[int, ...]
    """Maps each rank in this world to the coordinator's number of that rank."""
    home: frozenset[int]
    """The coordinator's numbers of the ranks on this machine."""
    inside: str
    timeout_s: float
    store: WorldStore
    """The world's store. torch refers only to the C++ half of this object, which calls the Python half, so the Python half is
    kept here."""
    inside_store: WorldStore
    """The store of groups inside this home, in which no other home can write the addresses that they connect to."""
    skip_lost: bool
    """True: collectives of scripts leave out ranks that are gone."""
    paused_reason: str
    """Value of RelayedGroup.paused_reason for groups that scripts use, including the default group."""
    patience_s: float
    """Value of RelayedGroup.patience_s for new groups."""


_worlds: list[_World] = []
_groups: weakref.WeakSet[RelayedGroup] = weakref.WeakSet()
_moved: weakref.WeakValueDictionary[str, RelayedGroup] = weakref.WeakValueDictionary()
"""Default groups of previous worlds, as long as something else refers to them, such as a DDP module to the one that it was made
with. Keyed by the name of a group's first world, which is equal on all ranks, including ranks that joined later."""
END_S = 5.0
GROUP_BITS = 16
"""torch numbers the groups of an epoch from its generation times 2 to this power on."""


def init_world(kv: KvClient, rank: int, world: int, home: range, *, inside: str, timeout_s: float, skip_lost: bool = False,
               paused_reason: str = "", patience_s: float = 0.0) -> None:
    """Creates torch's default group. `home`: numbers of the ranks on this machine; groups of only these ranks use the backend
    `inside`. `skip_lost`: collectives of scripts leave out ranks that are gone. `paused_reason`: until `release`, collectives
    fail with this text. `patience_s`: how long collectives wait beyond their timeout until a missing rank is evicted."""
    if NAME not in dist.Backend.backend_list:
        own = torch.accelerator.current_accelerator()  # such as mps
        devices = [*dict.fromkeys(("cpu", "cuda", own.type if own else "cpu"))]
        dist.Backend.register_backend(NAME, _group, extended_api=True, devices=devices)
    if not _worlds:
        atexit.register(_end)
        helper = distributed_c10d._new_process_group_helper
        distributed_c10d._new_process_group_helper = functools.wraps(helper)(functools.partial(_with_own_store, helper))
        rebuild = Reducer._rebuild_buckets
        Reducer._rebuild_buckets = lambda reducer: layout.rebuild(rebuild, reducer)
    object_collectives.install(NAME)
    # Ranks that join are the last ones, with further numbers.
    ids = (*range(world - len(home)), *home) if paused_reason else tuple(range(world))
    _worlds.append(_World(kv, f"world{len(_worlds)}", ids, frozenset(home), inside, timeout_s,
                          WorldStore(kv, timeout_s, ids[rank]), WorldStore(kv, timeout_s, ANY, min(home)), skip_lost,
                          paused_reason, patience_s))
    _make_default_group(rank)


def change_members(kv: KvClient, ids: Sequence[int], rank: int, generation: int) -> None:
    """Creates the default group of the remaining ranks in a new epoch. Groups of only this home's ranks stay; other groups of
    the previous epoch become unusable. `ids`: the coordinator's numbers of the ranks; `rank`: this process's index among them.
    """
    former, default, of_home = _worlds[-1], dist.group.WORLD, _take_home_groups()
    for group in [group for group in _groups if group is default]:
        _moved[former.name] = group
    moved = [*_moved.values()]
    dist.destroy_process_group()
    for group in moved:
        group.join(END_S)  # scripts' collectives leave out ranks that are gone, so they end soon
    former.kv.close()
    for group in [group for group in _groups if group not in moved]:
        group.abort()
    name = f"epoch{generation}"
    store = WorldStore(kv, former.timeout_s, ids[rank])
    inside_store = WorldStore(kv, former.timeout_s, ANY, min(former.home))
    # Kept groups have lower numbers. All homes number new groups alike, even if they have kept different ones.
    distributed_c10d._world.group_count = generation << GROUP_BITS
    _worlds[-1] = former._replace(kv=kv, name=name, ids=tuple(ids), store=store, inside_store=inside_store)
    _make_default_group(rank)
    for put_back in of_home:
        put_back({n: ids.index(former.ids[n]) for n in range(len(former.ids)) if former.ids[n] in former.home})
    for origin, group in _moved.items():
        group.move(kv, f"{name}/{origin}", ids, rank)


def _take_home_groups() -> list[Callable[[Mapping[int, int]], None]]:
    """Takes groups that contain only ranks of this home out of torch's tables, for example those of a sharded model. Otherwise
    torch would destroy them together with its default group. Returns functions that put the groups back; each receives the new
    number of each former rank."""
    known = distributed_c10d._world
    tables: list[dict[Any, Any]] = [known.pg_map, known.pg_names, known.pg_backend_config, known.pg_to_tag]
    of_home = [group for group, ranks in known.pg_group_ranks.items()
               if group is not dist.group.WORLD and group not in _groups and _all_in_own_home(ranks)]

    def take(group: Any) -> Callable[[Mapping[int, int]], None]:
        rows, ranks = [table.pop(group) for table in tables], known.pg_group_ranks.pop(group)

        def put_back(numbers: Mapping[int, int]) -> None:
            for table, row in zip(tables, rows, strict=True):
                table[group] = row
            known.pg_group_ranks[group] = {numbers[rank]: number for rank, number in ranks.items()}
            known.tags_to_pg.setdefault(known.pg_to_tag[group], []).append(group)
            distributed_c10d._register_process_group(known.pg_names[group], group)

        return put_back

    return [*map(take, of_home)]


def _make_default_group(rank: int) -> None:
    world = _worlds[-1]
    dist.init_process_group(NAME, store=PrefixStore(world.name, world.store), rank=rank, world_size=len(world.ids),
                            timeout=datetime.timedelta(seconds=world.timeout_s))


def _with_own_store(helper: Callable[..., Any], *args: Any, **more: Any) -> Any:
    """Creates a group as torch does. A group inside this home gets the home's own store."""
    call = inspect.signature(helper).bind(*args, **more)
    ranks = call.arguments["global_ranks_in_group"]
    if ranks and is_relayed() and _all_in_own_home(ranks):
        call.arguments["store"] = PrefixStore(_worlds[-1].name, _worlds[-1].inside_store)
    return helper(*call.args, **call.kwargs)


def exchange(name: str, ranks: Sequence[int], rank: int, data: bytes, timeout_s: float) -> tuple[bytes | None, ...]:
    """Exchanges one byte string per rank of this world through the store, and returns them in the order of `ranks`; None for
    ranks that sent nothing. `rank`: the index of this rank among them."""
    world = _worlds[-1]
    keys = [(f"{world.name}/{name}", world.ids[r]) for r in ranks]
    return world.kv.request(time.monotonic() + timeout_s, put=[(keys[rank], data)], want=keys, rank=keys[rank][1],
                            limit_s=timeout_s).values


def release() -> None:
    """Ends the hold on collectives of scripts: they are executed from now on."""
    if _worlds and _worlds[-1].paused_reason:
        _worlds[-1] = _worlds[-1]._replace(paused_reason="")
        for group in _groups:
            group.paused_reason = ""


@contextlib.contextmanager
def run_locally() -> Iterator[None]:
    """Context manager in which collectives on hold succeed locally, as if all ranks had this rank's data."""
    groups = [group for group in _groups if group.paused_reason]
    for group in groups:
        group.local_only = True
    try:
        yield
    finally:
        for group in groups:
            group.local_only = False


def set_timeout(group: Any, timeout_s: float) -> None:
    """Sets the timeout of collectives that begin in the group from now on. Only for groups on CPUs."""
    if isinstance(group, RelayedGroup):
        group.timeout_s = timeout_s
    else:
        distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=timeout_s), group)


def kv_client() -> KvClient:
    """Returns the key-value store client of this world's ranks."""
    return _worlds[-1].kv


def gather_present(x: torch.Tensor) -> list[torch.Tensor]:
    """Gathers a tensor of each rank that is not lost, over torch's default group. Returns the values in rank order, equal on
    all of these ranks. While collectives are on hold, this rank's tensor takes the place of the others'."""
    if not dist.is_initialized():
        return [x]
    group = dist.group.WORLD
    if isinstance(group, RelayedGroup):
        with run_locally():
            return group.allgather_present(x)
    rows = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, x)
    return rows


def make_strict(group: Any) -> Any:
    """Marks a group as commlayer's own: its collectives include all members or fail, and are never on hold. Returns the
    group."""
    if isinstance(group, RelayedGroup):
        group.skip_lost, group.paused_reason = False, ""
    return group


def is_relayed() -> bool:
    """Returns whether torch's default group relays through the coordinator, so ranks at different sites cannot connect to each
    other."""
    return dist.is_initialized() and dist.get_backend() == NAME


def backend_for(ranks: Iterable[int], wanted: str | None) -> str | None:
    """Returns the torch backend for a group of these ranks; `wanted`: the requested one. If torch's default group relays
    through the coordinator, only groups inside one machine use sockets; all others are relayed, too."""
    if not is_relayed():
        return wanted
    return (wanted if wanted not in (None, NAME) else _worlds[-1].inside) if _all_in_own_home(ranks) else NAME


def _all_in_own_home(ranks: Iterable[int]) -> bool:
    return {_worlds[-1].ids[rank] for rank in ranks} <= _worlds[-1].home


def _group(options: Any, _: Any) -> RelayedGroup:
    world = _worlds[-1]
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    group = RelayedGroup(world.kv, f"{world.name}/group{options.group_id}", [world.ids[rank] for rank in ranks],
                         options.group_rank, options.timeout.total_seconds())
    group.skip_lost, group.paused_reason, group.patience_s = world.skip_lost, world.paused_reason, world.patience_s
    _groups.add(group)
    return group


def _end() -> None:
    """Ends all groups at interpreter exit. A thread that still waits inside gRPC would crash the process then."""
    for group in _groups:
        group.shutdown()
    for world in _worlds:
        world.kv.close()
    for group in _groups:
        group.join(END_S)
