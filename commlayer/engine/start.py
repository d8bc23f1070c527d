"""connect(): from a Job to a running Worker. Settles the plan, starts or finds the servers, registers, and connects."""

from __future__ import annotations

import atexit
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import torch

from commlayer import records
from commlayer.cluster import messages, uplink
from commlayer.cluster.child_processes import EmbeddedServer
from commlayer.cluster.collectives import Groups, RowChannel
from commlayer.compressors import kernels
from commlayer.config import Config, codec_threads, is_loopback, notice_s, reconnect_window_s, verdict_s
from commlayer.engine import requested_plan
from commlayer.engine.agreed_plan import agreed_plan, check_plan, from_rank_0
from commlayer.engine.connection import Connection, Waits
from commlayer.engine.initial_sync import align as align_tensors
from commlayer.engine.interrupted import print_one_line
from commlayer.engine.newcomer import enter
from commlayer.engine.regroup import Regrouping, forbidding, unfit
from commlayer.engine.rendezvous import HEARD_S, Met, Start, compared, plan_kind
from commlayer.engine.replica import Replica
from commlayer.engine.ways import Asked, Forbids, stepping
from commlayer.errors import InvalidInput
from commlayer.planner.model import float64
from commlayer.planner.model.gradients_only import without_buffers
from commlayer.planner.model.plan_words import in_words
from commlayer.records import Job, Plan
from commlayer.transport import secret


def connect(
    job: Job, device: torch.device, start: Start, *, plan: Any, config: Config, align: Sequence[torch.Tensor] = (),
    forbids: Forbids = lambda _: "", asked: Asked = Asked(), whole: Job | None = None, must: Mapping[str, str] | None = None,
    settings: Mapping[str, str] | None = None, optimizer: str = "", replica: Replica | None = None,
) -> Connection:
    """Joins the job that the environment names; all ranks call it together, inside `start`.

    `must`: further values that must be the same on all ranks. `settings`: of optimizers, which may differ with drift="warn".
    `forbids`: why a plan cannot use a sync mode here (allowed_ways.py). `optimizer`: its family. `replica`: the state that this
    rank gives to later workers, or receives. `whole`: this job with buffers that are not averaged here; a plan may be for
    either."""
    kernels.choose(config.backend)
    must = {"plan": plan_kind(plan), "steps": str(asked), **(must or {})}
    met = start.meet(config, model=job.digest(), must=must, settings=settings or {})
    # Server child processes get the same limit.
    config = msgspec.structs.replace(config, codec_threads=codec_threads(config, met.launch._replace(local_world=met.here)))
    kernels.threads(config.codec_threads)
    made = Connection()
    made.logs = met.logs
    made.terms.asked, made.terms.forbids = asked, forbids
    made.terms.auto = isinstance(plan, str) and plan == "auto" and not asked.updates
    made.terms.optimizer, made.terms.max_loss = optimizer, config.max_loss
    made.terms.loss, made.terms.learning = config.loss, config.learning
    silent_s = max(config.dead_after_s, reconnect_window_s(config)) if config.join else config.dead_after_s
    made.waits = Waits(notice_s(config), verdict_s(config), config.deadline_s, silent_s)
    elastic = False
    if met.members is not None:
        made.rank = made.id = met.members.rank
        made.world = met.members.world
        elastic = bool(met.launch.home) and config.min_workers > 0 and made.world == met.launch.world
    made.replica = replica if elastic else None
    per_node = 1 if elastic else met.per_node  # workers leave one by one, so each sends for itself
    if elastic:
        made.terms.forbids = forbids = forbidding(forbids)
    how: dict[str, Any] = {"updates": asked.updates, "optimizer": optimizer, "forward": asked.overlap == "forward",
                           "fragments": asked.fragments or 1}
    if met.members is None and not config.join:
        settled = stepping(_of(requested_plan.settle(plan, job, config, 1, 1, **how), whole), asked)
        # An error in the plan counts on a single process, too; the number of nodes that it is for does not.
        nodes = max((len(b.by_node) for b in settled.buckets), default=0)
        check_plan(settled, job, nodes or 1, settled.ranks_per_node, device, forbids)
        if not isinstance(plan, Plan) or not settled.servers:
            return made
    try:
        if met.launch.joins >= 0:
            _enter(made, job, device, met, config, forbids, replica, compared(must, config))
            atexit.register(made.at_exit)
            return made
        if met.members is not None:
            with met.members.all_there(config.deadline_s):
                made.groups = Groups(per_node, config.deadline_s, device, met.members)
                made.rows = RowChannel(met.members, config.deadline_s)
            made.on_close.append(made.rows.close)
            align_tensors(align, made.groups, config.deadline_s)
        made.terms.basis = requested_plan.basis(plan, made.say) if made.rank == 0 else None
        if met.note and made.rank == 0:
            made.say(met.note)
        if met.differs:
            made.say(f'{met.differs}; training goes on with them, since drift="warn"')
        if config.min_workers and not elastic and made.rank == 0:
            made.say(f"min_workers {config.min_workers} counts for nothing here, and all must stay: it is for homes "
                     "(commlayer launch), all of whose workers train together; other process groups cannot lose a rank")
        nodes = made.world // per_node
        made.plan = agreed_plan(lambda: stepping(_of(requested_plan.with_server_nodes(
            requested_plan.settle(plan, job, config, made.world, per_node, **how), made.terms.basis, nodes, made.say,
        ), whole), asked), made.groups)
        if made.rank == 0 and (asked.fragments or 1) > made.plan.fragments:
            made.say(f"fragments={asked.fragments} becomes fragments={made.plan.fragments}: a round has at most as many as the "
                     f"plan has buckets ({len(made.plan.buckets)})")
        if elastic and (why := unfit(made.plan)):
            raise InvalidInput("E-PLAN-REFUSED", f"plan: {why}")
        check_plan(made.plan, job, nodes, per_node, device, forbids, reachable=met.reachable)
        if made.rank == 0 and (note := float64.told(job, nodes)):
            made.say(note)
        # Also without servers: a broken collective does not show which rank failed, the coordinator's heartbeats do.
        _join(made, job, _placed(config, met.address, made), per_node, outbound_only=not met.reachable, elastic=elastic,
              must_match=compared(must, config) if elastic else {})
        if elastic:
            made.members = Regrouping(made, config, met.launch.home)
        made.follow(made.worker_for(made.plan, job, device))
        made.log(f"begins with plan {records.digest(made.plan)}: {in_words(made.plan)}")
    except BaseException:
        made.close("failed to start")
        raise
    if made.groups is not None:
        print_one_line(made.rank)
    atexit.register(made.at_exit)
    return made


def _of(plan: Plan, whole: Job | None) -> Plan:
    """A plan for the whole job is also one for this job."""
    return plan if whole is None else without_buffers(plan, whole)


def _enter(
    made: Connection, job: Job, device: torch.device, met: Met, config: Config, forbids: Forbids, replica: Replica | None,
    must_match: Mapping[str, str],
) -> None:
    """Joins a running job."""
    if replica is None or not config.min_workers:
        raise InvalidInput("E-JOIN-ATTACH",
                           "joins a running job: allowed is attach(model, optimizer), in a home (commlayer launch), where the "
                           "server says --min-workers; not a communication hook that the script registers, nor a "
                           "DistributedDataParallel module that ignores parameters or has mixed_precision")
    made.id = met.launch.joins

    def check(plan: Plan, workers: int) -> None:
        check_plan(plan, job, workers, 1, device, forbids, reachable=False)

    enter(made, job, device, replica, messages.worker_request(
        job.digest(), made.id, 0, node=made.id, outbound_only=True, elastic=True, must_match=must_match,
        gradients=sum(not tensor.buffer for tensor in job.tensors)), config, met.launch.home, check)


def _join(
    made: Connection, job: Job, config: Config, per_node: int, *, outbound_only: bool, elastic: bool,
    must_match: Mapping[str, str],
) -> None:
    """Starts the embedded servers if none were named, then registers with the coordinator and connects."""
    assert made.plan is not None
    node, local = divmod(made.rank, per_node)
    address = config.join
    if not address:
        address, token = _start_embedded(made, config, per_node, node, local)
        config = msgspec.structs.replace(config, token=token)
    made.uplink = uplink.connect(address, messages.worker_request(
        job.digest(), made.rank, made.world, node=node, plan=records.encode(made.plan) if made.rank == 0 else b"",
        plan_digest=records.digest(made.plan), outbound_only=outbound_only, elastic=elastic,
        gradients=sum(not tensor.buffer for tensor in job.tensors), must_match=must_match,
    ), config)


def _placed(config: Config, address: str, made: Connection) -> Config:
    """Servers on loopback serve one machine only. If ranks run on several machines, this node's servers listen on `address`."""
    if not address or config.join or config.advertise or not is_loopback(config.bind):
        return config
    if made.rank == 0:
        made.say(f"servers of this node listen on {address}, this machine's address on the way to MASTER_ADDR; bind names "
                 "another")
    return msgspec.structs.replace(config, bind=address)


def _start_embedded(made: Connection, config: Config, per_node: int, node: int, local: int) -> tuple[str, str]:
    """Starts this node's `commlayer serve` processes: where the plan has its servers, else as the setting `servers` says.

    Returns the coordinator's address and the job's secret, which rank 0 makes and the group shares."""
    plan = made.plan
    assert plan is not None
    nodes = made.world // per_node
    config = msgspec.structs.replace(config, node=node)
    hosts = plan.hosts or [number % nodes if config.servers == "each" else 0 for number in range(plan.servers)]
    mine = [number for number, host in enumerate(hosts) if host == node] if local == 0 else []

    # Servers load codecs, a coordinator does not. So if several start, the coordinator starts first and alone, and they start
    # in parallel. A configured port is for the coordinator, and for a server in its process.
    alone = plan.servers > 1 and not config.port

    def first() -> bytes:
        number = mine.pop(0) if mine and not alone else None
        guarded = msgspec.structs.replace(config, token=config.token or secret.new_secret())
        child = EmbeddedServer.start(guarded, workers=made.world, servers=plan.servers, number=number)
        made.embedded.append(child)
        # The group's store is plain text. With keys, each rank reads the secret from its key folder instead.
        return f"{child.control} {'' if config.keys else guarded.token}".encode()

    # The child has join_deadline_s itself, and then reports why it did not start.
    reply = from_rank_0(first, made.groups, config.join_deadline_s + HEARD_S).decode()
    address, _, token = reply.partition(" ")
    token = token or config.token
    config = msgspec.structs.replace(config, token=token)

    def start(number: int) -> None:
        made.embedded.append(EmbeddedServer.start(config, join=address, number=number))

    if mine:
        with ThreadPoolExecutor(len(mine), "commlayer-start") as starting:
            list(starting.map(start, mine))
    return address, token
