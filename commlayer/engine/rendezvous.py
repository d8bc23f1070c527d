"""Rendezvous of a job's ranks: finds out the members, their machines, and whether all were started alike.

Every rank publishes one row about itself through the store of the process group, and all reach the same verdict from the rows.
So an error on one machine is one line on every rank, and no rank waits in a collective that others never enter.
"""

from __future__ import annotations

import contextlib
import json
import math
import platform
import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from commlayer.cluster import messages
from commlayer.cluster.process_groups import Members, exchange
from commlayer.config import Config, Launch, alike, is_loopback, master, read_launch, use_interface
from commlayer.engine import home_process, optimizer_settings
from commlayer.errors import CommError, InvalidInput, coded
from commlayer.records import Plan
from commlayer.transport import own_address
from commlayer.transport.key_folder import Keys

NAMED = 3
"""Most differing settings that one line names."""
HEARD_S = 5.0
"""Seconds for which a failing rank stays, so that the others can read the reason: the store may be in its process."""


class Arrival(NamedTuple):
    host: str
    """In a home, the name in its certificate."""
    machine: str
    agent: int = -1
    address: str = ""
    """This machine's address, as seen from the machine of the rendezvous."""
    insecure: bool = False
    keys: bool = False
    must: Mapping[str, str] = {}
    """Values that must be the same on all ranks."""
    settings: Mapping[str, str] = {}
    """Of the optimizer: the same on all ranks, unless the user allows different ones."""
    model: str = ""
    error: str = ""


class Met(NamedTuple):
    """The result. `members` is None if there are no other ranks."""

    members: Members | None
    launch: Launch
    per_node: int = 1
    here: int = 1
    """Number of ranks on this machine."""
    address: str = ""
    """Of this machine, to listen on; empty if all ranks are on one machine."""
    note: str = ""
    """A line for the log on the layout."""
    reachable: bool = True
    """Whether ranks reach those on other machines."""
    differs: str = ""
    """How optimizers differ between ranks, if that is allowed."""
    logs: bool = True
    """Whether this rank is the first of its node, or home."""


class Start:
    """One start of a job, as a context manager: an error inside it before the rendezvous is reported to all ranks."""

    def __init__(self, process_group: Any, device: torch.device) -> None:
        """`process_group`: the ranks to train with, None for the whole world."""
        self._group, self._device, self._told = process_group, device, False

    def __enter__(self) -> Start:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, CommError) or read_launch().joins >= 0:
            return  # the others cannot be reached, or did not come
        if isinstance(error, Exception) and not self._told:
            with contextlib.suppress(ValueError, CommError):  # then no rank waits for this one, or only for a short time
                members = self._members(read_launch(), Config())
                self._tell(members, Config(), _here(error=str(error).partition("\n")[0] or type(error).__name__))
                _stay(members)

    def meet(self, config: Config, *, model: str, must: Mapping[str, str], settings: Mapping[str, str]) -> Met:
        """Exchanges rows; all ranks call it together. ValueError, the same on all, if they were not started alike. With
        drift="warn", optimizer `settings` may differ."""
        launch = read_launch()
        members = self._members(launch, config)
        if members is None:
            return Met(None, launch, here=launch.local_world)
        if launch.joins >= 0:  # the others have met; the coordinator compares
            return Met(members, launch, here=launch.local_world, reachable=False, logs=launch.local_rank == 0)
        address = own_address.address_to(master()) if master() else own_address.default_address()
        name = Keys(config.keys).own.name if launch.home and config.keys else ""
        mine = _here(name, agent=launch.agent, address=address,
                     insecure=config.insecure, keys=bool(config.keys), must=compared(must, config), model=model,
                     settings=settings)
        rows = self._tell(members, config, mine)
        if problem := problem_of(rows, members.ranks, own_servers=not config.join):
            _stay(members)
            raise InvalidInput("E-RANKS-DIFFER", problem)
        differs = differing(rows, members.ranks)
        if differs and config.drift != "warn":
            _stay(members)
            raise InvalidInput("E-RANKS-DIFFER",
                               f'{differs}; allowed: the same on all ranks; drift="warn" trains with different ones')
        per_node, note = (config.ranks_per_node, "") if config.ranks_per_node else ranks_per_node(rows)
        several = len({row.machine for row in rows}) > 1
        address = _own_address(mine, rows) if several else ""
        if several and members.reachable and "gloo" not in dist.get_backend():
            use_interface(own_address.interface_of(address))  # for Gloo's groups, which carry small rows
        local_ranks = Counter(row.machine for row in rows)[mine.machine]
        mates = [row for row in rows if (row.machine, row.agent) == (mine.machine, mine.agent)]
        return Met(members, launch, per_node, local_ranks, address, note, members.reachable, differs,
                   logs=rows[members.rank] is mates[0])

    def _members(self, launch: Launch, config: Config) -> Members | None:
        begin_group(launch, self._device, config)
        if not dist.is_initialized():
            if self._group is not None:
                raise InvalidInput("E-PROCESS-GROUP",
                                   f"process_group: got {self._group!r}, but torch.distributed is not initialised")
            return None
        members = Members(self._group)
        return members if members.world > 1 else None

    def _tell(self, members: Members | None, config: Config, mine: Arrival) -> list[Arrival]:
        self._told = True
        if members is None:
            return [mine]
        rows = members.tell(json.dumps(mine._asdict()).encode(), config.join_deadline_s, "start")
        # Another version may send more fields.
        return [Arrival(**{k: v for k, v in json.loads(data).items() if k in Arrival._fields}) for data in rows]


def group_of(process_group: Any) -> Any:
    """The process group of the script's argument, which may be a DeviceMesh of one dimension."""
    if not isinstance(process_group, DeviceMesh):
        return process_group
    if process_group.ndim != 1:
        raise InvalidInput("E-PROCESS-GROUP",
                           f"process_group: got {process_group!r}, allowed: a DeviceMesh of one dimension, such as mesh['dp'] "
                           "where dimensions have names")
    return process_group.get_group()


def compared(must: Mapping[str, str], config: Config) -> dict[str, str]:
    """All values that must be the same on all ranks."""
    return _versions() | dict(must) | alike(config)


def begin_group(launch: Launch, device: torch.device, config: Config) -> None:
    """Makes the default process group, under a launcher, if the script has not made one."""
    if dist.is_initialized() or launch.world == 1:
        return
    if launch.home:
        home_process.begin_world(launch, "nccl" if device.type == "cuda" else "gloo")
        return
    if launch.world > launch.local_world:
        address = own_address.address_to(master())
        use_interface(own_address.interface_of(own_address.default_address() if is_loopback(address) else address))
    try:
        join = timedelta(seconds=config.join_deadline_s)
        store, rank, world = next(rendezvous("env://", launch.rank, launch.world, timeout=join))
    except (RuntimeError, ValueError) as error:
        raise CommError(f"start: rank {launch.rank} found no store of the job: {str(error).splitlines()[0]}",
                        peer=f"MASTER_ADDR {master()}") from None
    exchange(store, range(world), rank, b"", config.join_deadline_s, "start")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=rank, world_size=world,
                            timeout=timedelta(seconds=config.deadline_s))


def plan_kind(plan: Any) -> str:
    """The part of the `plan` setting that must be the same on all ranks. For plans and their files, rank 0's counts."""
    if isinstance(plan, Plan | Path) or (isinstance(plan, str) and plan != "auto" and "(" not in plan):
        return "a plan"
    return str(plan)


def problem_of(rows: Sequence[Arrival], ranks: Sequence[int], *, own_servers: bool = True) -> str:
    """Why these ranks cannot train together, in a line; empty if they can."""
    if wrong := [r for r, row in enumerate(rows) if row.error]:
        return f"{_who(wrong, rows, ranks)}: {rows[wrong[0]].error}"
    for name in dict.fromkeys(name for row in rows for name in row.must):
        values = [row.must.get(name, "unknown") for row in rows]
        if len(set(values)) > 1:
            return f"{name}: {_by_value(values, rows, ranks)}; allowed: the same on all ranks"
    machines = len({row.machine for row in rows})
    if own_servers and machines > 1:
        keyed = [r for r, row in enumerate(rows) if row.keys]
        if bare := [r for r, row in enumerate(rows) if not row.keys and (keyed or not row.insecure)]:
            if keyed:
                return coded("E-KEYS", f"keys: not set on {_who(bare, rows, ranks)}; others have keys: make those with "
                             "`commlayer keys add NAME` and set COMMLAYER_KEYS on every machine (docs/how-to/keys.md)")
            return coded("E-PLAIN-TEXT", f"insecure: not set on {_who(bare, rows, ranks)}; the ranks run on {machines} "
                         "machines and traffic between them is plain text without keys: make some with `commlayer keys init` "
                         "and set COMMLAYER_KEYS on every machine (docs/how-to/keys.md), or set COMMLAYER_INSECURE=1 on every "
                         "machine if you trust every machine on the way")
        if all(_local(row.address) for row in rows):
            return coded("E-ADDRESS", f"bind: the ranks run on {machines} machines, but MASTER_ADDR leads to loopback on each: "
                         "set MASTER_ADDR to an address that all reach, or COMMLAYER_BIND on every machine to its own")
    if other := [r for r, row in enumerate(rows) if row.model != rows[0].model]:
        return (f"rank {_numbers(other, ranks)} trains another model than rank {ranks[0]}: names, shapes, dtypes and order of "
                "what is trained must be equal")
    return ""


def differing(rows: Sequence[Arrival], ranks: Sequence[int]) -> str:
    """How the ranks' optimizers differ, in a line; empty if they do not."""
    differences = optimizer_settings.differences([row.settings for row in rows])
    return "; ".join(f"{name}: {_by_value(values, rows, ranks)}" for name, values in [*differences.items()][:NAMED])


def _by_value(values: Sequence[str], rows: Sequence[Arrival], ranks: Sequence[int]) -> str:
    return ", ".join(f"{value} on {_who([r for r, v in enumerate(values) if v == value], rows, ranks)}"
                     for value in dict.fromkeys(values))


def ranks_per_node(rows: Sequence[Arrival]) -> tuple[int, str]:
    """Number of consecutive ranks that are on one node, and a line for the log on the layout.

    Ranks with the same machine and agent are on one node. If nodes have unequal numbers of ranks, or ranks are dealt
    round-robin, the greatest number that fits counts: a machine is then several nodes."""
    blocks = [list(block) for _, block in groupby(rows, key=lambda row: (row.machine, row.agent))]
    runs = [(block[0].host, len(block)) for block in blocks]
    per_node = math.gcd(*(number for _, number in runs))
    if all(number == per_node for _, number in runs) and len(runs) == len({(row.machine, row.agent) for row in rows}):
        return per_node, ""
    counts = ", ".join(f"{number} on {host}" for host, number in runs[:8]) + (", ..." if len(runs) > 8 else "")
    return per_node, (f"ranks stand unevenly on machines ({counts}): planned as nodes of {per_node}, so more goes over the "
                      "network than need be; give every machine the same number, in a row")


def _stay(members: Members | None) -> None:
    """Waits until all ranks, which have the same verdict and are about to end, have read it."""
    if members is not None:
        with contextlib.suppress(CommError):
            members.tell(b"", HEARD_S, "start")


def _here(name: str = "", **told: Any) -> Arrival:
    return Arrival(name or socket.gethostname(), own_address.machine(), **told)


def _versions() -> dict[str, str]:
    return {"version of commlayer": messages.version(), "protocol of commlayer": str(messages.PROTOCOL),
            "version of torch": torch.__version__.partition("+")[0],
            # All ranks must compute the same floats: since 3.12, sum() rounds differently.
            "version of Python": ".".join(platform.python_version_tuple()[:2])}


def _own_address(mine: Arrival, rows: Iterable[Arrival]) -> str:
    """On the machine of the rendezvous, its own name may lead to loopback. Then the address toward another machine counts."""
    ways = [mine.address, *(own_address.address_to(row.address) for row in rows if not _local(row.address))]
    return next((address for address in ways if not _local(address)), "")


def _local(address: str) -> bool:
    return not address or is_loopback(address)


def _who(chosen: Sequence[int], rows: Sequence[Arrival], ranks: Sequence[int]) -> str:
    hosts = list(dict.fromkeys(rows[r].host for r in chosen))
    return f"rank {_numbers(chosen, ranks)} ({', '.join(hosts[:4])}{', ...' if len(hosts) > 4 else ''})"


def _numbers(chosen: Sequence[int], ranks: Sequence[int]) -> str:
    """0, 1, 2 and 5 as "0-2, 5", by their numbers in the world."""
    runs: list[list[int]] = []
    for number in sorted(ranks[r] for r in chosen):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
