"""Lets this worker join a running job: registers, connects to the servers, and receives the state of its first step."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Mapping

import torch

from commlayer.cluster.calls import messages
from commlayer.cluster.processes.collectives import Groups
from commlayer.cluster.processes.process_groups import Members
from commlayer.cluster.processes.rows import StepRows
from commlayer.cluster.servers.served_rows import ServedRows
from commlayer.cluster.servers.worker_client import WorkerClient, leave_job
from commlayer.compressors import restore, snapshot
from commlayer.config import Config, judged_s, reconnect_window_s
from commlayer.engine.buckets.bucket import EncodedBucket
from commlayer.engine.epochs.changing_members import ChangingMembers, new_world
from commlayer.engine.epochs.replica import Replica, TakenState
from commlayer.engine.epochs.state_relay import NewestEpoch, StateRelay
from commlayer.engine.job.job import DistributedJob, JoinedState
from commlayer.engine.job.plan_terms import PlanTerms
from commlayer.engine.model.optimizer_state import OptimizerMemory
from commlayer.engine.worker.root_cause import WaitsFor
from commlayer.engine.worker.worker import Worker
from commlayer.errors import CommError, DeadlineExceeded, InvalidInput, PeerLost
from commlayer.records import Epoch, Job

log = logging.getLogger("commlayer")


def enter(
    terms: PlanTerms, job: Job, device: torch.device, replica: Replica, memory: OptimizerMemory, request: messages.Join,
    config: Config, home: str, waits: WaitsFor, check: Callable[..., None], *, logs: bool,
) -> DistributedJob:
    """Joins a running job. Returns when this rank is a member, in the same step as all other members. `check` raises ValueError
    for a plan that cannot run with a given number of `workers`."""
    begin, own = time.monotonic(), request.rank
    with contextlib.ExitStack() as undo:
        groups = Groups(1, config.deadline_s, device, Members())
        undo.callback(lambda: groups.close())
        link = WorkerClient(config, config.join, request)
        link.membership.waits_for_state = True
        undo.callback(leave_job, link, (), "failed to start", -1, stay_s=waits.stay_s, notice_s=waits.notice_s)
        link.dial(time.monotonic() + config.join_deadline_s)
        log.warning("joining a running job as worker %d: waiting for an exchange in which it can begin", own)
        taken = _receive(replica, link, own, config, waits, check, begin)
        given = taken.told
        assert given.epoch is not None
        if given.matched and not memory.matched:
            raise InvalidInput("E-RANKS-DIFFER",
                               "sync: the job that this home joins uses norm-matched averaging (OuterSGD(matched=True)), but "
                               "this home does not; set it alike on all ranks")
        link.membership.waits_for_state = False
        link.switch_epoch(given.epoch)
        served = ServedRows(link.transport, own, config.deadline_s + judged_s(config))
        rows = StepRows(served, groups.members, may_leave=True)
        groups = new_world(groups, rows, config, home, given.epoch, own)
        terms.auto = given.automatic
        context = DistributedJob(
            terms, own, groups, rows, link, memory, taken.plan, job, generation=given.generation, logs=logs, waits=waits,
            matched=given.matched, joined=JoinedState(taken.local, taken.restore, dict(given.followed), given.carried),
            first_world=given.first_world)
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
    members = ChangingMembers(context, config, home, replica, given.joined)
    members.steps_at_exit |= given.exits
    members.confirmed = members.row_carried = given.confirmed
    context.say(f"joined the running job as worker {own} with the weights, buffers and optimizer state of its workers, after "
                f"{time.monotonic() - begin:.1f} s; this is rank {context.rank} of {context.world}, at step {context.passes}")
    return context


def _receive(
    replica: Replica, link: WorkerClient, own: int, config: Config, waits: WaitsFor, check: Callable[..., None], begin: float,
) -> TakenState:
    """Waits until the other members give the state of an exchange in which this rank can take part, and installs that state."""
    newest = NewestEpoch(link.epoch, waits.notice_s, reconnect_window_s(config))

    def offer(epoch: Epoch) -> None:
        newest.epoch = epoch

    link.subscribe_epochs(offer)

    def receive(epoch: Epoch) -> TakenState | None:
        _check_givers(epoch, own, link)
        relay = StateRelay(newest, epoch, own, config.deadline_s, judged_s(config), replica.most_nbytes)
        fits = functools.partial(check, workers=len(epoch.members))
        try:
            return relay.take(functools.partial(replica.take, check=fits))
        except DeadlineExceeded:
            if relay.announced:
                raise
            # The plan of the running job defines how long an exchange takes. The coordinator reports members that have
            # died.
            log.warning("still waiting for the other workers after %.0f s: under local steps "
                        "a worker can join only at a scheduled exchange, and there is none "
                        "if the script calls flush() more often than exchanges are due", time.monotonic() - begin)
            return None

    while (received := newest.run(receive)) is None:
        pass
    return received


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
