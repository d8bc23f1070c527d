"""Decisions of load balancing, as pure functions of (state, rows): which shares of the batch follow from the compute times of
all ranks.

All ranks give the same rows (one row per rank, with the rank's times) to balancers in equal states. The ranks therefore reach
the same decision without a coordinator. `now` is the next step to train: a decision applies to a step that no loader has drawn
yet.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from msgspec import structs

from commlayer.balance.balancer import Balancer, Decision, Event, Joined, Measurement, Outcome, SharePolicy
from commlayer.balance.share_solver import Communication
from commlayer.balance.time_models import LinearTime
from commlayer.errors import CommError, InvalidInput

if TYPE_CHECKING:
    from commlayer.balance.profile import InitialShares


def begin(
    rows: Sequence[RankStart], shares: Mapping[int, int], from_step: int, *, policy: SharePolicy,
    opening: InitialShares | None = None,
) -> SharesState:
    """Returns the initial state. `shares`: the newest shares, announced for `from_step`; `opening`: the result of profiling.

    Raises InvalidInput if the ranks' samplers do not match.
    """
    for rank, row in enumerate(rows):
        if row.rank != rank:
            raise InvalidInput("E-SAMPLER-RANKS",
                               f"the sampler of rank {rank} was made for rank {row.rank:.0f}, allowed: rank {rank}")
        if (row.batch, row.step) != (rows[0].batch, rows[0].step):
            raise InvalidInput("E-SAMPLER-RANKS",
                               f"the sampler of rank {rank} is at step {row.step:.0f} with batch {row.batch:.0f}, rank 0's "
                               f"at step {rows[0].step:.0f} with batch {rows[0].batch:.0f}, allowed: the same on all")
        if row.last_worker >= len(rows):
            raise InvalidInput("E-SAMPLER-RANKS",
                               f"the sampler of rank {rank} has a share for worker {row.last_worker:.0f}, allowed: 0 to "
                               f"{len(rows) - 1}")
    policy = structs.replace(policy, minimum=max(policy.minimum, *(int(row.least) for row in rows)))
    joined = [Joined(rank, int(row.cap) or None, LinearTime(row.slope_s, row.intercept_s) if row.known else None)
              for rank, row in enumerate(rows)]
    first = opening.decision if opening and opening.decision.from_step == from_step else None
    total = int(rows[0].batch)
    balancer = Balancer(joined, total, policy, shares=first or shares, from_step=max(0, from_step))
    return SharesState(balancer, policy)


def decide(
    state: SharesState, rows: Sequence[WorkerTime], step_s: float, now: int,
) -> tuple[SharesState, Decision | None, list[Event]]:
    """Decides on new shares from the times of all ranks; also returns events for the user. Raises CommError if a rank's shares
    differ from rank 0's. `step_s`: the longest step time of any rank."""
    step = int(rows[0].step)
    mismatched = [str(rank) for rank, row in enumerate(rows) if row.shares != rows[0].shares]
    if mismatched:
        raise CommError(f"decided on other shares than rank 0 at step {step}: the ranks differ in the arguments of "
                        "their LoadBalancer, or in their machines' arithmetic", peer=f"worker {', '.join(mismatched)}",
                        code="E-RANKS-DIFFER")
    balancer = state.balancer.copy()
    balancer.policy = structs.replace(state.policy, lead=now + int(max(row.lookahead for row in rows)) - step)
    if rows[0].comm_s:
        balancer.communication = Communication(rows[0].comm_s, rows[0].overlap)
    decision = balancer.decide(step, [
        Measurement(rank, int(row.computed), seconds) for rank, row in enumerate(rows) if row.computed
        for seconds in ((row.before_s, row.compute_s) if row.before_s else (row.compute_s,))
    ])
    events = [structs.replace(event, whole_s=step_s) if isinstance(event, Outcome) else event for event in balancer.events]
    balancer.events.clear()
    announced = state.announced if decision is None else (*state.announced, decision)
    return state._replace(balancer=balancer, announced=announced), decision, events


def apply_due_decisions(state: SharesState, step: int) -> tuple[SharesState, list[float]]:
    """Applies decisions that were announced for this step or an earlier one. Call it before a step is trained. Returns, for
    each decision, the fraction by which it changes a step's computing."""
    effective = list(itertools.takewhile(lambda decision: decision.from_step <= step, state.announced))
    parts = [abs(d.gain_s) / d.before_s if d.before_s < math.inf else 1.0 for d in effective]
    return state._replace(announced=state.announced[len(effective) :]), parts


def checksum(state: SharesState) -> float:
    """Returns a checksum of the newest shares, by which ranks detect a difference."""
    decision: Decision = state.balancer.latest
    return float(zlib.crc32(repr((decision.from_step, decision.by_worker)).encode()))


class RankStart(NamedTuple):
    """What each rank sends before its first measured time. Numbers only, because ranks exchange them as tensors."""

    rank: float
    """The rank that the sender's sampler is for."""
    batch: float
    cap: float
    """Maximum number of samples that fit in memory at once; 0: no limit."""
    least: float
    """The smallest batch that the sender's model can take."""
    step: float
    """The step that has ended."""
    last_worker: float
    """The highest worker number that the sender's sampler has a share for."""
    known: float
    """1: the rank's speed is known. 0: the next two numbers are meaningless."""
    slope_s: float
    intercept_s: float


class WorkerTime(NamedTuple):
    """One rank's times in its report. Numbers only, because ranks exchange them as tensors."""

    step: float = -1.0
    """Number of the sampler's last step, equal on all ranks; -1 if the load is not balanced."""
    computed: float = 0.0
    """Number of samples of the measured step; 0 if no step was measured."""
    compute_s: float = 0.0
    before_s: float = 0.0
    """Seconds of the latest earlier step, since the previous report, with as many samples; 0 if there is none. Two outliers
    count as a jump, so one report suffices to detect a jump if several steps share a report."""
    lookahead: float = 0.0
    """Number of batches that the rank's loader draws in advance; it draws at most as many steps."""
    comm_s: float = 0.0
    overlap: float = 0.0
    """`comm_s` and `overlap`: rank 0's predicted communication of the active plan, and the fraction of computing that
    overlaps it; 0 if unknown."""
    shares: float = 0.0
    """Checksum of the rank's newest shares."""


class SharesState(NamedTuple):
    """The complete state of load balancing. Ranks that start equal and receive the same rows have the same state at every
    step."""

    balancer: Balancer
    """The balancer. No decision changes this balancer: decisions are made on a copy."""
    policy: SharePolicy
    announced: tuple[Decision, ...] = ()
    """Decisions for steps that have not begun yet."""


def latest(times: Sequence[tuple[int, float]]) -> tuple[int, float, float]:
    """Returns samples and seconds of the last step, and seconds of the latest earlier step with as many samples (0 if none)."""
    if not times:
        return 0, 0.0, 0.0
    samples = times[-1][0]
    same = [seconds for one, seconds in times if one == samples]
    return samples, same[-1], same[-2] if len(same) > 1 else 0.0
