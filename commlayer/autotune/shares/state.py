"""State and actions of load balancing: plain values that are the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from commlayer.balance.balancer import Balancer, Decision, Event, Policy
from commlayer.balance.share_solver import Communication

if TYPE_CHECKING:  # it imports a solver that only comparisons need
    from commlayer.balance.lbb import LbbBalancer


class RankStart(NamedTuple):
    """One rank's row before its first measured time. Numbers only, because rows are exchanged as tensors."""

    rank: float
    """The rank that its sampler is for."""
    batch: float
    cap: float
    """Most samples that fit in memory at once; 0 for no limit."""
    least: float
    """The smallest batch that its model can take."""
    step: float
    """The step that has ended."""
    last_worker: float
    """The highest worker number that its sampler has a share for."""
    known: float
    """Whether its speed is known; if not, the next two numbers are meaningless."""
    slope_s: float
    intercept_s: float


class WorkerTime(NamedTuple):
    """One rank's row after a step. Numbers only, because rows are exchanged as tensors."""

    computed: float
    """Samples of the measured step; 0 if none was measured."""
    compute_s: float
    before_s: float
    """Time of another step with as many samples, the latest since the previous row; 0 if there is none. Two outliers count as
    a jump, so one row suffices to detect it if several steps share a row."""
    lookahead: float
    """Batches, and so at most steps, that its loader draws in advance."""
    cost_s: float
    """Seconds of the training thread for an exchange, including its part in the step that reads it."""
    step_s: float
    comm_s: float
    overlap: float
    """Rank 0's price of communication under the active plan, and the fraction of computing that overlaps it; 0 if unknown."""
    shares: float
    """Checksum of the rank's shares."""


class SharesState(NamedTuple):
    """The complete state. Ranks that start equal and receive the same rows have the same state at every step."""

    balancer: Balancer | LbbBalancer
    """Immutable here: decisions are made on a copy."""
    policy: Policy
    communication: Communication
    """The job's setting; FREE means rank 0's price."""
    every_given: int | None
    """Steps between exchanges as set by the user; None for the fewest that cost little."""
    every: int
    """The present value."""
    row_step: int
    """The step after which the latest row was sent."""
    next_row: int
    """No row is sent before this step is over."""
    announced: tuple[Decision, ...] = ()
    """Decisions for steps that have not begun."""


class Announce(NamedTuple):
    """The sampler must use these shares from their step on."""

    decision: Decision


class WorkMoves(NamedTuple):
    """New shares take effect with the next step and change a step's computing by this fraction."""

    part: float


class ShareEvent(NamedTuple):
    """An event for the user."""

    event: Event


Action = Announce | WorkMoves | ShareEvent


def latest(times: Sequence[tuple[int, float]]) -> tuple[int, float, float]:
    """Samples and seconds of the last step, and seconds of the latest earlier step with as many samples (0 if none)."""
    if not times:
        return 0, 0.0, 0.0
    samples = times[-1][0]
    same = [seconds for one, seconds in times if one == samples]
    return samples, same[-1], same[-2] if len(same) > 1 else 0.0
