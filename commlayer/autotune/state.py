"""The state of a job's tuning on one rank, as an immutable value. A decision is a function of this state and of an observation.
The function returns the next state, which contains the proposal, and the reasons (plan_policy.py, link_policy.py)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from enum import Enum, IntEnum
from typing import NamedTuple

from msgspec import structs

from commlayer.autotune.planning.candidate import Candidate, Price
from commlayer.autotune.quality.policy import CodecChange
from commlayer.autotune.reprobe import ReprobeSchedule
from commlayer.observe.link_monitor import LinkWatch, Rates, format_rates
from commlayer.observe.prediction_check import PredictionCheck, StalePlan
from commlayer.planner.model import Basis, Link
from commlayer.records import Plan, Record

WARM_STEPS = 2
"""Number of warm-up steps. Warm-up steps determine thresholds, buckets and the forward order, and their times do not represent
later steps."""
MEASURED_STEPS = 5


class Phase(Enum):
    WARMING = "warming"
    """The first steps, or the rest of the step in which rank 0 requested measuring."""
    MEASURING = "measuring"
    """Steps are recorded, as measurements for a plan."""
    WATCHING = "watching"
    """Ranks exchange reports about their steps, and act on reports that all ranks have received."""


class TuningRequest(IntEnum):
    """Rank 0's request to all ranks, sent in its report."""

    NOTHING = 0
    SWITCH = 1
    MEASURE = 2
    PROBE = 3


class LogLine(NamedTuple):
    """A line for session.inspect.decisions() and for the log."""

    text: str
    level: int = logging.INFO


Reason = LogLine | StalePlan
"""Why the state has changed, for the user. A StalePlan is also an event of session.inspect."""


class Measured(NamedTuple):
    """Results of measuring steps and links, equal on all ranks."""

    links: tuple[Link, ...]
    """The link of each node."""
    step_s: float
    computing_s: tuple[float, ...] = ()
    """Seconds that each rank computes per step; empty if load balancing already acts on them."""
    names: tuple[str, ...] = ()
    """Display name of each rank, for example "worker 2 (ben)"."""
    shares: bool = True
    """True: the job could use load balancing."""
    uncapped: tuple[Link, ...] = ()
    """The links without the homes' caps; empty if no home is capped."""


class LinkState(Record, frozen=True):
    """State of the nodes' links. Equal on all ranks, except for the times in `reprobe`, which come from each rank's clock."""

    links: tuple[Link, ...]
    """The links that planning uses, one per node."""
    watch: LinkWatch
    best: tuple[Rates, ...]
    """The best rates ever measured, one entry per node."""
    reprobe: ReprobeSchedule
    names: tuple[str, ...] = ()
    """Display name of each node; "" for all if they have the same name."""

    @classmethod
    def of(cls, links: tuple[Link, ...], step_s: float, now: float, names: tuple[str, ...] = (), steps: int = 1) -> LinkState:
        """Returns the state after the first measurement of the links, in which steps took `step_s`. `steps`: see LinkWatch."""
        rates = extract_rates(links)
        return cls(links, LinkWatch(rates, step_s, steps), rates, ReprobeSchedule().changed(now), names)

    def measured(self, links: tuple[Link, ...], now: float) -> LinkState:
        """Returns the state after a measurement or probe of the links. The usual step time under the active plan is kept."""
        rates = extract_rates(links)
        best = tuple(Rates(*map(max, zip(*both, strict=True))) for both in zip(self.best, rates, strict=True))
        watch = structs.replace(self.watch, planned=rates)
        return structs.replace(self, links=links, watch=watch, best=best, reprobe=self.reprobe.changed(now))

    def with_rates(self, rates: Sequence[Rates]) -> tuple[Link, ...]:
        return tuple(Link(*rate, old.alpha_s) for rate, old in zip(rates, self.links, strict=True))

    def format_rates(self, rates: Sequence[Rates] | None = None) -> str:
        """Formats these rates of the nodes, or the planned ones."""
        return format_rates(self.watch.planned if rates is None else rates, self.names)


def extract_rates(links: Sequence[Link]) -> tuple[Rates, ...]:
    return tuple(Rates(link.up_bps, link.down_bps) for link in links)


class SearchRequest(NamedTuple):
    """A search that rank 0 starts on a thread."""

    current: Plan
    """The active plan."""
    known: Plan | None
    """The planner's form of the active plan, if the planner made that plan; otherwise None."""
    links: tuple[Link, ...]
    step_s: float
    """Present step time in seconds, as measured by all ranks."""
    pace_s: float
    """The same on rank 0's clock, which also times other plans."""
    checks: bool = False
    """True: the predicted step time of the active plan must agree with the measured one, because both are for the same
    links."""
    uncapped: tuple[Link, ...] = ()
    """See Measured."""


class PlanProposal(NamedTuple):
    """A switch that rank 0 proposes; during the trial of a new plan, the roll-back to propose if it is slower."""

    candidate: Candidate
    before_s: float
    """Step time under the plan that the new one replaces, in seconds."""
    by_pace: bool = False
    """True: predictions cannot tell whether the new plan is faster; only its step time can."""
    back: bool = False
    """True: a roll-back to the previous plan, under which a loss was reached sooner."""


class TuningState(Record, frozen=True):
    """The knowledge and decisions of one rank. From `plan` to `agreed`, fields are equal on all ranks, except for `leads`. The
    others are about plans; only the rank that leads uses them.

    The leading rank is searching if there is an `order`, trying a plan if there is a `trial`, and otherwise idle.
    """

    plan: Plan
    """The active plan."""
    leads: bool = False
    """True: this rank decides on plans."""
    phase: Phase = Phase.WARMING
    step: int = 0
    """Number of steps and of exchanges of local steps that ran under automatic plans, after their warm-up."""
    until: int = WARM_STEPS
    """The `step` at which this phase ends, unless it is WATCHING."""
    links: LinkState | None = None
    """None before links are measured."""
    agreed: float | CodecChange | None = None
    """A decision that all ranks carry out together: to wait this many seconds for a search, or to change codecs."""

    order: SearchRequest | None = None
    trial: PlanProposal | None = None
    proposal: PlanProposal | None = None
    basis: Basis | None = None
    """The inputs from which the active plan was made; None if unknown."""
    price: Price | None = None
    """Predicted communication of the active plan; None if unknown."""
    steps: float = 1.0
    """Convergence factor of the active plan."""
    count: int = 0
    """Number of steps since the active plan was entered or kept."""
    recent: tuple[float, ...] = ()
    """Latest step times under the active plan, in seconds. `check` uses the median of the last three."""
    check: PredictionCheck | None = None
    stale: bool = False
    """True: step times under the active plan differ from the prediction."""
    moved: bool = False
    """True: batch shares, or what homes may send, have changed since the last measurement."""
    uncapped: tuple[Link, ...] = ()
    """See Measured."""
    searched: tuple[Link, ...] = ()
    """The links that the last search used, one per node."""
    discarded: bool = False
    """True: the last search was discarded because its predictions were far from the measured step time."""
    known: tuple[Plan, Plan] | None = None
    """The plan that rank 0 last made all ranks switch to, and the planner's form of that plan."""
    lateness: float = 1.0
    """Measured step time of the last tried plan, divided by the predicted one; at least 1."""
    alternatives: tuple[Candidate, ...] = ()
    """Other candidates of the last search. Ranks try them after the step time of the best candidate is known."""
    alone_s: float = 0.0
    auto_times: float = 0.0
    """`alone_s`, `auto_times`: of the last search, as in Candidate."""
    suggested: bool = False
    """True: the log has suggested a setting that the script could allow."""

    @property
    def idle(self) -> bool:
        return self.order is None and self.trial is None and self.proposal is None


Decided = tuple[TuningState, list[Reason]]
