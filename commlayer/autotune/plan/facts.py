"""Facts that the decisions of automatic planning react to. Plain values, created by the driver."""

from __future__ import annotations

from typing import NamedTuple

from commlayer.autotune.plan.actions import StartPlanning
from commlayer.autotune.plan.candidate import Candidate, Price
from commlayer.observe import Direction, Throughput
from commlayer.planner.model import Basis, Link
from commlayer.records import Plan, Record


class StepReport(NamedTuple):
    """A row: one rank's report about its steps. Numbers only, because rows are exchanged as tensors."""

    word: float
    """A `Word`: rank 0's request to all ranks."""
    plan_s: float
    """Time of rank 0's last planning; 0 before the first."""
    at_once: float
    """Whether the rank waits for the other rows at once, because its step was slow."""
    step_s: float
    """Mean step time since the previous row."""
    cost_s: float
    """Seconds of the training thread per row."""
    waited_s: float = 0.0
    """The part of step_s that the training thread waited for communication."""
    up_bps: float = 0.0
    up_share: float = 0.0
    down_bps: float = 0.0
    down_share: float = 0.0

    @property
    def carried(self) -> Throughput:
        return Throughput(Direction(self.up_bps, self.up_share), Direction(self.down_bps, self.down_share))


class ActivePlan(NamedTuple):
    """The active plan. Its basis and price are known on rank 0 at most."""

    plan: Plan
    basis: Basis | None = None
    price: Price | None = None


class PlanningDone(Record, frozen=True):
    """Planning has ended with a candidate, or with the reason for having none."""

    order: StartPlanning
    found: Candidate | None
    why: str = ""


class SharesMoved(Record, frozen=True):
    """Work moves between ranks with the next step."""

    part: float
    """The fraction of a step's computing that changes."""


class Events(Record, frozen=True):
    """Changes since the last fact, made by other threads or the script."""

    in_force: ActivePlan
    news: tuple[PlanningDone | SharesMoved, ...] = ()
    error_multiplier: float = 1.0
    """Error multiplier: this model's observed excess of steps under compression, relative to the usual one."""


class StepDone(Record, frozen=True):
    """A step has ended on this rank."""

    step: int
    """Steps since the start of the job."""
    seconds: float
    """Since the end of the previous step; 0 for the first."""
    meanwhile: Events
    waited_s: float = 0.0
    """The part of `seconds` spent waiting for communication."""


class StepTimes(Record, frozen=True):
    """All ranks have shared the time of a step."""

    step_s: float
    """Median over ranks, the same on all of them."""
    waited_s: float
    """The shortest wait of any rank: a rank that waits for a slower one waits longer than communication takes."""


class MeasuringDone(Record, frozen=True):
    """All ranks have the same measurements: each node's link, and the step time."""

    links: tuple[Link, ...]
    step_s: float
    computing_s: tuple[float, ...] = ()
    """Computing time of each rank; empty if shares of the batch already follow it."""
    names: tuple[str, ...] = ()
    """Display name of each rank."""
    shares: bool = True
    """Whether shares of the batch could follow computing time."""


class ReportsRead(Record, frozen=True):
    """The rows of all ranks in rank order, the same on all of them."""

    rows: tuple[StepReport, ...]


class ReportDue(Record, frozen=True):
    """The next rows are due."""


class ProbeDone(Record, frozen=True):
    """All ranks have the same results of a probe. plan_s and step_s are the action's."""

    links: tuple[Link, ...]
    took_s: float
    plan_s: float
    step_s: float


class WaitDone(Record, frozen=True):
    """Rank 0 has planned."""

    found: bool
    """Whether it has a better plan."""


class SwitchDone(Record, frozen=True):
    """All ranks have switched from plan `left` to `plan`."""

    plan: Plan
    left: Plan


class SwitchRefused(Record, frozen=True):
    """All ranks kept their plan because a rank refused rank 0's candidate."""

    why: str


Fact = (StepDone | Events | StepTimes | MeasuringDone | ReportsRead | ReportDue | ProbeDone | WaitDone | SwitchDone
        | SwitchRefused)
