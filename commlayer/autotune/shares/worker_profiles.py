"""Profiling of all workers before training: memory limits, batch times and first shares.

Each rank runs batches alone, without collectives. Afterwards all ranks exchange their results once and compute the same shares.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch.distributed as dist
from msgspec import structs
from torch import nn

from commlayer.autotune.measure.batch_trial import BatchTrial, LossOf, make_batch_function
from commlayer.balance import Sampler, SharePolicy
from commlayer.balance.assignment import TrainingSession
from commlayer.balance.profile import InitialShares, WorkerProfile, initial_shares, ladder, profile
from commlayer.cluster.processes.process_groups import Members
from commlayer.cluster.processes.rows import GatheredRows, StepRows
from commlayer.config import read_launch
from commlayer.engine.observers.inspection import Inspection
from commlayer.errors import CommError, InvalidInput
from commlayer.transport.protocol import peer_name

SLACK_S = 60.0
"""Extra seconds to wait for the other ranks, because of a batch that had begun and of startup."""
FINISHED, BROKE_OFF = 1.0, 0.0


class BalancedSession(TrainingSession, Protocol):
    """The part of a session that load balancing needs."""

    @property
    def inspect(self) -> Inspection: ...


def profile_together(
    session: BalancedSession, sampler: Sampler, policy: SharePolicy, model: nn.Module, loss_of: LossOf,
    batches: Any, *, limit_s: float, measure: Callable[[int], float] | None = None,
) -> tuple[list[WorkerProfile], InitialShares]:
    """Profiles all ranks. Returns every rank's profile and the first decision, and sets the sampler's cap and shares."""
    if not limit_s > 0:
        raise InvalidInput("E-SHARES-ARGUMENT", f"limit_s: got {limit_s}, allowed: more than 0 seconds")
    trial = BatchTrial(model, loss_of, make_batch_function(batches), measure=measure, sharing=read_launch().local_world)

    def run() -> WorkerProfile:
        end, most = time.monotonic() + limit_s, min(sampler.batch, sampler.cap or sampler.batch)
        try:
            with session.no_sync(), trial.preserve_state(begun=session.step > 0):
                result = profile(trial, most, left_s=lambda: end - time.monotonic())
        except MemoryError:
            return WorkerProfile((), 0, True)
        return structs.replace(result, ended=result.ended or most < sampler.batch)  # a given cap counts as the memory limit

    if not dist.is_initialized() or dist.get_world_size() == 1:
        profiles, first = [run()], _first_free_step(sampler)
    else:
        members = _members(session)
        with contextlib.closing(StepRows(GatheredRows(members, limit_s + SLACK_S), members)) as rows:
            profiles, first = _exchanged(rows, run, session, sampler)
    least = max(policy.minimum, sampler.least)
    start = initial_shares(profiles, sampler.batch, sampler.announced[1], step=first, minimum=least)
    if profiles[sampler.rank].ended:
        sampler.cap = profiles[sampler.rank].cap
    sampler.announce(first, start.decision.by_worker)
    return profiles, start


def _members(session: BalancedSession) -> Members:
    groups = session.inspect.context.groups
    return Members() if groups is None else groups.members


def _exchanged(
    rows: StepRows, run: Callable[[], WorkerProfile], session: BalancedSession, sampler: Sampler,
) -> tuple[list[WorkerProfile], int]:
    """Exchanges the profiles. Returns all of them, and the first step for which every rank may announce shares. A rank whose
    model raised an error reports the error first."""
    section, rungs = rows.section("profiles"), ladder(sampler.batch)
    try:
        mine = run()
    except BaseException:
        section.start(sampler.rank, sampler.batch, BROKE_OFF, *[0.0] * (3 + len(rungs)))
        rows.send()
        raise
    times = dict(mine.points)
    try:
        section.start(sampler.rank, sampler.batch, FINISHED, _first_free_step(sampler), mine.cap, mine.ended,
                      *(times.get(rung, 0.0) for rung in rungs))
        rows_read = section.read()
    except CommError as error:
        raise session.inspect.context.explain(error) from None
    profiles = []
    for rank, (number, batch, finished, _, cap, ended, *seconds) in enumerate(rows_read):
        if (number, batch) != (rank, sampler.batch):
            raise InvalidInput("E-SAMPLER-RANKS",
                               f"the sampler of rank {rank} was made for rank {number:.0f} and batch {batch:.0f}, allowed: "
                               f"rank {rank} and batch {sampler.batch}, as this rank's sampler")
        if not finished:
            raise CommError("profiling failed on that rank: see the error in its output", peer=peer_name(rank),
                            code="E-OTHER-RANK")
        points = tuple((rung, time_s) for rung, time_s in zip(rungs, seconds, strict=True) if time_s)
        profiles.append(WorkerProfile(points, int(cap), bool(ended)))
    return profiles, max(int(row[3]) for row in rows_read)


def _first_free_step(sampler: Sampler) -> int:
    """Returns the first step for which shares may be announced: not drawn yet, and after all announcements of a restored
    sampler."""
    return max(sampler.drawn, sampler.announced[0] + 1)
