"""Profiles a job's workers side by side before it trains: memory's ends, times, first shares. Knows sessions and samplers.

Each rank runs batches alone, without a collective; then all tell each other once what they found and come to the same shares.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from msgspec import structs
from torch import nn

from commlayer.autotune.measure.batch_trials import LossOf, Trial, batches_of
from commlayer.balance import Communication, Policy, Sampler
from commlayer.balance.first_shares import Opening, SharesOf, opening
from commlayer.balance.profiling import WorkerProfile, ladder, profile
from commlayer.cluster.members import Members
from commlayer.cluster.rank_rows import RowChannel, Rows
from commlayer.config import read_launch
from commlayer.errors import CommError, InvalidInput
from commlayer.session import Session
from commlayer.transport.protocol import peer_name

SLACK_S = 60.0
"""What others may take longer than the limit: a batch that had begun, starting up."""
FINISHED, BROKE_OFF = 1.0, 0.0


def together(
    session: Session, sampler: Sampler, policy: Policy, communication: Communication, model: nn.Module, loss_of: LossOf,
    batches: Any, *, limit_s: float, measure: Callable[[int], float] | None = None, shares_of: SharesOf | None = None,
) -> tuple[list[WorkerProfile], Opening]:
    """Every rank's profile, and what follows; the sampler has its cap and the shares. `shares_of`: another way to them."""
    if not limit_s > 0:
        raise InvalidInput("E-SHARES-ARGUMENT", f"limit_s: got {limit_s}, allowed: more than 0 seconds")
    trial = Trial(model, loss_of, batches_of(batches), measure=measure, sharing=read_launch().local_world)

    def run() -> WorkerProfile:
        end, most = time.monotonic() + limit_s, min(sampler.batch, sampler.cap or sampler.batch)
        try:
            with session.no_sync(), trial.untouched(begun=session.step > 0):
                found = profile(trial, most, left_s=lambda: end - time.monotonic())
        except MemoryError:
            return WorkerProfile((), 0, True)
        return structs.replace(found, ended=found.ended or most < sampler.batch)  # a cap that was given is memory's end

    if not dist.is_initialized() or dist.get_world_size() == 1:
        found, first = [run()], _free(sampler)
    else:
        with contextlib.closing(RowChannel(_members(session), limit_s + SLACK_S)) as channel:
            found, first = _exchanged(channel.rows("profiles"), run, session, sampler)
    least = max(policy.minimum, sampler.least)
    begun = opening(found, sampler.batch, sampler.announced[1], step=first, minimum=least, exclude=policy.exclude_gain < 1,
                    communication=communication, shares_of=shares_of)
    if found[sampler.rank].ended:
        sampler.cap = found[sampler.rank].cap
    sampler.announce(first, begun.decision.by_worker)
    return found, begun


def _members(session: Session) -> Members:
    """With DDP there may be no connection yet."""
    groups = session.inspect.connection.groups
    return Members() if groups is None else groups.members


def _exchanged(
    rows: Rows, run: Callable[[], WorkerProfile], session: Session, sampler: Sampler,
) -> tuple[list[WorkerProfile], int]:
    """All profiles, and the first step that is free on all ranks. A rank whose model raised says so before it ends."""
    rungs = ladder(sampler.batch)
    try:
        mine = run()
    except BaseException:
        rows.start(sampler.rank, sampler.batch, BROKE_OFF, *[0.0] * (3 + len(rungs)))
        raise
    times = dict(mine.points)
    try:
        rows.start(sampler.rank, sampler.batch, FINISHED, _free(sampler), mine.cap, mine.ended,
                   *(times.get(rung, 0.0) for rung in rungs))
        told = rows.read()
    except CommError as error:
        raise session.inspect.connection.explain(error) from None
    found = []
    for rank, (number, batch, finished, _, cap, ended, *seconds) in enumerate(told):
        if (number, batch) != (rank, sampler.batch):
            raise InvalidInput("E-SAMPLER-RANKS",
                               f"the sampler of rank {rank} is for rank {number:.0f} with batch {batch:.0f}, allowed: its own "
                               f"rank and the batch of this one, {sampler.batch}")
        if not finished:
            raise CommError("its profile broke off, the error is in its own output", peer=peer_name(rank), code="E-OTHER-RANK")
        points = tuple((rung, time_s) for rung, time_s in zip(rungs, seconds, strict=True) if time_s)
        found.append(WorkerProfile(points, int(cap), bool(ended)))
    return found, max(int(row[3]) for row in told)


def _free(sampler: Sampler) -> int:
    """The first step that shares may be announced for: not drawn yet, and behind all that a restored sampler has announced."""
    return max(sampler.drawn, sampler.announced[0] + 1)
