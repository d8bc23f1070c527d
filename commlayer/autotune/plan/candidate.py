"""What planning for a running job found: a plan, and the one in force by the same prices. Values only."""

from __future__ import annotations

from typing import NamedTuple

from msgspec import structs

from commlayer.planner.model.cluster import Basis, PlanInputs
from commlayer.planner.model.option import DENSE
from commlayer.planner.pricing.steps_needed import plan_excess
from commlayer.records import Plan

Price = tuple[float, float]
"""Seconds of communication, and the part of computing that hides it."""


LEAVES = 0.85
"""Averaged gradients are left for what is at the loss in this part of the time, or sooner. (Asked for three quarters, links of
50 Mb/s were at a loss later than links of 10: decision 0126.)"""
MOST_STEPS = 3.0
"""A plan that needs so many times as many steps as dense training loses, however short its steps are predicted to be: no
prediction of a step is trusted to make up for that."""
WAY = ("codes", "overlap", "local_steps", "fragments")
"""What of a plan says how steps are exchanged."""


class Candidate(NamedTuple):
    """A plan that a running job could go over to."""

    basis: Basis
    """With the plan as the planner has it: workers know some of its paths by other names, which have no price."""
    runnable: Plan
    """The same with buckets on the servers that run."""
    current: Plan
    """The plan that was in force when this was planned, as the planner has it."""
    current_s: float
    """Seconds of a step under it, by the prices that this plan has its own from."""
    uncontended_s: float
    """The same by prices that know nothing of processes sharing processors; see cpu_contention.py."""
    price: Price
    current_price: Price
    took_s: float
    """Of planning."""
    steps: float = 1.0
    """How many times as many steps this plan needs for a loss as dense training that exchanges in each, cautiously."""
    current_steps: float = 1.0
    """The same of the plan that was in force."""
    leaves: str = ""
    """Why steps are no longer ones on the average of all gradients; "" where they are, or were not before."""
    alone_s: float = 0.0
    """Seconds of one machine alone for what one step of dense training does for a loss; 0: unknown."""
    hint: str = ""
    """How much sooner a loss would come under local steps, which the script has not allowed; "" where that is little."""
    beside: tuple[Candidate, ...] = ()
    """Other plans by the same prices, to be tried in this order where the pace of this one turns out to allow it."""

    @property
    def plan(self) -> Plan:
        return self.basis.plan

    @property
    def back(self) -> Candidate:
        """The plan that was in force, as one to go over to."""
        return self._replace(basis=self.basis._replace(plan=self.current), price=self.current_price, steps=self.current_steps,
                             leaves="", beside=())

    @property
    def dense(self) -> bool:
        """Whether it is the plan without compression, and not local steps that need none."""
        return not self.leaves and all(b.codec == DENSE for b in self.plan.buckets)

    def as_run(self, plan: Plan) -> Candidate:
        """What came of it: a job may step otherwise than its plan says, as its script or its optimizers' states have it."""
        if all(getattr(plan, way) == getattr(self.runnable, way) for way in WAY):
            return self
        buckets = self.plan.buckets
        if plan.steps_locally:
            buckets = tuple(structs.replace(b, stale=False) for b in buckets)
        made = structs.replace(self.plan, buckets=buckets, step_s=plan.step_s, free_s=plan.free_s, steps=plan.steps,
                               steps_high=plan.steps_high, **{way: getattr(plan, way) for way in WAY})
        return self._replace(basis=self.basis._replace(plan=made), runnable=plan, steps=steps_of(made, self.basis.inputs))


def steps_of(plan: Plan, made_from: PlanInputs) -> float:
    """How many times as many steps as dense training it needs, cautiously."""
    job, cluster, profile, policy = made_from.job, made_from.cluster, made_from.profile, made_from.policy
    assert profile is not None
    assert policy is not None
    return 1.0 + plan_excess(plan, job, cluster, profile, policy).high


class ReplanVerdict(NamedTuple):
    """What planning found: seconds of a step."""

    measured_s: float
    """Under the plan in force, as all ranks measured it."""
    priced_s: float
    """Under the same plan, by prices that this figure did not go into."""
    found_s: float
    """Under the best plan found, by prices fitted to it."""
    measured_steps: float = 1.0
    found_steps: float = 1.0
    """How many times as many steps the two need as dense training."""
