"""Actions that the decisions of automatic planning request. Plain values; driver.py carries them out in order."""

from __future__ import annotations

from enum import IntEnum

from commlayer.autotune.plan.candidate import Candidate, Price
from commlayer.observe import StalePlan
from commlayer.planner.model import Basis, Link
from commlayer.records import Plan, Record


class Request(IntEnum):
    """Rank 0's request to all ranks, sent in its row."""

    NOTHING = 0
    SWITCH = 1
    MEASURE = 2
    PROBE = 3


class LogLine(Record, frozen=True):
    """A line for session.inspect.decisions() and for rank 0's log."""

    text: str
    warning: bool = False


class SuggestSetting(Record, frozen=True):
    """A line, once per job: a setting that the script could allow, and its benefit."""

    text: str


class RecordSteps(Record, frozen=True):
    """Workers record the timing of their steps from the next one on."""


class ShareStepTime(Record, frozen=True):
    """Collective: shares the time and the wait of a step among all ranks. Answered by `StepTimes`."""

    step_s: float
    """Step time of this rank."""
    waited_s: float
    """The part of step_s spent waiting for communication."""


class Measure(Record, frozen=True):
    """Collective: reads recorded steps, times collectives, probes links and shares the results. Answered by `MeasuringDone`."""


class ReadReports(Record, frozen=True):
    """Reads the rows of all ranks. Answered by `ReportsRead`, then by `ReportDue` if the next rows are due."""


class ShareReport(Record, frozen=True):
    """Collective: sends this rank's row. Answered by `ReportsRead` if all ranks wait for the rows."""

    word: Request
    plan_s: float
    """Time that rank 0's last planning took; 0 before the first."""
    slow_s: float
    """Ranks whose steps take longer than this wait for the rows at once."""


class Probe(Record, frozen=True):
    """Collective: measures only the links. Answered by `ProbeDone`, which returns both numbers."""

    plan_s: float
    step_s: float


class PaceSenders(Record, frozen=True):
    """Sets the pace of senders from these links, one per node."""

    links: tuple[Link, ...]


class ResetWindow(Record, frozen=True):
    """Clears the observations of steps and links: they do not apply to the next steps."""


class StartPlanning(Record, frozen=True):
    """Rank 0: plans on a thread while training continues. Answered by `PlanningDone`."""

    current: Plan
    """The active plan."""
    known: Plan | None
    """The planner's form of the active plan, if the planner made it."""
    links: tuple[Link, ...]
    step_s: float
    """Current time of a step."""


class AwaitPlan(Record, frozen=True):
    """Collective: waits until rank 0 has planned, and learns whether it found a better plan. Answered by `WaitDone`."""

    most_s: float
    """A search that takes longer continues while training goes on."""


class Switch(Record, frozen=True):
    """Collective: switches to rank 0's candidate; other ranks pass None. Answered by `SwitchDone` or `SwitchRefused`."""

    candidate: Candidate | None


class SetActivePlan(Record, frozen=True):
    """Rank 0: basis and communication price of the active plan, for traces and for shares."""

    basis: Basis | None
    price: Price | None


class ReportStale(Record, frozen=True):
    """An event for session.inspect.events()."""

    event: StalePlan


Action = (LogLine | SuggestSetting | RecordSteps | ShareStepTime | Measure | ReadReports | ShareReport | Probe | PaceSenders
          | ResetWindow | StartPlanning | AwaitPlan | Switch | SetActivePlan | ReportStale)
COLLECTIVE = (ShareStepTime, Measure, ReadReports, ShareReport, Probe, AwaitPlan, Switch)
"""All ranks take these after the same step in the same order; otherwise they would deadlock."""
