"""Actions that the decisions of automatic planning request. Plain values; driver.py carries them out in order."""

from __future__ import annotations

from enum import IntEnum

from commlayer.autotune.plan.candidate import Candidate, Price
from commlayer.observe import StalePlan
from commlayer.planner.model.cluster import Basis, Link
from commlayer.records import Plan, Record


class Word(IntEnum):
    """Rank 0's request to all ranks, sent in its row."""

    NOTHING = 0
    SWITCH = 1
    MEASURE = 2
    PROBE = 3


class Say(Record, frozen=True):
    """A line for session.inspect.decisions() and for rank 0's log."""

    text: str
    warning: bool = False


class Suggest(Record, frozen=True):
    """A line, once per job: a setting that the script could allow, and its benefit."""

    text: str


class RecordSteps(Record, frozen=True):
    """Workers record the timing of their steps from the next one on."""


class TellPace(Record, frozen=True):
    """Collective: shares the time and the wait of a step among all ranks. Answered by `PaceTold`."""

    step_s: float
    """Step time of this rank."""
    waited_s: float
    """The part of step_s spent waiting for communication."""


class Measure(Record, frozen=True):
    """Collective: reads the recorded steps, times collectives, probes links and shares the results. Answered by `Measured`."""


class Hear(Record, frozen=True):
    """Reads the rows of all ranks. Answered by `Heard`, then by `Due` if the next rows are due."""


class Tell(Record, frozen=True):
    """Collective: sends this rank's row. Answered by `Heard` if all ranks wait for the rows."""

    word: Word
    plan_s: float
    """Time that rank 0's last planning took; 0 before the first."""
    slow_s: float
    """Ranks whose steps take longer than this wait for the rows at once."""


class Probe(Record, frozen=True):
    """Collective: measures only the links. Answered by `Probed`, which returns both numbers."""

    plan_s: float
    step_s: float


class Pace(Record, frozen=True):
    """Sets the pace of senders from these links, one per node."""

    links: tuple[Link, ...]


class Afresh(Record, frozen=True):
    """Clears the observations of steps and links: they do not apply to the next steps."""


class StartPlanning(Record, frozen=True):
    """Rank 0: plans on a thread while training continues. Answered by `Planned`."""

    current: Plan
    """The active plan."""
    known: Plan | None
    """The planner's form of the active plan, if the planner made it."""
    links: tuple[Link, ...]
    step_s: float
    """Current time of a step."""


class AwaitPlan(Record, frozen=True):
    """Collective: waits until rank 0 has planned, and learns whether it found a better plan. Answered by `Awaited`."""

    most_s: float
    """A search that takes longer continues while training goes on."""


class Switch(Record, frozen=True):
    """Collective: switches to rank 0's candidate; other ranks pass None. Answered by `Switched` or `Refused`."""

    candidate: Candidate | None


class Describe(Record, frozen=True):
    """Rank 0: basis and communication price of the active plan, for traces and for shares."""

    basis: Basis | None
    price: Price | None


class Report(Record, frozen=True):
    """An event for session.inspect.events()."""

    event: StalePlan


Action = (Say | Suggest | RecordSteps | TellPace | Measure | Hear | Tell | Probe | Pace | Afresh | StartPlanning | AwaitPlan
          | Switch | Describe | Report)
COLLECTIVE = (TellPace, Measure, Hear, Tell, Probe, AwaitPlan, Switch)
"""All ranks take these after the same step in the same order; otherwise they would deadlock."""
