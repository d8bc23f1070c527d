"""What the decisions of automatic planning ask for. Values only: driver.py carries them out, in the order given."""

from __future__ import annotations

from enum import IntEnum

from commlayer.autotune.plan.candidate import Candidate, Price
from commlayer.observe import StalePlan
from commlayer.planner.model.cluster import Basis, Link
from commlayer.records import Plan, Record


class Word(IntEnum):
    """What rank 0 wants of all ranks, told in its row."""

    NOTHING = 0
    SWITCH = 1
    MEASURE = 2
    PROBE = 3


class Say(Record, frozen=True):
    """A line for session.inspect.decisions(), and for rank 0's log."""

    text: str
    warning: bool = False


class Suggest(Record, frozen=True):
    """A line, once in a job: what the script could allow, and what that would bring."""

    text: str


class RecordSteps(Record, frozen=True):
    """From the next step on workers record what takes time in it."""


class TellPace(Record, frozen=True):
    """All ranks together: tell each other what a step took, and how long it waited. Answered by `PaceTold`."""

    step_s: float
    """This rank's."""
    waited_s: float
    """Of it, for communication."""


class Measure(Record, frozen=True):
    """All ranks together: read the recorded steps, time collectives, probe links, tell each other. Answered by `Measured`."""


class Hear(Record, frozen=True):
    """Read the rows that all ranks have told. Answered by `Heard`, then by `Due` where the next rows are to be told."""


class Tell(Record, frozen=True):
    """All ranks together: tell this rank's row. Answered by `Heard` where all wait for it."""

    word: Word
    plan_s: float
    """How long rank 0 took to plan; 0 before it has."""
    slow_s: float
    """Ranks whose steps take longer wait for the rows at once."""


class Probe(Record, frozen=True):
    """All ranks together: measure the links alone. Answered by `Probed`, which gives both figures back."""

    plan_s: float
    step_s: float


class Pace(Record, frozen=True):
    """Send no faster than these links carry, one for each node."""

    links: tuple[Link, ...]


class Afresh(Record, frozen=True):
    """What was seen of steps and links so far says nothing of the steps to come."""


class StartPlanning(Record, frozen=True):
    """Rank 0: plan on a thread beside the training. Answered by `Planned`."""

    current: Plan
    """In force."""
    known: Plan | None
    """The same as the planner has it, if it is the planner's."""
    links: tuple[Link, ...]
    step_s: float
    """What a step takes now."""


class AwaitPlan(Record, frozen=True):
    """All ranks together: wait until rank 0 has planned, and hear whether it found a better plan. Answered by `Awaited`."""

    most_s: float
    """A search that takes longer goes on beside the training."""


class Switch(Record, frozen=True):
    """All ranks together: go over to rank 0's candidate, which others do not know. Answered by `Switched` or `Refused`."""

    candidate: Candidate | None


class Describe(Record, frozen=True):
    """Rank 0: what the plan in force was made from and what its communication costs, for traces and for shares."""

    basis: Basis | None
    price: Price | None


class Report(Record, frozen=True):
    """An event for session.inspect.events()."""

    event: StalePlan


Action = (Say | Suggest | RecordSteps | TellPace | Measure | Hear | Tell | Probe | Pace | Afresh | StartPlanning | AwaitPlan
          | Switch | Describe | Report)
COLLECTIVE = (TellPace, Measure, Hear, Tell, Probe, AwaitPlan, Switch)
"""All ranks take these after the same step in the same order, or they would wait for each other for ever."""
