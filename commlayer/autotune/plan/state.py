"""What automatic planning knows, by phase. Values only. The rules are in decide.py and decide_rank0.py; driver.py keeps the
present state.

All ranks go through the same phases after the same steps:

    Warming ---> Measuring ---> Watching
       ^                            |
       '---- rank 0 wants it -------'      since steps are not what was predicted, or work has moved between the ranks

Rank 0 looks for plans besides, and judges them:

    from         to           when
    any          Planning     all ranks have measured, or links have changed
    Planning     Proposing    a plan was found that is worth a change
    Planning     Settling     none was found: the plan in force is kept
    Planning     Steady       meanwhile somebody has changed the plan in force
    Proposing    Trial        all have gone over to it
    Proposing    Settling     all have gone back to the plan before, or kept theirs, since this one fits some rank ill
    Trial        Proposing    the loss comes later than before: back; or else another plan that was found is near
    Trial        Steady       neither
    Settling     Proposing    another plan that was found is near
    Settling     Steady       none is
"""

from __future__ import annotations

from commlayer.autotune.plan.actions import StartPlanning
from commlayer.autotune.plan.candidate import Candidate, ReplanVerdict
from commlayer.autotune.plan.facts import InForce
from commlayer.observe import LinkWatch, PredictionCheck, Rates, ReprobeSchedule
from commlayer.planner.model.cluster import Link
from commlayer.records import Plan, Record

# ---- phases of all ranks


class Warming(Record, frozen=True):
    """The first steps, or the rest of the one in which rank 0 asked for measuring."""

    until: int
    """Behind this step recording begins."""


class Measuring(Record, frozen=True):
    """Steps are recorded."""

    until: int
    """Behind this step they are read."""


class Watching(Record, frozen=True):
    """Ranks tell each other of their steps, and act upon what all have heard."""


# ---- phases of rank 0


class Steady(Record, frozen=True):
    """Nothing is under way; `Lead.check` says whether the plan in force still does what is expected of it."""


class Planning(Record, frozen=True):
    """A thread plans."""

    order: StartPlanning
    checks: bool = False
    """Steps were just measured, over these links: so the plan in force must be priced at about what it takes."""


class Proposing(Record, frozen=True):
    """With the next rows all ranks are asked to go over to a plan."""

    candidate: Candidate
    before_s: float = 0.0
    """Seconds of a step under the plan in force."""
    for_pace: bool = False
    """Prices cannot tell it from the plan in force; only its pace can."""
    back: bool = False
    """It is the plan before the one in force, under which the loss came sooner."""


class Trial(Record, frozen=True):
    """The first steps under a new plan."""

    before: Candidate
    """What all left for it."""
    before_s: float
    for_pace: bool
    times: tuple[float, ...] = ()
    """Seconds of its steps up to now."""


class Settling(Record, frozen=True):
    """Steps under a plan that is kept, whatever they take."""

    times: tuple[float, ...] = ()


class Lead(Record, frozen=True):
    """What rank 0 alone knows and decides."""

    phase: Steady | Planning | Proposing | Trial | Settling = Steady()
    check: PredictionCheck | None = None
    recent: tuple[float, ...] = ()
    """Seconds of the latest steps under the plan in force; of the last three the check sees the median."""
    steps: float = 1.0
    """How many times as many steps as dense training the plan in force needs for a loss."""
    harder: float = 1.0
    """What the plan in force was made with, of how much harder than usual compression is for this model."""
    pace_s: float = 0.0
    """What steps took when the planning under way began: how fast the plan in force is."""
    stale: bool = False
    """Steps under the plan in force do not take what was expected."""
    moved: bool = False
    """Shares have changed since work was last measured."""
    searched: tuple[Link, ...] = ()
    """What a plan was last looked for with."""
    discarded: bool = False
    """The last search's prices were far from what steps take, so it was discarded."""
    known: tuple[Plan, Plan] | None = None
    """The plan that was last put in force here, and the same as the planner has it."""
    plan_s: float = 0.0
    """How long planning took, the last time that it found something."""
    lateness: float = 1.0
    """So many times as long as predicted steps took under the last plan that was tried."""
    beside: tuple[Candidate, ...] = ()
    """Other plans that planning found, to be tried once the pace of the best is known."""
    verdicts: tuple[ReplanVerdict, ...] = ()


# ---- all of it


class Links(Record, frozen=True):
    """What is known of the nodes' links, the same on all ranks except for the clock's part in `reprobe`."""

    links: tuple[Link, ...]
    """What is planned for, one of each node."""
    watch: LinkWatch
    best: tuple[Rates, ...]
    """Best rates ever measured, per node."""
    reprobe: ReprobeSchedule
    before: tuple[Plan, LinkWatch] | None = None
    """The plan that all have left last, and what was seen under it."""


class State(Record, frozen=True):
    """`lead` on rank 0 alone."""

    phase: Warming | Measuring | Watching
    lead: Lead | None = None
    per_node: int = 1
    """Ranks of a node; the first one's row tells what the node's link carried."""
    keep: bool = False
    """Looks for plans and changes none."""
    step: int = 0
    """The last that it heard of."""
    in_force: InForce | None = None
    links: Links | None = None
    """None before the first measuring."""
