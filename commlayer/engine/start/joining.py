"""Lets this worker join a running job: registers, waits until the others reach a step, and receives their state."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable

import torch

from commlayer.cluster.calls import messages
from commlayer.cluster.membership.epoch_change import wire_generation
from commlayer.cluster.processes.collectives import Groups
from commlayer.cluster.processes.process_groups import Members
from commlayer.cluster.processes.rows import StepRows
from commlayer.cluster.servers.served_rows import ServedRows
from commlayer.cluster.servers.worker_client import WorkerClient, leave_job
from commlayer.config import Config, judged_s, reconnect_window_s
from commlayer.engine.epochs.agreement import AWAY, Vote
from commlayer.engine.epochs.epoch_messages import EpochMessages
from commlayer.engine.epochs.membership_change import MembershipChange, new_world
from commlayer.engine.epochs.replica import Replica, TakenState
from commlayer.engine.epochs.state_relay import StateRelay
from commlayer.engine.job.job import DistributedJob, JoinedState
from commlayer.engine.job.plan_terms import PlanTerms
from commlayer.engine.model.optimizer_state import OptimizerMemory
from commlayer.engine.worker.root_cause import WaitsFor
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
        undo.callback(leave_job, link, (), "failed to start", -1, stay_s=waits.stay_s, notice_s=waits.notice_s)
        log.warning("joining a running job as worker %d: waiting for the other workers to reach the end of a step", own)
        epoch, taken = _receive(replica, link, own, config, waits, check, begin)
        given = taken.told
        if given.matched and not memory.matched:
            raise InvalidInput("E-RANKS-DIFFER",
                               "sync: the job that this home joins uses norm-matched averaging (OuterSGD(matched=True)), but "
                               "this home does not; set it alike on all ranks")
        link.switch_epoch(epoch)
        rows = StepRows(ServedRows(link.transport, own, config.deadline_s), groups.members)
        groups = new_world(groups, rows, config, home, epoch, own)
        terms.auto = given.automatic
        context = DistributedJob(
            terms, own, groups, rows, link, memory, taken.plan, job, generation=wire_generation(epoch), logs=logs, waits=waits,
            matched=given.matched, joined=JoinedState(taken.local, taken.restore, dict(given.followed), given.carried))
        undo.pop_all()
    context.passes = given.passes - int(taken.plan.steps_locally)  # local steps are counted at the end of their backward pass
    worker = context.worker
    worker.now.number, worker.counters.exchanges = given.step, given.counted
    MembershipChange(context, config, home, replica)
    context.say(f"joined the running job as worker {own} with the weights, buffers and optimizer state of its workers, after "
                f"{time.monotonic() - begin:.1f} s; this is rank {context.rank} of {context.world}, at step {context.passes}")
    return context


def _receive(
    replica: Replica, link: WorkerClient, own: int, config: Config, waits: WaitsFor, check: Callable[..., None], begin: float,
) -> tuple[Epoch, TakenState]:
    """Waits until the other members reach a step in which this rank can join, and installs their state. Returns the epoch with
    this rank, and the state."""
    epochs = EpochMessages(link.epoch, waits.notice_s, reconnect_window_s(config))

    def offer(epoch: Epoch) -> None:
        epochs.newest = epoch

    link.subscribe_epochs(offer)
    dialled = False

    def receive(epoch: Epoch) -> tuple[Epoch, TakenState] | None:
        nonlocal dialled
        _check_givers(epoch, own, link)
        try:
            ready = epochs.exchange_votes(epoch, "ready", own, Vote(-1), time.monotonic() + config.deadline_s)
        except DeadlineExceeded:
            # The plan of the running job defines how long an exchange takes. The coordinator reports members that have
            # died.
            log.warning("still waiting for the other workers after %.0f s: under local steps "
                        "a worker can join only at a scheduled exchange, and there is none "
                        "if the script calls flush() more often than exchanges are due", time.monotonic() - begin)
            return None
        if AWAY in ready:
            raise CommError("members were lost while the job wrote a checkpoint, changed its "
                            "plan or flushed local steps, and no worker can join at such a time: "
                            "run the same command again", code="E-JOIN-MISSED")
        if not dialled:  # servers know this worker now
            link.dial(time.monotonic() + config.join_deadline_s)
            dialled = True
        relay = StateRelay(epochs, epoch, own, Vote(-1), config.deadline_s, judged_s(config), replica.most_nbytes)
        fits = functools.partial(check, workers=len(epoch.members))
        return epoch, relay.take(functools.partial(replica.take, check=fits))

    while (received := epochs.in_newest_epoch(receive)) is None:
        pass
    return received


def _check_givers(epoch: Epoch, mine: int, link: WorkerClient) -> None:
    """Raises an error if the coordinator has dropped this worker, or if all members that have the job's state are gone."""
    link.check()
    ids = [m.rank for m in epoch.members]
    if mine not in ids:
        raise PeerLost("the job continued without this home", peer=f"coordinator {link.address}", code="E-JOIN-MISSED")
    if ids[0] == mine:
        raise CommError("the job ended before this home joined: no worker is left that has the job's weights",
                        code="E-JOB-ENDED")
