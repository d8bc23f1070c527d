"""Results of planning for a running job: a plan, and the active plan at the same prices."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import structs

from commlayer.planner.costs import plan_excess
from commlayer.planner.model import DENSE, Basis, PlanInputs
from commlayer.records import Plan

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
    """Its step time at prices without contention for processors; see cpu_contention.py."""
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
