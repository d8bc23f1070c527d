"""Rendezvous of a job's ranks.

Every rank publishes one row about itself through the store of the process group, and all ranks draw the same conclusion from
all rows. An error on one machine is therefore one line on every rank, and no rank waits in a collective that other ranks never
enter.
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
from operator import attrgetter
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from commlayer import records
from commlayer.cluster.calls import messages
from commlayer.cluster.processes.channels import node_ranks
from commlayer.cluster.processes.collectives import decode_json
from commlayer.cluster.processes.process_groups import Members, exchange
from commlayer.cluster.processes.script_host import begin_world
from commlayer.config import (
    Config,
    Launch,
    is_loopback,
    master,
    read_launch,
    settings_to_match,
    use_interface,
)
from commlayer.engine.model import optimizer_settings
from commlayer.errors import CommError, CorruptFrame, InvalidInput, append_code, short_line
from commlayer.records import Job, TensorInfo, complete
from commlayer.transport import own_address
from commlayer.transport.crc import crc32c
from commlayer.transport.keys.key_folder import Keys

NAMED = 3
"""Largest number of differing settings that one error message names."""
MOST_TENSORS = 1 << 15
"""Number of tensors, the first of a model, that are compared to find a difference. Their digests fit into one call."""
HEARD_S = 5.0
"""Seconds that a failing rank keeps running, so that other ranks can read the reason: the store might be in its process."""


class RankRow(NamedTuple):
    host: str
    """Host name of the rank's machine; in a home, the name in its certificate."""
    machine: str
    agent: int = -1
    address: str = ""
    """The machine's address on its route to the machine of the rendezvous."""
    insecure: bool = False
    keys: bool = False
    must: Mapping[str, str] = {}
    """Values that must be the same on all ranks, by name."""
    settings: Mapping[str, str] = {}
    """Settings of the optimizer, which must be the same on all ranks unless drift="warn"."""
    model: str = ""
    site: int = 0
    """Number of ranks over which the model is sharded; 0: it is not sharded."""
    matched: bool = False
    """True: averages of weight changes are scaled to the norm of the ranks' changes (norm-matched averaging)."""
    error: str = ""


class Rendezvous(NamedTuple):
    """Result of a job's rendezvous on one rank. `members` is None if there are no other ranks."""

    members: Members | None
    launch: Launch
    per_node: int = 1
    sites: Sequence[Sequence[int]] = ()
    """The members of each node, which may have unequal numbers of them."""
    sharded: Sequence[Sequence[int]] = ()
    """The members of each site, if the model is sharded over them."""
    local_world: int = 1
    """Number of the job's ranks on this machine."""
    address: str = ""
    """Address of this machine, on which servers can listen; empty if all ranks are on one machine."""
    note: str = ""
    """A line to log about uneven numbers of ranks per machine; empty if there is none."""
    reachable: bool = True
    """True: ranks on different machines can connect to one another directly."""
    differs: str = ""
    """Text that describes how optimizers differ between ranks, if the settings allow it; empty if they are equal."""
    logs: bool = True
    """True: this rank logs for its node or home, because it is the first rank there."""
    matched: bool = False
    """True: all ranks use norm-matched averaging."""


class StartExchange:
    """Context manager for the start of a job. An error inside it before the rendezvous is sent to all ranks."""

    def __init__(self, process_group: Any, device: torch.device) -> None:
        """`process_group`: the ranks to train with; None: all ranks of the job."""
        self._group, self._device, self._reported = process_group, device, False

    def __enter__(self) -> StartExchange:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, CommError) or read_launch().joins >= 0:
            return  # the other ranks cannot be reached, or did not start
        if isinstance(error, Exception) and not self._reported:
            with contextlib.suppress(ValueError, CommError):  # other ranks then notice the loss by themselves
                members = self._members(read_launch(), Config())
                self._exchange_rows(members, Config(), _own_row(error=str(error).partition("\n")[0] or type(error).__name__))
                _hold_open(members)

    def exchange_rows(
        self, config: Config, *, job: Job, must: Mapping[str, str], settings: Mapping[str, str], matched: bool = False,
        site: int = 0,
    ) -> Rendezvous:
        """Exchanges the values that must be the same on all ranks; all ranks call it together. Raises the same ValueError on
        all ranks if their values differ. With drift="warn", the optimizers' `settings` can differ. `site`: number of ranks over
        which the model is sharded."""
        launch = read_launch()
        members = self._members(launch, config)
        if members is None:
            return Rendezvous(None, launch, local_world=launch.local_world)
        if launch.joins >= 0:  # the other ranks have compared theirs already; the coordinator compares this rank's values
            return Rendezvous(members, launch, local_world=launch.local_world, reachable=False, logs=launch.local_rank == 0)
        address = own_address.address_to(master()) if master() else own_address.default_address()
        name = Keys(config.keys).own.name if launch.home and config.keys else ""
        mine = _own_row(name, agent=launch.agent, address=address,
                        insecure=config.insecure, keys=bool(config.keys), must=values_to_compare(must, config),
                        model=job.digest(),
                        settings=settings, matched=matched, site=site)
        rows = self._exchange_rows(members, config, mine)
        problem = find_mismatch(rows, members.ranks, own_servers=not config.join)
        if not problem and any(row.model != mine.model for row in rows):
            problem = other_model(rows, members, job, config.join_deadline_s)
        differs = describe_optimizer_differences(rows, members.ranks)
        if not problem and differs and config.drift != "warn":
            problem = f'{differs}; they must be the same on all ranks, or set drift="warn" to train with different ones'
        if problem:
            _hold_open(members)
            raise InvalidInput("E-RANKS-DIFFER", problem)
        per_node, note = (config.ranks_per_node, "") if config.ranks_per_node else ranks_per_node(rows)
        sites = node_ranks(members.world, per_node) if config.ranks_per_node else _sites(rows)
        several = len({row.machine for row in rows}) > 1
        address = _own_address(mine, rows) if several else ""
        if several and members.reachable and "gloo" not in dist.get_backend():
            use_interface(own_address.find_interface(address))  # for Gloo's groups, which send small measurements
        local_ranks = Counter(row.machine for row in rows)[mine.machine]
        mates = [row for row in rows if (row.machine, row.agent) == (mine.machine, mine.agent)]
        return Rendezvous(members, launch, per_node, sites, _sharded(rows), local_ranks, address, note, members.reachable,
                          differs, rows[members.rank] is mates[0], all(row.matched for row in rows))

    def _members(self, launch: Launch, config: Config) -> Members | None:
        begin_group(launch, self._device, config)
        if not dist.is_initialized():
            if self._group is not None:
                raise InvalidInput("E-PROCESS-GROUP",
                                   f"process_group: got {self._group!r}, but torch.distributed is not initialized; call "
                                   "init_process_group first")
            return None
        members = Members(self._group)
        return members if members.world > 1 or launch.home else None

    def _exchange_rows(self, members: Members | None, config: Config, mine: RankRow) -> list[RankRow]:
        self._reported = True
        if members is None:
            return [mine]
        rows = members.exchange_bytes(json.dumps(mine._asdict()).encode(), config.join_deadline_s, "start")
        return [decode_rank_row(data, f"rank {rank}") for data, rank in zip(rows, members.ranks, strict=True)]


def decode_rank_row(data: bytes, peer: str) -> RankRow:
    """Decodes the row of a rank. The rank may have another version of commlayer, and its row then has other fields."""
    fields = RankRow("", "")._asdict() | decode_json(data, dict[str, Any], "a row about itself", peer)
    try:
        return msgspec.convert([fields[name] for name in RankRow._fields], complete(RankRow))
    except msgspec.ValidationError as error:
        raise CorruptFrame(f"sends a row about itself that is malformed: {short_line(error, 200)}", peer=peer) from None


def resolve_process_group(process_group: Any) -> Any:
    """Returns the process group for the argument `process_group`, which can be a DeviceMesh of one dimension."""
    if not isinstance(process_group, DeviceMesh):
        return process_group
    if process_group.ndim != 1:
        raise InvalidInput("E-PROCESS-GROUP",
                           f"process_group: got {process_group!r}, but a DeviceMesh must have one dimension: pass for "
                           "example mesh['dp'] if dimensions have names")
    return process_group.get_group()


def values_to_compare(must: Mapping[str, str], config: Config) -> dict[str, str]:
    """Returns all values that must be the same on all ranks, by name: versions, `must`, and settings."""
    return _versions() | dict(must) | settings_to_match(config)


def begin_group(launch: Launch, device: torch.device, config: Config) -> None:
    """Creates the default process group under a launcher, if the script has not created one."""
    if dist.is_initialized() or (launch.world == 1 and not launch.home):
        return
    if launch.home:
        begin_world(launch, "nccl" if device.type == "cuda" else "gloo")
        return
    if launch.world > launch.local_world:
        address = own_address.address_to(master())
        use_interface(own_address.find_interface(own_address.default_address() if is_loopback(address) else address))
    try:
        join = timedelta(seconds=config.join_deadline_s)
        store, rank, world = next(rendezvous("env://", launch.rank, launch.world, timeout=join))
    except (RuntimeError, ValueError) as error:
        raise CommError(f"start: rank {launch.rank} cannot connect to the store of the job's rendezvous: "
                        f"{str(error).splitlines()[0]}",
                        peer=f"MASTER_ADDR {master()}") from None
    exchange(store, range(world), rank, b"", config.join_deadline_s, "start")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=rank, world_size=world,
                            timeout=timedelta(seconds=config.deadline_s))


def find_mismatch(rows: Sequence[RankRow], ranks: Sequence[int], *, own_servers: bool = True) -> str:
    """Returns one line with the reason why these ranks cannot train together; "" if they can. `own_servers`: True if the job
    starts its servers itself."""
    if wrong := [r for r, row in enumerate(rows) if row.error]:
        return f"{_rank_list(wrong, rows, ranks)}: {rows[wrong[0]].error}"
    for name in dict.fromkeys(name for row in rows for name in row.must):
        values = [row.must.get(name, "unknown") for row in rows]
        if len(set(values)) > 1:
            return f"{name}: {_group_ranks_by_value(values, rows, ranks)}; it must be the same on all ranks"
    machines = len({row.machine for row in rows})
    if own_servers and machines > 1:
        keyed = [r for r, row in enumerate(rows) if row.keys]
        if bare := [r for r, row in enumerate(rows) if not row.keys and (keyed or not row.insecure)]:
            if keyed:
                return append_code("E-KEYS",
                                   f"keys: not set on {_rank_list(bare, rows, ranks)}; other ranks have keys: make the "
                                   "missing ones with `commlayer keys add NAME` and set COMMLAYER_KEYS on every "
                                   "machine (docs/how-to/keys.md)")
            return append_code("E-PLAIN-TEXT",
                               f"insecure: not set on {_rank_list(bare, rows, ranks)}; the ranks run on {machines} "
                               "machines, and without keys the traffic between them is not encrypted: make keys "
                               "with `commlayer keys init` and set COMMLAYER_KEYS on every machine "
                               "(docs/how-to/keys.md), or set COMMLAYER_INSECURE=1 on every machine if you trust "
                               "the complete network between them")
        if all(_local(row.address) for row in rows):
            return append_code("E-ADDRESS",
                               f"bind: the ranks run on {machines} machines, but MASTER_ADDR is a loopback address "
                               "on each of them: set MASTER_ADDR to an address that all machines can reach, or set "
                               "COMMLAYER_BIND on every machine to its own address")
    return ""


def other_model(rows: Sequence[RankRow], members: Members, job: Job, deadline_s: float) -> str:
    """Returns one line with the differences between the models of these ranks. All ranks call it together."""
    tags = [records.encode(tensor) for tensor in job.tensors]
    every = members.exchange_bytes(b"".join(crc32c(tag).to_bytes(4, "little") for tag in tags[:MOST_TENSORS]), deadline_s,
                                   "start")
    first = next((number for number in range(MOST_TENSORS)
                  if len({digests[4 * number : 4 * number + 4] for digests in every}) > 1), MOST_TENSORS)
    own = tensor_text(job.tensors[first]) if first < len(job.tensors) else "none"
    lines = members.exchange_bytes(json.dumps([f"{len(tags)} tensors with {job.numel} elements", own]).encode(), deadline_s,
                                   "start")
    counts, shown = zip(*(decode_json(line, tuple[str, str], "its number of tensors", f"rank {rank}")
                          for line, rank in zip(lines, members.ranks, strict=True)), strict=True)
    return (f"model: {_group_ranks_by_value(counts, rows, members.ranks)}; first difference, tensor {first}: "
            f"{_group_ranks_by_value(shown, rows, members.ranks)}: trained parameters and buffers must have equal names, "
            "shapes, dtypes and order on all ranks")


def tensor_text(tensor: TensorInfo) -> str:
    """
    >>> tensor_text(TensorInfo("0.weight", (64, 12)))
    '0.weight of shape (64, 12)'
    >>> tensor_text(TensorInfo("1.running_mean", (64,), "float16", buffer=True))
    'buffer 1.running_mean of shape (64,) and dtype float16'
    """
    dtype = "" if tensor.dtype == "float32" else f" and dtype {tensor.dtype}"
    return f"{'buffer ' * tensor.buffer}{tensor.name} of shape {tensor.shape}{dtype}"


def describe_optimizer_differences(rows: Sequence[RankRow], ranks: Sequence[int]) -> str:
    """Returns one line with the differences between the ranks' optimizers; "" if the optimizers are equal."""
    differences = optimizer_settings.differences([row.settings for row in rows])
    return "; ".join(f"{name}: {_group_ranks_by_value(values, rows, ranks)}" for name, values in [*differences.items()][:NAMED])


def _group_ranks_by_value(values: Sequence[str], rows: Sequence[RankRow], ranks: Sequence[int]) -> str:
    return ", ".join(f"{value} on {_rank_list([r for r, v in enumerate(values) if v == value], rows, ranks)}"
                     for value in dict.fromkeys(values))


def ranks_per_node(rows: Sequence[RankRow]) -> tuple[int, str]:
    """Returns the number of consecutive ranks that form a node, and a line to log about uneven machines (empty: none).

    Ranks with the same machine and agent form a node. If nodes have unequal numbers of ranks, or ranks are assigned
    round-robin, the greatest common divisor is used: a machine then counts as several nodes.
    """
    blocks = [list(block) for _, block in groupby(rows, key=attrgetter("machine", "agent"))]
    runs = [(block[0].host, len(block)) for block in blocks]
    per_node = math.gcd(*(number for _, number in runs))
    if all(number == per_node for _, number in runs) and len(runs) == len({(row.machine, row.agent) for row in rows}):
        return per_node, ""
    counts = ", ".join(f"{number} on {host}" for host, number in runs[:8]) + (", ..." if len(runs) > 8 else "")
    return per_node, (f"ranks are spread unevenly over machines ({counts}): commlayer treats them as nodes of {per_node}, "
                      "which sends more over the network than necessary; give every machine the same number of consecutive "
                      "ranks")


def _sites(rows: Sequence[RankRow]) -> list[list[int]]:
    """Returns the members of each node, if all of a node's members have consecutive numbers."""
    return [[*block] for _, block in groupby(range(len(rows)), key=lambda place: (rows[place].machine, rows[place].agent))]


def _sharded(rows: Sequence[RankRow]) -> list[list[int]]:
    """Returns the members of each site, if the model is sharded in some. Members without shards are sites of their own."""
    sites, place = list[list[int]](), 0
    while place < len(rows) and any(row.site for row in rows):
        sites.append([*range(place, min(len(rows), place + (rows[place].site or 1)))])
        place = sites[-1][-1] + 1
    return sites


def _hold_open(members: Members | None) -> None:
    """Keeps this rank's process running until all ranks have read the common error. Afterwards all ranks end."""
    if members is not None:
        with contextlib.suppress(CommError):
            members.exchange_bytes(b"", HEARD_S, "start")


def _own_row(name: str = "", **fields: Any) -> RankRow:
    return RankRow(name or socket.gethostname(), own_address.machine(), **fields)


def _versions() -> dict[str, str]:
    return {"version of commlayer": messages.version(), "protocol of commlayer": str(messages.PROTOCOL),
            "version of torch": torch.__version__.partition("+")[0],
            # All ranks must compute the same floats, but sum() rounds differently since Python 3.12.
            "version of Python": ".".join(platform.python_version_tuple()[:2])}


def _own_address(mine: RankRow, rows: Iterable[RankRow]) -> str:
    """Returns this machine's address on its route to another machine. MASTER_ADDR can be loopback on the machine that it names,
    so that machine uses the route to another rank's machine."""
    ways = [mine.address, *(own_address.address_to(row.address) for row in rows if not _local(row.address))]
    return next((address for address in ways if not _local(address)), "")


def _local(address: str) -> bool:
    return not address or is_loopback(address)


def _rank_list(chosen: Sequence[int], rows: Sequence[RankRow], ranks: Sequence[int]) -> str:
    hosts = list(dict.fromkeys(rows[r].host for r in chosen))
    return f"rank {_numbers(chosen, ranks)} ({', '.join(hosts[:4])}{', ...' if len(hosts) > 4 else ''})"


def _numbers(chosen: Sequence[int], ranks: Sequence[int]) -> str:
    """Formats ranks as intervals: 0, 1, 2 and 5 as "0-2, 5". `chosen` are indices into `ranks`, which contains the ranks of the
    job."""
    runs: list[list[int]] = []
    for number in sorted(ranks[r] for r in chosen):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
