"""Starts training on one rank: chooses the plan, starts or finds the servers, registers with the coordinator, and connects."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import functools
import json
import logging
import math
import os
import platform
import runpy
import secrets
import signal
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.rendezvous import rendezvous

from commlayer import records
from commlayer.cluster import messages, uplink
from commlayer.cluster.child_processes import EmbeddedServer
from commlayer.cluster.collectives import Groups, RowChannel, decode_json
from commlayer.cluster.process_groups import Members, exchange
from commlayer.cluster.uplink import Uplink, leave_job
from commlayer.compressors import kernels
from commlayer.config import (
    Config,
    Launch,
    alike,
    codec_threads,
    is_loopback,
    judged_s,
    master,
    notice_s,
    read_config,
    read_launch,
    reconnect_window_s,
    use_interface,
    verdict_s,
)
from commlayer.engine import optimizers, plan_choice
from commlayer.engine.connection import DistributedJob, JobContext, WaitsFor
from commlayer.engine.interrupted import print_one_line
from commlayer.engine.optimizers import OptimizerMemory
from commlayer.engine.plan_choice import PlanTerms, agreed_plan, check_plan, from_rank_0
from commlayer.engine.regroup import MembershipChange, forbidding, unfit
from commlayer.engine.replica import Replica, enter
from commlayer.engine.replica import align as align_tensors
from commlayer.engine.run_events import check_folder
from commlayer.engine.sync_modes import Forbids, RequestedModes, with_modes
from commlayer.errors import Coded, CommError, CorruptFrame, InvalidInput, coded, short_line
from commlayer.observe.log_lines import LogLines
from commlayer.planner import tensors as float64
from commlayer.planner.plan_rules import late_and_sparse, summary_of
from commlayer.planner.tables import learning_rows
from commlayer.records import Job, Plan, TensorInfo
from commlayer.transport import own_address, secret
from commlayer.transport.crc import crc32c
from commlayer.transport.key_folder import Keys


def connect(
    job: Job, device: torch.device, start: Start, memory: OptimizerMemory, *, plan: Plan | Path | str, config: Config,
    align: Sequence[torch.Tensor] = (), forbids: Forbids = lambda _: "", requested: RequestedModes = RequestedModes(),
    must: Mapping[str, str] | None = None, settings: Mapping[str, str] | None = None, replica: Replica | None = None,
) -> JobContext:
    """Connects this rank to the job that the environment names. All ranks call it together, inside `start`. Returns a
    DistributedJob if there are other ranks.

    `must`: further values that must be the same on all ranks. `settings`: settings of optimizers, which can differ between
    ranks if drift="warn". `forbids` returns why a plan cannot use a sync mode (sync_modes.py). `replica`: sends this rank's
    state to workers that join later, or receives it if this rank joins; None: workers cannot leave or join.
    """
    kernels.choose(config.backend)
    check_folder(config)
    must = {"plan": "a plan" if isinstance(plan, Plan | Path) else plan, "sync": str(requested), **(must or {})}
    met = start.meet(config, job=job, must=must, settings=settings or {}, matched=memory.matched)
    # Child processes of this rank's servers get the same limit.
    placed = met.launch._replace(local_world=met.local_world)
    config = msgspec.structs.replace(config, codec_threads=codec_threads(config, placed))
    kernels.threads(config.codec_threads)
    terms = PlanTerms(requested, forbids, auto=plan == "auto" and not requested.updates, optimizer=memory.family,
                      max_loss=config.max_loss, loss=config.loss, learning=config.learning)

    if met.members is None:
        if config.join:
            raise InvalidInput("E-PROCESS-GROUP", f"join: got {config.join}, but this process has no other ranks: start the "
                                                  "script with torchrun or `commlayer join`, or leave join out")
        settled = plan_choice.settle(plan, job, config, 1, 1, requested=requested, optimizer=memory.family)
        settled = with_modes(settled, requested)
        # A single process also reports an error in the plan, but ignores the plan's number of nodes.
        nodes = max((len(b.by_node) for b in settled.buckets), default=0)
        check_plan(settled, job, nodes or 1, settled.ranks_per_node, device, forbids)
        alone = JobContext(terms, logs=met.logs)
        alone.stream.open(config, rank=0, world=1, run=secrets.token_hex(8), host=socket.gethostname())
        if config.events:
            alone.open()
        return alone
    silent_s = max(config.dead_after_s, reconnect_window_s(config)) if config.join else config.dead_after_s
    waits = WaitsFor(notice_s(config), verdict_s(config), config.deadline_s, silent_s)
    if met.launch.joins >= 0:
        context = _enter(terms, job, device, met, config, replica, memory, waits, compared(must, config))
    else:
        context = _begin(terms, job, device, met, met.members, config, replica, memory, waits, plan, align,
                         compared(must, config))
        print_one_line(context.rank)
    me = next((member for member in context.uplink.view.members if member.rank == context.id), None)
    context.stream.open(config, rank=context.id, world=context.world, run=context.uplink.view.run,
                        host="" if me is None else me.certificate or me.name)
    context.note_plan("start")
    context.open()
    return context


def _begin(
    terms: PlanTerms, job: Job, device: torch.device, met: Rendezvous, members: Members, config: Config,
    replica: Replica | None, memory: OptimizerMemory, waits: WaitsFor, plan: Plan | Path | str,
    align: Sequence[torch.Tensor], must_match: Mapping[str, str],
) -> DistributedJob:
    elastic = replica is not None and bool(met.launch.home) and config.min_workers > 0 and members.world == met.launch.world
    per_node = 1 if elastic else met.per_node  # workers leave one by one, so each one exchanges for itself
    nodes, first = members.world // per_node, members.rank == 0
    if elastic:
        terms.forbids = forbidding(terms.forbids)
    notes = [met.note] if met.note and first else []
    if met.differs:
        notes.append(f'{met.differs}; training continues, since drift="warn"')
    if config.min_workers and not elastic and first:
        notes.append(f"min_workers={config.min_workers} is ignored, and all ranks must stay: the setting applies to homes "
                     "(commlayer join) whose workers all train together; other process groups cannot lose a rank")
    servers: list[EmbeddedServer] = []
    link: Uplink | None = None
    with contextlib.ExitStack() as undo:
        with members.all_there(config.deadline_s):
            groups = Groups(per_node, config.deadline_s, device, members)
            undo.callback(groups.close)
            rows = RowChannel(members, config.deadline_s)
            undo.callback(rows.close)
        undo.callback(lambda: leave_job(link, servers, "failed to start", -1, stay_s=waits.stay_s, notice_s=waits.notice_s))
        align_tensors(align, groups, config.deadline_s)
        terms.basis = plan_choice.basis(plan, notes.append) if first else None

        def settle() -> Plan:
            made = plan_choice.settle(plan, job, config, members.world, per_node, requested=terms.requested,
                                      optimizer=memory.family, elastic=elastic)
            return with_modes(plan_choice.with_server_nodes(made, terms.basis, nodes, notes.append), terms.requested)

        agreed = agreed_plan(settle, groups)
        if first and (terms.requested.fragments or 1) > agreed.fragments:
            notes.append(f"{terms.requested}: fragments={terms.requested.fragments} becomes fragments={agreed.fragments}: a "
                         f"plan cannot have more fragments than buckets ({len(agreed.buckets)})")
        if elastic and (why := unfit(agreed)):
            raise InvalidInput("E-PLAN-REFUSED", f"plan: {why}")
        check_plan(agreed, job, nodes, per_node, device, terms.forbids, reachable=met.reachable)
        if first:
            notes += late_and_sparse(agreed, learning_rows(config.learning), memory.family)
        if first and (note := float64.doubles_notice(job, nodes)):
            notes.append(note)
        # Heartbeats are needed even without servers: a broken collective does not show which rank failed.
        config = _placed(config, met.address, notes.append if first else _not_told)
        link = _join(job, agreed, groups, servers, config, outbound_only=not met.reachable, elastic=elastic,
                     must_match=must_match if elastic else {})
        context = DistributedJob(terms, groups.rank, groups, rows, link, memory, agreed, job, logs=met.logs, waits=waits,
                                 embedded=servers, matched=met.matched)
        undo.pop_all()
    for line in notes:
        context.say(line)
    if elastic and replica is not None:
        context.members = MembershipChange(context, config, met.launch.home, replica)
    context.log(f"begins with plan {records.digest(agreed)}: {summary_of(agreed)}", event=False)
    return context


def _enter(
    terms: PlanTerms, job: Job, device: torch.device, met: Rendezvous, config: Config, replica: Replica | None,
    memory: OptimizerMemory, waits: WaitsFor, must_match: Mapping[str, str],
) -> DistributedJob:
    """Registers this worker with a running job, and receives the state of its workers."""
    if replica is None or not config.min_workers:
        raise InvalidInput("E-JOIN-ATTACH",
                           "attach() cannot join a running job in this way: call attach(model, optimizer) in a home "
                           "(commlayer join), with a server that was started with --min-workers. A communication "
                           "hook that the script registers is not supported")
    own = met.launch.joins

    def check(plan: Plan, workers: int) -> None:
        check_plan(plan, job, workers, 1, device, terms.forbids, reachable=False)

    return enter(terms, job, device, replica, memory, messages.worker_request(
        job.digest(), own, 0, node=own, outbound_only=True, elastic=True, must_match=must_match,
        gradients=sum(not tensor.buffer for tensor in job.tensors), tensors=len(job.tensors), elements=job.numel),
        config, met.launch.home, waits, check, logs=met.logs)


def _join(
    job: Job, plan: Plan, groups: Groups, servers: list[EmbeddedServer], config: Config, *, outbound_only: bool, elastic: bool,
    must_match: Mapping[str, str],
) -> Uplink:
    """Starts this node's servers unless the setting `join` names a coordinator, then registers with the coordinator and
    connects."""
    address = config.join
    if not address:
        address, token = _start_embedded(plan, groups, servers, config)
        config = msgspec.structs.replace(config, token=token)
    return uplink.connect(address, messages.worker_request(
        job.digest(), groups.rank, groups.world, node=groups.node, plan=records.encode(plan) if groups.rank == 0 else b"",
        plan_digest=records.digest(plan), outbound_only=outbound_only, elastic=elastic,
        gradients=sum(not tensor.buffer for tensor in job.tensors), tensors=len(job.tensors), elements=job.numel,
        must_match=must_match,
    ), config)


def _not_told(_line: str) -> None:
    """Does nothing with a log line, because rank 0 logs it for all ranks."""


def _placed(config: Config, address: str, tell: Callable[[str], None]) -> Config:
    """Returns settings with `address` as the address on which this node's servers listen, if ranks run on several machines.
    Servers on loopback serve one machine only."""
    if not address or config.join or config.advertise or not is_loopback(config.bind):
        return config
    tell(f"the servers of this node listen on {address}, the address of this machine on the route to MASTER_ADDR; the setting "
         "bind overrides it")
    return msgspec.structs.replace(config, bind=address)


def _start_embedded(plan: Plan, groups: Groups, servers: list[EmbeddedServer], config: Config) -> tuple[str, str]:
    """Starts this node's `commlayer serve` processes and adds them to `servers`. The plan decides on which nodes servers run,
    otherwise the setting `servers`.

    Returns the coordinator's address and the job's secret, which rank 0 creates and sends to the other ranks.
    """
    nodes = groups.world // groups.ranks_per_node
    config = msgspec.structs.replace(config, node=groups.node)
    hosts = plan.hosts or [number % nodes if config.servers == "each" else 0 for number in range(plan.servers)]
    mine = [number for number, host in enumerate(hosts) if host == groups.node] if groups.local == 0 else []

    # Servers load codecs, which takes time; a coordinator does not. So the coordinator starts first, and then the servers start
    # in parallel. A configured port is for the coordinator, and for a server in its process.
    alone = plan.servers > 1 and not config.port

    def first() -> bytes:
        number = mine.pop(0) if mine and not alone else None
        guarded = msgspec.structs.replace(config, token=config.token or secret.new_secret())
        child = EmbeddedServer.start(guarded, workers=groups.world, servers=plan.servers, number=number)
        servers.append(child)
        # The group's store is plain text. With keys, each rank reads the secret from its key folder instead.
        return f"{child.control} {'' if config.keys else guarded.token}".encode()

    # The child process has the limit join_deadline_s itself, and then reports why it did not start.
    reply = from_rank_0(first, groups, config.join_deadline_s + HEARD_S).decode()
    address, _, token = reply.partition(" ")
    token = token or config.token
    config = msgspec.structs.replace(config, token=token)

    def start(number: int) -> None:
        servers.append(EmbeddedServer.start(config, join=address, number=number))

    if mine:
        with ThreadPoolExecutor(len(mine), "commlayer-start") as starting:
            list(starting.map(start, mine))
    return address, token


# ---- runs a training script as one process of a home, as `commlayer join` starts it. A script that creates the process group
# itself asks torch for sockets between all ranks, which homes behind NAT do not have. So that call is replaced: it returns the
# group of site_process_group.py, whose traffic between homes passes through the coordinator. Rank and world size come from the
# environment.

_LOG = logging.getLogger("commlayer")
PR_SET_PDEATHSIG = 1
AHEAD = ("this home joins a running job, and the other workers take part in collectives of its script only after its first "
         "step: move this call after the first step (a communication hook that the script registers makes such calls, too: use "
         "attach() instead)")
OWN = (None, "", "env://")
"""Values of init_process_group's argument init_method with which a script leaves the rendezvous to the launcher."""


def begin_world(launch: Launch, inside: str, timeout_s: float = 0.0) -> None:
    """Creates torch's default process group. `inside`: the backend for groups within this machine. `timeout_s`: seconds after
    which a collective fails; 0: the setting deadline_s."""
    from commlayer.cluster import site_process_group
    from commlayer.cluster.site_client import KvClient

    config = read_config()  # from the environment, in which the launcher stores the settings used with the coordinator
    leave = config.min_workers > 0
    first = (launch.rank if launch.joins < 0 else launch.joins) - launch.local_rank
    site_process_group.init_world(KvClient(config.join, config, launch.home), launch.rank, launch.world,
                     range(first, first + launch.local_world), inside=inside, timeout_s=timeout_s or config.deadline_s,
                     skip_lost=leave, paused_reason=AHEAD if launch.joins >= 0 else "",
                     patience_s=judged_s(config) if leave else 0.0)


def main() -> None:
    """Runs a training script: `python -m commlayer.engine.start PARENT line|traceback SCRIPT ARGS...`. PARENT is the launcher's
    process id. The second argument selects how errors are printed."""
    parent, how, script, *args = sys.argv[1:]
    try:
        _end_with(int(parent))
        _run(script, args)
    except BaseException as error:
        if how == "traceback" or not (line := line_for(error)):
            raise
        sys.last_value = error  # as Python does when it prints an error; the session sends it to the other ranks as the reason
        if not isinstance(error, KeyboardInterrupt):  # the launcher reports Ctrl-C
            sys.stderr.write(f"commlayer: {line}\n")  # one write, so that lines of several processes do not mix
            sys.stderr.flush()
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)


def line_for(error: BaseException) -> str:
    """Returns the line that describes an error which ends a script: Ctrl-C, or an error of commlayer with a code. Returns ""
    for an error in the script itself or a bug, which need their traceback."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return str(error) if isinstance(error, Coded) else ""


def _run(script: str, args: list[str]) -> None:
    tell()
    _stand_in()
    if read_launch().joins >= 0:
        _ddp_alone()
    sys.argv = [script, *args]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


def _end_with(parent: int) -> None:
    """Makes this process end as if by Ctrl-C when the launcher is killed (only on Linux). Shells make background processes and
    their children ignore SIGINT. This function restores the default, so that the launcher's SIGINT ends the process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGINT)
        if os.getppid() != parent:
            raise KeyboardInterrupt


class _Unheard(LogLines):
    """Log handler that prints commlayer's log lines, unless the script has log handlers of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers or len(_LOG.handlers) > 1:
            return
        super().emit(record)


def tell() -> None:
    """Prints commlayer's log lines for the user who started the home. A script's own logging configuration takes precedence."""
    handler = _Unheard("commlayer")
    _LOG.addHandler(handler)
    _LOG.setLevel(logging.INFO)
    root = logging.getLogger()
    # Python ignores the root logger's level for records of child loggers.
    _LOG.addFilter(lambda record: not root.handlers or record.levelno >= root.level)


def _stand_in() -> None:
    """Replaces torch's functions that create process groups or send objects, in every module from which scripts import them."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    from commlayer.cluster import object_collectives, site_process_group

    object_collectives.install(site_process_group.NAME)
    for name, replacement in (("init_process_group", _init), ("new_group", _new_group)):
        wrapper = _in_place_of(getattr(dist, name), replacement)
        for module in (dist, distributed_c10d):
            setattr(module, name, wrapper)


def _ddp_alone() -> None:
    """Prevents DDP's constructor from comparing and sharing weights. A home that joins a running job receives its weights
    later, in attach()."""
    from torch.nn.parallel import DistributedDataParallel

    from commlayer.cluster import site_process_group

    known = DistributedDataParallel.__init__

    @functools.wraps(known)
    def construct(*args: Any, **more: Any) -> None:
        with site_process_group.run_locally():
            known(*args, **more)

    DistributedDataParallel.__init__ = construct  # type: ignore[method-assign]


def _in_place_of(known: Callable[..., Any], construct: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(known)(functools.partial(construct, known))


def _init(known: Callable[..., Any], backend: str | None = None, init_method: str | None = None,
          timeout: datetime.timedelta | None = None, world_size: int = -1, rank: int = -1, store: Any = None,
          **more: Any) -> Any:
    import torch

    if store is not None:
        return known(backend, init_method, timeout, world_size, rank, store, **more)
    launch = read_launch()
    if init_method not in OWN or rank not in (-1, launch.rank) or world_size not in (-1, launch.world):
        raise InvalidInput("E-PROCESS-GROUP",
                           f"init_process_group(init_method={init_method!r}, rank={rank}, world_size={world_size}) is not "
                           "supported under `commlayer join`: leave these arguments out, or pass env:// with rank "
                           f"{launch.rank} of {launch.world}")
    inside = str(backend or ("nccl" if torch.cuda.is_available() else "gloo"))
    begin_world(launch, inside, timeout.total_seconds() if timeout else 0.0)
    return None


def _new_group(known: Callable[..., Any], ranks: Any = None, timeout: Any = None, backend: str | None = None,
               *args: Any, **more: Any) -> Any:
    import torch.distributed as dist

    from commlayer.cluster import site_process_group

    members = range(dist.get_world_size()) if ranks is None else ranks
    return known(ranks, timeout, site_process_group.backend_for(members, backend), *args, **more)


if __name__ == "__main__":
    main()


# ---- rendezvous of a job's ranks. Every rank publishes one row about itself through the store of the process group, and all
# ranks draw the same conclusion from all rows. So an error on one machine is one line on every rank, and no rank waits in a
# collective that others never enter.

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
    matched: bool = False
    """True: averages of weight changes are scaled to the norm of the ranks' changes (norm-matched averaging)."""
    error: str = ""


class Rendezvous(NamedTuple):
    """Result of a job's rendezvous on one rank. `members` is None if there are no other ranks."""

    members: Members | None
    launch: Launch
    per_node: int = 1
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


class Start:
    """Context manager for the start of a job. An error inside it before the rendezvous is sent to all ranks."""

    def __init__(self, process_group: Any, device: torch.device) -> None:
        """`process_group`: the ranks to train with; None: all ranks of the job."""
        self._group, self._device, self._told = process_group, device, False

    def __enter__(self) -> Start:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, CommError) or read_launch().joins >= 0:
            return  # the other ranks cannot be reached, or did not start
        if isinstance(error, Exception) and not self._told:
            with contextlib.suppress(ValueError, CommError):  # other ranks then notice the loss by themselves
                members = self._members(read_launch(), Config())
                self._tell(members, Config(), _own_row(error=str(error).partition("\n")[0] or type(error).__name__))
                _stay(members)

    def meet(
        self, config: Config, *, job: Job, must: Mapping[str, str], settings: Mapping[str, str], matched: bool = False,
    ) -> Rendezvous:
        """Exchanges the values that must be the same on all ranks; all ranks call it together. Raises the same ValueError on
        all ranks if their values differ. With drift="warn", the optimizers' `settings` can differ."""
        launch = read_launch()
        members = self._members(launch, config)
        if members is None:
            return Rendezvous(None, launch, local_world=launch.local_world)
        if launch.joins >= 0:  # the other ranks have compared theirs already; the coordinator compares this rank's values
            return Rendezvous(members, launch, local_world=launch.local_world, reachable=False, logs=launch.local_rank == 0)
        address = own_address.address_to(master()) if master() else own_address.default_address()
        name = Keys(config.keys).own.name if launch.home and config.keys else ""
        mine = _own_row(name, agent=launch.agent, address=address,
                        insecure=config.insecure, keys=bool(config.keys), must=compared(must, config), model=job.digest(),
                        settings=settings, matched=matched)
        rows = self._tell(members, config, mine)
        problem = problem_of(rows, members.ranks, own_servers=not config.join)
        if not problem and any(row.model != mine.model for row in rows):
            problem = other_model(rows, members, job, config.join_deadline_s)
        if problem:
            _stay(members)
            raise InvalidInput("E-RANKS-DIFFER", problem)
        differs = differing(rows, members.ranks)
        if differs and config.drift != "warn":
            _stay(members)
            raise InvalidInput("E-RANKS-DIFFER",
                               f'{differs}; they must be the same on all ranks, or set drift="warn" to train with different '
                               "ones")
        per_node, note = (config.ranks_per_node, "") if config.ranks_per_node else ranks_per_node(rows)
        several = len({row.machine for row in rows}) > 1
        address = _own_address(mine, rows) if several else ""
        if several and members.reachable and "gloo" not in dist.get_backend():
            use_interface(own_address.interface_of(address))  # for Gloo's groups, which send small measurements
        local_ranks = Counter(row.machine for row in rows)[mine.machine]
        mates = [row for row in rows if (row.machine, row.agent) == (mine.machine, mine.agent)]
        return Rendezvous(members, launch, per_node, local_ranks, address, note, members.reachable, differs,
                          rows[members.rank] is mates[0], all(row.matched for row in rows))

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

    def _tell(self, members: Members | None, config: Config, mine: RankRow) -> list[RankRow]:
        self._told = True
        if members is None:
            return [mine]
        rows = members.tell(json.dumps(mine._asdict()).encode(), config.join_deadline_s, "start")
        return [row_of(data, f"rank {rank}") for data, rank in zip(rows, members.ranks, strict=True)]


def row_of(data: bytes, peer: str) -> RankRow:
    """Decodes the row of a rank, which can be of another version and then has other fields."""
    fields = RankRow("", "")._asdict() | decode_json(data, dict[str, Any], "a row about itself", peer)
    try:
        return msgspec.convert([fields[name] for name in RankRow._fields], RankRow)
    except msgspec.ValidationError as error:
        raise CorruptFrame(f"sends a row about itself that is malformed: {short_line(error, 200)}", peer=peer) from None


def group_of(process_group: Any) -> Any:
    """Returns the process group for the argument `process_group`, which can be a DeviceMesh of one dimension."""
    if not isinstance(process_group, DeviceMesh):
        return process_group
    if process_group.ndim != 1:
        raise InvalidInput("E-PROCESS-GROUP",
                           f"process_group: got {process_group!r}, but a DeviceMesh must have one dimension: pass for "
                           "example mesh['dp'] if dimensions have names")
    return process_group.get_group()


def compared(must: Mapping[str, str], config: Config) -> dict[str, str]:
    """Returns all values that must be the same on all ranks, by name: versions, `must`, and settings."""
    return _versions() | dict(must) | alike(config)


def begin_group(launch: Launch, device: torch.device, config: Config) -> None:
    """Creates the default process group under a launcher, if the script has not created one."""
    if dist.is_initialized() or (launch.world == 1 and not launch.home):
        return
    if launch.home:
        begin_world(launch, "nccl" if device.type == "cuda" else "gloo")
        return
    if launch.world > launch.local_world:
        address = own_address.address_to(master())
        use_interface(own_address.interface_of(own_address.default_address() if is_loopback(address) else address))
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


def problem_of(rows: Sequence[RankRow], ranks: Sequence[int], *, own_servers: bool = True) -> str:
    """Returns why these ranks cannot train together, in one line; "" if they can. `own_servers`: True if the job starts its
    servers itself."""
    if wrong := [r for r, row in enumerate(rows) if row.error]:
        return f"{_who(wrong, rows, ranks)}: {rows[wrong[0]].error}"
    for name in dict.fromkeys(name for row in rows for name in row.must):
        values = [row.must.get(name, "unknown") for row in rows]
        if len(set(values)) > 1:
            return f"{name}: {_by_value(values, rows, ranks)}; it must be the same on all ranks"
    machines = len({row.machine for row in rows})
    if own_servers and machines > 1:
        keyed = [r for r, row in enumerate(rows) if row.keys]
        if bare := [r for r, row in enumerate(rows) if not row.keys and (keyed or not row.insecure)]:
            if keyed:
                return coded("E-KEYS", f"keys: not set on {_who(bare, rows, ranks)}; other ranks have keys: make the "
                                       "missing ones with `commlayer keys add NAME` and set COMMLAYER_KEYS on every "
                                       "machine (docs/how-to/keys.md)")
            return coded("E-PLAIN-TEXT", f"insecure: not set on {_who(bare, rows, ranks)}; the ranks run on {machines} "
                                         "machines, and without keys the traffic between them is not encrypted: make keys "
                                         "with `commlayer keys init` and set COMMLAYER_KEYS on every machine "
                                         "(docs/how-to/keys.md), or set COMMLAYER_INSECURE=1 on every machine if you trust "
                                         "the complete network between them")
        if all(_local(row.address) for row in rows):
            return coded("E-ADDRESS", f"bind: the ranks run on {machines} machines, but MASTER_ADDR is a loopback address "
                                      "on each of them: set MASTER_ADDR to an address that all machines can reach, or set "
                                      "COMMLAYER_BIND on every machine to its own address")
    return ""


def other_model(rows: Sequence[RankRow], members: Members, job: Job, deadline_s: float) -> str:
    """Returns how the models of these ranks differ, in one line. All ranks call it together."""
    tags = [records.encode(tensor) for tensor in job.tensors]
    every = members.tell(b"".join(crc32c(tag).to_bytes(4, "little") for tag in tags[:MOST_TENSORS]), deadline_s, "start")
    first = next((number for number in range(MOST_TENSORS)
                  if len({digests[4 * number : 4 * number + 4] for digests in every}) > 1), MOST_TENSORS)
    own = tensor_text(job.tensors[first]) if first < len(job.tensors) else "none"
    lines = members.tell(json.dumps([f"{len(tags)} tensors with {job.numel} elements", own]).encode(), deadline_s, "start")
    counts, shown = zip(*(decode_json(line, tuple[str, str], "its number of tensors", f"rank {rank}")
                          for line, rank in zip(lines, members.ranks, strict=True)), strict=True)
    return (f"model: {_by_value(counts, rows, members.ranks)}; first difference, tensor {first}: "
            f"{_by_value(shown, rows, members.ranks)}: trained parameters and buffers must have equal names, shapes, dtypes "
            "and order on all ranks")


def tensor_text(tensor: TensorInfo) -> str:
    """
    >>> tensor_text(TensorInfo("0.weight", (64, 12)))
    '0.weight of shape (64, 12)'
    >>> tensor_text(TensorInfo("1.running_mean", (64,), "float16", buffer=True))
    'buffer 1.running_mean of shape (64,) and dtype float16'
    """
    dtype = "" if tensor.dtype == "float32" else f" and dtype {tensor.dtype}"
    return f"{'buffer ' * tensor.buffer}{tensor.name} of shape {tensor.shape}{dtype}"


def differing(rows: Sequence[RankRow], ranks: Sequence[int]) -> str:
    """Returns how the ranks' optimizers differ, in one line; "" if they are equal."""
    differences = optimizers.differences([row.settings for row in rows])
    return "; ".join(f"{name}: {_by_value(values, rows, ranks)}" for name, values in [*differences.items()][:NAMED])


def _by_value(values: Sequence[str], rows: Sequence[RankRow], ranks: Sequence[int]) -> str:
    return ", ".join(f"{value} on {_who([r for r, v in enumerate(values) if v == value], rows, ranks)}"
                     for value in dict.fromkeys(values))


def ranks_per_node(rows: Sequence[RankRow]) -> tuple[int, str]:
    """Returns the number of consecutive ranks that form a node, and a line to log about uneven machines (empty: none).

    Ranks with the same machine and agent form a node. If nodes have unequal numbers of ranks, or ranks are assigned
    round-robin, the greatest common divisor is used: a machine then counts as several nodes.
    """
    blocks = [list(block) for _, block in groupby(rows, key=lambda row: (row.machine, row.agent))]
    runs = [(block[0].host, len(block)) for block in blocks]
    per_node = math.gcd(*(number for _, number in runs))
    if all(number == per_node for _, number in runs) and len(runs) == len({(row.machine, row.agent) for row in rows}):
        return per_node, ""
    counts = ", ".join(f"{number} on {host}" for host, number in runs[:8]) + (", ..." if len(runs) > 8 else "")
    return per_node, (f"ranks are spread unevenly over machines ({counts}): commlayer treats them as nodes of {per_node}, "
                      "which sends more over the network than necessary; give every machine the same number of consecutive "
                      "ranks")


def _stay(members: Members | None) -> None:
    """Keeps this rank's process running until all ranks have read the common error, after which all of them end."""
    if members is not None:
        with contextlib.suppress(CommError):
            members.tell(b"", HEARD_S, "start")


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


def _who(chosen: Sequence[int], rows: Sequence[RankRow], ranks: Sequence[int]) -> str:
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
