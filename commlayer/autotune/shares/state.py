"""What balancing knows and may ask for, as values that are the same on all ranks. Knows no session, sampler, clock or torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from commlayer.balance.balancer import Balancer, Policy
from commlayer.balance.events import Decision, Event
from commlayer.balance.share_solver import Communication

if TYPE_CHECKING:  # it loads a solver, which jobs that compare with nothing do without
    from commlayer.balance.published import Published


class RankStart(NamedTuple):
    """What a rank says before its first measured time. Numbers only: the exchange carries nothing else."""

    rank: float
    """The one that its sampler is for."""
    batch: float
    cap: float
    """Most samples that it holds at once; 0 for no limit."""
    least: float
    """The smallest batch that its model can take."""
    step: float
    """The one that is over."""
    last_worker: float
    """The highest number of a worker that its sampler has a share for."""
    known: float
    """Whether anything is known of its speed; if not, the two numbers below say nothing."""
    slope_s: float
    intercept_s: float


class WorkerTime(NamedTuple):
    """What a rank says after a step. Numbers only: the exchange carries nothing else."""

    computed: float
    """Samples of the step that was measured; 0 where none was."""
    compute_s: float
    before_s: float
    """Of another step with as many samples, the latest since the row before; 0 without one. Two outliers make a jump, so
    that one row is enough to see it where several steps share one."""
    lookahead: float
    """How many batches its loader draws ahead, and so at most how many steps."""
    cost_s: float
    """Seconds of its training thread that an exchange takes, with the step at which it is read."""
    step_s: float
    comm_s: float
    overlap: float
    """Rank 0's price of communication under the plan in force, and the part of computing that hides it; 0 without one."""
    shares: float
    """A check sum of what it believes the shares to be."""


class SharesState(NamedTuple):
    """All that decisions depend on. Ranks that begin alike and hear the same rows have the same state at every step."""

    balancer: Balancer | Published
    """Never changed: a decision is made on a copy of it."""
    policy: Policy
    communication: Communication
    """As the job was told; FREE leaves it to rank 0's price."""
    every_given: int | None
    """Steps from one exchange to the next as somebody asked for them; None for as few as cost little."""
    every: int
    """The same as it is now."""
    row_step: int
    """The step that the latest row was sent after."""
    next_row: int
    """No row is sent before this step is over."""
    announced: tuple[Decision, ...] = ()
    """For steps that have not begun."""


class Announce(NamedTuple):
    """The sampler shall use these shares from their step on."""

    decision: Decision


class WorkMoves(NamedTuple):
    """New shares hold from the step to come: by this part does a step's computing change."""

    part: float


class Say(NamedTuple):
    """Something that the user may want to see."""

    event: Event


Action = Announce | WorkMoves | Say


def latest(times: Sequence[tuple[int, float]]) -> tuple[int, float, float]:
    """(samples, seconds) of the last step, and the seconds of one before it with as many samples: 0 where there is none."""
    if not times:
        return 0, 0.0, 0.0
    samples = times[-1][0]
    same = [seconds for one, seconds in times if one == samples]
    return samples, same[-1], same[-2] if len(same) > 1 else 0.0
