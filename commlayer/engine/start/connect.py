"""Starts training on one rank: chooses the plan, starts or finds the servers, registers with the coordinator, and connects."""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import torch

from commlayer import last_run, records
from commlayer.callbacks import ignore
from commlayer.cluster.calls import messages
from commlayer.cluster.processes.channels import node_ranks
from commlayer.cluster.processes.child_processes import EmbeddedServer
from commlayer.cluster.processes.collectives import Groups
from commlayer.cluster.processes.process_groups import Members
from commlayer.cluster.processes.rows import GatheredRows, StepRows
from commlayer.cluster.servers import worker_client
from commlayer.cluster.servers.served_rows import ServedRows
from commlayer.cluster.servers.worker_client import WorkerClient, leave_job
from commlayer.compressors import kernels
from commlayer.config import (
    Config,
    codec_threads,
    continue_wait_s,
    is_loopback,
    master,
    notice_s,
    reconnect_window_s,
    verdict_s,
)
from commlayer.engine.epochs.changing_members import ChangingMembers
from commlayer.engine.epochs.replica import Replica
from commlayer.engine.job.job import DistributedJob, JobContext
from commlayer.engine.job.plan_agreement import check_plan, encode_lowered_plan, from_rank_0, plan_in
from commlayer.engine.job.plan_terms import PlanTerms
from commlayer.engine.job.run_events import check_folder
from commlayer.engine.model.alignment import agreed_shards
from commlayer.engine.model.alignment import align as align_tensors
from commlayer.engine.model.optimizer_state import OptimizerMemory
from commlayer.engine.start import plan_choice
from commlayer.engine.start.interrupted import print_one_line
from commlayer.engine.start.joining import check_norms, enter, worker_request
from commlayer.engine.start.rendezvous import HEARD_S, Rendezvous, StartExchange, values_to_compare
from commlayer.engine.sync.sync_modes import Forbids, RequestedModes, with_modes
from commlayer.engine.worker.root_cause import WaitsFor
from commlayer.engine.worker.site import LocalSite
from commlayer.errors import InvalidInput
from commlayer.last_run import LastRuns
from commlayer.planner import tensors as float64
from commlayer.planner.data.tables import learning_rows
from commlayer.planner.plan_rules import late_and_sparse, summarize_plan
from commlayer.planner.shards import Shards
from commlayer.records import Job, Plan
from commlayer.transport import own_address
from commlayer.transport.keys import secret


def connect(
    job: Job, device: torch.device, start: StartExchange, memory: OptimizerMemory, *, plan: Plan | Path | str, config: Config,
    align: Sequence[torch.Tensor] = (), forbids: Forbids = lambda _: "", requested: RequestedModes = RequestedModes(),
    must: Mapping[str, str] | None = None, settings: Mapping[str, str] | None = None, replica: Replica | None = None,
    shards: Shards = Shards(),
) -> JobContext:
    """Connects this rank to the job that the environment names. All ranks call it together, inside `start`. Returns a
    DistributedJob if there are other ranks.

    `must`: further values that must be the same on all ranks. `settings`: settings of optimizers, which can differ between
    ranks if drift="warn". `forbids` returns why a plan cannot use a sync mode (sync_modes.py). `replica`: sends this rank's
    state to workers that join later, or receives it if this rank joins. None: workers cannot leave or join. `shards`: how the
    model is sharded inside of each site.
    """
    kernels.choose(config.backend)
    check_folder(config)
    must = {"plan": "a plan" if isinstance(plan, Plan | Path) else plan, "sync": str(requested), **(must or {})}
    met = start.exchange_rows(config, job=job, must=must, settings=settings or {}, matched=memory.matched,
                              site=shards.ranks)
    # Child processes of this rank's servers get the same limit.
    placed = met.launch._replace(local_world=met.local_world)
    config = msgspec.structs.replace(config, codec_threads=codec_threads(config, placed))
    kernels.threads(config.codec_threads)
    terms = PlanTerms(requested, forbids, auto=plan == "auto" and not requested.updates, optimizer=memory.family,
                      max_loss=config.max_loss, loss=config.loss, learning=config.learning)
    if terms.auto:
        terms.last_runs = _last_runs(job, config, terms, str(requested), device, shards.ranks)

    if met.members is None:
        if config.join:
            raise InvalidInput("E-PROCESS-GROUP", f"join: got {config.join}, but this process has no other ranks: start the "
                                                  "script with torchrun or `commlayer join`, or leave join out")
        settled = plan_choice.resolve_plan(plan, job, config, 1, 1, requested=requested, optimizer=memory.family)
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
        context = enter(terms, job, device, met, config, replica, memory, waits, values_to_compare(must, config), shards)
    else:
        context = _begin(terms, job, device, met, met.members, config, replica, memory, waits, plan, align,
                         values_to_compare(must, config), shards)
        print_one_line(context.rank)
    me = next((member for member in context.uplink.epoch.members if member.rank == context.id), None)
    context.stream.open(config, rank=context.id, world=context.world, run=context.uplink.epoch.run,
                        host="" if me is None else me.certificate or me.name)
    context.note_plan("start")
    context.open()
    return context


def _begin(
    terms: PlanTerms, job: Job, device: torch.device, met: Rendezvous, members: Members, config: Config,
    replica: Replica | None, memory: OptimizerMemory, waits: WaitsFor, plan: Plan | Path | str,
    align: Sequence[torch.Tensor], must_match: Mapping[str, str], shards: Shards,
) -> DistributedJob:
    elastic = replica is not None and bool(met.launch.home) and config.min_workers > 0 and \
        members.world == met.launch.world
    sites = met.sites if elastic else met.sharded or node_ranks(members.world, met.per_node)
    if met.sharded and met.sharded != sites:
        raise InvalidInput("E-SHARDED", f"the model is sharded over {[*map(len, met.sharded)]} ranks, but homes have "
                                        f"{[*map(len, sites)]} workers: shard it over all workers of each home")
    if met.sharded:
        check_norms(sites, must_match, matched=terms.requested.updates and met.matched)
    per_node, nodes, first = max(map(len, sites)), len(sites), members.rank == 0
    notes = [met.note] if met.note and first and not elastic else []
    whole = [] if elastic else [members.ranks[site[0]] for site in met.sharded if len(site) == 1]
    if first and 0 < len(whole) < nodes:
        notes.append(f"sites have {[*map(len, sites)]} ranks: ranks {whole} have whole models, each as a site of its own; if "
                     "they belong to a larger site, call fully_shard() over all of its ranks")
    if met.differs:
        notes.append(f'{met.differs}. Training continues because drift="warn".')
    if config.min_workers and not elastic and first:
        notes.append(f"min_workers={config.min_workers} is ignored, and all ranks must stay: the setting applies to homes "
                     "(commlayer join) whose workers all train together; other process groups cannot lose a rank")
    servers: list[EmbeddedServer] = []
    link: WorkerClient | None = None
    with contextlib.ExitStack() as undo:
        with members.all_there(config.deadline_s):
            # where members may leave, the coordinator decides who is lost
            patience_s = continue_wait_s(config) if elastic else 0.0
            groups = Groups(sites, config.deadline_s, device, members, patience_s=patience_s)
            undo.callback(groups.close)
        undo.callback(lambda: leave_job(link, servers, "failed to start", -1, stay_s=waits.stay_s, notice_s=waits.notice_s))
        shards = agreed_shards(shards, job, groups) if met.sharded else shards
        align_tensors(align, groups, config.deadline_s, shards=shards)
        terms.basis = plan_choice.basis(plan, notes.append) if first else None

        def fit_to_job(made: Plan) -> Plan:
            made = with_modes(plan_choice.with_server_nodes(made, terms.basis, nodes, notes.append), terms.requested)
            return shards.cut(made, job, {*map(len, sites)})

        def check(made: Plan) -> Plan:
            check_plan(made, job, nodes, made.ranks_per_node if elastic else per_node, device, terms.forbids,
                       reachable=met.reachable)
            return made

        def settle() -> Plan:
            first_plan = plan_choice.resolve_plan(plan, job, config, members.world, per_node, requested=terms.requested,
                                                  optimizer=memory.family, elastic=elastic)
            last = terms.last_runs.load(sites)
            if last is not None and last.plan.servers == first_plan.servers:
                with contextlib.suppress(ValueError):  # the job may have changed in what the file's name does not contain
                    return check(fit_to_job(last.plan))
            return fit_to_job(first_plan)

        agreed = plan_in(from_rank_0(lambda: encode_lowered_plan(settle()), groups))
        if first and (terms.requested.fragments or 1) > agreed.fragments:
            notes.append(f"{terms.requested}: fragments={terms.requested.fragments} becomes fragments={agreed.fragments}: a "
                         f"plan cannot have more fragments than buckets ({len(agreed.buckets)})")
        check(agreed)
        if first:
            notes += late_and_sparse(agreed, learning_rows(config.learning), memory.family)
        if first and (note := float64.doubles_notice(job, nodes)):
            notes.append(note)
        gathered = None if agreed.servers else GatheredRows(members, config.deadline_s)
        if gathered is not None:
            undo.callback(gathered.close)
        # Heartbeats are needed even without servers: a broken collective does not show which rank failed.
        config = _placed(config, met.address, notes.append if first else ignore)
        link = _join(job, agreed, groups, servers, config, outbound_only=not met.reachable, elastic=elastic,
                     must_match=must_match if elastic else {})
        if agreed.servers > (there := len(link.epoch.servers)):
            raise InvalidInput("E-PLAN-REFUSED", f"plan: it needs {agreed.servers} servers, but the job has {there}: start the "
                                                 "coordinator without --no-server, or use a plan without servers")
        rows = StepRows(gathered or ServedRows(link.transport, groups.rank, config.deadline_s + patience_s), members,
                        may_leave=elastic)
        context = DistributedJob(terms, groups.rank, groups, rows, link, memory, agreed, job, logs=met.logs, waits=waits,
                                 embedded=servers, matched=met.matched,
                                 site=LocalSite.of(shards, groups, groups.rank))
        undo.pop_all()
    for line in notes:
        context.log_decision(line)
    if elastic and replica is not None:
        ChangingMembers(context, config, met.launch.home, replica)
    what = "the last run's plan" if terms.auto and agreed.step_s else "plan"
    context.log(f"begins with {what} {records.digest(agreed)}: {summarize_plan(agreed)}", event=False)
    return context


def _join(
    job: Job, plan: Plan, groups: Groups, servers: list[EmbeddedServer], config: Config, *, outbound_only: bool, elastic: bool,
    must_match: Mapping[str, str],
) -> WorkerClient:
    """Starts this node's servers unless the setting `join` names a coordinator, then registers with the coordinator and
    connects."""
    address = config.join
    if not address:
        address, token = _start_embedded(plan, groups, servers, config)
        config = msgspec.structs.replace(config, token=token)
    return worker_client.connect(address, worker_request(
        job, groups.rank, groups.world, node=groups.node, site_world=len(groups.site),
        plan=records.encode(plan) if groups.rank == 0 else b"", plan_digest=records.digest(plan),
        outbound_only=outbound_only, elastic=elastic, must_match=must_match), config)


def _last_runs(job: Job, config: Config, terms: PlanTerms, sync: str, device: torch.device, ranks: int) -> LastRuns:
    """Returns what this machine remembers of earlier runs of the job, on the same network and with the same server."""
    alike = ("max_loss", "loss", "learning", "servers", "guard", "fuse_nbytes", "cut_nbytes", "ratio_over", "warmup")
    return LastRuns(last_run.folder(config.cache), {
        "model": job.digest(), "server": config.join or master(), "network": own_address.gateway(), "sync": sync,
        "optimizer": terms.optimizer, "device": device.type, "version": messages.version(), "shards": str(ranks),
        **{name: str(getattr(config, name)) for name in alike}})


def _placed(config: Config, address: str, note: Callable[[str], None]) -> Config:
    """Returns settings with `address` as the address on which this node's servers listen, if ranks run on several machines.
    Servers on loopback serve one machine only."""
    if not address or config.join or config.advertise or not is_loopback(config.bind):
        return config
    note(f"the servers of this node listen on {address}, the address of this machine on the route to MASTER_ADDR; the setting "
         "bind overrides it")
    return msgspec.structs.replace(config, bind=address)


def _start_embedded(plan: Plan, groups: Groups, servers: list[EmbeddedServer], config: Config) -> tuple[str, str]:
    """Starts this node's `commlayer serve` processes and adds them to `servers`. The plan decides on which nodes servers run,
    otherwise the setting `servers`.

    Returns the coordinator's address and the job's secret, which rank 0 creates and sends to the other ranks.
    """
    nodes = len(groups.sites)
    config = msgspec.structs.replace(config, node=groups.node)
    hosts = plan.hosts or [number % nodes if config.servers == "each" else 0 for number in range(plan.servers)]
    mine = [number for number, host in enumerate(hosts) if host == groups.node] if groups.local == 0 else []

    # Servers load codecs, which takes time; a coordinator does not. The coordinator therefore starts first, and then the
    # servers start in parallel. A configured port is for the coordinator, and for a server in its process.
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
