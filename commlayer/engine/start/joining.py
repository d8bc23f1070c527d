"""Lets this worker join a running job: registers, connects to the servers, and receives the state of its first step."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from commlayer import records
from commlayer.callbacks import ignore
from commlayer.cluster.calls import messages
from commlayer.cluster.processes.channels import node_ranks
from commlayer.cluster.processes.collectives import Groups
from commlayer.cluster.processes.process_groups import Members
from commlayer.cluster.processes.rows import StepRows
from commlayer.cluster.servers.served_rows import ServedRows
from commlayer.cluster.servers.worker_client import WorkerClient, leave_job
from commlayer.compressors import restore, snapshot
from commlayer.config import Config, continue_wait_s, reconnect_window_s
from commlayer.engine.buckets.bucket import EncodedBucket
from commlayer.engine.epochs.changing_members import ChangingMembers, new_world
from commlayer.engine.epochs.replica import Replica, TakenState, decode_state
from commlayer.engine.epochs.state_relay import NewestEpoch, StateRelay, TransferRestarted
from commlayer.engine.job.job import DistributedJob
from commlayer.engine.job.plan_agreement import check_plan
from commlayer.engine.job.plan_terms import PlanTerms
from commlayer.engine.model.optimizer_state import OptimizerMemory
from commlayer.engine.start.rendezvous import Rendezvous
from commlayer.engine.start.result_follower import ResultFollower
from commlayer.engine.worker.root_cause import WaitsFor
from commlayer.engine.worker.site import LocalSite
from commlayer.engine.worker.worker import Worker
from commlayer.errors import CommError, DeadlineExceeded, InvalidInput, PeerLost
from commlayer.optim import OuterSGD
from commlayer.planner.shards import Shards
from commlayer.records import Epoch, Job, Plan, group_by_site

log = logging.getLogger("commlayer")
T = TypeVar("T")


def enter(
    terms: PlanTerms, job: Job, device: torch.device, met: Rendezvous, config: Config, replica: Replica | None,
    memory: OptimizerMemory, waits: WaitsFor, must_match: Mapping[str, str], shards: Shards,
) -> DistributedJob:
    """Registers this worker with a running job, and receives the state of its workers. Returns when this rank is a member, in
    the same step as all other members."""
    if replica is None or not config.min_workers:
        raise InvalidInput("E-JOIN-ATTACH",
                           "attach() cannot join a running job in this way: call attach(model, optimizer) in a home "
                           "(commlayer join), with a server that was started with --min-workers. A communication "
                           "hook that the script registers is not supported")
    begin, own, launch = time.monotonic(), met.launch.joins, met.launch
    site_world = 1 if config.ranks_per_node == 1 else launch.local_world

    def check(plan: Plan, sites: Sequence[Sequence[int]]) -> None:
        check_plan(plan, job, len(sites), plan.ranks_per_node, device, terms.forbids, reachable=False)
        if shards.joining(plan, job, site_world):
            check_norms(sites, must_match, matched=(terms.requested.updates or plan.steps_locally) and memory.matched)

    request = worker_request(job, own, 0, node=own - launch.local_rank, outbound_only=True, elastic=True,
                             site_world=site_world, must_match=must_match)
    with contextlib.ExitStack() as undo:
        ranks = Members()
        own_site = range(ranks.world - site_world, ranks.world)
        groups = Groups([*node_ranks(own_site.start, 1), own_site], config.deadline_s, device, ranks,
                        patience_s=continue_wait_s(config))
        undo.callback(lambda: groups.close())
        site = LocalSite.of(shards, groups, own)
        link = WorkerClient(config, config.join, request)
        undo.callback(leave_job, link, (), "failed to start", -1, stay_s=waits.stay_s, notice_s=waits.notice_s)
        link.dial(time.monotonic() + config.join_deadline_s)
        log.warning("joining a running job as worker %d: waiting for an exchange in which it can begin", own)
        taken = _StateReceiver(replica, link, job, memory.outer, device, config, waits, check, begin).receive_state()
        given = taken.told
        assert given.epoch is not None
        site.shards = shards.joining(taken.plan, job, site_world)
        if given.matched and not memory.matched:
            raise InvalidInput("E-RANKS-DIFFER",
                               "sync: the job that this home joins uses norm-matched averaging (OuterSGD(matched=True)), but "
                               "this home does not; set it alike on all ranks")
        link.switch_epoch(given.epoch)
        served = ServedRows(link.transport, own, config.deadline_s + continue_wait_s(config))
        rows = StepRows(served, groups.members, may_leave=True)
        groups = new_world(groups, rows, config, launch.home, given.epoch, own)
        terms.auto = given.automatic
        context = DistributedJob(
            terms, own, groups, rows, link, memory, taken.plan, job, generation=given.generation, logs=met.logs, waits=waits,
            matched=given.matched, joined=taken.joined, first_world=given.first_world, site=site)
        context.worker.late.restore(taken.late)
        _restore_codecs(context.worker, taken.codecs)
        undo.pop_all()
    context.training_id = given.training_id
    context.passes = given.passes - int(taken.plan.steps_locally)  # local steps are counted at the end of their backward pass
    worker = context.worker
    worker.now.number, worker.counters.exchanges = given.step, given.counted
    worker.now.joined = served.joined = given.joined
    served.number = given.row
    for bucket in worker.buckets:
        bucket.assumed = given.totals.get(bucket.id)
        bucket.ledger.unreported = given.undone.get(bucket.id, 0)
    members = ChangingMembers(context, config, launch.home, replica, given.joined)
    members.steps_at_exit |= given.exits
    members.admitted |= {*given.admitted}
    members.followers |= {*given.followers}
    members.confirmed = members.row_exchanged_steps = given.confirmed
    meanwhile = f", in which the others have made {taken.followed} exchanges" if taken.followed else ""
    context.log_decision(f"joined the running job as worker {own} with the weights, buffers and optimizer state of its "
                         f"workers, after {time.monotonic() - begin:.1f} s{meanwhile}; this is rank {context.rank} of "
                         f"{context.world}, at step {context.passes}")
    return context


class _StateReceiver:
    """Receives the state of a running job on a worker that joins."""

    def __init__(
        self, replica: Replica, link: WorkerClient, job: Job, outer: OuterSGD, device: torch.device, config: Config,
        waits: WaitsFor, check: Callable[..., None], begin: float,
    ) -> None:
        self._replica, self._link, self._job, self._outer, self._device = replica, link, job, outer, device
        self._config, self._check, self._begin = config, check, begin
        self._follower: ResultFollower | None = None
        self._newest = NewestEpoch(lambda: link.membership.newest, waits.notice_s, reconnect_window_s(config))

    def receive_state(self) -> TakenState:
        """Waits until the other members give the state of an exchange in which this rank can take part, and installs it.

        Under local steps this rank first follows their exchanges, and receives the state while they train.
        """
        given = self._take("state", self._take_state)
        if isinstance(given, TakenState):
            return given
        log.warning("receiving the weights, while the other workers train on")
        snapshot = self._take("snapshot", functools.partial(self._take_snapshot, given))
        given.catch_up()
        taken = self._take("rest", functools.partial(self._take_rest, given, *snapshot))
        given.stop()
        return taken

    def _take_state(self, own: bytes, common: bytes) -> TakenState | ResultFollower:
        """Installs the state, or begins to follow the exchanges. This method and the next two may be called again with
        equal values."""
        given, tensors = decode_state(own, common)
        if not given.follow:
            return self._replica.install(given, tensors, self._fits)
        plan = records.decode(given.plan, Plan, "plan of the running job")
        self._fits(plan)
        if self._follower is None:
            self._follower = ResultFollower(self._link, self._job, plan, given, self._outer, self._device,
                                            self._config.deadline_s)
        return self._follower

    def _take_snapshot(self, follower: ResultFollower, own: bytes, common: bytes) -> tuple[int, dict[str, torch.Tensor]]:
        given, tensors = decode_state(own, common)
        follower.begin(given.step, given.row, *self._replica.common(tensors))
        return given.counted, tensors

    def _take_rest(
        self, follower: ResultFollower, counted: int, tensors: Mapping[str, torch.Tensor], own: bytes, common: bytes,
    ) -> TakenState:
        given, rest = decode_state(own, common)
        complete = self._replica.completed(rest, tensors, *follower.advance(given.step))
        return self._replica.install(given, complete, self._fits)._replace(followed=given.counted - counted)

    def _take(self, name: str, enter: Callable[[bytes, bytes], T]) -> T:
        """Takes part in the transfer `name`; again, if it begins late."""
        def take(epoch: Epoch) -> T:
            _check_givers(epoch, self._link.transport.rank, self._link)
            relay = StateRelay(self._newest, epoch, self._link.transport.rank, self._config.deadline_s,
                               continue_wait_s(self._config),
                               self._replica.most_nbytes, name, ignore if self._follower is None else self._follower.check)
            try:
                return relay.take(enter)
            except DeadlineExceeded:
                if relay.announced:
                    raise
                # The plan of the running job defines how long an exchange takes. The coordinator reports members that have
                # died.
                log.warning("still waiting for the other workers after %.0f s: under local steps "
                            "a worker can join only at a scheduled exchange, and there is none "
                            "if the script calls flush() more often than exchanges are due", time.monotonic() - self._begin)
                raise TransferRestarted from None

        return self._newest.run(take)

    def _fits(self, plan: Plan) -> None:
        self._check(plan, sites=group_by_site(self._newest.epoch.members))


def _restore_codecs(worker: Worker, given: Mapping[str, torch.Tensor]) -> None:
    """Sets the part of codec states that is equal on all workers."""
    for bucket in worker.buckets:
        if isinstance(bucket, EncodedBucket):
            start = f"{bucket.id}."
            shared = {name.removeprefix(start): t for name, t in given.items() if name.startswith(start)}
            restore(bucket.ledger.state, snapshot(bucket.ledger.state) | shared)


def _check_givers(epoch: Epoch, mine: int, link: WorkerClient) -> None:
    """Raises an error if the coordinator has dropped this worker, or if all members that have the job's state are gone."""
    link.check()
    ids = [m.rank for m in epoch.members]
    if mine not in ids:
        raise PeerLost("the job continued without this home", peer=f"coordinator {link.address}", code="E-JOIN-MISSED")
    if ids[0] == mine:
        raise CommError("the job ended before this home joined: no worker is left that has the job's weights",
                        code="E-JOB-ENDED")


def worker_request(job: Job, rank: int, world: int, **fields: Any) -> messages.Join:
    """Returns the request by which this worker registers with the coordinator."""
    return messages.worker_request(job.digest(), rank, world, gradients=sum(not tensor.buffer for tensor in job.tensors),
                                   tensors=len(job.tensors), elements=job.numel, **fields)


def check_norms(sites: Sequence[Sequence[int]], must_match: Mapping[str, str], *, matched: bool) -> None:
    """Raises ValueError if the job needs norms, which sites of unlike sizes add in unlike orders."""
    clips = must_match["clip_grad_norm"] != "not given"
    if len({*map(len, sites)}) > 1 and (clips or matched):
        what = "clip_grad_norm" if clips else "local steps whose averages are scaled to a norm"
        remedy = "leave clip_grad_norm out" if clips else "LocalSteps(..., outer=OuterSGD())"
        raise InvalidInput("E-SHARDED", f"sites have {[*map(len, sites)]} ranks, and with a sharded model {what} would differ "
                                        f"in the last bit between them: use sites of equal size, or {remedy}")
