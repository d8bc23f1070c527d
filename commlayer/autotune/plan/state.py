"""State of automatic planning, by phase. Plain values; the rules are in decide.py and decide_rank0.py.

All ranks go through the same phases after the same steps:

    Warming ---> Measuring ---> Watching
       ^                            |
       '---- rank 0 requests it ----'      because steps differ from the prediction, or work has moved between ranks

Rank 0 in addition searches for plans and judges them:

    from         to           when
    any          Planning     all ranks have measured, or links have changed
    Planning     Proposing    the search found a plan that is worth a switch
    Planning     Settling     it found none: the active plan stays
    Planning     Steady       the active plan was changed during the search
    Proposing    Trial        all ranks have switched to the plan
    Proposing    Settling     all ranks have rolled back, or kept their plan because a rank refused the new one
    Trial        Proposing    a loss comes later than before: roll back; or another candidate is close
    Trial        Steady       neither
    Settling     Proposing    another candidate is close
    Settling     Steady       no other candidate is
"""

from __future__ import annotations

from commlayer.autotune.plan.actions import StartPlanning
from commlayer.autotune.plan.candidate import Candidate, ReplanVerdict
from commlayer.autotune.plan.facts import ActivePlan
from commlayer.observe import LinkWatch, PredictionCheck, Rates, ReprobeSchedule
from commlayer.planner.model import Link
from commlayer.records import Plan, Record

# ---- phases of all ranks


class Warming(Record, frozen=True):
    """The first steps, or the rest of the step in which rank 0 requested measuring."""

    until: int
    """Recording begins after this step."""


class Measuring(Record, frozen=True):
    """Steps are being recorded."""

    until: int
    """The records are read after this step."""


class Watching(Record, frozen=True):
    """Ranks exchange rows about their steps and act on rows that all have received."""


# ---- phases of rank 0


class Steady(Record, frozen=True):
    """No search or trial is in progress; `LeaderState.check` compares steps with the prediction."""


class Planning(Record, frozen=True):
    """The planner thread searches."""

    order: StartPlanning
    checks: bool = False
    """Whether the price of the active plan must agree with its step time: steps were just measured over these links."""


class Proposing(Record, frozen=True):
    """The next rows ask all ranks to switch to a plan."""

    candidate: Candidate
    before_s: float = 0.0
    """Step time under the active plan."""
    for_pace: bool = False
    """Prices cannot distinguish it from the active plan; only its step time can."""
    back: bool = False
    """Whether this is a roll-back to the previous plan, under which a loss came sooner."""


class Trying(Record, frozen=True):
    """The first steps under a new plan."""

    before: Candidate
    """The previous plan, for a roll-back."""
    before_s: float
    for_pace: bool
    times: tuple[float, ...] = ()
    """Seconds of its steps so far."""


class Settling(Record, frozen=True):
    """Steps under a plan that is kept; they only determine its step time."""

    times: tuple[float, ...] = ()


class LeaderState(Record, frozen=True):
    """State that only rank 0 has."""

    phase: Steady | Planning | Proposing | Trying | Settling = Steady()
    check: PredictionCheck | None = None
    recent: tuple[float, ...] = ()
    """Latest step times under the active plan; `check` uses the median of the last three."""
    steps: float = 1.0
    """Convergence factor of the active plan."""
    error_multiplier: float = 1.0
    """Error multiplier of compression for this model that was used for the active plan."""
    pace_s: float = 0.0
    """Step time of the active plan when the present planning began."""
    stale: bool = False
    """Whether steps under the active plan differ from the prediction."""
    moved: bool = False
    """Whether shares have changed since work was last measured."""
    searched: tuple[Link, ...] = ()
    """Links that the last search used."""
    discarded: bool = False
    """Whether the last search was discarded because its prices were far from the step time."""
    known: tuple[Plan, Plan] | None = None
    """The plan that was last activated here, and the planner's form of it."""
    plan_s: float = 0.0
    """Time of the last planning that found a candidate."""
    lateness: float = 1.0
    """Measured step time divided by the predicted one, of the last plan that was tried; at least 1."""
    beside: tuple[Candidate, ...] = ()
    """Other candidates, tried after the step time of the best one is known."""
    verdicts: tuple[ReplanVerdict, ...] = ()


# ---- complete state


class LinkState(Record, frozen=True):
    """Knowledge about the nodes' links. The same on all ranks, except for the clock's part in `reprobe`."""

    links: tuple[Link, ...]
    """Links used for planning, one per node."""
    watch: LinkWatch
    best: tuple[Rates, ...]
    """Best rates ever measured, per node."""
    reprobe: ReprobeSchedule
    before: tuple[Plan, LinkWatch] | None = None
    """The previous plan and the observations under it."""


class AutoPlanState(Record, frozen=True):
    """`lead` is None except on rank 0."""

    phase: Warming | Measuring | Watching
    lead: LeaderState | None = None
    per_node: int = 1
    """Ranks per node; the first rank's row reports the traffic of the node's link."""
    keep: bool = False
    """Whether the planner searches for plans without ever switching."""
    step: int = 0
    """The last step reported."""
    in_force: ActivePlan | None = None
    links: LinkState | None = None
    """None before the first measurement."""
