"""What decisions of automatic planning are made from: what happened, as the driver saw it. Values only."""

from __future__ import annotations

from typing import NamedTuple

from commlayer.autotune.plan.actions import StartPlanning
from commlayer.autotune.plan.candidate import Candidate, Price
from commlayer.observe import Direction, Throughput
from commlayer.planner.model.cluster import Basis, Link
from commlayer.records import Plan, Record


class StepReport(NamedTuple):
    """A row: what a rank tells the others of its steps. Numbers only: the exchange carries nothing else."""

    word: float
    """A `Word`: what rank 0 wants of all."""
    plan_s: float
    """Seconds that rank 0 took to plan; 0 before it has."""
    at_once: float
    """Whether it waits for the others' rows, for its step was slow."""
    step_s: float
    """Of a step, since the row before."""
    cost_s: float
    """Of its training thread for a row."""
    waited_s: float = 0.0
    """Of step_s: how long the training thread waited for communication."""
    up_bps: float = 0.0
    up_share: float = 0.0
    down_bps: float = 0.0
    down_share: float = 0.0

    @property
    def carried(self) -> Throughput:
        return Throughput(Direction(self.up_bps, self.up_share), Direction(self.down_bps, self.down_share))


class InForce(NamedTuple):
    """The plan that steps run under. Rank 0 knows what it was made from and what its communication costs, if anybody does."""

    plan: Plan
    basis: Basis | None = None
    price: Price | None = None


class Planned(Record, frozen=True):
    """Planning is over: a candidate, or the reason why there is none."""

    order: StartPlanning
    found: Candidate | None
    why: str = ""


class SharesMoved(Record, frozen=True):
    """With the next step work moves between the ranks."""

    part: float
    """Of a step's computing that this changes."""


class Meanwhile(Record, frozen=True):
    """What has happened since the last fact, on other threads or by other hands."""

    in_force: InForce
    news: tuple[Planned | SharesMoved, ...] = ()
    harder: float = 1.0
    """How many times the excess of steps that is usual under a codec this model needs, as far as was seen."""


class StepOver(Record, frozen=True):
    """A step has ended on this rank."""

    step: int
    """How many have, since the start of the job."""
    seconds: float
    """Since the step before ended; 0 for the first."""
    meanwhile: Meanwhile
    waited_s: float = 0.0
    """Of them, for communication."""


class PaceTold(Record, frozen=True):
    """All ranks have told what a step took."""

    step_s: float
    """The median, the same on all of them."""
    waited_s: float
    """Of a step, the least that one of them waited for communication: who waits for a slower rank waits longer."""


class Measured(Record, frozen=True):
    """All ranks have measured and know the same: each node's link, and seconds of a step."""

    links: tuple[Link, ...]
    step_s: float
    computing_s: tuple[float, ...] = ()
    """Of each rank; none where shares of the batch follow that already."""
    names: tuple[str, ...] = ()
    """Of each rank, for people."""
    shares: bool = True
    """Whether shares of the batch could follow it."""


class Heard(Record, frozen=True):
    """The rows of all ranks in rank order, the same on all of them."""

    rows: tuple[StepReport, ...]


class Due(Record, frozen=True):
    """It is time to tell the next rows."""


class Probed(Record, frozen=True):
    """All ranks have probed the links and know the same of them. The rest is the order's."""

    links: tuple[Link, ...]
    took_s: float
    plan_s: float
    step_s: float


class Awaited(Record, frozen=True):
    """Rank 0 has planned."""

    found: bool
    """Whether it has a better plan."""


class Switched(Record, frozen=True):
    """All ranks have gone over to a plan, and left another."""

    plan: Plan
    left: Plan


class Refused(Record, frozen=True):
    """All ranks have kept their plan, since rank 0's candidate fits some rank ill."""

    why: str


Fact = StepOver | Meanwhile | PaceTold | Measured | Heard | Due | Probed | Awaited | Switched | Refused
