"""State of automatic planning, by phase. Plain values; the rules are in policy.py.

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
    Proposing    Trying        all ranks have switched to the plan
    Proposing    Settling     all ranks have rolled back, or kept their plan because a rank refused the new one
    Trying        Proposing    a loss comes later than before: roll back; or another candidate is close
    Trying        Steady       neither
    Settling     Proposing    another candidate is close
    Settling     Steady       no other candidate is
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from msgspec import structs

from commlayer.observe import Direction, LinkWatch, PredictionCheck, Rates, ReprobeSchedule, StalePlan, Throughput
from commlayer.planner.costs import plan_excess
from commlayer.planner.model import DENSE, Basis, Link, PlanInputs
from commlayer.records import Plan, Record

# ---- results of planning for a running job: a plan, and the active plan at the same prices

Price = tuple[float, float]
"""Seconds of communication, and the fraction of computing that overlaps it."""


LEAVES = 0.85
"""Averaged gradients are given up if the time to a loss falls to this fraction or below. (With three quarters, links of 50
Mb/s reached a loss later than links of 10 Mb/s.)"""
MOST_STEPS = 3.0
"""Plans with a convergence factor above this are never chosen: no predicted step time is accurate enough to justify them."""
WAY = ("codes", "overlap", "local_steps", "fragments")
"""Fields of a plan that define its sync mode."""


class Candidate(NamedTuple):
    """A plan that a running job could switch to."""

    basis: Basis
    """With the planner's form of the plan: workers use other names for some paths, which have no price."""
    runnable: Plan
    """The same plan with buckets assigned to the running servers."""
    current: Plan
    """The planner's form of the plan that was active during planning."""
    current_s: float
    """Its step time at the prices used for this plan."""
    uncontended_s: float
    """Its step time at prices without contention for processors."""
    price: Price
    current_price: Price
    took_s: float
    """Duration of planning."""
    steps: float = 1.0
    """Convergence factor of this plan, cautious estimate."""
    current_steps: float = 1.0
    """Convergence factor of the plan that was active."""
    leaves: str = ""
    """Why steps no longer use the average of all gradients; "" if they do, or did not before."""
    alone_s: float = 0.0
    """Time one machine alone needs for the progress of one dense training step; 0 if unknown."""
    hint: str = ""
    """The benefit of local steps that the script has not allowed; "" if small."""
    beside: tuple[Candidate, ...] = ()
    """Other candidates at the same prices, to be tried in this order if this plan's step time permits."""

    @property
    def plan(self) -> Plan:
        return self.basis.plan

    @property
    def back(self) -> Candidate:
        """The plan that was active, as a candidate for a roll-back."""
        return self._replace(basis=self.basis._replace(plan=self.current), price=self.current_price, steps=self.current_steps,
                             leaves="", beside=())

    @property
    def dense(self) -> bool:
        """Whether this is the plan without compression, excluding local steps that need none."""
        return not self.leaves and all(b.codec == DENSE for b in self.plan.buckets)

    def as_run(self, plan: Plan) -> Candidate:
        """The candidate as it runs: the script or optimizer states may force another sync mode than planned."""
        if all(getattr(plan, way) == getattr(self.runnable, way) for way in WAY):
            return self
        buckets = self.plan.buckets
        if plan.steps_locally:
            buckets = tuple(structs.replace(b, stale=False) for b in buckets)
        actual = structs.replace(self.plan, buckets=buckets, step_s=plan.step_s, free_s=plan.free_s, steps=plan.steps,
                               steps_high=plan.steps_high, **{way: getattr(plan, way) for way in WAY})
        return self._replace(basis=self.basis._replace(plan=actual), runnable=plan, steps=steps_of(actual, self.basis.inputs))


def steps_of(plan: Plan, made_from: PlanInputs) -> float:
    """Convergence factor of a plan, cautious estimate."""
    job, cluster, profile, policy = made_from.job, made_from.cluster, made_from.profile, made_from.policy
    assert profile is not None
    assert policy is not None
    return 1.0 + plan_excess(plan, job, cluster, profile, policy).high


class ReplanVerdict(NamedTuple):
    """Outcome of a planning, with step times."""

    measured_s: float
    """Under the active plan, as measured by all ranks."""
    priced_s: float
    """Under the same plan, at prices that were not fitted to the measured time."""
    found_s: float
    """Under the best plan found, at prices fitted to the measured time."""
    measured_steps: float = 1.0
    found_steps: float = 1.0
    """Convergence factors of the active plan and of the plan found."""


# ---- actions that the decisions of automatic planning request
#
# Plain values; driver.py carries them out in order.

class PlanRequest(IntEnum):
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

    word: PlanRequest
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


# ---- facts that the decisions of automatic planning react to
#
# Plain values, created by the driver.

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
